"""The tokens that receive the most attention from each head, with their texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhead.observation import AttentionSite
from polyhead.observation.collectors import Collected, states_of
from polyhead.observation.top_keys import SiteTopKeys, TopKeys

CANDIDATES = 1024  # distinct tokens that are counted: the most frequent ones of the text
MAX_KEYS = 10  # reported per head


@dataclass(frozen=True, slots=True)
class TopKey:
    """A token, with the share of a head's attention on all its occurrences."""

    token: int
    text: str
    share: float  # of the head's attention
    frequency: float  # of the text's tokens, special ones included


def most_frequent(counts: Tensor) -> TopKeys:
    """Return the collector for the most frequent tokens, given `counts` [vocabulary]; ties go to the lower id."""
    order = counts.sort(descending=True, stable=True).indices
    return TopKeys(order[: min(CANDIDATES, int((counts > 0).sum()))].clone())


def top_keys_of(
    collected: Collected, tokenizer: Any, counts: Tensor
) -> dict[AttentionSite, tuple[tuple[TopKey, ...], ...]]:
    """Return up to `MAX_KEYS` tokens per head by site, the most attended first; only tokens that receive attention."""
    top_keys = {}
    frequency = (counts / counts.sum().clamp_min(1)).tolist()
    for site, state in states_of(collected, "top_keys", SiteTopKeys).items():
        ids, shares = state.compute(MAX_KEYS)
        top_keys[site] = tuple(
            tuple(
                TopKey(token, _text(tokenizer, token), share, frequency[token])
                for token, share in zip(*row, strict=True)
                if share > 0
            )
            for row in zip(ids.tolist(), shares.tolist(), strict=True)
        )
    return top_keys


def _text(tokenizer: Any, token: int) -> str:
    """Return the text of a token; its name in the vocabulary if it has none of its own, as a byte of a character.

    White space alone is written as ␣ and by escapes.
    """
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    if not text or "\ufffd" in text:
        return str(tokenizer.convert_ids_to_tokens(token))
    return text.strip() or "".join("␣" if x == " " else repr(x)[1:-1] for x in text)

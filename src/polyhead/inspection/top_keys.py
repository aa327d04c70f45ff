"""The tokens that each head looks at most, as people can read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhead.observation import AttentionSite, CollectorState
from polyhead.observation.top_keys import SiteTopKeys, TopKeys

CANDIDATES = 1024  # tokens that are told apart: the most frequent ones of the text
MOST = 10  # that are told of each head


@dataclass(frozen=True, slots=True)
class TopKey:
    """A token, and how much of a head's attention all its occurrences have."""

    token: int
    text: str
    share: float  # of the head's attention
    frequency: float  # of the text's tokens, special ones included


def most_frequent(counts: Tensor, most: int = CANDIDATES) -> TopKeys:
    """What to gather, of a text in which each token of the vocabulary occurs so often; ties go to the lower id."""
    order = counts.sort(descending=True, stable=True).indices
    return TopKeys(order[: min(most, int((counts > 0).sum()))].clone())


def top_keys_of(
    collected: Mapping[AttentionSite, Mapping[str, CollectorState]], tokenizer: Any, counts: Tensor
) -> dict[AttentionSite, tuple[tuple[TopKey, ...], ...]]:
    """The `MOST` of each head of each site, the most attended first; fewer where no more got any attention."""
    found = {}
    frequency = (counts / counts.sum().clamp_min(1)).tolist()
    for site, values in collected.items():
        value = values.get("top_keys")
        if not isinstance(value, SiteTopKeys):
            continue
        ids, shares = value.compute(MOST)
        found[site] = tuple(
            tuple(
                TopKey(token, _text(tokenizer, token), share, frequency[token])
                for token, share in zip(*row, strict=True)
                if share > 0
            )
            for row in zip(ids.tolist(), shares.tolist(), strict=True)
        )
    return found


def _text(tokenizer: Any, token: int) -> str:
    """What a token stands for; the vocabulary's own name for it where that cannot be seen."""
    text = str(tokenizer.decode([token], skip_special_tokens=False)).strip()
    return text if text and "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(token))

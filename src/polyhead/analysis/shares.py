"""Share of a head's attention to other tokens that is within the word, the phrase and the sentence.

A token's attention to itself does not count: it is inside every span, whatever the head computes. The null is attention
with the head's distances: a head that attends to its neighbours is inside short spans without knowing of them. As in a
syntax table, one half of the texts ranks the heads, by their share above the null, and the held-out half measures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from polyhead.analysis.dependency_accuracy import collected_words, held_out_texts
from polyhead.analysis.intervals import ratio_of_sums
from polyhead.errors import OptionError
from polyhead.observation.observations import Observations
from polyhead.observation.word_attention import SPANS


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one head for one of `polyhead.observation.word_attention.SPANS`."""

    site: str
    layer: int
    head: int
    span: str  # word, phrase or sentence
    words: int  # in such a span, in the held-out texts
    share: float  # of the attention of these words to other tokens, special tokens included
    low: float  # 95% interval over texts
    high: float
    expected: float  # the share of attention at the same distances: the null
    to_others: float  # attention of a token to other tokens, the rest is to itself; mean over these words
    chosen_excess: float  # share above the null in the choosing half, which ranks heads: biased upwards for the first
    original_head: str  # its number in the unedited model


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all heads; spans that no word of a half has are absent."""

    entries: tuple[Share, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        return (asdict(entry) for entry in self.entries)

    def of(self, span: str) -> list[Share]:
        """Return the shares for a span, in decreasing order of the excess over the null in the choosing half."""
        if span not in SPANS:
            raise OptionError(f"span must be one of {', '.join(SPANS)}; got {span!r}")
        entries = [entry for entry in self.entries if entry.span == span]
        # A head without any attention to other tokens has a share of NaN.
        return sorted(entries, key=lambda entry: math.inf if math.isnan(entry.chosen_excess) else -entry.chosen_excess)


def inner_shares(observations: Observations, *, seed: int = 0) -> Shares:
    """Return the shares from the data that a `WordAttention` collected; `seed` draws the halves as in a table."""
    entries = []
    sites, states, maps = collected_words(observations)
    held_out = held_out_texts(len(maps), seed)
    for site, state in zip(sites, states, strict=True):
        shares, expected, totals, counts = (state[name] for name in ("shares", "expected", "totals", "counts"))
        ratio, low, high = ratio_of_sums(shares[held_out], totals[held_out])
        null, _, _ = ratio_of_sums(expected[held_out], totals[held_out])
        to_others, _, _ = ratio_of_sums(totals[held_out], counts[held_out][:, None])
        chosen_excess, _, _ = ratio_of_sums((shares - expected)[~held_out], totals[~held_out])
        low, high = low.clamp_min(0.0), high.clamp_max(1.0)
        columns = ratio, low, high, null, to_others, chosen_excess
        for index, span in enumerate(SPANS):
            words, chosen = int(counts[held_out, index].sum()), int(counts[~held_out, index].sum())
            for head in range(site.num_heads if words and chosen else 0):
                place = site.name, site.layer, head, span, words
                share, lower, upper, expected_share, rest, ranked = (float(x[head, index]) for x in columns)
                entries.append(Share(*place, share, lower, upper, expected_share, rest, ranked, site.label(head)))
    return Shares(tuple(entries))

"""Share of a head's attention within the word, the phrase and the sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from polyhead.analysis.intervals import ratio_of_sums
from polyhead.errors import OptionError
from polyhead.observation.collectors import states_of
from polyhead.observation.observations import Observations
from polyhead.observation.word_attention import SPANS, ByContext, WordAttention


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one head for one of `polyhead.observation.word_attention.SPANS`."""

    site: str
    layer: int
    head: int
    span: str  # word, phrase or sentence
    words: int  # in such a span
    share: float  # of their attention (the total includes special tokens), averaged over words
    low: float  # 95% interval over texts
    high: float
    expected: float  # the share of uniform attention over the visible tokens: the null
    original_head: str  # its number in the unedited model


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all heads; spans that no word has are absent."""

    entries: tuple[Share, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        return (asdict(entry) for entry in self.entries)

    def of(self, span: str) -> list[Share]:
        """Return the shares for a span, in decreasing order."""
        if span not in SPANS:
            raise OptionError(f"span must be one of {', '.join(SPANS)}; got {span!r}")
        return sorted((entry for entry in self.entries if entry.span == span), key=lambda entry: -entry.share)


def inner_shares(observations: Observations, *, collector: str = "words") -> Shares:
    """Return the shares from the data that a `WordAttention` collected."""
    entries = []
    for site, value in states_of(observations.collected, collector, ByContext).items():
        if not isinstance(value.collector, WordAttention):
            continue
        state = value.state()
        counts = state["counts"]
        if not len(counts):
            continue
        ratio, low, high = ratio_of_sums(state["shares"], counts[:, None])
        expected = ratio_of_sums(state["expected"], counts)[0]
        for index, span in enumerate(SPANS):
            words = int(counts[:, index].sum())
            for head in range(site.num_heads if words else 0):
                share, lower, upper = (float(x[head, index]) for x in (ratio, low, high))
                null = float(expected[index])
                entries.append(
                    Share(site.name, site.layer, head, span, words, share, lower, upper, null, site.label(head))
                )
    if not entries:
        raise OptionError(
            f"shares need data of a WordAttention collector named {collector!r}, got none; "
            "observe the model with collect=[WordAttention(maps)]"
        )
    return Shares(tuple(entries))

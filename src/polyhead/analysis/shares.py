"""How much of a head's attention stays inside the word, the phrase and the sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from polyhead.analysis.intervals import ratio_of_sums
from polyhead.errors import OptionError
from polyhead.observation.observations import Observations
from polyhead.observation.word_attention import CIRCLES, ByContext, WordAttention


@dataclass(frozen=True, slots=True)
class Share:
    """One head and one of `polyhead.observation.word_attention.CIRCLES`."""

    site: str
    layer: int
    head: int
    circle: str  # word, phrase or sentence
    words: int  # that have such a circle
    share: float  # of their attention, special tokens' part included in the whole, the mean over words
    low: float  # the ends of the 95% interval over texts
    high: float
    expected: float  # what even attention over the visible tokens would leave there: the null
    original_head: str  # its number in the unedited model


@dataclass(frozen=True, slots=True)
class Shares:
    """Every head's shares; a circle that no word has is not there."""

    entries: tuple[Share, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        return (asdict(entry) for entry in self.entries)

    def of(self, circle: str) -> list[Share]:
        """The heads that keep the most inside a circle first."""
        if circle not in CIRCLES:
            raise OptionError(f"a circle is one of {', '.join(CIRCLES)}; got {circle!r}")
        return sorted((entry for entry in self.entries if entry.circle == circle), key=lambda entry: -entry.share)


def inner_shares(observations: Observations, *, collector: str = "words") -> Shares:
    """What a `WordAttention` gathered of the words' circles."""
    entries = []
    for site, values in observations.collected.items():
        value = values.get(collector)
        if not (isinstance(value, ByContext) and isinstance(value.collector, WordAttention)):
            continue
        state = value.state()
        counts = state["counts"]
        if not len(counts):
            continue
        ratio, low, high = ratio_of_sums(state["shares"], counts[:, None])
        expected = ratio_of_sums(state["expected"], counts)[0]
        for index, circle in enumerate(CIRCLES):
            words = int(counts[:, index].sum())
            for head in range(site.num_heads if words else 0):
                own, least, most = (float(x[head, index]) for x in (ratio, low, high))
                null = float(expected[index])
                entries.append(
                    Share(site.name, site.layer, head, circle, words, own, least, most, null, site.label(head))
                )
    if not entries:
        raise OptionError(
            f"shares are made of what a WordAttention gathered under the name {collector!r}, got none; "
            "observe the model with collect=[WordAttention(maps)]"
        )
    return Shares(tuple(entries))

"""Which heads look from a pronoun at what it stands for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.alignment import cut, pieces_of
from polyhead.analysis.intervals import Z, normal_quantile, ratio_of_sums, student_quantile, wilson
from polyhead.errors import OptionError
from polyhead.observation.observations import Observations
from polyhead.observation.statistics import AttentionSite
from polyhead.observation.word_attention import ByContext, SpanAttention
from polyhead.sources import Context, special_tokens
from polyhead.sources.pronouns import PronounSentence

NAME = "pronouns"
LEVEL = 0.95
LEAST = 2.0  # times the weight of a head that looks everywhere alike, for one that is said to look at antecedents
NULL = 0.5  # of a head for which the pronoun's meaning changes nothing; see `polyhead.sources.pronouns`


@dataclass(frozen=True, slots=True)
class PronounScore:
    """How often the antecedent gets more weight from the pronoun than the distractor; a tie is half of a time.

    Wilson's interval takes sentences for independent draws, but the four of a frame share their words: the interval
    over frames is the one to trust where it is wider. Both are of a head that was named beforehand; the best of many
    heads is above the null by chance alone. `all_low` and `all_high` are for that: each misses with a chance of 5%
    divided by the number of heads, so that all heads' intervals hold at once in 95 of 100 texts. They are the wider of
    Wilson's and of Student's over frames, at that level.
    """

    site: str
    layer: int
    head: int
    sentences: int
    score: float
    low: float  # the ends of the 95% interval of Wilson
    high: float
    frames_low: float  # the same over frames
    frames_high: float
    all_low: float  # the same for all heads at once
    all_high: float
    weight: float  # that the antecedent gets, the mean over sentences
    expected: float  # the same of a head that looks alike at all tokens it may see
    null: float = NULL

    @property
    def looks_there(self) -> bool:
        """Whether the antecedent has a weight to speak of. A preference between two names that the head hardly looks
        at follows from any accident of its weights."""
        return self.weight >= LEAST * self.expected


@dataclass(frozen=True, slots=True)
class PronounTable:
    """One row a head."""

    entries: tuple[PronounScore, ...]
    unreadable: int  # sentences of frames that the tokenizer cannot read

    def rows(self) -> Iterator[dict[str, Any]]:
        return (asdict(entry) for entry in self.entries)

    def best(self) -> list[PronounScore]:
        return sorted(self.entries, key=lambda entry: -entry.score)


@dataclass(frozen=True, slots=True, eq=False)
class PronounTexts:
    """The sentences as a model reads them, for `alignment.watch(loaded, texts.contexts, [texts.collector()])`."""

    contexts: tuple[Context, ...]
    labels: tuple[tuple[int, ...], ...]  # of each token: 0 pronoun, 1 antecedent, 2 distractor, -1 anything else
    frames: tuple[int, ...]  # of each sentence
    unreadable: int

    def collector(self) -> SpanAttention:
        return SpanAttention(self.labels, 2, NAME)


def pronoun_texts(sentences: Sequence[PronounSentence], tokenizer: Any, *, longest: int | None = None) -> PronounTexts:
    """Cut the sentences into tokens, and leave out what the model could not read.

    A model that sees an unknown token for "she" and for "he" cannot tell them apart. A frame with an unknown token,
    with a name that has no token of its own, or of more than `longest` tokens is left out whole: its sentences are
    balanced only together.
    """
    special_ids = special_tokens(tokenizer).ids
    unknown = {tokenizer.unk_token_id} - set(special_ids)
    read: list[tuple[int, list[int], list[bool], tuple[int, ...]]] = []
    broken: set[int] = set()
    for sentence in sentences:
        ids, special, offsets = cut(sentence.text, tokenizer, special_ids)
        spans = (sentence.pronoun, sentence.antecedent, sentence.distractor)
        order = sorted(range(3), key=lambda index: spans[index])
        found = pieces_of(offsets, special, [spans[index] for index in order])
        label = tuple(order[piece] if piece >= 0 else -1 for piece in found)
        if not {0, 1, 2} <= set(label) or unknown & set(ids) or (longest is not None and len(ids) > longest):
            broken.add(sentence.frame)
        read.append((sentence.frame, ids, special, label))
    kept = [row for row in read if row[0] not in broken]
    return PronounTexts(
        contexts=tuple(Context(number, 0, ids, special) for number, (_, ids, special, _) in enumerate(kept)),
        labels=tuple(label for _, _, _, label in kept),
        frames=tuple(frame for frame, _, _, _ in kept),
        unreadable=len(read) - len(kept),
    )


def pronoun_table(observations: Observations, texts: PronounTexts) -> PronounTable:
    """What the gatherer of `texts` has seen, head by head."""
    found = {site: values[NAME] for site, values in observations.collected.items() if NAME in values}
    states = {site: value.state() for site, value in found.items() if isinstance(value, ByContext)}
    states = {site: state for site, state in states.items() if len(state["weights"])}
    if not states:
        raise OptionError(
            "a pronoun table is made of what the gatherer of pronoun_texts(...) has seen, got none "
            f"({len(texts.contexts)} sentences to read, {texts.unreadable} that the tokenizer cannot)"
        )
    heads = sum(site.num_heads for site in states)
    entries = [entry for site, state in states.items() for entry in _scores(site, state, texts, heads)]
    return PronounTable(tuple(entries), texts.unreadable)


def _scores(
    site: AttentionSite, state: Mapping[str, Tensor], texts: PronounTexts, heads: int
) -> Iterator[PronounScore]:
    weights = state["weights"]  # [sentences, heads, 2]
    count = len(weights)
    points = (torch.sign(weights[..., 0] - weights[..., 1]) + 1) / 2
    frame = torch.tensor(texts.frames)[state["contexts"]].unique(return_inverse=True)[1]
    frames = int(frame.max()) + 1
    by_frame = points.new_zeros(frames, site.num_heads).index_add_(0, frame, points)
    sizes = frame.bincount().to(points.dtype)[:, None]
    tail = (1 - LEVEL) / 2 / heads
    over_frames = ratio_of_sums(by_frame, sizes)[1:]
    all_over_frames = ratio_of_sums(by_frame, sizes, student_quantile(tail, max(1, frames - 1)))[1:]
    for head, total in enumerate(points.sum(0).tolist()):
        low, high = _wilson(total, count, Z)
        all_low, all_high = _wilson(total, count, normal_quantile(tail))
        frames_low, frames_high = (float(x[head]) for x in over_frames)
        wide_low, wide_high = (float(x[head]) for x in all_over_frames)
        yield PronounScore(
            site=site.name,
            layer=site.layer,
            head=head,
            sentences=count,
            score=total / count,
            low=low,
            high=high,
            # A single frame has no interval of its own (NaN): nothing is known then, and the ends are 0 and 1.
            frames_low=max(0.0, frames_low),
            frames_high=min(1.0, frames_high),
            all_low=max(0.0, min(wide_low, all_low)),
            all_high=min(1.0, max(wide_high, all_high)),
            weight=float(weights[:, head, 0].mean()),
            expected=float(state["expected"][:, 0].mean()),
        )


def _wilson(hits: float, count: int, deviations: float) -> tuple[float, float]:
    # Half a hit is none for the lower end and one for the upper.
    return wilson(math.floor(hits), count, deviations)[0], wilson(math.ceil(hits), count, deviations)[1]

"""Which heads look from a pronoun at what it stands for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from polyhead.analysis.alignment import cut, pieces_of
from polyhead.analysis.intervals import ratio_of_sums, wilson
from polyhead.errors import OptionError
from polyhead.observatory.observations import Observations
from polyhead.observatory.words import ByContext, SpanAttention
from polyhead.sources import Context, special_tokens
from polyhead.sources.pronouns import PronounSentence

NAME = "pronouns"
NULL = 0.5  # of a head for which the pronoun's meaning changes nothing; see `polyhead.sources.pronouns`


@dataclass(frozen=True, slots=True)
class PronounScore:
    """How often the antecedent gets more weight from the pronoun than the distractor; a tie is half of a time.

    Wilson's interval takes sentences for independent draws, but the four of a frame share their words: the interval
    over frames is the one to trust where it is wider. Both are of a head that was named beforehand; the best of many
    heads is above the null by chance alone.
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
    null: float = NULL


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
    """The sentences as a model reads them, for `alignment.watch(loaded, texts.contexts, [texts.gatherer()])`."""

    contexts: tuple[Context, ...]
    labels: tuple[tuple[int, ...], ...]  # of each token: 0 pronoun, 1 antecedent, 2 distractor, -1 anything else
    frames: tuple[int, ...]  # of each sentence
    unreadable: int

    def gatherer(self) -> SpanAttention:
        return SpanAttention(self.labels, 2, NAME)


def pronoun_texts(sentences: Sequence[PronounSentence], tokenizer: Any) -> PronounTexts:
    """Cut the sentences into tokens, and leave out what the model could not read.

    A model that sees an unknown token for "she" and for "he" cannot tell them apart. A frame with an unknown token, or
    with a name that has no token of its own, is left out whole: its sentences are balanced only together.
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
        if not {0, 1, 2} <= set(label) or unknown & set(ids):
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
    entries = []
    for site, values in observations.gathered.items():
        value = values.get(NAME)
        if not isinstance(value, ByContext):
            continue
        state = value.state()
        weights = state["weights"]  # [sentences, heads, 2]
        count = len(weights)
        if not count:
            continue
        points = (torch.sign(weights[..., 0] - weights[..., 1]) + 1) / 2
        frame = torch.tensor(texts.frames)[state["contexts"]].unique(return_inverse=True)[1]
        by_frame = points.new_zeros(int(frame.max()) + 1, site.num_heads).index_add_(0, frame, points)
        _, frames_low, frames_high = ratio_of_sums(by_frame, frame.bincount().to(points.dtype)[:, None])
        for head, total in enumerate(points.sum(0).tolist()):
            # Half a hit is none for the lower end and one for the upper.
            low, high = wilson(math.floor(total), count)[0], wilson(math.ceil(total), count)[1]
            over_frames = max(0.0, float(frames_low[head])), min(1.0, float(frames_high[head]))
            entries.append(PronounScore(site.name, site.layer, head, count, total / count, low, high, *over_frames))
    if not entries:
        raise OptionError(
            "a pronoun table is made of what the gatherer of pronoun_texts(...) has seen, got none "
            f"({len(texts.contexts)} sentences to read, {texts.unreadable} that the tokenizer cannot)"
        )
    return PronounTable(tuple(entries), texts.unreadable)

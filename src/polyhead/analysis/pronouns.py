"""Pronoun scores: how often a head attends from a pronoun to its antecedent, by what the antecedent is known by."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.alignment import cut, pieces_of
from polyhead.analysis.intervals import Z, normal_quantile, ratio_of_sums, student_quantile, wilson_of_ties
from polyhead.errors import OptionError
from polyhead.observation.collectors import states_of
from polyhead.observation.observations import Observations
from polyhead.observation.statistics import AttentionSite
from polyhead.observation.word_attention import ByContext, SpanAttention
from polyhead.sources import Context, special_tokens
from polyhead.sources.pronoun_sentences import Cue, PronounSentence

NAME = "pronouns"
CUES: tuple[Cue, ...] = ("gender", "number", "meaning")
AGREEMENT: tuple[Cue, ...] = ("gender", "number")
LEVEL = 0.95
MIN_WEIGHT_RATIO = 2.0  # weight on antecedents, relative to uniform attention
NULL = 0.5  # score of a head that ignores the pronoun's meaning; see `polyhead.sources.pronoun_sentences`


@dataclass(frozen=True, slots=True)
class PronounScore:
    """Share of sentences in which the pronoun attends more to the antecedent than to the distractor; ties count half.

    The Wilson interval assumes independent sentences, but the four sentences of a frame (template) share their words:
    where the interval over frames is wider, prefer it. Both are for a head chosen in advance; the best of many heads
    may exceed the null by chance. `all_low` and `all_high` correct for that (Bonferroni): each interval has an error
    rate of 5% divided by the number of heads, so that all hold simultaneously with 95% probability. It covers both the
    Wilson interval and Student's t interval over frames at that level.
    """

    site: str
    layer: int
    head: int
    sentences: int
    score: float
    low: float  # 95% Wilson interval
    high: float
    frames_low: float  # 95% interval over frames
    frames_high: float
    all_low: float  # simultaneous interval of all heads
    all_high: float
    weight: float  # attention weight on the antecedent, averaged over sentences
    expected: float  # the same for uniform attention over the visible tokens
    null: float = NULL

    @property
    def has_enough_weight(self) -> bool:
        """True if the weight on the antecedent is large enough.

        A preference between two names that both receive little attention may be accidental.
        """
        return self.weight >= MIN_WEIGHT_RATIO * self.expected


@dataclass(frozen=True, slots=True)
class PronounTable:
    """Pronoun scores, one row per head."""

    entries: tuple[PronounScore, ...]
    excluded: int  # number of sentences of excluded frames; see `pronoun_texts`


@dataclass(frozen=True, slots=True, eq=False)
class PronounTexts:
    """Tokenised sentences; `alignment.observe_contexts(loaded, texts.contexts, [texts.collector()])` reads them."""

    contexts: tuple[Context, ...]
    labels: tuple[tuple[int, ...], ...]  # per token: 0 pronoun, 1 antecedent, 2 distractor, -1 other
    frames: tuple[int, ...]  # frame of each sentence
    cues: tuple[Cue, ...]  # by which the antecedent of each sentence is known
    excluded: int  # number of sentences of excluded frames

    def collector(self) -> SpanAttention:
        return SpanAttention(self.labels, 2, NAME)

    def without_endings(self) -> PronounTexts:
        """Return the texts without the tokens after the pronoun and the names, which a causal pronoun does not see."""
        ends = [1 + max(index for index, part in enumerate(label) if part >= 0) for label in self.labels]
        contexts = tuple(
            Context(x.document, x.piece, x.ids[:end], x.special[:end])
            for x, end in zip(self.contexts, ends, strict=True)
        )
        labels = tuple(label[:end] for label, end in zip(self.labels, ends, strict=True))
        return replace(self, contexts=contexts, labels=labels)


def pronoun_texts(sentences: Sequence[PronounSentence], tokenizer: Any, *, longest: int | None = None) -> PronounTexts:
    """Tokenise the sentences, and exclude frames that the tokenizer cannot represent.

    A model with an unknown token for both "she" and "he" cannot distinguish them. If a sentence has an unknown token, a
    pronoun or name without a token of its own, or more than `longest` tokens, all sentences of its frame are excluded,
    as they are balanced only together.
    """
    special_ids = special_tokens(tokenizer).ids
    unknown = {tokenizer.unk_token_id} - set(special_ids)
    tokenised: list[tuple[PronounSentence, list[int], list[bool], tuple[int, ...]]] = []
    excluded: set[int] = set()
    for sentence in sentences:
        ids, special, offsets = cut(sentence.text, tokenizer, special_ids)
        spans = (sentence.pronoun, sentence.antecedent, sentence.distractor)
        order = sorted(range(3), key=lambda index: spans[index])  # `pieces_of` needs the spans in text order
        pieces = pieces_of(offsets, special, [spans[index] for index in order])
        label = tuple(order[piece] if piece >= 0 else -1 for piece in pieces)
        if not {0, 1, 2} <= set(label) or unknown & set(ids) or (longest is not None and len(ids) > longest):
            excluded.add(sentence.frame)
        tokenised.append((sentence, ids, special, label))
    rows = [row for row in tokenised if row[0].frame not in excluded]
    return PronounTexts(
        contexts=tuple(Context(number, 0, ids, special) for number, (_, ids, special, _) in enumerate(rows)),
        labels=tuple(label for _, _, _, label in rows),
        frames=tuple(sentence.frame for sentence, _, _, _ in rows),
        cues=tuple(sentence.cue for sentence, _, _, _ in rows),
        excluded=len(tokenised) - len(rows),
    )


def pronoun_table(observations: Observations, texts: PronounTexts, cues: Collection[Cue] = CUES) -> PronounTable:
    """Return the pronoun scores of every head, from the data of the collector of `texts`.

    Args:
        observations: of the sentences, with that collector.
        texts: the sentences.
        cues: only sentences whose antecedent is known by one of these; each of them needs some.
    """
    states = {site: x.state() for site, x in states_of(observations.collected, NAME, ByContext).items()}
    states = {site: state for site, state in states.items() if len(state["weights"])}
    if not states:
        raise OptionError(
            "a pronoun table needs data of the collector of pronoun_texts(...), got none "
            f"({len(texts.contexts)} sentences, and {texts.excluded} that the tokenizer cannot represent)"
        )
    heads = sum(site.num_heads for site in states)
    chosen = torch.tensor([cue in cues for cue in texts.cues])
    for site, state in states.items():
        states[site] = {name: x[chosen[state["contexts"]]] for name, x in state.items()}
    entries = [entry for site, state in states.items() for entry in _scores(site, state, texts, heads)]
    return PronounTable(tuple(entries), texts.excluded)


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
        low, high = wilson_of_ties(total, count, Z)
        all_low, all_high = wilson_of_ties(total, count, normal_quantile(tail))
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
            # The interval of a single frame is NaN: max and min then return their first arguments, 0 and 1.
            frames_low=max(0.0, frames_low),
            frames_high=min(1.0, frames_high),
            all_low=max(0.0, min(wide_low, all_low)),
            all_high=min(1.0, max(wide_high, all_high)),
            weight=float(weights[:, head, 0].mean()),
            expected=float(state["expected"][:, 0].mean()),
        )

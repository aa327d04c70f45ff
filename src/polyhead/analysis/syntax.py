"""Which grammatical relation a head knows: for each, the head that most often looks from one word at the other.

A head that is the best of hundreds on some sentences is flattered by them. So half of the texts (drawn by a seed)
choose the head of each relation, and only the other half says how good it is. The same goes for what it is compared
with: the best fixed offset ("the word before"), which knows no grammar at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.analysis.intervals import wilson
from polyhead.analysis.syntax_table import SyntaxRow, SyntaxTable
from polyhead.errors import OptionError
from polyhead.observation.observations import Observations
from polyhead.observation.statistics import AttentionSite
from polyhead.observation.word_attention import ByContext, WordAttention, WordMap

__all__ = ["DIRECTIONS", "DOWNWARD", "EVERY", "MINIMUM", "UPWARD", "SyntaxRow", "SyntaxTable", "syntax_table"]

UPWARD, DOWNWARD = DIRECTIONS = ("dependent -> head", "head -> dependent")
EVERY = "every relation"
MINIMUM = 30


def syntax_table(
    observations: Observations, *, minimum: int = MINIMUM, seed: int = 0, collector: str = "words"
) -> SyntaxTable:
    """What a `WordAttention` gathered, relation by relation.

    A relation and direction with fewer than `minimum` words to ask in either half is left out, and counted. The
    intervals take words for independent draws; words of one sentence are not quite that.
    """
    if minimum < 1:
        raise OptionError(f"minimum is a number of words, at least 1, got {minimum}")
    sites, states, maps = _collected(observations, collector)
    held_out = _held_out(len(maps), seed)
    visible = torch.stack([state["visible"] for state in states]).any(0)
    edges = _Edges.of(maps, held_out, visible)
    entries: list[SyntaxRow] = []
    left_out: list[tuple[str, str, int]] = []
    for direction in DIRECTIONS:
        for instances in (edges.requested(direction, every=True), edges.requested(direction, every=False)):
            correct = torch.cat([instances.correct(state["looks"]) for state in states], -1)  # [2, relations, heads]
            totals = instances.totals()
            for index, relation in enumerate(instances.relations):
                chosen, held = int(totals[0, index]), int(totals[1, index])
                if min(chosen, held) < minimum:
                    left_out.append((relation, direction, held))
                    continue
                best = int(correct[0, index].argmax())  # of several, torch may take any; the counts are the same
                best = int((correct[0, index] == correct[0, index, best]).nonzero()[0])
                entries.append(_row(instances, index, direction, correct[:, index, best], best, sites, states))
    entries.sort(key=lambda row: (row.relation != EVERY, -row.count, row.relation, row.direction))
    return SyntaxTable(
        entries=tuple(entries),
        left_out=tuple(left_out),
        heads=sum(site.num_heads for site in sites),
        texts=(len(maps) - int(held_out.sum()), int(held_out.sum())),
        minimum=minimum,
        seed=seed,
    )


def _collected(
    observations: Observations, collector: str
) -> tuple[list[AttentionSite], list[dict[str, Tensor]], list[WordMap]]:
    """The sites, what each has gathered, and the maps of the texts that were read."""
    found = {site: values[collector] for site, values in observations.collected.items() if collector in values}
    values = [value for value in found.values() if isinstance(value, ByContext)]
    collectors = [value.collector for value in values if isinstance(value.collector, WordAttention)]
    if not values or len(collectors) != len(found):
        raise OptionError(
            f"a syntax table is made of what a WordAttention gathered under the name {collector!r}, got none; "
            "observe the model with collect=[WordAttention(maps)]"
        )
    states = [value.state() for value in values]
    contexts = states[0]["contexts"]
    if any(not torch.equal(state["contexts"], contexts) for state in states):
        raise OptionError("every layer must have read the same texts, got some that read others; observe with every=1")
    return list(found), states, [collectors[0].maps[context] for context in contexts.tolist()]


def _held_out(texts: int, seed: int) -> Tensor:
    """Which texts say how good the choice is: half of them, the larger half of an odd number."""
    order = torch.randperm(texts, generator=torch.Generator().manual_seed(seed))
    held_out = torch.ones(texts, dtype=torch.bool)
    held_out[order[: texts // 2]] = False
    return held_out


# ---- the questions


@dataclass(frozen=True, slots=True, eq=False)
class _Instances:
    """Words that are asked, [instances], and the words each may answer with, [edges]."""

    relations: tuple[str, ...]
    relation: Tensor  # [instances]
    held_out: Tensor  # [instances] bool
    instance: Tensor  # [edges]: whose answer it is
    requested: Tensor  # [edges]: the row of the word that is asked
    answer: Tensor  # [edges]: the index in its text of the word that is right
    offset: Tensor  # [edges]: from the one to the other, in words

    def _right(self, edges: Tensor) -> Tensor:
        """Whether any answer of an instance is given, from [edges, ...] to [instances, ...]."""
        right = torch.zeros(len(self.relation), *edges.shape[1:], dtype=torch.int64)
        return right.index_add_(0, self.instance, edges.to(torch.int64)) > 0

    def hits(self, looks: Tensor) -> Tensor:
        """Which instances each head gets right, [instances, heads], of the words it looks at [words, heads]."""
        return self._right(looks[self.requested] == self.answer[:, None])

    def offset_hits(self, offset: int) -> Tensor:
        return self._right(self.offset == offset)

    def by_relation(self, values: Tensor) -> Tensor:
        """Sums over the instances of each half and relation, [2, relations, ...]."""
        sums = torch.zeros(2 * len(self.relations), *values.shape[1:], dtype=torch.int64)
        place = self.held_out.to(torch.int64) * len(self.relations) + self.relation
        return sums.index_add_(0, place, values.to(torch.int64)).unflatten(0, (2, len(self.relations)))

    def correct(self, looks: Tensor) -> Tensor:
        return self.by_relation(self.hits(looks))

    def totals(self) -> Tensor:
        return self.by_relation(torch.ones_like(self.relation))

    def best_offset(self, relation: int) -> int:
        """Right most often in the half that chooses; of several the nearest, then the one before."""
        chosen = (self.relation == relation) & ~self.held_out
        # A word's answers stand at different offsets, so counting answers counts words.
        offsets, counts = self.offset[chosen[self.instance]].unique(return_counts=True)
        ranked = zip(offsets.tolist(), counts.tolist(), strict=True)
        return min(ranked, key=lambda pair: (-pair[1], abs(pair[0]), pair[0]))[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Every word that has a governor, both with tokens of their own, text after text."""

    relations: tuple[str, ...]
    relation: Tensor  # [edges]
    word: Tensor  # [edges]: its row among the words of all texts
    governor: Tensor  # the same of its governor
    start: Tensor  # the row of its text's first word
    held_out: Tensor  # bool
    visible: Tensor  # [edges, 2] bool: from the word to its governor, and back

    @classmethod
    def of(cls, maps: Sequence[WordMap], held_out: Tensor, visible: Tensor) -> _Edges:
        names: dict[str, int] = {}
        rows: list[tuple[int, int, int, int, bool]] = []
        start = 0
        for found, held in zip(maps, held_out.tolist(), strict=True):
            pieces = found.pieces()
            for word, (governor, relation) in enumerate(zip(found.governors, found.relations, strict=True)):
                if governor >= 0 and pieces[word] and pieces[governor]:
                    name = names.setdefault(relation, len(names))
                    rows.append((name, start + word, start + governor, start, held))
            start += len(found)
        if not rows:
            raise OptionError("a syntax table needs words with governors, got texts without any")
        relation, word, governor, starts, held_out = torch.tensor(rows, dtype=torch.int64).T
        return cls(tuple(names), relation, word, governor, starts, held_out > 0, visible[word])

    def requested(self, direction: str, *, every: bool) -> _Instances:
        upward = direction == UPWARD
        kept = self.visible[:, 0 if upward else 1]
        word, governor, start = self.word[kept], self.governor[kept], self.start[kept]
        relation = torch.zeros_like(word) if every else self.relation[kept]
        relations = (EVERY,) if every else self.relations
        requested, answer = (word, governor) if upward else (governor, word)
        # A governor is asked once a relation, however many dependents it has by it.
        questions, instance = (requested * len(relations) + relation).unique(return_inverse=True)
        held_out = torch.zeros(len(questions), dtype=torch.bool)
        held_out[instance] = self.held_out[kept]
        return _Instances(
            relations=relations,
            relation=questions % len(relations),
            held_out=held_out,
            instance=instance,
            requested=requested,
            answer=answer - start,
            offset=answer - requested,
        )


def _row(
    instances: _Instances,
    relation: int,
    direction: str,
    correct: Tensor,
    best: int,
    sites: Sequence[AttentionSite],
    states: Sequence[dict[str, Tensor]],
) -> SyntaxRow:
    for site, state in zip(sites, states, strict=True):  # noqa: B007 - the one that has the head
        if best < site.num_heads:
            break
        best -= site.num_heads
    own = instances.relation == relation
    chosen, held = own & ~instances.held_out, own & instances.held_out
    offset = instances.best_offset(relation)
    by_offset = instances.offset_hits(offset)
    by_head = instances.hits(state["looks"][:, best : best + 1])[:, 0]
    count, hits, baseline_hits = int(held.sum()), int(correct[1]), int(by_offset[held].sum())
    low, high = wilson(hits, count)
    baseline_low, baseline_high = wilson(baseline_hits, count)
    return SyntaxRow(
        relation=instances.relations[relation],
        direction=direction,
        count=count,
        site=site.name,
        layer=site.layer,
        head=best,
        accuracy=hits / count,
        low=low,
        high=high,
        offset=offset,
        baseline=baseline_hits / count,
        baseline_low=baseline_low,
        baseline_high=baseline_high,
        head_only=int((by_head & ~by_offset)[held].sum()),
        baseline_only=int((by_offset & ~by_head)[held].sum()),
        chosen_count=int(chosen.sum()),
        chosen_accuracy=int(correct[0]) / int(chosen.sum()),
        chosen_baseline=int(by_offset[chosen].sum()) / int(chosen.sum()),
        original_head=site.label(best),
    )

"""Syntax tables: for each dependency relation, the head that most often attends from one word to the other.

The accuracy of the best of hundreds of heads is biased upwards on the sentences it was chosen on. So half of the texts
(drawn with a seed) choose the head of each relation, and the held-out half measures it. The same holds for the
baseline: the best fixed offset ("the previous word"), which uses no syntax. After Clark et al. (2019), "What Does BERT
Look At?".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.analysis.intervals import wilson
from polyhead.analysis.syntax_table import FEW_WORDS, SyntaxRow, SyntaxTable
from polyhead.errors import OptionError
from polyhead.observation.observations import Observations
from polyhead.observation.statistics import AttentionSite
from polyhead.observation.word_attention import ByContext, WordAttention, WordMap

UPWARD, DOWNWARD = DIRECTIONS = ("dependent -> head", "head -> dependent")
EVERY = "every relation"


def syntax_table(observations: Observations, *, minimum: int = FEW_WORDS, seed: int = 0) -> SyntaxTable:
    """Return the table from the data that a `WordAttention` collected.

    A relation and direction with fewer than `minimum` words in either half is excluded, and counted. The intervals
    assume independent words; words of one sentence are not quite independent.
    """
    if minimum < 1:
        raise OptionError(f"minimum must be at least 1 word, got {minimum}")
    sites, states, maps = collected_words(observations)
    held_out = held_out_texts(len(maps), seed)
    edges = _Edges.of(maps, held_out, torch.stack([state["visible"] for state in states]).any(0))
    entries: list[SyntaxRow] = []
    left_out: list[tuple[str, str, int]] = []
    for direction in DIRECTIONS:
        for instances in (edges.instances(direction, every=True), edges.instances(direction, every=False)):
            correct = torch.cat([instances.correct(state["looks"]) for state in states], -1)  # [2, relations, heads]
            totals = instances.totals()
            for index, relation in enumerate(instances.relations):
                chosen_count, count = int(totals[0, index]), int(totals[1, index])
                if min(chosen_count, count) < minimum:
                    left_out.append((relation, direction, count))
                    continue
                best = int(correct[0, index].argmax())  # torch may return any of several maxima; take the first below
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


def collected_words(observations: Observations) -> tuple[list[AttentionSite], list[dict[str, Tensor]], list[WordMap]]:
    """Return the sites, their collector states, and the word maps of the texts."""
    by_site = {site: values["words"] for site, values in observations.collected.items() if "words" in values}
    values = [value for value in by_site.values() if isinstance(value, ByContext)]
    collectors = [value.collector for value in values if isinstance(value.collector, WordAttention)]
    if not values or len(collectors) != len(by_site):
        raise OptionError(
            "syntax needs data of a WordAttention collector named 'words', got none; "
            "observe the model with collect=[WordAttention(maps)]"
        )
    states = [value.state() for value in values]
    contexts = states[0]["contexts"]
    if any(not torch.equal(state["contexts"], contexts) for state in states):
        raise OptionError("all layers must have the same texts, got some with others; observe with every=1")
    return list(by_site), states, [collectors[0].maps[context] for context in contexts.tolist()]


def held_out_texts(texts: int, seed: int) -> Tensor:
    """Return the mask of held-out texts: half of them, the larger half of an odd number."""
    order = torch.randperm(texts, generator=torch.Generator().manual_seed(seed))
    held_out = torch.ones(texts, dtype=torch.bool)
    held_out[order[: texts // 2]] = False
    return held_out


# ---- instances


@dataclass(frozen=True, slots=True, eq=False)
class _Instances:
    """Query words, [instances], and the correct target words of each, [edges]."""

    relations: tuple[str, ...]
    relation: Tensor  # [instances]
    held_out: Tensor  # [instances] bool
    instance: Tensor  # [edges]: the instance that an edge belongs to
    query: Tensor  # [edges]: row of the query word
    target: Tensor  # [edges]: index of a correct word in its text
    offset: Tensor  # [edges]: from query to target, in words

    def _any_edge(self, edges: Tensor) -> Tensor:
        """Reduce [edges, ...] to [instances, ...]: True if any edge of an instance is."""
        counts = torch.zeros(len(self.relation), *edges.shape[1:], dtype=torch.int64)
        return counts.index_add_(0, self.instance, edges.to(torch.int64)) > 0

    def hits(self, most_attended: Tensor) -> Tensor:
        """Return the correct instances, [instances, heads], from the most attended words [words, heads]."""
        return self._any_edge(most_attended[self.query] == self.target[:, None])

    def offset_hits(self, offset: int) -> Tensor:
        return self._any_edge(self.offset == offset)

    def by_relation(self, values: Tensor) -> Tensor:
        """Return sums over the instances of each half and relation, [2, relations, ...]."""
        sums = torch.zeros(2 * len(self.relations), *values.shape[1:], dtype=torch.int64)
        place = self.held_out.to(torch.int64) * len(self.relations) + self.relation
        return sums.index_add_(0, place, values.to(torch.int64)).unflatten(0, (2, len(self.relations)))

    def correct(self, most_attended: Tensor) -> Tensor:
        return self.by_relation(self.hits(most_attended))

    def totals(self) -> Tensor:
        return self.by_relation(torch.ones_like(self.relation))

    def best_offset(self, relation: int) -> int:
        """Return the offset with the most hits in the choosing half; ties go to the nearest, then the preceding."""
        chosen = (self.relation == relation) & ~self.held_out
        # The targets of a word have different offsets, so counting edges counts words.
        offsets, counts = self.offset[chosen[self.instance]].unique(return_counts=True)
        ranked = zip(offsets.tolist(), counts.tolist(), strict=True)
        return min(ranked, key=lambda pair: (-pair[1], abs(pair[0]), pair[0]))[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """All dependency edges between words with tokens of their own, over all texts."""

    relations: tuple[str, ...]
    relation: Tensor  # [edges]
    word: Tensor  # [edges]: row of the dependent among the words of all texts
    governor: Tensor  # row of its governor
    start: Tensor  # row of its text's first word
    held_out: Tensor  # bool
    visible: Tensor  # [edges, 2] bool: from the word to its governor, and back

    @classmethod
    def of(cls, maps: Sequence[WordMap], held_out: Tensor, visible: Tensor) -> _Edges:
        names: dict[str, int] = {}
        rows: list[tuple[int, int, int, int, bool]] = []
        start = 0
        for word_map, is_held_out in zip(maps, held_out.tolist(), strict=True):
            pieces = word_map.pieces()
            for word, (governor, relation) in enumerate(zip(word_map.governors, word_map.relations, strict=True)):
                if governor >= 0 and pieces[word] and pieces[governor]:
                    name = names.setdefault(relation, len(names))
                    rows.append((name, start + word, start + governor, start, is_held_out))
            start += len(word_map)
        if not rows:
            raise OptionError("a syntax table needs words with governors, got texts without any")
        relation, word, governor, starts, held_out = torch.tensor(rows, dtype=torch.int64).T
        return cls(tuple(names), relation, word, governor, starts, held_out > 0, visible[word])

    def instances(self, direction: str, *, every: bool) -> _Instances:
        upward = direction == UPWARD
        visible = self.visible[:, 0 if upward else 1]
        word, governor, start = self.word[visible], self.governor[visible], self.start[visible]
        relation = torch.zeros_like(word) if every else self.relation[visible]
        relations = (EVERY,) if every else self.relations
        query, target = (word, governor) if upward else (governor, word)
        # A governor is one instance per relation, regardless of its number of dependents.
        keys, instance = (query * len(relations) + relation).unique(return_inverse=True)
        held_out = torch.zeros(len(keys), dtype=torch.bool)
        held_out[instance] = self.held_out[visible]
        return _Instances(
            relations=relations,
            relation=keys % len(relations),
            held_out=held_out,
            instance=instance,
            query=query,
            target=target - start,
            offset=target - query,
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
    for site, state in zip(sites, states, strict=True):  # noqa: B007 - used after the loop: the site of the head
        if best < site.num_heads:
            break
        best -= site.num_heads
    of_relation = instances.relation == relation
    chosen, held_out = of_relation & ~instances.held_out, of_relation & instances.held_out
    offset = instances.best_offset(relation)
    by_offset = instances.offset_hits(offset)
    by_head = instances.hits(state["looks"][:, best : best + 1])[:, 0]
    count, hits, baseline_hits = int(held_out.sum()), int(correct[1]), int(by_offset[held_out].sum())
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
        head_only=int((by_head & ~by_offset)[held_out].sum()),
        baseline_only=int((by_offset & ~by_head)[held_out].sum()),
        chosen_count=int(chosen.sum()),
        chosen_accuracy=int(correct[0]) / int(chosen.sum()),
        chosen_baseline=int(by_offset[chosen].sum()) / int(chosen.sum()),
        original_head=site.label(best),
    )

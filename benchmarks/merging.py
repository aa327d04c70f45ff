"""Merging heads against pruning as many with compensation: `python -m benchmarks merging --help`.

Heads of a layer form a group if all cosines of their outputs on the calibration text are at least halfway between 1 and
the largest one of random weights; signed cosines, since a mean replaces heads of equal sign only. The m heads of a
group are replaced by one, by their mean (`MergeHeads`) and in closed form (`FuseHeads`), and W_O is compensated. For
comparison m - 1 of the same heads are pruned, all but the best, and the m - 1 most dispensable heads of the layer.
Heads are chosen and solved for on the calibration split and evaluated on the reporting split: the loss as a share of
the layer's output, and the figures of the whole model with that one edit. Where no group can be merged, the most
similar pairs of every layer are tried, and those of its most dispensable head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring.markdown import markdown_table
from benchmarks.surgery_quality.language import LanguageTask
from benchmarks.surgery_quality.sentences import LONGEST
from benchmarks.surgery_quality.tasks import Batch
from polyhead.analysis.relations import cosine
from polyhead.inspection.probing import CHANCE_TOKENS, random_twin
from polyhead.observation import Contributions, find_projections, observe
from polyhead.observation.collectors import states_of
from polyhead.observation.contributions import SiteContributions
from polyhead.surgery import (
    AttentionLayer,
    HeadWeights,
    KeyTransform,
    MergeHeads,
    collect_moments,
    find_key_transforms,
    find_layers,
    fuse,
    pruning_order,
    read_heads,
)
from polyhead.surgery.adapters.head_weights import pack_heads
from polyhead.surgery.calibration.layer_moments import collect_inputs, collect_targets
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.calibration.streams import Piece, Streams, swapped_parameters
from polyhead.surgery.compensation.least_squares import OutputRegression

RIDGE = 1e-3
PAIRS = 3
CHANCE_LENGTH = CHANCE_TOKENS // 8
WAYS = {
    "merged": "made one by their mean",
    "fused": "made one in closed form",
    "pruned": "all but the best of them pruned",
    "best_pruned": "the layer's most dispensable heads pruned",
}
AS_ONE = ("merged", "fused")


# ---- similar heads


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Cosines of the outputs of heads, by the name of their layer's site, and the groups of similar heads."""

    cosines: Mapping[str, Tensor]
    null: float  # the largest cosine of random weights

    @property
    def threshold(self) -> float:
        return (1 + max(self.null, 0.0)) / 2

    @property
    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """The site of each group, and its heads."""
        return [(site, group) for site, x in self.cosines.items() for group in complete_groups(x, self.threshold)]

    def of(self, layer: AttentionLayer) -> list[tuple[int, ...]]:
        return [group for site, group in self.groups if site == layer.site]

    def least(self, layer: AttentionLayer, heads: Sequence[int]) -> float:
        """Return the cosine of the least similar two of these heads."""
        return min(float(self.cosines[layer.site][pair]) for pair in combinations(heads, 2))


def alike(model: nn.Module, batches: Sequence[Batch], seed: int = 0) -> Alike:
    """Return the cosines of a model, and those of random weights on short pieces of the same text."""
    null = _cosines(random_twin(model, seed), _beginnings(batches))
    return Alike(_cosines(model, batches), max(_largest(x) for x in null.values()))


def complete_groups(cosines: Tensor, threshold: float) -> list[tuple[int, ...]]:
    """Return the complete-linkage clusters of two heads or more, in which all pairs reach the threshold."""
    values = torch.where(cosines.isnan(), -torch.inf, cosines)
    values.fill_diagonal_(-torch.inf)
    members: dict[int, list[int]] = {head: [head] for head in range(len(values))}
    while len(members) > 1:
        one, other = sorted(divmod(int(values.argmax()), len(values)))
        if not values[one, other] >= threshold:
            break
        # The similarity of two groups is that of their least similar pair.
        values[one] = torch.minimum(values[one], values[other])
        values[:, one] = values[one]
        values[other], values[:, other] = -torch.inf, -torch.inf
        values[one, one] = -torch.inf
        members[one] += members.pop(other)
    return sorted(tuple(sorted(group)) for group in members.values() if len(group) > 1)


@torch.no_grad()
def _cosines(model: nn.Module, batches: Sequence[Batch]) -> dict[str, Tensor]:
    head_projections = find_projections(model, lambda: model(**{name: x[:1, :16] for name, x in batches[0].items()}))
    with observe(model, statistics=False, collect=[Contributions()]) as session:
        for batch in batches:
            model(**batch)
    states = states_of(session.observations.collected, "contributions", SiteContributions)
    cosines = {}
    for site, state in states.items():
        output = head_projections[site].output if site in head_projections else None
        if output is not None and state.moments is not None:
            cosines[site.name] = cosine(state.moments, output).cpu()
    return cosines


def _beginnings(batches: Sequence[Batch]) -> list[Batch]:
    """Return the beginnings of rows of all batches in turn, without padding: as many tokens as an inspection reads."""
    found: list[Batch] = []
    tokens = 0
    for row in range(max(len(batch["input_ids"]) for batch in batches)):
        for batch in batches:
            if tokens < CHANCE_TOKENS and row < len(batch["input_ids"]):
                real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[row] != 0
                found.append({name: x[row : row + 1, real][:, :CHANCE_LENGTH] for name, x in batch.items()})
                tokens += found[-1]["input_ids"].shape[1]
    return found


def parts_to_merge(heads: HeadWeights, group: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the heads of a group that can be merged: all of them, or else those that read one KV head.

    Heads with KV heads of their own can be merged with each other; a KV head with other readers must stay.
    """
    readers = heads.readers
    by_key: dict[int, list[int]] = {}
    for head in group:
        key = heads.key_heads[head]
        by_key.setdefault(key if len(readers[key]) > 1 else -1, []).append(head)
    return [tuple(part) for part in by_key.values() if len(part) > 1]


# ---- losses


@dataclass(slots=True, eq=False)
class Outcome:
    """A layer with fewer heads, in its old shape with zeros for the others, and the loss of its output."""

    heads: HeadWeights
    calibrated: float
    held_out: float
    whole: dict[str, list[float]] | None = None  # the figures of the whole model, once they are measured


@dataclass(eq=False)
class Trial:
    """One layer, whose heads are merged or pruned and whose W_O is solved for the others."""

    model: nn.Module
    layer: AttentionLayer
    heads: HeadWeights
    calibration: list[Piece]
    held_out: list[Piece]
    moments: OutputMoments
    held_moments: OutputMoments
    _pruned: dict[tuple[int, ...], Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problem, self.held_problem = (
            OutputRegression.of(x, self.heads, RIDGE, self.layer.path) for x in (self.moments, self.held_moments)
        )
        self.order = pruning_order(self.moments, self.heads, ridge=RIDGE).heads

    def pruned(self, gone: Sequence[int]) -> Outcome:
        key = tuple(sorted(gone))
        if key not in self._pruned:
            self._pruned[key] = self._solved(self.heads, self._without(gone), self.problem, self.held_problem)
        return self._pruned[key]

    def best_of(self, group: Sequence[int]) -> tuple[int, ...]:
        """Return the heads of a group without the one that is best kept, by the loss on the calibration text."""
        every = [tuple(head for head in group if head != stays) for stays in group]
        return min(every, key=lambda gone: self.pruned(gone).calibrated)

    def ways(self, group: tuple[int, ...], transform: KeyTransform) -> dict[str, Outcome]:
        merged = self.made_one(MergeHeads(self.layer.number, group).change(self.heads), group)
        found = {"merged": merged}
        if len({self.heads.key_heads[head] for head in group}) == 1:
            found["fused"] = merged  # heads of one KV head are fused by their mean
        elif transform.norm == "none":
            inputs = collect_inputs(self.model, self.layer, self.calibration)
            found["fused"] = self.made_one(fuse(self.heads, group, transform, inputs), group)
        found["pruned"] = self.pruned(self.best_of(group))
        found["best_pruned"] = self.pruned(self.order[: len(group) - 1])
        return found

    def made_one(self, made: HeadWeights, group: Sequence[int]) -> Outcome:
        """Return the outcome with the merged head in place of the first and zeros for the others, in the old shape."""
        kept = self._without(group[1:])
        held: dict[str, Any] = {"output_bias": made.output_bias}
        old_keys = [self.heads.key_heads[head] for head in kept]
        places = dict.fromkeys(("query", "output", "query_bias"), (kept, list(range(len(kept)))))
        places |= dict.fromkeys(("key", "value", "key_bias", "value_bias"), (old_keys, list(made.key_heads)))
        for name, (to, of) in places.items():
            x = getattr(self.heads, name)
            held[name] = None if x is None else x.clone()
            if x is not None:
                held[name][to] = getattr(made, name)[of]
        spread = replace(self.heads, **held)
        swapped = pack_heads(self.model, self.layer, spread)
        moments = [collect_targets(self.model, self.layer, text, swapped) for text in (self.calibration, self.held_out)]
        problems = (OutputRegression.of(x.outputs, spread, RIDGE, self.layer.path, target=x.target) for x in moments)
        return self._solved(spread, kept, *problems)

    def _without(self, gone: Sequence[int]) -> list[int]:
        return [head for head in range(self.heads.num_heads) if head not in gone]

    def _solved(
        self, spread: HeadWeights, kept: list[int], problem: OutputRegression, held_problem: OutputRegression
    ) -> Outcome:
        matrix, bias = problem.solve(kept)
        output = torch.zeros_like(spread.output)
        output[kept] = matrix.unflatten(0, (len(kept), -1)).to(output)
        heads = replace(
            spread, output=output, output_bias=None if spread.output_bias is None else bias.to(spread.output_bias)
        )
        calibrated, held_out = (
            _missing(own, kept, matrix, bias, float((whole.matrix * whole.cross).sum()))
            for own, whole in ((problem, self.problem), (held_problem, self.held_problem))
        )
        return Outcome(heads, calibrated, held_out)


def _missing(problem: OutputRegression, kept: list[int], matrix: Tensor, bias: Tensor, energy: float) -> float:
    """Return the mean squared error as a share of the mean square of the output, centred if there is a bias."""
    at = problem.channels(kept)
    off = energy - 2 * float((matrix * problem.cross[at]).sum())
    off += float((matrix * (problem.products[at][:, at] @ matrix)).sum())
    if problem.centred:
        off += float((problem.target_mean - problem.mean[at] @ matrix - bias).square().sum())
    return off / energy


# ---- the whole model


def judged(task: Any, pairs: int | None = None, *, whole: bool = True) -> Iterator[dict[str, Any]]:
    """Yield a row of the groups, then one for each group or pair: the loss of each way.

    `pairs` of each layer are tried beside groups; None is a few where no group can be merged. `whole` adds the figures
    of the whole model.
    """
    model, calibration, held_out = task.model, task.calibration, held_out_batches(task)
    found = alike(model, calibration)
    layers = [layer for layer in find_layers(model) if not layer.refusals and layer.site in found.cosines]
    heads = {layer.path: read_heads(model, layer) for layer in layers}
    groups = {layer.path: [(x, parts_to_merge(heads[layer.path], x)) for x in found.of(layer)] for layer in layers}
    every = [one for own in groups.values() for one in own]
    if pairs is None:
        pairs = 0 if any(len(parts) for _, parts in every) else PAIRS
    moments, held_moments = collect_moments(model, calibration), collect_moments(model, held_out)
    yield {
        "kind": "found",
        "threshold": round(found.threshold, 4),
        "null": round(found.null, 4),
        "largest_cosine": max(_largest(x) for x in found.cosines.values()),
        "groups": len(found.groups),
        "in_part": sum(len(parts) > 0 and parts != [group] for group, parts in every),
        "not_at_all": sum(not len(parts) for _, parts in every) + len(found.groups) - len(every),
        "calibrated_tokens": max(x.count for x in moments.values()),
        "held_out_tokens": max(x.count for x in held_moments.values()),
        **({"whole": _figures(task)} if whole else {}),
    }
    if not pairs and not any(len(parts) for _, parts in every):
        return
    forms = find_key_transforms(model, calibration[0])
    texts = Streams(model, calibration), Streams(model, held_out)
    for layer in layers:
        path = layer.path
        tried = [("group", part, group) for group, parts in groups[path] for part in parts]
        if not tried and not pairs:
            continue
        own, others = (text.before(layer, {}) for text in texts)
        trial = Trial(model, layer, heads[path], own, others, moments[path], held_moments[path])
        in_groups = [part for _, part, _ in tried]
        tried += [("pair", pair, pair) for pair in _pairs(trial, found, pairs) if pair not in in_groups]
        for kind, chosen, group in tried:
            ways = trial.ways(chosen, forms[path])
            row = {
                "kind": kind,
                "layer": path,
                "heads": chosen,
                "group": group,
                "cosine": round(found.least(layer, chosen), 4),
                "key_heads": len({trial.heads.key_heads[head] for head in chosen}),
                "has_best": trial.order[0] in chosen,
                "pruned_heads": {"pruned": trial.best_of(chosen), "best_pruned": trial.order[: len(chosen) - 1]},
                "calibrated": {name: round(outcome.calibrated, 7) for name, outcome in ways.items()},
                "held_out": {name: round(outcome.held_out, 7) for name, outcome in ways.items()},
            }
            for outcome in ways.values() if whole else ():
                if outcome.whole is None:
                    with swapped_parameters(model, pack_heads(model, layer, outcome.heads)):
                        outcome.whole = _figures(task)
            if whole:
                row["whole"] = {name: outcome.whole for name, outcome in ways.items()}
            yield row


def held_out_batches(task: Any) -> list[Batch]:
    """Return the batches of the reporting split of a task."""
    if isinstance(task, LanguageTask):
        return [{"input_ids": rows} for rows in task.splits["report"].split(task.batch)]
    sentences = sorted(task.splits["report"].sentences, key=len)
    batches: list[Batch] = []
    for at in range(0, len(sentences), task.batch):
        some = sentences[at : at + task.batch]
        encoded = task.tokenizer(some, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        batches.append({name: x.to(task.device) for name, x in encoded.items()})
    return batches


def _pairs(trial: Trial, found: Alike, count: int) -> list[tuple[int, ...]]:
    """Return the most similar pairs that can be merged, and those of the most dispensable head."""
    every = [x for x in combinations(range(trial.heads.num_heads), 2) if parts_to_merge(trial.heads, x)]
    every = sorted(every, key=lambda pair: -found.least(trial.layer, pair))
    with_best = [pair for pair in every if trial.order[0] in pair]
    return list(dict.fromkeys((*every[:count], *with_best[:count])))


def _largest(cosines: Tensor) -> float:
    apart = cosines[~torch.eye(len(cosines), dtype=torch.bool)]
    return round(float(apart[~apart.isnan()].max()), 4) if len(apart) else -1.0


def _figures(task: Any) -> dict[str, list[float]]:
    return {name: [round(x.value, 6), round(x.error, 6)] for name, x in task.figures("report").items()}


# ---- summary


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return tables of mean losses, and of how often a merged head loses less than pruning."""
    found, losses = rows[0], ("held_out", "calibrated")
    lines = [
        f"groups of similar heads: {found['groups']} (cosine at least {found['threshold']}; the largest is "
        f"{found['largest_cosine']}); merged in part, for other heads that read their KV heads: {found['in_part']}; "
        f"not at all: {found['not_at_all']}"
    ]
    for kind in ("group", "pair"):
        own = [row for row in rows if row["kind"] == kind]
        if not own:
            continue
        figure = _compared(own[0])
        heads = ["", "lost, held out", "lost, calibrated", *([] if figure is None else [figure])]
        heads += [f"less lost than {way}" for way in ("pruned", "best_pruned")]
        heads += [] if figure is None else [f"better {figure} than {way}" for way in ("pruned", "best_pruned")]
        table = []
        for way, words in WAYS.items():
            have = [row for row in own if way in row["held_out"]]
            if not have:
                continue
            cells = [f"{way}: {words}", *(f"{fmean(row[x][way] for row in have):.4%}" for x in losses)]
            cells += [] if figure is None else [f"{fmean(row['whole'][way][figure][0] for row in have):.5f}"]
            for better in (_loses_less, *([] if figure is None else [_is_better])):
                for other in ("pruned", "best_pruned"):
                    wins = sum(better(row, way, other) for row in have)
                    cells.append(f"{wins} of {len(have)}" if way in AS_ONE else "")
            table.append(cells)
        lines += ["", f"{kind}s that were tried: {len(own)}", "", *markdown_table(heads, *table)]
    return "\n".join(lines)


def _compared(row: Mapping[str, Any]) -> str | None:
    """Return the figure of the whole model to compare: similarity of embeddings, or the ratio of perplexities."""
    if "whole" not in row:
        return None
    return "cosine" if "cosine" in row["whole"]["merged"] else "ratio"


def _loses_less(row: Mapping[str, Any], way: str, other: str) -> bool:
    return bool(row["held_out"][way] < row["held_out"][other])


def _is_better(row: Mapping[str, Any], way: str, other: str) -> bool:
    name = _compared(row)
    ours, theirs = (row["whole"][x][name][0] for x in (way, other))
    return bool(ours > theirs if name == "cosine" else ours < theirs)

"""The most informative findings about a model's heads, as values; `wording` has their text.

A finding about the text must hold on both halves of it, the even and the odd documents (or contexts, where there are
few documents). Without two of them there are no such findings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.analysis.intervals import influence_error, student_quantile
from polyhead.analysis.redundancy import ALONE, PREDICTABLE, THRESHOLD
from polyhead.analysis.roles import HeadRoles, RoleScore
from polyhead.analysis.roles_evidence import EVIDENCE
from polyhead.analysis.roles_rules import RULES
from polyhead.inspection.heads import Head, has_stacks
from polyhead.inspection.result import Inspection
from polyhead.inspection.vocabulary import ROLE_ORDER
from polyhead.inspection.wording import REPEATED, Basis, Finding, FindingKind

MAX_FINDINGS = 3
TAIL = 0.025  # of Student's t: two-sided tests at 5% of a median against 0, and of two heads against each other
SINK_MASS = 0.5  # share of attention on the first token above which a head counts as a sink
MOSTLY = 0.5  # share of a redundant head from which one other head is named: it predicts more than all the rest
SAME = 0.5  # |cosine| from which two heads write much the same, or the opposite: less than 60 degrees apart
NEAR_UNIFORM = 0.9  # share of the maximum entropy above which attention counts as uniform
_COMMON: tuple[tuple[str, FindingKind, float], ...] = (
    ("sink_mass", "sink", SINK_MASS),
    ("normalized_entropy", "uniform", NEAR_UNIFORM),
)


def findings(inspection: Inspection, limit: int = MAX_FINDINGS) -> tuple[Finding, ...]:
    """Return findings, one of each kind in turn: roles, redundant heads, importance, common patterns, extremes."""
    kinds = [
        _clearest(inspection),
        _redundant(inspection),
        _importance(inspection),
        _common(inspection),
        _extremes(inspection),
    ]
    result: list[Finding] = []
    stacked = has_stacks(inspection.table.sites)
    while len(result) < limit:
        before = len(result)
        for kind in kinds:
            finding = next(kind, None)
            if finding is not None and len(result) < limit:
                result.append(replace(finding, stacked=stacked, basis=_basis(inspection, finding)))
        if len(result) == before:
            break
    return tuple(result)


def least_important(inspection: Inspection, measure: str, count: int) -> tuple[list[int], int | None]:
    """Return the rows of the `count` least important heads, and their number with that of the heads as unimportant.

    The latter do not differ significantly from the last of the former, by the standard error of the difference of two
    heads on the same documents. The number is None without errors, as on a single document.
    """
    values = inspection.table[measure].nan_to_num(nan=math.inf)
    rows = values.argsort(stable=True)[:count].tolist()
    effects = [inspection.influence.get(site, {}).get(measure) for site in inspection.table.sites]
    last = effects[rows[-1]]
    if last is None or len(last) < 2:
        return rows, None
    last = last[:, inspection.table.heads[rows[-1]]]
    among, deviations = len(rows), student_quantile(TAIL, len(last) - 1)
    for row, (effect, head) in enumerate(zip(effects, inspection.table.heads, strict=True)):
        if row not in rows and effect is not None:
            error = influence_error(effect[:, head] - last)
            among += float(values[row] - values[rows[-1]]) <= deviations * error
    return rows, among


def _basis(inspection: Inspection, finding: Finding) -> Basis | None:
    """Return the text that a finding is about; None for roles that are measured on the built-in sentences."""
    facts, measured = inspection.facts, "importance_" if finding.kind == "importance" else ""
    source = RULES[str(finding.values["role"])].source if finding.kind == "role" else "text"
    if source == "repeated":
        return Basis(REPEATED, None, None, halves=True)
    if "context" not in facts or source != "text":
        return None
    tokens, context = facts[f"{measured}tokens"], facts[f"{measured}context"]
    return Basis(inspection.settings.text, tokens, context, halves=True)


def _halves(inspection: Inspection, column: str) -> Tensor:
    """Return the values of a column on the whole text and on both halves, [3, rows]; NaN where they are unknown."""
    table, unknown = inspection.table, torch.full((2,), torch.nan)
    of_halves = [
        unknown if column not in (of_site := inspection.halves.get(site, {})) else of_site[column][:, head]
        for site, head in zip(table.sites, table.heads, strict=True)
    ]
    return torch.cat([table[column][None], torch.stack(of_halves, 1)])


def _largest(values: Tensor) -> int | None:
    """Return the row with the largest value on the whole text and on both halves; None if they differ."""
    first, *others = values.nan_to_num(nan=-math.inf).argmax(1).tolist()
    same = all(x == first for x in others) and bool(values[:, first].isfinite().all())
    return int(first) if same else None


def _clearest(inspection: Inspection) -> Iterator[Finding]:
    scored: list[tuple[int, float, HeadRoles, RoleScore]] = []
    for head in inspection.roles:
        for score in head.scores:
            if score.holds_in_halves:
                scored.append((ROLE_ORDER.index(score.role), -score.score, head, score))
    reported = set()
    for _, _, head, score in sorted(scored, key=lambda x: x[:2]):
        if score.role not in reported:
            reported.add(score.role)
            values = {name: getattr(score, name) for name in EVIDENCE if getattr(score, name) is not None}
            yield Finding("role", ((head.site, head.head),), None, values)


def _redundant(inspection: Inspection) -> Iterator[Finding]:
    """Yield the redundant heads, each with the head that alone predicts most of it, if one does; a pair once."""
    reported: set[frozenset[Head]] = set()
    for redundant in inspection.redundant:
        site, head = redundant.head
        halves = inspection.halves.get(site, {})
        share, alone = (float(halves[x][:, head].min()) if x in halves else math.nan for x in (PREDICTABLE, ALONE))
        if not share >= THRESHOLD:
            continue
        heads: tuple[Head, ...] = (redundant.head,)
        values: dict[str, float | str] = {"share": redundant.share}
        if alone >= MOSTLY:
            heads = (redundant.head, redundant.other)
            relation = "linear_map" if abs(redundant.cosine) < SAME else "same" if redundant.cosine > 0 else "opposite"
            values |= {"relation": relation, "alone": redundant.share_of_other, "cosine": redundant.cosine}
        if frozenset(heads) not in reported:
            reported.add(frozenset(heads))
            yield Finding("redundant", heads, PREDICTABLE, values)


def _importance(inspection: Inspection) -> Iterator[Finding]:
    table = inspection.table
    for measure in ("ablation", "gradient"):
        if measure not in table.columns:
            continue
        values = _halves(inspection, measure)
        best = _largest(values)
        if best is None or len(table) < 2:
            continue
        median, *_ = medians = values.nanquantile(0.5, 1)  # Tensor.median is the lower of two middle values
        numbers: dict[str, float | str | bool] = {
            "value": float(values[0, best]),
            "by_representation": inspection.facts.get("loss") == "representation",
        }
        if median > _median_half_width(inspection, measure) and bool((medians > 0).all()):
            numbers["times"] = float((values[:, best] / medians).min())
        yield Finding("importance", (_head(inspection, best),), measure, numbers)


def _median_half_width(inspection: Inspection, measure: str) -> float:
    """Return half of the 95% interval of the head at the median, the wider one if it is between two; inf if unknown."""
    table, effects = inspection.table, (x.get(measure) for x in inspection.influence.values())
    samples = max((len(x) for x in effects if x is not None), default=0)
    if f"{measure}_error" not in table.columns or samples < 2:
        return math.inf
    values = table[measure]
    order = values[values.isfinite()].argsort()
    errors = table[f"{measure}_error"][values.isfinite()][order]
    error = float(errors[(len(order) - 1) // 2 : len(order) // 2 + 1].max())
    return student_quantile(TAIL, samples - 1) * error


def _common(inspection: Inspection) -> Iterator[Finding]:
    table = inspection.table
    for column, kind, threshold in _COMMON:
        if column not in table.columns:
            continue
        rows = (_halves(inspection, column) > threshold).all(0).nonzero()[:, 0].tolist()
        if rows:
            heads = tuple(_head(inspection, row) for row in rows)
            values = {"count": len(rows), "of": len(table)}
            yield Finding(kind, heads, column, values)


def _extremes(inspection: Inspection) -> Iterator[Finding]:
    """Yield the heads with the largest max attention weight and mean attention distance."""
    table = inspection.table
    for column in ("confidence", "mean_distance"):
        best = _largest(_halves(inspection, column)) if column in table.columns else None
        if best is not None:
            numbers = {"value": float(table[column][best])}
            yield Finding("extreme", (_head(inspection, best),), column, numbers)


def _head(inspection: Inspection, row: int) -> Head:
    return inspection.table.sites[row], inspection.table.heads[row]

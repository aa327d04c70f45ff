"""The most informative findings about a model's heads, as values; `wording` has their text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from polyhead.analysis.roles import HeadRoles, RoleScore
from polyhead.analysis.roles_evidence import EVIDENCE
from polyhead.inspection.heads import Head
from polyhead.inspection.result import Inspection
from polyhead.inspection.vocabulary import ROLE_ORDER
from polyhead.inspection.wording import Finding, FindingKind
from polyhead.observation import HeadProfile

MAX_FINDINGS = 3
DEVIATIONS = 1.96  # standard errors: a median within so many of 0 is no unit to compare with
SINK_MASS = 0.5  # share of attention on the first token above which a head counts as a sink
NEAR_UNIFORM = 0.9  # share of the maximum entropy above which attention counts as uniform
_COMMON: tuple[tuple[str, FindingKind, float], ...] = (
    ("sink_mass", "sink", SINK_MASS),
    ("normalized_entropy", "uniform", NEAR_UNIFORM),
)


def findings(inspection: Inspection, limit: int = MAX_FINDINGS) -> tuple[Finding, ...]:
    """Return findings, one of each kind in turn: roles, similar heads, importance, common patterns, extremes."""
    kinds = [
        _clearest(inspection),
        _similar(inspection),
        _importance(inspection),
        _common(inspection),
        _extremes(inspection),
    ]
    result: list[Finding] = []
    while len(result) < limit:
        before = len(result)
        for kind in kinds:
            finding = next(kind, None)
            if finding is not None and len(result) < limit:
                result.append(finding)
        if len(result) == before:
            break
    return tuple(result)


def _is_stacked(inspection: Inspection) -> bool:
    return len({(site.stack, site.kind) for site in inspection.table.sites}) != 1


def _clearest(inspection: Inspection) -> Iterator[Finding]:
    scored: list[tuple[int, float, HeadRoles, RoleScore]] = []
    for head in inspection.roles:
        for score in head.scores:
            if score.holds:
                scored.append((ROLE_ORDER.index(score.role), -score.score, head, score))
    reported = set()
    for _, _, head, score in sorted(scored, key=lambda x: x[:2]):
        if score.role not in reported:
            reported.add(score.role)
            values = {name: getattr(score, name) for name in EVIDENCE if getattr(score, name) is not None}
            yield Finding("role", ((head.site, head.head),), None, values, _is_stacked(inspection))


def _similar(inspection: Inspection) -> Iterator[Finding]:
    groups = [(group.least, group.heads, False) for group in inspection.groups]
    redundancy = inspection.redundancy
    threshold = math.inf if redundancy is None else redundancy.threshold
    groups += [(pair.cosine, (pair.one, pair.other), True) for pair in inspection.pairs if pair.cosine >= threshold]
    null = {} if redundancy is None else {"null": redundancy.null}
    for cosine, heads, across in sorted(groups, key=lambda x: -x[0]):
        yield Finding("similar", heads, None, {"cosine": cosine, "across": across, **null}, _is_stacked(inspection))


def _importance(inspection: Inspection) -> Iterator[Finding]:
    table = inspection.table
    for measure in ("ablation", "gradient"):
        if measure not in table.columns:
            continue
        values = table[measure]
        order = values.nan_to_num(nan=-math.inf).argsort(descending=True)
        if len(order) < 2 or not bool(values[order[0]].isfinite()):
            continue
        largest = float(values[order[0]])
        median = float(values[values.isfinite()].quantile(0.5))  # Tensor.median is the lower of two middle values
        numbers: dict[str, float | str | bool] = {
            "value": largest,
            "by_representation": inspection.facts.get("loss") == "representation",
        }
        if median > DEVIATIONS * _median_error(table, measure):
            numbers["times"] = largest / median
        yield Finding("importance", (_head(inspection, int(order[0])),), measure, numbers, _is_stacked(inspection))


def _median_error(table: HeadProfile, measure: str) -> float:
    """Return the standard error of the head at the median, the larger one if it is between two; inf if unknown."""
    if f"{measure}_error" not in table.columns:
        return math.inf
    values = table[measure]
    order = values[values.isfinite()].argsort()
    errors = table[f"{measure}_error"][values.isfinite()][order]
    return float(errors[(len(order) - 1) // 2 : len(order) // 2 + 1].max())


def _common(inspection: Inspection) -> Iterator[Finding]:
    table = inspection.table
    for column, kind, threshold in _COMMON:
        if column not in table.columns:
            continue
        rows = (table[column] > threshold).nonzero()[:, 0].tolist()
        if rows:
            heads = tuple(_head(inspection, row) for row in rows)
            values = {"count": len(rows), "of": len(table)}
            yield Finding(kind, heads, column, values, _is_stacked(inspection))


def _extremes(inspection: Inspection) -> Iterator[Finding]:
    """Yield the heads with the largest max attention weight, mean attention distance and output norm."""
    table = inspection.table
    for column in ("confidence", "mean_distance", "output_norm_share"):
        if column in table.columns and bool(table[column].isfinite().any()):
            values = table[column].nan_to_num(nan=-math.inf)
            best = int(values.argmax())
            numbers = {"value": float(values[best])}
            yield Finding("extreme", (_head(inspection, best),), column, numbers, _is_stacked(inspection))


def _head(inspection: Inspection, row: int) -> Head:
    return inspection.table.sites[row], inspection.table.heads[row]

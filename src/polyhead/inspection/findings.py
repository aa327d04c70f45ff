"""The most telling things about a model's heads, as values; `wording` says them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from polyhead.analysis.roles import HeadRoles, RoleScore
from polyhead.inspection.heads import Head
from polyhead.inspection.result import Inspection
from polyhead.inspection.vocabulary import TELLING
from polyhead.inspection.wording import Finding, FindingKind

MOST = 3
RESTING = 0.5  # of its attention on the first token, from which on a head is said to rest there
WIDE = 0.9  # of the largest entropy, from which on a head is said to look everywhere alike
_COMMON: tuple[tuple[str, FindingKind, float], ...] = (
    ("sink_mass", "resting", RESTING),
    ("normalized_entropy", "wide", WIDE),
)


def findings(inspection: Inspection, most: int = MOST) -> tuple[Finding, ...]:
    """One of each kind: what the clearest head does, which say the same, which matters most; then what is common."""
    kinds = [
        _clearest(inspection),
        _alike(inspection),
        _matters(inspection),
        _common(inspection),
        _extremes(inspection),
    ]
    found: list[Finding] = []
    while len(found) < most:
        before = len(found)
        for kind in kinds:
            finding = next(kind, None)
            if finding is not None and len(found) < most:
                found.append(finding)
        if len(found) == before:
            break
    return tuple(found)


def _is_stacked(inspection: Inspection) -> bool:
    return len({(site.stack, site.kind) for site in inspection.table.sites}) != 1


def _clearest(inspection: Inspection) -> Iterator[Finding]:
    scored: list[tuple[int, float, HeadRoles, RoleScore]] = []
    for head in inspection.roles:
        for score in head.scores:
            if score.holds:
                scored.append((TELLING.index(score.role), -score.score, head, score))
    told = set()
    for _, _, head, score in sorted(scored, key=lambda x: x[:2]):
        if score.role not in told:
            told.add(score.role)
            values: dict[str, float | str | bool] = {
                "role": score.role,
                "score": score.score,
                "null": score.null,
                "evidence": score.evidence,
            }
            yield Finding("role", ((head.site, head.head),), None, values, _is_stacked(inspection))


def _alike(inspection: Inspection) -> Iterator[Finding]:
    groups = [(group.least, group.heads, False) for group in inspection.groups]
    threshold = math.inf if inspection.likeness is None else inspection.likeness.threshold
    groups += [(pair.cosine, (pair.one, pair.other), True) for pair in inspection.pairs if pair.cosine >= threshold]
    null = {} if inspection.likeness is None else {"null": inspection.likeness.null}
    for cosine, heads, across in sorted(groups, key=lambda x: -x[0]):
        yield Finding("alike", heads, None, {"cosine": cosine, "across": across, **null}, _is_stacked(inspection))


def _matters(inspection: Inspection) -> Iterator[Finding]:
    table = inspection.table
    for measure in ("ablation", "gradient"):
        if measure not in table.columns:
            continue
        values = table[measure]
        order = values.nan_to_num(nan=-math.inf).argsort(descending=True)
        if len(order) < 2 or not bool(values[order[0]].isfinite()):
            continue
        most, middle = float(values[order[0]]), float(values[values.isfinite()].median())
        told: dict[str, float | str | bool] = {
            "value": most,
            "turned": inspection.facts.get("loss") == "representation",
        }
        if middle > 0:
            told["times"] = most / middle
        yield Finding("matters", (_head(inspection, int(order[0])),), measure, told, _is_stacked(inspection))


def _common(inspection: Inspection) -> Iterator[Finding]:
    table = inspection.table
    for column, kind, least in _COMMON:
        if column not in table.columns:
            continue
        there = (table[column] > least).nonzero()[:, 0].tolist()
        if there:
            heads = tuple(_head(inspection, index) for index in there)
            values = {"count": len(there), "of": len(table)}
            yield Finding(kind, heads, column, values, _is_stacked(inspection))


def _extremes(inspection: Inspection) -> Iterator[Finding]:
    """What can be said of any model: its sharpest, its furthest and its loudest head."""
    table = inspection.table
    for column in ("confidence", "mean_distance", "output_norm_share"):
        if column in table.columns and bool(table[column].isfinite().any()):
            values = table[column].nan_to_num(nan=-math.inf)
            best = int(values.argmax())
            told = {"value": float(values[best])}
            yield Finding("extreme", (_head(inspection, best),), column, told, _is_stacked(inspection))


def _head(inspection: Inspection, row: int) -> Head:
    return inspection.table.sites[row], inspection.table.heads[row]

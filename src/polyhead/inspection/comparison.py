"""Two inspections side by side, with the differences that sampling does not explain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polyhead.inspection.heads import Head
from polyhead.inspection.matching import Matching, Unmatched, match_heads
from polyhead.inspection.result import Inspection
from polyhead.inspection.vocabulary import IMPORTANCE

DEVIATIONS = 1.96  # of the difference, from which on it is beyond sampling error
LEAST = 0.01  # of the larger value: with many tokens every difference is beyond sampling error


@dataclass(frozen=True, slots=True)
class Change:
    """One number of one head in both, at its place in the first and at that in the second."""

    head: Head
    head_after: Head
    name: str
    before: float
    after: float
    error: float  # the standard error of the difference; NaN where it is not known

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def beyond(self) -> bool:
        """Whether sampling does not explain it, and it is large enough to speak of."""
        size = abs(self.difference)
        return size > DEVIATIONS * self.error and size > LEAST * max(abs(self.before), abs(self.after))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two inspections; heads with roles are at their places in the first."""

    changes: tuple[Change, ...]
    gained: tuple[tuple[Head, str], ...]  # roles
    lost: tuple[tuple[Head, str], ...]
    only_before: tuple[Unmatched, ...]  # heads that the other does not have
    only_after: tuple[Unmatched, ...]
    losses: tuple[str | None, str | None] = (None, None)  # by which importance was measured in both

    def beyond(self, name: str | None = None) -> tuple[Change, ...]:
        """The changes beyond sampling error, of one statistic or of all, the clearest first."""
        found = [x for x in self.changes if x.beyond and (name is None or x.name == name)]
        return tuple(sorted(found, key=lambda x: -abs(x.difference) / x.error if x.error > 0 else -math.inf))


def compare(before: Inspection, after: Inspection) -> Comparison:
    """Compare two inspections head by head, each with the same head of the unedited model.

    The standard error of a mean is that of its documents where the inspection knows it (roles), and that of its tokens
    otherwise. Tokens of a document are alike, so the latter is too small: such a difference is marked from
    1.96 standard errors on, each counted as if only one token in eight were new.
    """
    found = match_heads(before, after)
    mine, theirs = _rows(before), _rows(after)
    names = [name for name in before.table.names if name in after.table.names]
    losses = before.facts.get("loss"), after.facts.get("loss")
    if losses[0] != losses[1]:  # nats and cosines have no difference
        names = [name for name in names if name not in IMPORTANCE]
    changes = []
    for head, twin in found.pairs:
        one, other = mine[head], theirs[twin]
        for name in names:
            value, changed = one[name], other[name]
            if math.isnan(value) or math.isnan(changed):
                continue
            error = math.hypot(_error(one, name), _error(other, name))
            changes.append(Change(head, twin, name, value, changed, error))
    gained, lost = _roles(before, after, found)
    return Comparison(tuple(changes), gained, lost, found.only_before, found.only_after, losses)


TOKENS_ALIKE = 8


def _error(row: dict[str, Any], name: str) -> float:
    if f"{name}_error" in row:
        return float(row[f"{name}_error"])
    if f"{name}_std" in row and row["tokens"] > 0:
        return float(row[f"{name}_std"]) / math.sqrt(max(1.0, row["tokens"] / TOKENS_ALIKE))
    return math.nan


def _rows(inspection: Inspection) -> dict[Head, dict[str, Any]]:
    table = inspection.table
    return dict(zip(zip(table.sites, table.heads, strict=True), table.rows(), strict=True))


def _roles(
    before: Inspection, after: Inspection, matching: Matching
) -> tuple[tuple[tuple[Head, str], ...], tuple[tuple[Head, str], ...]]:
    mine, theirs = ({(x.site, x.head): x.roles for x in inspection.roles} for inspection in (before, after))
    gained, lost = [], []
    for head, twin in matching.pairs:
        if head in mine and twin in theirs:
            gained += [(head, role) for role in sorted(theirs[twin] - mine[head])]
            lost += [(head, role) for role in sorted(mine[head] - theirs[twin])]

    def order(found: tuple[Head, str]) -> tuple[str, int, int, str]:
        (site, head), role = found
        return site.stack, site.layer, head, role

    return tuple(sorted(gained, key=order)), tuple(sorted(lost, key=order))

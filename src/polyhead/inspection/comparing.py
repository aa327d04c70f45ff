"""Two inspections side by side, with the differences that sampling does not explain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polyhead.errors import OptionError
from polyhead.inspection.result import Inspection
from polyhead.observatory import AttentionSite

DEVIATIONS = 1.96  # of the difference, from which on it is beyond sampling error
LEAST = 0.01  # of the larger value: with many tokens every difference is beyond sampling error


@dataclass(frozen=True, slots=True)
class Change:
    """One number of one head in both."""

    site: AttentionSite
    head: int
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
    """What changed from one inspection to another."""

    changes: tuple[Change, ...]
    gained: tuple[tuple[AttentionSite, int, str], ...]  # roles
    lost: tuple[tuple[AttentionSite, int, str], ...]
    only_before: int  # heads that the other does not have
    only_after: int

    def beyond(self, name: str | None = None) -> tuple[Change, ...]:
        """The changes beyond sampling error, of one statistic or of all, the clearest first."""
        found = [x for x in self.changes if x.beyond and (name is None or x.name == name)]
        return tuple(sorted(found, key=lambda x: -abs(x.difference) / x.error if x.error > 0 else -math.inf))


def compare(before: Inspection, after: Inspection) -> Comparison:
    """Head by head, by the path of its layer and its number.

    The standard error of a mean is that of its documents where the inspection knows it (roles), and that of its tokens
    otherwise. Tokens of a document are alike, so the latter is too small: such a difference is marked from
    1.96 standard errors on, each counted as if only one token in eight were new.
    """
    mine, theirs = _rows(before), _rows(after)
    both = [place for place in mine if place in theirs]
    if not len(both):
        raise OptionError("two inspections are compared head by head, got none that both models have")
    names = [name for name in before.table.names if name in after.table.names]
    changes = []
    for place in both:
        one, other = mine[place], theirs[place]
        for name in names:
            value, changed = one[name], other[name]
            if math.isnan(value) or math.isnan(changed):
                continue
            error = math.hypot(_error(one, name), _error(other, name))
            changes.append(Change(one["site_"], place[2], name, value, changed, error))
    gained, lost = _roles(before, after)
    return Comparison(tuple(changes), gained, lost, len(mine) - len(both), len(theirs) - len(both))


TOKENS_ALIKE = 8


def _error(row: dict[str, Any], name: str) -> float:
    if f"{name}_error" in row:
        return float(row[f"{name}_error"])
    if f"{name}_spread" in row and row["tokens"] > 0:
        return float(row[f"{name}_spread"]) / math.sqrt(max(1.0, row["tokens"] / TOKENS_ALIKE))
    return math.nan


def _rows(inspection: Inspection) -> dict[tuple[str, str, int], dict[str, Any]]:
    rows = zip(inspection.table.rows(), inspection.table.sites, strict=True)
    return {(row["site"], row["kind"], row["head"]): {**row, "site_": site} for row, site in rows}


def _roles(
    before: Inspection, after: Inspection
) -> tuple[tuple[tuple[AttentionSite, int, str], ...], tuple[tuple[AttentionSite, int, str], ...]]:
    def held(inspection: Inspection) -> dict[tuple[str, str, int], tuple[AttentionSite, frozenset[str]]]:
        return {(x.site.name, x.site.kind, x.head): (x.site, x.roles) for x in inspection.roles}

    mine, theirs = held(before), held(after)
    gained, lost = [], []
    for place in mine.keys() & theirs.keys():
        site, roles = mine[place]
        now = theirs[place][1]
        gained += [(site, place[2], role) for role in sorted(now - roles)]
        lost += [(site, place[2], role) for role in sorted(roles - now)]
    order = lambda x: (x[0].stack, x[0].layer, x[1], x[2])  # noqa: E731
    return tuple(sorted(gained, key=order)), tuple(sorted(lost, key=order))

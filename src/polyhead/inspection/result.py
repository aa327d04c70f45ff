"""`Inspection`: the result of one run over a model and a text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyhead.analysis.redundancy import PREDICTABLE, THRESHOLD, best_other
from polyhead.analysis.roles import HeadRoles
from polyhead.inspection.example_weights import Example
from polyhead.inspection.head_maps import HeadMaps
from polyhead.inspection.heads import Pair, RedundantHead
from polyhead.inspection.most_attended import TopKey
from polyhead.inspection.notebook_view import inspection_html
from polyhead.inspection.settings import Settings
from polyhead.inspection.wording import Finding
from polyhead.observation import AttentionSite, HeadProfile


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """Statistics, roles, similarity and importance of every head; the table has one row per head."""

    settings: Settings
    facts: Mapping[str, Any]  # about the run: model, tokens, documents, versions, time
    table: HeadProfile
    roles: tuple[HeadRoles, ...] = ()
    pairs: tuple[Pair, ...] = ()
    relations: Mapping[AttentionSite, Mapping[str, Tensor]] = field(default_factory=dict)  # [heads, heads] each
    findings: tuple[Finding, ...] = ()
    head_maps: Mapping[AttentionSite, HeadMaps] = field(default_factory=dict)  # mean attention maps and offsets
    examples: tuple[Example, ...] = ()  # short excerpts with all attention weights
    top_keys: Mapping[AttentionSite, tuple[tuple[TopKey, ...], ...]] = field(default_factory=dict)  # by head
    spectra: Mapping[AttentionSite, Mapping[str, Tensor]] = field(default_factory=dict)  # qk, ov [heads, head_dim]
    # By column, [documents, heads]: effect of each document (or context) on the mean, to first order. Standard errors
    # follow from their squares, and errors of paired differences from the squares of differences of two runs.
    influence: Mapping[AttentionSite, Mapping[str, Tensor]] = field(default_factory=dict)
    # By column, [2, heads]: values on the even and on the odd documents (or contexts), on which findings must agree.
    halves: Mapping[AttentionSite, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def redundant(self) -> tuple[RedundantHead, ...]:
        """Heads of whose output the others of their layer predict at least `THRESHOLD` linearly, the largest first.

        Each share is that with all other heads present: of two heads that predict each other, one is needed.
        """
        redundant = []
        for row, (site, head) in enumerate(zip(self.table.sites, self.table.heads, strict=True)):
            matrices = self.relations.get(site, {})
            share = float(self.table[PREDICTABLE][row]) if PREDICTABLE in self.table.columns else math.nan
            if share >= THRESHOLD and {PREDICTABLE, "cosine"} <= matrices.keys():
                other = int(best_other(matrices[PREDICTABLE])[head])
                alone, cosine = (float(matrices[name][head, other]) for name in (PREDICTABLE, "cosine"))
                redundant.append(RedundantHead((site, head), share, (site, other), alone, cosine))
        return tuple(sorted(redundant, key=lambda x: -x.share))

    def roles_of(self, site: AttentionSite, head: int) -> HeadRoles | None:
        """Return the roles of a head, and None if none were computed for it.

        Args:
            site: attention site of the head, as in `table.sites`.
            head: index of the head within the site.
        """
        return next((x for x in self.roles if x.site == site and x.head == head), None)

    def roles_table(self) -> list[dict[str, Any]]:
        """Return a row per head and role with its score, interval, null, threshold and whether the head has the role.

        `pandas.DataFrame(found.roles_table())` is a data frame. The scores alone are also columns of `table`, e.g.
        `found.table["induction_score"]`.
        """
        names = ("role", "score", "low", "high", "null", "threshold", "holds")
        return [
            {**head.site.location(head.head), **{name: getattr(score, name) for name in names}}
            for head in self.roles
            for score in head.scores
        ]

    def __repr__(self) -> str:
        counts = Counter(role for head in self.roles for role in head.roles)
        roles = ", ".join(f"{role} {count}" for role, count in counts.most_common()) or "no roles"
        lines = [f"Inspection of {self.facts.get('model')}: {len(self.table.heads)} heads; {roles}"]
        return "\n".join([*lines, *(f"- {finding}" for finding in self.findings)])

    def _repr_html_(self) -> str:
        return inspection_html(self)

"""An `Inspection` as a notebook shows it: where it came from, what is most telling, roles in a grid, a card a head."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from polyhead.analysis.roles import HeadRoles
from polyhead.inspection.heads import Group
from polyhead.inspection.identity import described, edits_of
from polyhead.inspection.vocabulary import TELLING, role_of
from polyhead.inspection.wording import Finding, place_of
from polyhead.observation import AttentionSite, HeadProfile
from polyhead.observation.cards import Cell, folded, grids
from polyhead.observation.notebook import cards_html, table_html

NO_ROLE = "··"


def inspection_html(
    facts: Mapping[str, Any],
    table: HeadProfile,
    judged: Sequence[HeadRoles],
    groups: Sequence[Group],
    told: Sequence[Finding],
) -> str:
    """The fragment; it needs no script, and what opens is folded until then."""
    edits = edits_of(table.sites)
    where = f"{facts['tokens']:,} tokens of {facts['documents']} documents; {len(table)} heads"
    where += "" if edits is None else f"; edited: {edits.en}"
    findings = "".join(f"<li>{html.escape(str(finding))}</li>" for finding in told)
    roles = {(x.site, x.head): x for x in judged}

    def cell(site: AttentionSite, head: int) -> Cell | None:
        found = roles.get((site, head))
        held = [role for role in TELLING if found is not None and role in found.roles]
        about = f"{place_of((site, head))}: {', '.join(held) or 'no role'}"
        return Cell(role_of(held[0]).letters if held else NO_ROLE, 0.6 if held else 0.0, about)

    def said(site: AttentionSite, head: int) -> list[str]:
        found = roles.get((site, head))
        lines = [] if found is None else [f"{x.role}: {x.evidence}" for x in found.scores if x.holds]
        mine = [group for group in groups if (site, head) in group.heads]
        others = [described(other) for group in mine for other in group.heads if other != (site, head)]
        return [*lines, *([f"says the same as {', '.join(others)}"] if others else [])]

    drawn = grids(list(dict.fromkeys(table.sites)), cell) if len(roles) else ""
    used = [role for role in TELLING if any(role in x.roles for x in judged)]
    legend = "; ".join(f"{role_of(role).letters} {role}: {role_of(role).about.en}" for role in used)
    return (
        f"<p><strong>{html.escape(str(facts['model']))}</strong><br>{html.escape(where)}</p>"
        f"{f'<ul>{findings}</ul>' if findings else ''}"
        f"{drawn}{f'<p>{html.escape(legend)}</p>' if legend else ''}"
        f"{cards_html(table, said)}{folded('every number', table_html(table))}"
    )

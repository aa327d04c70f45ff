"""HTML of an `Inspection` for notebooks: facts of the run, findings, a grid of roles, and a card per head."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from polyhead.inspection.identity import edits_of
from polyhead.inspection.vocabulary import ROLE_ORDER, role_of
from polyhead.inspection.wording import place_of
from polyhead.observation import AttentionSite
from polyhead.observation.cards import Cell, folded, grids
from polyhead.observation.head_profile import cards_html, table_html

if TYPE_CHECKING:
    from polyhead.inspection.result import Inspection

NO_ROLE = "··"


def inspection_html(inspection: Inspection) -> str:
    """Return the HTML fragment; it has no script, and details are collapsed by default."""
    facts, table, redundant = inspection.facts, inspection.table, inspection.redundant
    edits = edits_of(table.sites)
    summary = f"{facts['tokens']:,} tokens of {facts['documents']} documents; {len(table)} heads"
    summary += "" if edits is None else f"; edited: {edits.en}"
    items = "".join(f"<li>{html.escape(str(finding))}</li>" for finding in inspection.findings)
    by_head = {(x.site, x.head): x for x in inspection.roles}

    def cell(site: AttentionSite, head: int) -> Cell | None:
        of_head = by_head.get((site, head))
        roles = [role for role in ROLE_ORDER if of_head is not None and role in of_head.roles]
        about = f"{place_of((site, head))}: {', '.join(roles) or 'no role'}"
        return Cell(role_of(roles[0]).letters if roles else NO_ROLE, 0.6 if roles else 0.0, about)

    def card_lines(site: AttentionSite, head: int) -> list[str]:
        of_head = by_head.get((site, head))
        lines = [] if of_head is None else [f"{x.role}: {x.evidence}" for x in of_head.scores if x.holds]
        shares = [x.share for x in redundant if x.head == (site, head)]
        return [*lines, *(f"redundant: the other heads of its layer predict {x:.0%} of its output" for x in shares)]

    grid = grids(list(dict.fromkeys(table.sites)), cell) if len(by_head) else ""
    used = [role for role in ROLE_ORDER if any(role in x.roles for x in inspection.roles)]
    legend = "; ".join(f"{role_of(role).letters} {role}: {role_of(role).about.en}" for role in used)
    return (
        f"<p><strong>{html.escape(str(facts['model']))}</strong><br>{html.escape(summary)}</p>"
        f"{f'<ul>{items}</ul>' if items else ''}"
        f"{grid}{f'<p>{html.escape(legend)}</p>' if legend else ''}"
        f"{cards_html(table, card_lines)}{folded('all statistics', table_html(table))}"
    )

"""Self-contained HTML page of a plan: tables, and charts over the context length and the number of heads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from polyhead.costs import plan_wording as wording
from polyhead.costs.curves import ContextPoint, HeadsPoint
from polyhead.costs.layout_warnings import explained
from polyhead.costs.phases import PhasePlan
from polyhead.costs.planning import Plan
from polyhead.observation.saving import write_atomically
from polyhead.report.packing import text_in_html as escape
from polyhead.report.page import Assets, check_place, document
from polyhead.report.plan_payload import plan_charts

_SECTIONS = {"context": "By context length", "heads": "By number of heads"}


def write_plan_page(
    path: str | os.PathLike[str], plan: Plan, contexts: Sequence[ContextPoint], heads: Sequence[HeadsPoint]
) -> Path:
    """Write a plan as one HTML file that needs no network, and return its absolute path."""
    file = Path(path)
    check_place(file)
    write_atomically(file, plan_html(plan, contexts, heads).encode("utf-8"))
    return file.absolute()


def plan_html(plan: Plan, contexts: Sequence[ContextPoint], heads: Sequence[HeadsPoint]) -> str:
    """Return the HTML text of a plan's page; its script draws the charts, everything else needs none."""
    charts = plan_charts(plan, contexts, heads)
    body = [
        f"<h1>{escape(plan.model.name)}</h1><p>{escape(wording.layout_words(plan.model))}</p>",
        f'<p class="muted">{escape(wording.requested(plan))}</p>',
        _cards(plan),
        _warnings(plan),
        *(_phase(plan, phase) for phase in plan.phases),
        *(_charts(section) for section in charts if charts[section]),
        _metadata(plan),
    ]
    main = "\n".join(part for part in body if part)
    return document(f"Costs of {plan.model.name}", f"<main>\n{main}\n</main>", charts, Assets.load(name="plan"))


def _cards(plan: Plan) -> str:
    cards = [("parameters", *wording.parameter_words(plan))]
    cache = wording.cache_words(plan)
    cards += [("cache", *cache)] if cache else []
    crossover = "never" if plan.crossover is None else f"{plan.crossover:,} tokens"
    cards.append(("crossover of n² and n d²", crossover, wording.crossover_words(plan)))
    square = "holds" if plan.identity.holds else f"{plan.identity.found / plan.identity.expected:.3g} of it"
    cards.append(("Q, K, V, O are 4 d_model²", square, ", and ".join(plan.identity.reasons)))
    items = "".join(
        f'<li>{escape(name)}<b>{escape(big)}</b><span class="muted">{escape(small)}</span></li>'
        for name, big, small in cards
    )
    return f'<ul class="cards">{items}</ul>'


def _warnings(plan: Plan) -> str:
    if not plan.warnings:
        return ""
    why = dict(explained(plan.warnings))
    items = "".join(
        f'<li>{escape(kind)}: {escape(words)} <span class="muted">({escape(why[kind])})</span></li>'
        for kind, words in plan.warnings
    )
    return f"<h2>Warnings</h2><ul>{items}</ul>"


def _phase(plan: Plan, phase: PhasePlan) -> str:
    columns = ["FLOPs", "exponentials", "bytes moved", "time"]
    shown = len(columns) if phase.timing is not None else len(columns) - 1
    head = "".join(f'<th scope="col">{column}</th>' for column in columns[:shown])
    lines_of_table = []
    for row in wording.rows(phase):
        kind = ' class="total"' if row.name == "total" else ""
        sub = ' class="sub"' if row.name in wording.WITHIN_ATTENTION else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells[:shown])
        lines_of_table.append(f'<tr{kind}><th scope="row"{sub}>{escape(row.name)}</th>{cells}</tr>')
    notes = [f"{about}: {words}" if about else words for about, words in wording.below(phase)]
    paragraphs = "".join(f"<p>{escape(words)}</p>" for words in notes)
    name = escape(wording.title(plan, phase).capitalize())
    return (
        f'<h2>{name}</h2><div class="table-scroll" tabindex="0" role="region" aria-label="{name}">'
        f'<table><thead><tr><th scope="col"></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines_of_table)}</tbody></table></div>{paragraphs}"
    )


def _charts(section: str) -> str:
    return (
        f'<h2>{_SECTIONS[section]}</h2><div data-charts="{section}"></div>'
        "<noscript><p>The charts need JavaScript, which is disabled here.</p></noscript>"
    )


def _metadata(plan: Plan) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*plan.model.notes, *plan.notes))
    return f'<h2>Notes</h2><ul class="muted">{notes}</ul>' if notes else ""

"""Self-contained HTML page of a plan: tables, and charts over the context length and the number of heads."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from polyhead.costs import plan_wording as wording
from polyhead.costs.curves import ContextPoint, HeadsPoint
from polyhead.costs.layout_warnings import explained
from polyhead.costs.phases import PhasePlan
from polyhead.costs.planning import Plan
from polyhead.costs.quantities import count, seconds, size
from polyhead.observation.saving import write_atomically
from polyhead.report.page import check_place
from polyhead.report.plan_charts import Axis, Series, lines, stacked
from polyhead.report.plan_style import STYLE

_STAGES = ("projection", "positions", "cache", "attention", "mixing", "output", "launch")
_FLOPS = ("projection", "scores", "values", "mixing", "output")
_MEMORY = ("parameters", "gradients", "cache", "activations")


def write_plan_page(
    path: str | os.PathLike[str], plan: Plan, contexts: Sequence[ContextPoint], heads: Sequence[HeadsPoint]
) -> Path:
    """Write a plan as one HTML file that needs no network, and return its absolute path."""
    file = Path(path)
    check_place(file)
    write_atomically(file, plan_html(plan, contexts, heads).encode("utf-8"))
    return file.absolute()


def plan_html(plan: Plan, contexts: Sequence[ContextPoint], heads: Sequence[HeadsPoint]) -> str:
    name = escape(plan.model.name)
    style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    body = [
        f"<h1>{name}</h1><p>{escape(wording.layout_words(plan.model))}</p>",
        f'<p class="muted">{escape(wording.requested(plan))}</p>',
        _cards(plan),
        _warnings(plan),
        *(_phase(plan, phase) for phase in plan.phases),
        _over_context(plan, contexts),
        _over_heads(plan, heads),
        _metadata(plan),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{style}'; "
        "base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>Costs of {name}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


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
    return f'<ul class="numbers">{items}</ul>'


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
        f'<h2>{name}</h2><div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f'<table><thead><tr><th scope="col"></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines_of_table)}</tbody></table></div>{paragraphs}"
    )


def _over_context(plan: Plan, points: Sequence[ContextPoint]) -> str:
    places = [_short(point.context) for point in points]
    drawn = ["<h2>By context length</h2>"]
    peak = Axis("peak memory", size, binary=True)
    for index, phase in enumerate(plan.phases):
        phases = [point.phases[index] for point in points]
        # A decode step computes one token; the other phases compute all of them.
        tokens = [plan.batch * (1 if phase.phase == "decode" else point.context) for point in points]
        title = wording.title(plan, phase).capitalize()
        if phase.timing is not None:
            parts = [_stage(stage, phases, tokens, colour) for colour, stage in enumerate(_STAGES)]
            drawn.append(_stack(f"{title}: time per token", places, parts, Axis("time per token", seconds)))
        else:
            parts = [
                Series(name, tuple(getattr(x.flops, name) / n for x, n in zip(phases, tokens, strict=True)), colour)
                for colour, name in enumerate(_FLOPS)
            ]
            drawn.append(_stack(f"{title}: FLOPs per token", places, parts, Axis("FLOPs per token", count)))
        memory = [
            Series(name, tuple(float(getattr(x.fused, name)) for x in phases), colour)
            for colour, name in enumerate(_MEMORY)
        ]
        drawn.append(_stack(f"{title}: memory, fused attention", places, memory, peak))
        both = [
            Series("fused", tuple(float(x.fused.total) for x in phases), 0),
            Series("materialised weights", tuple(float(x.materialised.total) for x in phases), 1, dashed=True),
        ]
        drawn.append(
            lines(f"{title}: memory of fused and materialised attention", places, both, peak, "tokens of context")
        )
    return "".join(drawn)


def _stack(title: str, places: Sequence[str], series: Sequence[Series], axis: Axis) -> str:
    return stacked(title, places, [one for one in series if any(one.values)], axis, "tokens of context")


def _stage(stage: str, phases: Sequence[PhasePlan], tokens: Sequence[int], colour: int) -> Series:
    times = [x.timing.stages.get(stage, 0.0) if x.timing is not None else 0.0 for x in phases]
    values = tuple(time / n for time, n in zip(times, tokens, strict=True))
    return Series(wording.STAGE_NAMES[stage], values, colour)


def _over_heads(plan: Plan, points: Sequence[HeadsPoint]) -> str:
    if not points:
        return ""
    baseline = points[0].phase
    series = [
        Series("FLOPs of matrix products", tuple(p.phase.flops.total / baseline.flops.total for p in points), 0),
        Series("exponentials", tuple(p.phase.exponentials / baseline.exponentials for p in points), 1),
        Series(
            "memory, materialised weights",
            tuple(p.phase.materialised.total / baseline.materialised.total for p in points),
            2,
            dashed=True,
        ),
        Series("memory, fused attention", tuple(p.phase.fused.total / baseline.fused.total for p in points), 3),
    ]
    if baseline.timing is not None:
        first = baseline.timing.seconds
        times = tuple(p.phase.timing.seconds / first if p.phase.timing is not None else None for p in points)
        series.append(Series("predicted time", times, 4))
    width = points[0].heads * points[0].head_dim
    places = [_short(point.heads) for point in points]
    first_layout = f"{points[0].heads:,} x {points[0].head_dim:,}"
    title = f"{wording.title(plan, baseline).capitalize()}, relative to {first_layout}, at d_model {width:,}"
    chart = lines(title, places, series, Axis("relative cost", _ratio), "heads, at constant total width")
    return f"<h2>By number of heads</h2>{chart}"


def _metadata(plan: Plan) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*plan.model.notes, *plan.notes))
    return f'<h2>Notes</h2><ul class="muted">{notes}</ul>' if notes else ""


def _short(number: int) -> str:
    """Format a position on an axis: 4096 as 4K."""
    return f"{number // 1024:,}K" if number >= 1024 and number % 1024 == 0 else f"{number:,}"


def _ratio(number: float) -> str:
    return f"{number:,.0f}x" if number >= 10 else f"{number:.3g}x"

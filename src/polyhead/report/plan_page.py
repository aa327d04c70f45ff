"""Self-contained HTML page of a plan: will it fit, how fast, which layout, and all numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from polyhead.analysis.languages import Language, Text
from polyhead.costs import plan_wording as wording
from polyhead.costs.comparison import Comparison
from polyhead.costs.layout_warnings import explained
from polyhead.costs.phases import PhasePlan
from polyhead.costs.planning import Plan
from polyhead.costs.quantities import plural
from polyhead.report import plan_answers as answers
from polyhead.report import plan_tables as tables
from polyhead.report import plan_words as words
from polyhead.report.packing import text_in_html as escape
from polyhead.report.page import Assets, charts_of, document, in_both_languages, write_html
from polyhead.report.plan_payload import plan_charts

_CODE = re.compile("`([^`]+)`")


def write_plan_page(
    path: str | os.PathLike[str], plan: Plan, comparison: Comparison, *, language: Language = "en"
) -> Path:
    """Write a plan as one HTML file that needs no network, and return its absolute path."""
    return write_html(path, lambda: plan_html(plan, comparison, language=language))


def plan_html(plan: Plan, comparison: Comparison, *, language: Language = "en") -> str:
    """Return the HTML text of a plan's page in both languages, the other one hidden.

    Its script draws the charts and shows one view at a time; everything else needs none.
    """
    charts = plan_charts(plan, comparison)
    facts = Text(*[f"{wording.layout_words(plan.model)}; {wording.requested(plan)}"] * 2)

    def views(shown: Language) -> dict[str, tuple[str, str]]:
        contents = {
            "fit": _fit(plan, comparison, shown),
            "speed": _speed(plan, comparison, shown),
            "layout": _layout(plan, comparison, bool(charts["layout"]), shown),
            "numbers": _numbers(plan, comparison, shown),
        }
        return {view: (words.VIEWS[view][shown], content) for view, content in contents.items()}

    body = in_both_languages(plan.model.name, facts, views, language)
    return document(f"Costs of {plan.model.name}", body, charts, Assets.load(name="plan"), language)


def _answer(sentences: list[Text], language: Language) -> str:
    first, *rest = [escape(sentence[language]) for sentence in sentences]
    return f'<p class="answer">{first}</p>' + "".join(f"<p>{sentence}</p>" for sentence in rest)


def _beside(chart: str, table: str) -> str:
    return f'<div class="beside">{chart}<div>{table}</div></div>'


def _note(text: Text, language: Language) -> str:
    return '<p class="note">' + _CODE.sub(r"<code>\1</code>", escape(text[language])) + "</p>"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _fit(plan: Plan, comparison: Comparison, language: Language) -> str:
    about = Text(
        "Share of each machine's memory. GB are 10⁹ bytes, as memory is sold; GiB elsewhere are 2³⁰.",
        "占各机器内存的比例。GB 为 10⁹ 字节，与内存销售的单位一致；别处的 GiB 为 2³⁰ 字节。",
    )
    table = tables.fit_table(plan, comparison, language)
    return (
        _answer(answers.fit(plan, comparison), language)
        + _note(words.fit_scope(plan), language)
        + _beside(charts_of("fit", language), table + _note(about, language))
    )


def _speed(plan: Plan, comparison: Comparison, language: Language) -> str:
    about = Text(
        "Tokens/s are of device time. Measured machines were calibrated, and their errors are those on layers that no "
        "calibration has seen. Times of datasheet machines are estimated from peak rates and the efficiency of a "
        "measured machine at the same sizes; their error was not measured. `polyhead plan calibrate` measures yours.",
        "每秒词元数按设备时间计算。实测的机器经过校准，其误差来自校准未见过的层。"
        "数据表机器的时间由峰值速率和实测机器在相同尺寸下的效率估计，其误差未测。"
        "`polyhead plan calibrate` 可测量你的机器。",
    )
    table = tables.speed_table(plan, comparison, language) + _note(words.TIMES, language) + _note(about, language)
    return (
        _answer(answers.speed(plan, comparison), language)
        + _note(words.ATTENTION_ONLY, language)
        + _beside(charts_of("speed", language), table)
    )


def _layout(plan: Plan, comparison: Comparison, has_chart: bool, language: Language) -> str:
    text = _answer(answers.layout(plan, comparison), language)
    if comparison.layouts:
        about = Text(
            "The same number of heads and head_dim; GQA-8 has 8 KV heads, MLA-512 a latent of 512 channels.",
            "头数和 head_dim 相同；GQA-8 有 8 个 KV 头，MLA-512 的潜变量有 512 个通道。",
        )
        table = tables.layout_table(plan, comparison, language) + _note(about, language)
        table += _note(words.TIMES, language) if plan.is_timed else ""
        text += _beside(charts_of("layout", language), table) if has_chart else table
    choices = comparison.choices
    if choices is not None:
        timed = choices.machine is not None
        front = Text(
            f"Other layouts of this width within this cache per token, by polyhead choose ({len(choices.found)})",
            f"polyhead choose 在此宽度和每词元缓存内找到的其他布局（{len(choices.found)}）",
        )
        known = Text(
            f"Well-known models at this context ({len(choices.references)})",
            f"此上下文下的知名模型（{len(choices.references)}）",
        )
        for caption, layouts in ((front, choices.found), (known, choices.references)):
            text += _details(caption[language], tables.choices_table(caption, layouts, language, timed=timed))
    return text


def _numbers(plan: Plan, comparison: Comparison, language: Language) -> str:
    phases = "".join(f"<div>{_phase(plan, phase, language)}</div>" for phase in plan.phases)
    by_context = Text("{phase}, by context length", "{phase}，按上下文长度")
    details = [
        _details(
            by_context.format(phase=words.title(plan, phase))[language],
            tables.context_tables(plan, comparison, index, language),
        )
        for index, phase in enumerate(plan.phases)
    ]
    if comparison.heads:
        title = words.title(plan, comparison.heads[0].phase)
        by_heads = Text("{phase}, by number of heads at constant total width", "{phase}，总宽度不变时按头数")
        details.append(_details(by_heads.format(phase=title)[language], tables.heads_table(comparison.heads, language)))
    details.append(_sources(comparison, language))
    above = _cards(plan) + _warnings(plan, language)
    phases = f'<div class="columns">{phases}</div>'
    return above + phases + _ranks(plan, language) + "".join(details) + _notes(plan, language)


def _ranks(plan: Plan, language: Language) -> str:
    if plan.ranks is None:
        return ""
    stored = "".join(f"<p>{escape(text)}</p>" for text in wording.rank_words(plan, plan.ranks))
    sent = "".join(tables.collectives_table(plan, phase, language) for phase in plan.ranks.phases)
    return f"<h3>{words.OVER_RANKS[language]}</h3>{stored}{sent}"


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


def _warnings(plan: Plan, language: Language) -> str:
    if not plan.warnings:
        return ""
    why = dict(explained(plan.warnings))
    items = "".join(
        f'<li>{escape(kind)}: {escape(about)} <span class="muted">({escape(why[kind])})</span></li>'
        for kind, about in plan.warnings
    )
    return f"<h3>{Text('Warnings', '警告')[language]}</h3><ul>{items}</ul>"


def _phase(plan: Plan, phase: PhasePlan, language: Language) -> str:
    notes = [f"{about}: {text}" if about else text for about, text in wording.below(phase)]
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in notes)
    return (
        f"<h3>{escape(words.title(plan, phase)[language])}</h3>{tables.phase_table(plan, phase, language)}{paragraphs}"
    )


def _sources(comparison: Comparison, language: Language) -> str:
    machines = [point.machine for point in comparison.machines]
    items = "".join(
        f"<li>{escape(answers.machine_words(machine)[language])}"
        + (f': <span class="muted">{escape(machine.source)}</span></li>' if machine.source else "</li>")
        for machine in machines
    )
    about = Text(
        f"Where the rates of {plural(len(machines), 'machine')} are from", f"{len(machines)} 台机器的速率的来源"
    )
    return _details(about[language], f"<ul>{items}</ul>")


def _notes(plan: Plan, language: Language) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*plan.model.notes, *plan.notes))
    title = Text("Notes", "说明")[language]
    return f'<h3>{title}</h3><ul class="muted">{notes}</ul>' if notes else ""

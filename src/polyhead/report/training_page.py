"""Self-contained HTML page of a training run: small multiples of every statistic over the steps, a line per head."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.languages import Language, Text
from polyhead.inspection.vocabulary import column_of
from polyhead.report.packing import packed_floats
from polyhead.report.packing import text_in_html as escape
from polyhead.report.page import Assets, charts_of, document, in_both_languages, write_html
from polyhead.report.plan_tables import Row, table
from polyhead.training.head_history import HeadHistory
from polyhead.training.monitor import LARGEST

MOST_POINTS = 400  # of a line
MOST_GRIDS = 100  # steps of the slider
MOST_ROWS = 200  # of the table of a statistic
LOSS, STEP = Text("loss", "损失"), Text("step", "步")
_COLUMNS = (
    Text("head", "头"), Text("first", "首步"), Text("last", "末步"), Text("lowest", "最低"), Text("highest", "最高"),
)  # fmt: skip
_LABELS = {  # of columns that only a monitor has
    "normalized_entropy_p10": Text("normalized entropy, lowest decile", "归一化熵：最低十分位"),
    "gradient_norm": Text("gradient norm", "梯度范数"),
    "output_cosine": Text("output cosine", "输出余弦"),
    "gradient_cosine": Text("gradient cosine", "梯度余弦"),
}
_LINES = Text(
    "A panel per layer, a line per head; point at a line for its name. The slider chooses the step of the grid, with a "
    "row per layer and a column per head.",
    "每层一格，每个头一条线；指向线条可见其名称。滑块选择网格的步，每层一行，每个头一列。",
)
_MERGED = Text(
    "Two points of a line are the lowest and the highest value of up to {steps} steps.",
    "线上每两个点是至多 {steps} 个步中的最低值与最高值。",
)
_ROWS = Text(
    "The {rows} heads that changed most between first and last step.", "首步与末步之间变化最大的 {rows} 个头。"
)


def write_training_page(
    path: str | os.PathLike[str], history: HeadHistory, name: str, *, language: Language = "en"
) -> Path:
    """Write a training run as one HTML file that needs no network, and return its absolute path.

    Args:
        path: the file; an earlier page is replaced atomically.
        history: steps of the run.
        name: title of the page.
        language: "en" or "zh", the initial language; the page has a switch.
    """
    return write_html(path, lambda: training_html(history, name, language=language))


def training_html(history: HeadHistory, name: str, *, language: Language = "en") -> str:
    """Return the HTML text of a run's page in both languages, the other one hidden."""
    steps, losses = torch.tensor(history.steps), torch.tensor([history.losses], dtype=torch.float64)
    series = {column: _measured(steps, history[column].T) for column in history.columns}
    series = {column: lines for column, lines in series.items() if len(lines[0])}
    charts = {column: _chart(steps, _label(column), *lines, _panels(history)) for column, lines in series.items()}
    if losses.isfinite().any():
        charts = {"loss": _chart(steps, LOSS, steps, losses, [(LOSS, ["loss"])]), **charts}
    first, last = (history.steps[0], history.steps[-1]) if len(history) else (0, 0)
    facts = Text(
        f"{len(history.heads):,} heads, {len(history):,} steps from {first:,} to {last:,}",
        f"{len(history.heads):,} 个头，从第 {first:,} 步到第 {last:,} 步共 {len(history):,} 步",
    )
    body = in_both_languages(name, facts, lambda shown: _views(history, list(charts), series, shown), language)
    data = {view: [{"name": None, "chart": chart}] for view, chart in charts.items()}
    return document(f"Heads of {name} in training", body, data, Assets.load(name="plan"), language)


def _label(column: str) -> Text:
    """Return the label of a statistic; some are maxima over a step, the others means."""
    return _LABELS.get(column) or column_of(f"{column}_max" if column in LARGEST else column).label


def _measured(steps: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the steps and the values, [heads, steps], without steps in which a rare statistic was not measured."""
    present = ~values.isnan().all(0)
    return (steps, values) if 2 * int(present.sum()) > len(steps) else (steps[present], values[:, present])


def _chart(
    all_steps: Tensor, label: Text, steps: Tensor, values: Tensor, panels: list[tuple[Text, list[str]]]
) -> dict[str, Any]:
    indices = torch.linspace(0, len(steps) - 1, min(len(steps), MOST_GRIDS)).round().long()
    grid = {"steps": steps[indices].tolist(), "values": _packed(values[:, indices].T)}
    steps, shown = merged(steps, values)
    return {
        "title": Text(f"{label.en}, over the steps", f"{label.zh}随步数的变化"),
        "x_label": STEP,
        "y_label": label,
        "domain": [int(all_steps[0]), int(all_steps[-1])],
        "steps": steps.tolist(),
        "panels": [{"label": name, "lines": lines} for name, lines in panels],
        "values": _packed(shown),
        "grid": grid if len(values) > 1 else None,
    }


def _packed(values: Tensor) -> dict[str, Any]:
    """Return values with NaN where they are not finite, which is drawn as a gap."""
    return packed_floats(torch.where(values.isfinite(), values, torch.nan))


def merged(steps: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return at most 400 points of each line: lowest and highest value of consecutive steps, in their order.

    A NaN among them is returned, so that it is seen as a gap.

    Args:
        steps: [steps].
        values: [lines, steps].
    """
    size = math.ceil(len(steps) / (MOST_POINTS // 2)) if len(steps) > MOST_POINTS else 1
    if size == 1:
        return steps, values
    # The last group is filled up with the last step, which changes neither its lowest nor its highest value.
    indices = torch.arange(math.ceil(len(steps) / size) * size).clamp(max=len(steps) - 1).reshape(-1, size)
    groups = values[:, indices]  # [lines, groups, size]
    order = torch.stack([groups.argmin(-1), groups.argmax(-1)], -1).sort(-1).values
    return steps[indices[:, [0, size // 2]].flatten()], groups.gather(-1, order).flatten(1)


def _panels(history: HeadHistory) -> list[tuple[Text, list[str]]]:
    """Return label and heads of each layer; a label has the path if there are several stacks."""
    layers: dict[tuple[str, str], list[str]] = {}
    for head in history.heads:
        layers.setdefault((head.site, head.kind), []).append(f"L{head.layer}H{head.head}")
    first = {(head.site, head.kind): head for head in history.heads}
    has_stacks = len({(head.stack, head.kind) for head in history.heads}) > 1
    panels = []
    for place, lines in layers.items():
        site = f" ({place[0]}, {place[1]})" if has_stacks else ""
        layer = first[place].layer
        panels.append((Text(f"Layer {layer}{site}", f"第 {layer} 层{site}"), lines))
    return panels


def _views(
    history: HeadHistory, charts: Sequence[str], series: dict[str, tuple[Tensor, Tensor]], language: Language
) -> dict[str, tuple[str, str]]:
    """Return the heading and the content of each view: a chart of each statistic, and all tables."""
    size = math.ceil(len(history) / (MOST_POINTS // 2))
    merged_steps = " " + _MERGED[language].format(steps=size) if len(history) > MOST_POINTS else ""
    views = {}
    for view in charts:
        label, note = (LOSS, "") if view == "loss" else (_label(view), _LINES[language])
        views[view] = label[language], f"{charts_of(view, language)}<p>{note}{merged_steps}</p>"
    tables = "".join(_table(history, column, *lines, language) for column, lines in series.items())
    return {**views, "numbers": (Text("All numbers", "全部数字")[language], tables)}


def _table(history: HeadHistory, column: str, steps: Tensor, values: Tensor, language: Language) -> str:
    """Return the first, last, lowest and highest value of each head, those that changed most first."""
    change = (values[:, -1] - values[:, 0]).abs().nan_to_num(nan=-1.0)
    rows = change.sort(descending=True, stable=True).indices[:MOST_ROWS].tolist()
    cells = []
    for row in rows:
        line = values[row]
        finite = torch.where(line.isfinite(), line, torch.nan)
        low, high = (int(x) for x in (finite.nan_to_num(math.inf).argmin(), finite.nan_to_num(-math.inf).argmax()))
        extremes = [(f"{line[i]:.4g}", f"{STEP[language]} {int(steps[i]):,}") for i in (low, high)]
        cells.append(Row(str(history.heads[row]), [f"{line[0]:.4g}", f"{line[-1]:.4g}", *extremes]))
    title = _label(column)[language]
    note = _ROWS[language].format(rows=MOST_ROWS) if len(values) > MOST_ROWS else ""
    names = [name[language] for name in _COLUMNS]
    return f"<h3>{escape(title)}</h3>" + (f"<p>{note}</p>" if note else "") + table(title, names, cells)

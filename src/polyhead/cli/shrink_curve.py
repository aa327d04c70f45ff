"""The curve of `polyhead shrink`: what the model is worth at every size, as a table and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyhead.cli.line_plot import line_plot
from polyhead.cli.progress import bar

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.surgery.selection.budgets import CurvePoint
    from polyhead.surgery.selection.quality import Quality
    from polyhead.surgery.selection.shrinking import Shrinker
    from polyhead.surgery.selection.uniform import UniformShrinker


def measured_curve(shrinker: Shrinker | UniformShrinker, quality: Quality) -> list[CurvePoint]:
    """What the model is worth at every size, beside its controls."""
    choices = shrinker.choices()
    with bar(f"Measure the {quality.name} of every size", sum(x.measurements for x in choices)) as step:
        return shrinker.curve(quality, choices, progress=step)


def show_curve(points: Sequence[CurvePoint], quality: Quality, console: Console) -> None:
    """The whole curve as a table and as a plot; over layouts where every layer ends alike."""
    from rich.table import Table

    by_layout = any(point.layout is not None for point in points)
    table = Table(box=None, pad_edge=False, title=f"{quality.words}, beside {quality.whole:.4g} of the whole model")
    if by_layout:
        table.add_column("heads/KV heads", justify="right")
    caches = any(point.size.cache is not None for point in points)
    sizes = ("heads gone", "cache left", "FLOPs left") if caches else ("heads gone", "FLOPs left")
    for column in (*sizes, "compensated", "not compensated", "random heads, compensated"):
        table.add_column(column, justify="right")
    means = [statistics.fmean(x.value for x in point.random) for point in points]
    for point, mean in zip(points, means, strict=True):
        spread = statistics.stdev(x.value for x in point.random) if len(point.random) > 1 else 0.0
        table.add_row(
            *([point.layout] if by_layout else []),
            f"{1 - point.size.heads:.0%}",
            *([] if point.size.cache is None else [f"{point.size.cache:.0%}"]),
            f"{point.size.flops:.0%}",
            f"{point.compensated.value:.4g} ± {point.compensated.error:.2g}",
            f"{point.not_compensated.value:.4g}",
            f"{mean:.4g} ± {spread:.2g}",
        )
    console.print(table)
    columns = [point.layout or f"{1 - point.size.heads:.0%}" for point in points]
    curves = {
        "compensated": [point.compensated.value for point in points],
        "not compensated": [point.not_compensated.value for point in points],
        "random heads, compensated": means,
    }
    console.print(line_plot(columns, curves, upwards=quality.name == "fidelity"))
    below = "heads/KV heads that stay in every layer" if by_layout else "heads gone"
    console.print(f"{below}; ± is the standard error over rows, of random heads the spread over seeds", style="dim")

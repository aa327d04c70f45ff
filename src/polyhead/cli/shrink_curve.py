"""Curve of `polyhead shrink`: quality of the model over its size, as a table and as a plot."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from polyhead.cli.line_plot import line_plot
from polyhead.cli.terminal import plain_table

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.workflows.shrinking import ShrunkModel

CURVES = ("least squares", "not compensated", "random, least squares")


def show_curve(shrunk: ShrunkModel, console: Console) -> None:
    """Print the curve as a table and as a plot; over layouts if all layers have the same one."""
    points = shrunk.curve
    by_layout = any(point.layout is not None for point in points)
    title = f"{shrunk.metric_description}, on the test set; original model {shrunk.original:.4g}"
    layouts = ["heads/KV heads"] if by_layout else []
    caches = ["cache left"] if any(point.size.cache is not None for point in points) else []
    table = plain_table([], [*layouts, "heads removed", *caches, "FLOPs left", *CURVES], title=title)
    means = [statistics.fmean(x.value for x in point.random) for point in points]
    for point, mean in zip(points, means, strict=True):
        deviation = statistics.stdev(x.value for x in point.random) if len(point.random) > 1 else 0.0
        table.add_row(
            *([point.layout] if by_layout else []),
            f"{1 - point.size.heads:.0%}",
            *([] if point.size.cache is None else [f"{point.size.cache:.0%}"]),
            f"{point.size.flops:.0%}",
            f"{point.compensated.value:.4g} ± {point.compensated.error:.2g}",
            f"{point.not_compensated.value:.4g}",
            f"{mean:.4g} ± {deviation:.2g}",
        )
    console.print(table)
    columns = [point.layout or f"{1 - point.size.heads:.0%}" for point in points]
    values = [point.compensated.value for point in points], [point.not_compensated.value for point in points], means
    upwards = shrunk.metric == "fidelity"
    console.print(line_plot(columns, dict(zip(CURVES, values, strict=True)), upwards=upwards))
    worse = [name for name, *two in zip(columns, *values[:2], strict=True) if two != sorted(two, reverse=upwards)]
    axis = "heads/KV heads left in every layer" if by_layout else "heads removed"
    console.print(
        f"{axis}; ± is the standard error over documents or stretches of text, for random heads the std over seeds\n"
        "The curve compensates by least squares alone; the result is distilled as well, and differs",
        style="dim",
    )
    if worse:
        console.print(
            f"At {', '.join(worse)} compensation is worse than none: too many heads are removed, or --tokens "
            "is too small",
            style="yellow",
        )

"""Draw docs/images/plan-accuracy.svg: predicted over measured time of held-out layers, by regime.

python -m benchmarks plan --machine nvidia-h200 --output benchmarks/results/plan-cuda-nvidia-h200.json
python docs/images/draw_plan_accuracy.py benchmarks/results/plan-cuda-nvidia-h200.json
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 1000, 470
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 78, 66
LOWEST, HIGHEST = 1 / 64, 2.0  # of predicted over measured; what lies outside is drawn at the edge
INK, SOFT, OURS, SHEET, BAND = "#1f2933", "#7b8794", "#3b6fb6", "#d9730d", "#3b6fb6"
REGIMES = ("prefill", "decode", "training", "launch-bound")


def text(x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def height(ratio: float) -> float:
    """Return the y coordinate of a ratio on a logarithmic axis."""
    share = math.log(min(max(ratio, LOWEST), HIGHEST) / LOWEST) / math.log(HIGHEST / LOWEST)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def band(error: float, opacity: float) -> str:
    top, bottom = height(1 + error), height(1 - error)
    place = f'x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - top:.1f}"'
    return f'<rect {place} fill="{BAND}" fill-opacity="{opacity}"/>'


def dot(x: float, ratio: float, colour: str, title: str) -> str:
    y = height(ratio)
    inside = LOWEST <= ratio <= HIGHEST
    path = f"M{x - 4:.1f} {y - 4:.1f} h8 l-4 8 z" if ratio < LOWEST else f"M{x - 4:.1f} {y + 4:.1f} h8 l-4 -8 z"
    mark = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"' if inside else f'<path d="{path}"'
    return f'{mark} fill="{colour}" fill-opacity="0.75"><title>{title}</title></{"circle" if inside else "path"}>'


def column(rows: list[dict[str, Any]], left: float, width: float) -> list[str]:
    """Draw one regime: polyhead on the left, datasheet on the right, from the shortest layer to the longest."""
    parts = []
    for said, colour, start in (("predicted", OURS, left + 0.06 * width), ("promised", SHEET, left + 0.55 * width)):
        ratios = [row[said] / row["measured"] for row in rows]
        room = 0.39 * width
        for i, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
            shape = row["shape"]
            title = f"{shape['batch']} x {shape['heads']}/{shape['kv_heads']} x {shape['tokens']} x {shape['head_dim']}"
            title += f", window {shape['window']}" if shape["window"] else ""
            parts.append(dot(start + room * (i + 0.5) / len(rows), ratio, colour, f"{title}: {ratio:.2f}"))
        errors = [abs(ratio - 1) for ratio in ratios]
        told = f"{statistics.median(errors):.0%}, worst {max(errors):.0%}"
        parts.append(text(start + room / 2, HEIGHT - BOTTOM + 38, told, size=12, fill=colour, anchor="middle"))
    return parts


def draw(content: dict[str, Any]) -> str:
    rows = [row for row in content["rows"] if row["measured"] is not None]
    shown = content["machine"]["gpu"] or content["machine"]["cpu"]
    title = f"Predicted time over measured time, {len(rows)} held-out layers, {shown}"
    parts = [text(LEFT, 28, title, size=15)]
    parts += [
        f'<circle cx="{LEFT + 6}" cy="48" r="4" fill="{OURS}"/>',
        text(LEFT + 16, 52, "polyhead plan, calibrated"),
    ]
    parts += [f'<circle cx="{LEFT + 206}" cy="48" r="4" fill="{SHEET}"/>', text(LEFT + 216, 52, "datasheet roofline")]
    parts.append(text(LEFT + 366, 52, "bands: within 15% and 35%; below: median and worst error", fill=SOFT))
    parts += [band(0.35, 0.10), band(0.15, 0.16)]
    for ratio in (2.0, 1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64):
        y, words = height(ratio), f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"
        stroke = f'stroke="{INK if ratio == 1 else SOFT}" stroke-opacity="{0.8 if ratio == 1 else 0.25}"'
        parts.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" {stroke}/>')
        parts.append(text(LEFT - 10, y + 4, words, fill=SOFT, anchor="end"))
    width = (WIDTH - LEFT - RIGHT) / len(REGIMES)
    for i, regime in enumerate(REGIMES):
        found = sorted((row for row in rows if row["regime"] == regime), key=lambda row: row["measured"])
        left = LEFT + i * width
        parts.append(text(left + width / 2, HEIGHT - BOTTOM + 20, f"{regime} ({len(found)})", size=14, anchor="middle"))
        parts += column(found, left, width) if found else []
    style = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"python docs/images/draw_plan_accuracy.py RESULT, got {len(sys.argv) - 1} arguments")
    read = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    (Path(__file__).parent / "plan-accuracy.svg").write_text(draw(read), encoding="utf-8")

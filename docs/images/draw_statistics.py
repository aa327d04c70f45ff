"""Draw docs/images/statistics.svg: one row of attention weights with its statistics.

    python docs/images/draw_statistics.py

The numbers in the picture are what `polyhead.attention` gives for the weights that are drawn.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

import polyhead

KEYS, ROW, CELL = 16, 13, 22
INK, SOFT, BAR, MARK = "#1f2933", "#7b8794", "#3b6fb6", "#d9730d"


def weights_and_statistics() -> tuple[torch.Tensor, dict[str, float]]:
    """Return the weights of a head that attends to the first key, the previous token and, weakly, nearby tokens."""
    distance = torch.arange(KEYS) - torch.arange(KEYS)[:, None]
    logits = -0.28 * distance.abs().float() + 1.1 * (distance == -1) + 2.9 * (torch.arange(KEYS) == 0)
    # Keys that are one-hot, and queries that are the logits, give exactly these logits.
    query, key = logits[None, None] * math.sqrt(KEYS), torch.eye(KEYS)[None, None]
    requested = polyhead.Statistics(sink_keys=1, window=3)
    result = polyhead.attention(
        query, key, key, mask=polyhead.Mask.causal(), statistics=requested, weights=True, backend="reference"
    )
    assert result.weights is not None
    assert result.statistics is not None
    return result.weights[0, 0], {name: float(x[0, 0, ROW]) for name, x in result.statistics.items()}


def text(x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def bracket(left: float, right: float, y: float, words: str) -> str:
    path = f"M{left:.1f} {y:.1f} v6 H{right:.1f} v-6"
    return f'<path d="{path}" fill="none" stroke="{MARK}"/>' + text(
        (left + right) / 2, y + 20, words, fill=MARK, anchor="middle"
    )


def draw() -> str:
    weights, statistics = weights_and_statistics()
    parts = [text(20, 28, "Attention weights of one head, causal", size=14)]
    top, left = 48, 20
    for i in range(KEYS):
        for j in range(i + 1):
            shade = math.sqrt(float(weights[i, j]))
            place = f'x="{left + j * CELL}" y="{top + i * CELL}" width="{CELL - 1}" height="{CELL - 1}"'
            parts.append(f'<rect {place} fill="{BAR}" fill-opacity="{shade:.3f}"/>')
    parts.append(
        f'<rect x="{left - 2}" y="{top + ROW * CELL - 2}" width="{(ROW + 1) * CELL + 2}" height="{CELL + 3}" '
        f'fill="none" stroke="{MARK}" stroke-width="2"/>'
    )
    parts.append(text(left + (ROW + 1) * CELL + 8, top + ROW * CELL + 15, f"row {ROW}", fill=MARK))
    parts.append(text(left, top + KEYS * CELL + 18, "keys", fill=SOFT))

    origin, base, width = 430, 258, 34
    parts.append(text(origin, 28, f"Row {ROW}: attention weights over its visible keys", size=14))
    for j in range(ROW + 1):
        height = 190 * float(weights[ROW, j])
        x = origin + j * width
        place = f'x="{x}" y="{base - height:.1f}" width="{width - 6}" height="{height:.1f}"'
        parts.append(f'<rect {place} fill="{BAR}"/>')
        parts.append(text(x + 14, base + 16, str(j - ROW), size=11, fill=SOFT, anchor="middle"))
    parts.append(text(origin + (ROW + 1) * width, base + 16, "distance d", size=11, fill=SOFT))
    end = origin + ROW * width

    def columns(first: int, last: int) -> tuple[float, float]:
        return origin + (ROW + first) * width, origin + (ROW + last) * width + 28

    parts.append(bracket(*columns(-ROW, -ROW), base + 22, f"sink_mass {statistics['sink_mass']:.2f}"))
    parts.append(bracket(*columns(-3, 0), base + 22, f"window_mass {statistics['window_mass']:.2f} (|d| &lt;= 3)"))
    parts.append(text(end + 14, base - 190 * float(weights[ROW, ROW]) - 8, "self", size=11, fill=MARK, anchor="middle"))
    before = base - 190 * float(weights[ROW, ROW - 1]) - 8
    parts.append(text(end - 20, before, "previous", size=11, fill=MARK, anchor="middle"))
    lines = [
        f"confidence, the max attention weight: {statistics['confidence']:.3f}",
        f"entropy: {statistics['entropy']:.3f} nats (uniform over its {statistics['visible_keys']:.0f} keys: "
        f"{math.log(statistics['visible_keys']):.3f})",
        f"mean_distance, of |d|: {statistics['mean_distance']:.2f}; mean_offset {statistics['mean_offset']:.2f}",
        f"self_mass {statistics['self_mass']:.3f}, previous_mass {statistics['previous_mass']:.3f}, max_logit "
        f"{statistics['max_logit']:.2f}",
    ]
    parts += [text(origin, base + 82 + 22 * i, line) for i, line in enumerate(lines)]
    style = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="440" viewBox="0 0 1000 440" {style}>'
    return "\n".join([head, '<rect width="1000" height="440" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "statistics.svg").write_text(draw(), encoding="utf-8")

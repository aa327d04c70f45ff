"""Draw docs/images/surgery-MODEL.svg: the quality of a pruned model by criterion and compensation.

    python docs/images/draw_surgery.py

Every number is read from benchmarks/results/surgery-MODEL.jsonl, which `python -m benchmarks surgery` writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.surgery_quality.points import read_results
from benchmarks.surgery_quality.standings import Curve, curves_of

ROOT = Path(__file__).resolve().parents[2]
INK, SOFT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
# Colours that stay apart for those who see no red or green, and dashes besides.
STYLES = {
    "compensated, weighted by token": ("#0b3d6e", "", 3.0),
    "compensated, weighted by direction": ("#0b7fd5", "", 2.0),
    "compensated": ("#7cc0f0", "", 2.0),
    "plain, weighted by token": ("#7c3a06", "", 2.0),
    "plain, weighted by direction": ("#b45309", "", 2.0),
    "plain": ("#e8a33d", "", 2.0),
    "ablation": ("#7c3aed", "6 3", 1.8),
    "gradient": ("#db2777", "6 3", 1.8),
    "taylor": ("#be123c", "2 3", 1.8),
    "magnitude": ("#15803d", "2 3", 1.8),
    "redundancy": ("#0f766e", "8 3 2 3", 1.8),
    "random": ("#616e7c", "", 2.0),
}
WIDTH, HEIGHT, TOP, LEFT, GAP, SIDE = 330, 300, 64, 62, 46, 274


@dataclass(frozen=True)
class Picture:
    """A figure of one model, with the limits of its axis; values beyond are clipped."""

    model: str
    title: str
    figure: str
    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False


PICTURES = (
    Picture(
        "smollm2",
        "SmolLM2-135M, perplexity relative to the unedited model (WikiText-2)",
        "ratio",
        1,
        10,
        (1, 1.25, 1.5, 2, 3, 5, 10),
        logarithmic=True,
    ),
    Picture(
        "minilm",
        "MiniLM, Spearman's correlation on STS-B test",
        "spearman",
        0.66,
        0.84,
        (0.7, 0.75, 0.8, 0.82),
    ),
    Picture(
        "minilm",
        "MiniLM, mean cosine to the embeddings of the unedited model (STS-B test)",
        "cosine",
        0.5,
        1.0,
        (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    ),
)


def text(x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def draw(picture: Picture, curves: Sequence[Curve]) -> str:
    """Return an SVG with two panels on one scale: not compensated, compensated."""
    width, height = LEFT + 2 * WIDTH + GAP + SIDE, TOP + HEIGHT + 56
    parts = [text(16, 26, picture.title, size=15)]
    scale = math.log if picture.logarithmic else float

    def down(value: float) -> float:
        held = min(max(value, picture.low), picture.high)
        share = (scale(held) - scale(picture.low)) / (scale(picture.high) - scale(picture.low))
        return TOP + HEIGHT * (1 - share)

    for panel, (name, words) in enumerate(
        (("not compensated", "not compensated"), ("compensated", "least-squares compensation"))
    ):
        left = LEFT + panel * (WIDTH + GAP)

        def along(share: float, left: float = left) -> float:
            return left + WIDTH * (share - 0.05) / 0.8

        parts.append(text(left, TOP - 12, words, size=13, fill=SOFT))
        for tick in picture.ticks:
            y = down(tick)
            parts.append(f'<path d="M{left} {y:.1f} H{left + WIDTH}" stroke="{GRID}"/>')
            if not panel:
                parts.append(text(left - 8, y + 4, f"{tick:g}", size=11, fill=SOFT, anchor="end"))
        for share in range(1, 9):
            label = f"{share}0%"
            parts.append(text(along(share / 10), TOP + HEIGHT + 18, label, size=11, fill=SOFT, anchor="middle"))
        parts.append(text(left + WIDTH / 2, TOP + HEIGHT + 40, "heads removed", size=12, fill=SOFT, anchor="middle"))
        ends = []
        for criterion, (colour, dashes, stroke) in STYLES.items():
            found = [curve for curve in curves if curve.name == f"{criterion}, {name}"]
            for curve in found:
                parts += _line(curve, along, down, colour, dashes, stroke)
                ends.append((down(curve.medians[-1]), criterion, colour, dashes))
        if panel:
            parts += _names(ends, LEFT + 2 * WIDTH + GAP + 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img"><title>{picture.title}</title>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _line(
    curve: Curve,
    along: Callable[[float], float],
    down: Callable[[float], float],
    colour: str,
    dashes: str,
    stroke: float,
) -> list[str]:
    across = list(map(along, curve.shares))
    parts = []
    if any(len(own) > 1 for own in curve.figures):
        upper, lower = ([(x, end(own)) for x, own in zip(across, curve.figures, strict=True)] for end in (max, min))
        edge = " ".join(f"{x:.1f},{down(value):.1f}" for x, value in (*upper, *reversed(lower)))
        parts.append(f'<polygon points="{edge}" fill="{colour}" fill-opacity="0.18"/>')
    points = " ".join(f"{x:.1f},{down(value):.1f}" for x, value in zip(across, curve.medians, strict=True))
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{stroke}"{dash}/>')
    return parts


def _names(ends: Sequence[tuple[float, str, str, str]], x: float) -> list[str]:
    """The names beside the ends of the lines, in their order and never on top of each other."""
    parts, below = [], TOP - 8.0
    ordered = sorted(ends)
    for index, (y, name, colour, dashes) in enumerate(ordered):
        room = TOP + HEIGHT + 6 - 17 * (len(ordered) - index - 1)  # so that those that follow fit as well
        below = max(below + 17, min(y + 4, room))
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<path d="M{x} {below - 4:.1f} h22" stroke="{colour}" stroke-width="2.4"{dash}/>')
        words = "random, 5 seeds and their range" if name == "random" else name
        parts.append(text(x + 28, below, words, size=12))
    return parts


def file_name(picture: Picture) -> str:
    return f"surgery-{picture.model}" + ("-cosine" if picture.figure == "cosine" else "") + ".svg"


def main() -> None:
    for picture in PICTURES:
        source = ROOT / "benchmarks" / "results" / f"surgery-{picture.model}.jsonl"
        if not source.exists():
            continue
        target = Path(__file__).parent / file_name(picture)
        target.write_text(draw(picture, curves_of(read_results(source), picture.figure)), encoding="utf-8")


if __name__ == "__main__":
    main()

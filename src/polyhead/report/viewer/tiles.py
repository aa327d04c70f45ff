"""Attention map of one head as tiles at any position and zoom level, computed from Q, K and the log-sum-exp.

A cell of level L is a square of 2**L tokens with the sum or the maximum of its weights. The *picture* of a head is its
full matrix at the finest level with at most 1024 cells per side; coarser tiles are pooled from it, and finer ones are
computed on demand. All values are exact, except the estimate that is shown until the strips of a picture are computed;
it comes with the sampling rule that was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyhead.ops.profile import BlockMap
from polyhead.report.viewer.failures import invalid
from polyhead.report.viewer.trace import RecordedAttention

Pool = Literal["sum", "max"]
Span = tuple[int, int]

TILE_CELLS = 256
PICTURE_CELLS = 1024
ESTIMATE_CELLS = 128
# Pairs of tokens, chosen so that a strip takes about 0.1 s, and an estimate a few times that.
STRIP_PAIRS = {"cpu": 1 << 23, "cuda": 1 << 28}
ESTIMATE_PAIRS = {"cpu": 1 << 24, "cuda": 1 << 28}


@dataclass(frozen=True, slots=True)
class Rule:
    """Sampling rule of an estimate: of every `every` queries the middle `rows` are computed."""

    every: int
    rows: int
    pool: Pool


@dataclass(frozen=True, slots=True)
class Strip:
    """A horizontal strip of a picture."""

    first: int  # index of its first row of cells
    cells: Tensor  # [heads, rows, columns], on the CPU


def level_of(attention: RecordedAttention, cells: int) -> int:
    """Return the finest level at which an attention matrix has at most `cells` cells per side."""
    longest = max(attention.queries, attention.keys)
    return max(0, (-(-longest // cells) - 1).bit_length())


def top_level(attention: RecordedAttention) -> int:
    """Return the level at which one tile covers the whole matrix."""
    return level_of(attention, TILE_CELLS)


def window(attention: RecordedAttention, rows: Span, columns: Span, level: int, pool: Pool) -> Tensor:
    """Return the cells of a window, [heads, rows, columns] on the CPU."""
    block = 1 << level
    result = attention.profile(block_map=BlockMap(block=(block, block), pool=pool), rows=rows, columns=columns)
    assert result.block_map is not None
    return result.block_map[0].cpu()


def tile_spans(attention: RecordedAttention, level: int, row: int, column: int) -> tuple[Span, Span]:
    """Return the token ranges that a tile covers; raise if the tile does not exist."""
    highest = top_level(attention)
    if not 0 <= level <= highest:
        raise invalid(f"level must be 0 to {highest} for this text, got {level}")
    side = TILE_CELLS << level
    spans = []
    for name, number, size in (("row", row, attention.queries), ("column", column, attention.keys)):
        last = -(-size // side) - 1
        if not 0 <= number <= last:
            raise invalid(f"the {name} of a tile of level {level} must be 0 to {last} for this text, got {number}")
        spans.append((number * side, min((number + 1) * side, size)))
    return spans[0], spans[1]


def cut_out(picture: Tensor, picture_level: int, level: int, row: int, column: int, pool: Pool) -> Tensor:
    """Return a tile of a coarser level, pooled from a picture [rows, columns]."""
    factor = 1 << (level - picture_level)
    side = TILE_CELLS * factor
    return pooled(picture[row * side : (row + 1) * side, column * side : (column + 1) * side], factor, pool)


def pooled(cells: Tensor, factor: int, pool: Pool) -> Tensor:
    """Pool squares of cells; padding the edges with 0 is exact, as weights are not negative."""
    if factor == 1:
        return cells
    height, width = cells.shape
    padded = torch.nn.functional.pad(cells, (0, -width % factor, 0, -height % factor))
    squares = padded.unflatten(1, (-1, factor)).unflatten(0, (-1, factor))
    return squares.sum((1, 3)) if pool == "sum" else squares.amax((1, 3))


def strips(
    attention: RecordedAttention, level: int, pool: Pool, rows: Span | None = None, columns: Span | None = None
) -> Iterator[Strip]:
    """Yield a window, or the whole matrix, exactly, as strips from top to bottom."""
    (first, last), columns = rows or (0, attention.queries), columns or (0, attention.keys)
    step = strip_height(attention, level, columns)
    for start in range(first, last, step):
        cells = window(attention, (start, min(start + step, last)), columns, level, pool)
        yield Strip((start - first) >> level, cells)


def strip_height(attention: RecordedAttention, level: int, columns: Span) -> int:
    """Return the height of a strip in tokens, a multiple of the cell size."""
    pairs = max(1, attention.heads * (columns[1] - columns[0]))
    return max(1, STRIP_PAIRS[_kind(attention)] // pairs >> level) << level


def rule_for(attention: RecordedAttention, level: int, pool: Pool, pairs: int | None = None) -> Rule | None:
    """Return the sampling rule of an estimate of about `pairs` token pairs; None if it would include all rows."""
    block = 1 << level
    most = ESTIMATE_PAIRS[_kind(attention)] if pairs is None else pairs
    blocks = -(-attention.queries // block)
    rows = max(1, most // max(1, attention.heads * attention.keys * blocks))
    return None if rows >= block else Rule(block, rows, pool)


def estimate(attention: RecordedAttention, level: int, rule: Rule) -> Iterator[Strip]:
    """Yield the estimated picture, one row of cells at a time, [heads, 1, columns] each."""
    block = 1 << level
    for number, start in enumerate(range(0, attention.queries, block)):
        stop = min(start + block, attention.queries)
        middle = (start + stop) // 2
        first = max(start, min(middle - rule.rows // 2, stop - rule.rows))
        rows = first, min(first + rule.rows, stop)
        cells = window(attention, rows, (0, attention.keys), level, rule.pool)
        if rule.pool == "sum":
            cells = cells * ((stop - start) / (rows[1] - rows[0]))
        yield Strip(number, cells)


def stacked(parts: Iterator[Strip]) -> Tensor:
    """Return all strips as one tensor, [heads, rows, columns]."""
    return torch.cat([part.cells for part in parts], 1)


def _kind(attention: RecordedAttention) -> str:
    return "cuda" if attention.query.device.type == "cuda" else "cpu"

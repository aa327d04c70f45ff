"""Row statistics as running sums over tiles, and the factors of their gradients.

Values of rows are [batch, heads, rows], tiles [batch, heads, rows, columns]. Exponentials are of the logits minus the
running row max, and every sum is rescaled when the row max grows, as in FlashAttention's online softmax (Dao et al.
2022, arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.common.request import StatisticsRequest
from polyhead.ops.common.statistics import LINEAR
from polyhead.ops.common.tiles import Tiling
from polyhead.ops.common.tracing import is_exporting, may_overwrite
from polyhead.ops.common.visibility import Span

# Below this exp(x) is exactly 0 in every dtype, so exp(x) * x is 0 as well, and never 0 * inf.
EXP_UNDERFLOW = -1000.0
_AT_DISTANCE = {"self_mass": 0, "previous_mass": -1, "next_mass": 1}


class RowSums:
    """Accumulator of the statistics of one block of rows, updated tile by tile."""

    def __init__(self, tiling: Tiling, rows: Span, sink: Tensor | None, like: Tensor, *, blocks: bool) -> None:
        """Start with empty sums.

        `sink` is the learned sink's logit of each row, `like` any tensor with the logits' dtype and device; `blocks`
        also records the column blocks of the max logit and the max |logit|.
        """
        request = tiling.statistics
        assert request is not None
        self.request, self.tiling, self.rows = request, tiling, rows
        self.names, self.sink, self.blocks = request.names, sink, blocks
        self.is_first = True  # until a tile is added
        self.shape = shape = (tiling.batch, tiling.heads, rows[1] - rows[0])

        def start(number: float, dtype: torch.dtype | None = None) -> Tensor:
            return like.new_full(shape, number, dtype=dtype)

        self.needs_max = "max_logit" in self.names or "confidence" in self.names
        self.needs_entropy = "entropy" in self.names
        self.max_logit = start(-torch.inf) if self.needs_max else None
        self.max_abs_logit = start(0.0) if "max_abs_logit" in self.names else None
        self.max_logit_block = start(-1, torch.int32) if blocks and self.needs_max else None
        self.max_abs_block = start(-1, torch.int32) if blocks and self.max_abs_logit is not None else None
        self.entropy_sum: Tensor | None = None  # sum of exp(s - m) * (s - m), starting with the sink's term, which is 0
        if self.needs_entropy:
            self.entropy_sum = start(0.0)
            if sink is not None:
                # 0 as well, but computed from the sink, so that autograd records its gradient.
                sink_shifted = torch.where(sink.detach() == -torch.inf, 0.0, sink - sink.detach())
                self.entropy_sum = torch.exp(sink_shifted) * sink_shifted
        self.visible_keys = start(0.0) if "visible_keys" in self.names else None
        linear = [name for name in self.names if name in LINEAR]
        self.linear_sums = like.new_zeros((len(linear), *shape))
        self.linear = dict(zip(linear, self.linear_sums.unbind(0), strict=True))  # views of it, unless autograd records

    def add_logits(self, tile: Tensor, columns: Span, largest: Tensor, *, masked: bool) -> None:
        """Update the statistics that are read off the logits; `largest` is the tile's max logit in each row."""
        tile = self.tiling.by_head(tile)
        records_grad = torch.is_grad_enabled()
        if self.max_logit is not None:
            # Among equal maxima the lowest key receives the gradient.
            tile_max = tile.max(-1).values if records_grad else largest.view(self.max_logit.shape)
            if self.is_first and self.max_logit_block is None:
                self.max_logit = tile_max
            else:
                is_larger = (tile_max > self.max_logit) | tile_max.isnan()
                self.max_logit = torch.where(is_larger, tile_max, self.max_logit)
                if self.max_logit_block is not None:
                    self.max_logit_block = torch.where(is_larger, columns[0], self.max_logit_block)
        if self.max_abs_logit is not None:
            if records_grad or masked:
                magnitudes = magnitude(tile, masked=masked)
                tile_max = magnitudes.max(-1).values if records_grad else magnitudes.amax(-1)
            else:
                tile_max = torch.maximum(largest.view(self.max_abs_logit.shape), -tile.amin(-1))
            is_larger = (tile_max > self.max_abs_logit) | tile_max.isnan()
            self.max_abs_logit = torch.where(is_larger, tile_max, self.max_abs_logit)
            if self.max_abs_block is not None:
                self.max_abs_block = torch.where(is_larger, columns[0], self.max_abs_block)
        if self.visible_keys is not None:
            count = (tile != -torch.inf).sum(-1, dtype=tile.dtype) if masked else columns[1] - columns[0]
            self.visible_keys = self.visible_keys + count

    def add(
        self,
        exponentials: Tensor,
        shifted: Tensor | None,
        sums: Tensor,
        columns: Span,
        decay: Tensor | None,
        max_change: Tensor | None,
        previous_sum: Tensor | None,
        *,
        masked: bool,
    ) -> None:
        """Add a tile to the sums of weights, given its exponentials, shifted logits and row sums.

        `shifted` are the logits minus the row max, which the entropy needs; they are overwritten. `decay`
        rescales the sums so far, `max_change` is the old row max minus the new one, `previous_sum` the row sum so far;
        they are None for the first tile of a row without a learned sink.
        """
        tile = self.tiling.by_head(exponentials)
        decay = None if decay is None else decay.view(self.shape)
        if self.entropy_sum is not None and shifted is not None:
            entropy_sum = self._entropy_sum(exponentials, shifted, masked)
            if decay is not None and max_change is not None and previous_sum is not None:
                change = (decay * max_change.view(self.shape)) * previous_sum.view(self.shape)
                entropy_sum = decay * self.entropy_sum + change + entropy_sum
            self.entropy_sum = entropy_sum
        records_grad = torch.is_grad_enabled()
        if decay is not None and not self.is_first:
            if records_grad:
                self.linear = {name: x * decay for name, x in self.linear.items()}
            else:
                self.linear_sums.mul_(decay)
        self.is_first = False
        sums = sums.view(self.shape)
        for name, part in linear_sums(self.tiling, self.request, tuple(self.linear), tile, sums, self.rows, columns):
            self.linear[name] = self.linear[name] + part if records_grad else self.linear[name].add_(part)

    def _entropy_sum(self, exponentials: Tensor, shifted: Tensor, masked: bool) -> Tensor:
        if may_overwrite():
            shifted = shifted.clamp_(min=EXP_UNDERFLOW) if masked else shifted
            product = shifted.mul_(exponentials)
        else:
            product = exponentials * (shifted.clamp_min(EXP_UNDERFLOW) if masked else shifted)
        return self.tiling.by_head(product).sum(-1)

    def finish(self, row_sum: Tensor, row_max: Tensor) -> dict[str, Tensor]:
        """Return the statistics, given the sum and the max of each row (1 and 0 for rows without keys)."""
        statistics = {name: x / row_sum for name, x in self.linear.items()}
        if not torch.is_grad_enabled():  # the mask of a CPU tile takes a NaN for +inf; the row's weights are NaN
            is_nan = row_sum.isnan()
            if self.max_logit is not None:
                self.max_logit = self.max_logit.masked_fill(is_nan, torch.nan)
            if self.max_abs_logit is not None:
                self.max_abs_logit = self.max_abs_logit.masked_fill(is_nan, torch.nan)
        if self.max_logit is not None:
            statistics["max_logit"] = self.max_logit
            if "confidence" in self.names:
                statistics["confidence"] = torch.exp(self.max_logit - row_max) / row_sum
        if self.max_abs_logit is not None:
            statistics["max_abs_logit"] = self.max_abs_logit
        if self.entropy_sum is not None:
            statistics["entropy"] = torch.log(row_sum) - self.entropy_sum / row_sum
        if self.visible_keys is not None:
            statistics["visible_keys"] = self.visible_keys
        if self.sink is not None and "learned_sink_mass" in self.names:
            statistics["learned_sink_mass"] = torch.exp(self.sink - row_max) / row_sum
        return {name: statistics[name] for name in self.names}


def magnitude(tile: Tensor, *, masked: bool) -> Tensor:
    """Return |logit|, and -1 for masked keys."""
    return torch.where(tile == -torch.inf, -1.0, tile.abs()) if masked else tile.abs()


def linear_sums(
    tiling: Tiling,
    request: StatisticsRequest,
    names: tuple[str, ...],
    tile: Tensor,
    sums: Tensor,
    rows: Span,
    columns: Span,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a tile's contribution to each statistic that is linear in the weights, unless it is 0.

    `tile` is [batch, heads, rows, columns] and `sums` its row sums. Far from the diagonal no distance per pair is
    needed: the moments of the columns, computed once, serve all rows. Near the diagonal that would lose digits.
    """
    places = request.places
    height, width = tile.shape[-2:]
    exact = []
    if "sink_mass" in names and places.key_ordinals is None:
        if columns[0] < request.sink_keys:
            yield "sink_mass", tile[..., : request.sink_keys - columns[0]].sum(-1)
        names = tuple(name for name in names if name != "sink_mass")
    if places.query_positions is None and not is_exporting():
        low, high = _distances(request, rows, columns)
        min_abs_distance = max(low, -high)
        moments: tuple[Tensor, Tensor, Tensor] | None = None
        for name in names:
            if name in _AT_DISTANCE:
                start = rows[0] + places.offset + _AT_DISTANCE[name] - columns[0]
                if -height < start < width:
                    diagonal = tile.diagonal(start, -2, -1)
                    above = max(0, -start)
                    below = height - above - diagonal.shape[-1]
                    yield name, F.pad(diagonal, (above, below)) if above or below else diagonal
            elif name == "window_mass" and max(-low, high) <= request.window:
                yield name, sums
            elif name in ("mean_distance", "mean_offset", "mean_squared_distance") and min_abs_distance >= width:
                if moments is None:
                    first_distance = torch.arange(0, -height, -1, device=tile.device, dtype=tile.dtype) + (
                        columns[0] - rows[0] - places.offset
                    )
                    step = torch.arange(width, device=tile.device, dtype=tile.dtype)
                    moments = first_distance, step, _moment(tile, step)
                first_distance, step, first = moments
                if name == "mean_squared_distance":
                    yield name, first_distance * (first_distance * sums + 2 * first) + _moment(tile, step * step)
                else:
                    signed = first_distance * sums + first
                    yield name, -signed if name == "mean_distance" and high < 0 else signed
            else:
                exact.append(name)
    else:
        exact += names
    for name, factor in factors(request, tuple(exact), rows, columns, tile):
        yield name, torch.mul(tile, factor, out=tiling.buffer("products", tile.shape, tile)).sum(-1)


def _moment(tile: Tensor, step: Tensor) -> Tensor:
    return torch.mv(tile.flatten(0, 2), step).view(tile.shape[:-1])


def factors(
    request: StatisticsRequest, names: tuple[str, ...], rows: Span, columns: Span, like: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the factor of each weight, [batch or 1, 1, rows or 1, columns], unless it is all 0."""
    places = request.places
    distance: Tensor | None = None
    for name in names:
        if name == "sink_mass":
            if places.key_ordinals is None and columns[0] >= request.sink_keys:
                continue
            first = places.first_tile(columns, request.sink_keys).to(like.dtype)
            yield name, first.view(-1, 1, 1, columns[1] - columns[0])
            continue
        if places.query_positions is None and not _contains_distance(request, name, rows, columns):
            continue
        if distance is None:
            distance = _distance(request, rows, columns, like)
        if name in _AT_DISTANCE:
            yield name, (distance == _AT_DISTANCE[name]).to(like.dtype)
        elif name == "window_mass":
            yield name, (distance.abs() <= request.window).to(like.dtype)
        elif name == "mean_distance":
            yield name, distance.abs()
        else:
            yield name, distance if name == "mean_offset" else distance * distance


def _distances(request: StatisticsRequest, rows: Span, columns: Span) -> tuple[int, int]:
    """Return the smallest and the largest distance in a tile, where positions are indices."""
    offset = request.places.offset
    return columns[0] - (rows[1] - 1) - offset, columns[1] - 1 - rows[0] - offset


def _contains_distance(request: StatisticsRequest, name: str, rows: Span, columns: Span) -> bool:
    """Return True if some pair of the tile has a distance that counts for this statistic."""
    low, high = _distances(request, rows, columns)
    if name in _AT_DISTANCE:
        return low <= _AT_DISTANCE[name] <= high
    return name != "window_mass" or max(low, -high) <= request.window


def _distance(request: StatisticsRequest, rows: Span, columns: Span, like: Tensor) -> Tensor:
    """Return key position minus query position, [batch or 1, 1, rows, columns], in the logits' dtype."""
    places = request.places
    if places.query_positions is None:
        start = columns[0] - rows[0] - places.offset
        first_distance = torch.arange(start, start - (rows[1] - rows[0]), -1, device=like.device, dtype=like.dtype)
        step = torch.arange(columns[1] - columns[0], device=like.device, dtype=like.dtype)
        return (step + first_distance[:, None])[None, None]
    return places.distance_tile(rows, columns).to(like.dtype).unsqueeze(-3)

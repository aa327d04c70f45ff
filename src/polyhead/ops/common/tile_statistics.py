"""Row statistics as running sums of tiles, and the factors by which their gradients reach the logits.

Everything here is [batch, heads, rows] or a tile of it; exponentials are those of the logits less a shift, the row's
largest logit so far, and every sum is scaled down when the shift moves up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.common.request import StatisticsRequest
from polyhead.ops.common.statistics import LINEAR
from polyhead.ops.common.tiles import Tiling
from polyhead.ops.common.tracing import is_exporting
from polyhead.ops.common.visibility import Span

# Below this the exponential is exactly 0 in every dtype, so that the product of both is too, and none is 0 * inf.
NOTHING = -1000.0
_AT_DISTANCE = {"self_mass": 0, "previous_mass": -1, "next_mass": 1}


class RowSums:
    """The statistics of one block of rows, tile after tile."""

    def __init__(self, tiling: Tiling, rows: Span, sink: Tensor | None, like: Tensor, *, blocks: bool) -> None:
        """`sink` is the learned sink's logit of each row, `like` any tensor of the logits' kind; `blocks` asks for the
        column blocks in which the largest logits stand."""
        request = tiling.statistics
        assert request is not None
        self.request, self.tiling, self.rows = request, tiling, rows
        self.names, self.sink, self.blocks = request.names, sink, blocks
        shape = (tiling.batch, tiling.heads, rows[1] - rows[0])

        def start(number: float, dtype: torch.dtype | None = None) -> Tensor:
            return like.new_full(shape, number, dtype=dtype)

        self.needs_top = "max_logit" in self.names or "confidence" in self.names
        self.needs_spread = "entropy" in self.names
        self.top = start(-torch.inf) if self.needs_top else None
        self.size = start(0.0) if "max_abs_logit" in self.names else None
        self.top_block = start(-1, torch.int32) if blocks and self.needs_top else None
        self.size_block = start(-1, torch.int32) if blocks and self.size is not None else None
        self.spread: Tensor | None = None  # the sum of exp(s - m) * (s - m); it starts with the sink's, which is 0
        if self.needs_spread:
            self.spread = start(0.0)
            if sink is not None:
                own = torch.where(sink.detach() == -torch.inf, 0.0, sink - sink.detach())
                self.spread = torch.exp(own) * own
        self.seen = start(0.0) if "visible_keys" in self.names else None
        self.linear = {name: start(0.0) for name in self.names if name in LINEAR}

    def look(self, tile: Tensor, columns: Span, largest: Tensor, *, masked: bool) -> None:
        """Take what is told of the logits themselves; `largest` is the tile's largest in each row."""
        tile = self.tiling.by_head(tile)
        taped = torch.is_grad_enabled()
        if self.top is not None:
            # Of several largest the first has the gradient: of a tile that of the lowest key, of tiles the first.
            mine = tile.max(-1).values if taped else largest.view(self.top.shape)
            higher = (mine > self.top) | mine.isnan()
            self.top = torch.where(higher, mine, self.top)
            if self.top_block is not None:
                self.top_block = torch.where(higher, columns[0], self.top_block)
        if self.size is not None:
            if taped or masked:
                sizes = magnitude(tile, masked=masked)
                mine = sizes.max(-1).values if taped else sizes.amax(-1)
            else:
                mine = torch.maximum(largest.view(self.size.shape), -tile.amin(-1))
            higher = (mine > self.size) | mine.isnan()
            self.size = torch.where(higher, mine, self.size)
            if self.size_block is not None:
                self.size_block = torch.where(higher, columns[0], self.size_block)
        if self.seen is not None:
            count = (tile != -torch.inf).sum(-1).to(tile.dtype) if masked else columns[1] - columns[0]
            self.seen = self.seen + count

    def add(
        self,
        exponentials: Tensor,
        shifted: Tensor | None,
        sums: Tensor,
        columns: Span,
        decay: Tensor,
        moved: Tensor,
        before: Tensor,
        *,
        masked: bool,
    ) -> None:
        """Add a tile: its exponentials, the logits less the shift (only for the entropy, and used up), its row sums.

        `decay` is what the sums so far are scaled by, `moved` how far the shift went, `before` the total until then.
        """
        tile, sums = self.tiling.by_head(exponentials), self.tiling.by_head(sums).squeeze(-1)
        decay, moved, before = (self.tiling.by_head(x).squeeze(-1) for x in (decay, moved, before))
        if self.spread is not None and shifted is not None:
            self.spread = decay * self.spread + (decay * moved) * before + self._spread(exponentials, shifted, masked)
        for name in self.linear:
            self.linear[name] = self.linear[name] * decay
        for name, part in linear_sums(self.tiling, self.request, tuple(self.linear), tile, sums, self.rows, columns):
            self.linear[name] = self.linear[name] + part

    def _spread(self, exponentials: Tensor, shifted: Tensor, masked: bool) -> Tensor:
        if torch.is_grad_enabled():
            product = exponentials * (shifted.clamp_min(NOTHING) if masked else shifted)
        else:
            shifted = shifted.clamp_(min=NOTHING) if masked else shifted
            product = shifted.mul_(exponentials)
        return self.tiling.by_head(product).sum(-1)

    def finish(self, total: Tensor, shift: Tensor) -> dict[str, Tensor]:
        """The statistics, from the total and the shift of each row, 1 and 0 where it has nothing to attend to."""
        found = {name: x / total for name, x in self.linear.items()}
        if self.top is not None:
            found["max_logit"] = self.top
            found["confidence"] = torch.exp(self.top - shift) / total
        if self.size is not None:
            found["max_abs_logit"] = self.size
        if self.spread is not None:
            found["entropy"] = torch.log(total) - self.spread / total
        if self.seen is not None:
            found["visible_keys"] = self.seen
        if self.sink is not None and "learned_sink_mass" in self.names:
            found["learned_sink_mass"] = torch.exp(self.sink - shift) / total
        return {name: found[name] for name in self.names}


def magnitude(tile: Tensor, *, masked: bool) -> Tensor:
    """|logit|, and -1 where a key is hidden."""
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
    """The part of a tile in each sum of weights times something known of the key; nothing where it has none.

    `tile` is [batch, heads, rows, columns] and `sums` its row sums. A far tile needs no distance of every pair: the
    moments of its columns, taken once, serve all rows. Near the diagonal that would lose digits.
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
        gap = max(low, -high)
        ahead = torch.arange(0, -height, -1, device=tile.device, dtype=tile.dtype) + (
            columns[0] - rows[0] - places.offset
        )
        step = torch.arange(width, device=tile.device, dtype=tile.dtype)
        first: Tensor | None = None
        for name in names:
            if name in _AT_DISTANCE:
                start = rows[0] + places.offset + _AT_DISTANCE[name] - columns[0]
                if -height < start < width:
                    found = tile.diagonal(start, -2, -1)
                    above = max(0, -start)
                    yield name, F.pad(found, (above, height - above - found.shape[-1]))
            elif name == "window_mass" and max(-low, high) <= request.window:
                yield name, sums
            elif name in ("mean_distance", "mean_offset", "mean_squared_distance") and gap >= width:
                if first is None:
                    first = _moment(tile, step)
                if name == "mean_squared_distance":
                    yield name, ahead * (ahead * sums + 2 * first) + _moment(tile, step * step)
                else:
                    signed = ahead * sums + first
                    yield name, -signed if name == "mean_distance" and high < 0 else signed
            else:
                exact.append(name)
    else:
        exact += names
    for name, factor in factors(request, tuple(exact), rows, columns, tile):
        yield name, torch.mul(tile, factor, out=tiling.room("products", tile.shape, tile)).sum(-1)


def _moment(tile: Tensor, step: Tensor) -> Tensor:
    return torch.mv(tile.flatten(0, 2), step).view(tile.shape[:-1])


def factors(
    request: StatisticsRequest, names: tuple[str, ...], rows: Span, columns: Span, like: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """What each weight of a tile is multiplied by, [batch or 1, 1, rows or 1, columns]; nothing where it is all 0."""
    places = request.places
    distance: Tensor | None = None
    for name in names:
        if name == "sink_mass":
            if places.key_ordinals is None and columns[0] >= request.sink_keys:
                continue
            first = places.first_tile(columns, request.sink_keys).to(like.dtype)
            yield name, first.view(-1, 1, 1, columns[1] - columns[0])
            continue
        if places.query_positions is None and not _may_hold(request, name, rows, columns):
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
    """The least and the greatest distance in a tile, where positions are indices."""
    offset = request.places.offset
    return columns[0] - (rows[1] - 1) - offset, columns[1] - 1 - rows[0] - offset


def _may_hold(request: StatisticsRequest, name: str, rows: Span, columns: Span) -> bool:
    """Whether a tile has a pair at the distance that a mass is of."""
    low, high = _distances(request, rows, columns)
    if name in _AT_DISTANCE:
        return low <= _AT_DISTANCE[name] <= high
    return name != "window_mass" or max(low, -high) <= request.window


def _distance(request: StatisticsRequest, rows: Span, columns: Span, like: Tensor) -> Tensor:
    """Key position minus query position, [batch or 1, 1, rows, columns], in the logits' dtype."""
    places = request.places
    if places.query_positions is None:
        start = columns[0] - rows[0] - places.offset
        ahead = torch.arange(start, start - (rows[1] - rows[0]), -1, device=like.device, dtype=like.dtype)
        step = torch.arange(columns[1] - columns[0], device=like.device, dtype=like.dtype)
        return (step + ahead[:, None])[None, None]
    return places.distance_tile(rows, columns).to(like.dtype).unsqueeze(-3)

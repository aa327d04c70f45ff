"""The profile in tiles of plain PyTorch: any device, any mask, memory linear in the sequence length.

Each tile of logits is computed once, in [batch, heads, rows, columns], and passed to the accumulator of every requested
statistic. Query heads that share a KV head are folded into the rows, so no key is repeated.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyhead.ops.common.kernels.sizes import blocks_of
from polyhead.ops.common.visibility import Span
from polyhead.ops.profile.request import FAR_BINS, NEAR, OFFSET_BINS, ProfileRequest

# Logits of one tile over all heads: 4 MB in float32. Smaller tiles are slower due to the overhead per call.
_TILE_ELEMENTS = 1 << 20
_TILE_COLUMNS = 512
_NARROW = 64  # rows or columns of a window up to which tiles are longer


def run(request: ProfileRequest) -> dict[str, Tensor]:
    """Compute the results that need tiles, by their names in `AttentionProfile`.

    `block_map` contains sums or maxima.
    """
    accumulators: list[_Accumulator] = []
    if request.received:
        accumulators.append(_Received(request))
    if request.block is not None:
        accumulators.append(_Blocks(request))
    if request.offsets:
        accumulators.append(_Offsets(request))
    if request.argmax:
        accumulators.append(_Argmax(request))
    if request.topk:
        accumulators.append(_Top(request))
    if request.key_set is not None:
        accumulators.append(_KeySet(request))
    if request.head_pairs is not None:
        accumulators.append(_HeadPairs(request))
    dtype = request.accumulation_dtype
    batch, heads, _, head_dim = request.query.shape
    kv_heads = request.key.shape[1]
    scale = request.scale.to(dtype)[:, None, None] if isinstance(request.scale, Tensor) else request.scale
    visibility = request.visibility
    block = request.block or (1, 1)
    height, width = _tile_sides(request)
    key = request.key.flatten(0, 1)
    for rows in _split_window(request.rows, block[0], height):
        query = request.query[:, :, slice(*rows)].to(dtype) * scale
        query = query.reshape(batch * kv_heads, -1, head_dim)
        # Rows without visible keys get an infinite log-sum-exp, so that their weights are exactly 0.
        logsumexp = request.logsumexp[:, :, slice(*rows), None].to(dtype)
        lse = torch.where(logsumexp == -torch.inf, torch.inf, logsumexp)
        spans = [request.columns] if visibility is None else visibility.spans(rows)
        for columns in _split_window(request.columns, block[1], width):
            columns = _clip(columns, spans, block[1])
            if columns[0] == columns[1]:
                continue
            tile = torch.bmm(query, key[:, slice(*columns)].to(dtype).transpose(1, 2))
            tile = tile.view(batch, heads, rows[1] - rows[0], columns[1] - columns[0])
            if request.softcap is not None:
                tile = tile.div_(request.softcap).tanh_().mul_(request.softcap)
            allowed = None
            if visibility is not None:
                bias = visibility.bias_tile(rows, columns, dtype)
                tile = tile if bias is None else tile.add_(bias)
                allowed = visibility.allowed_tile(rows, columns)
            tile = tile.sub_(lse)
            if allowed is not None:
                tile = tile.masked_fill_(~allowed, -torch.inf)
            weights = tile.exp()
            for accumulator in accumulators:
                accumulator.update(tile, weights, rows, columns)
        for accumulator in accumulators:
            accumulator.finish_rows(rows)
    results: dict[str, Tensor] = {}
    for accumulator in accumulators:
        results |= accumulator.compute()
    return results


def _tile_sides(request: ProfileRequest) -> tuple[int, int]:
    """Return the height and width of a tile.

    Tiles are longer if the window is narrow, such as one row of a long text.
    """
    rows, columns = (max(1, stop - start) for start, stop in (request.rows, request.columns))
    max_size = _TILE_ELEMENTS // max(request.query.shape[0] * request.query.shape[1], 1)
    width = min(_TILE_COLUMNS, columns)
    height = max(16, min(1024, max_size // width))
    if rows <= _NARROW:
        width = min(max(width, max_size // rows), columns)
    elif columns <= _NARROW and not request.offsets:  # offsets store as many diagonals as the tile has rows
        height = max(height, max_size // columns)
    return height, width


def _split_window(window: Span, block: int, max_size: int) -> Iterator[Span]:
    """Split a window into pieces of about `max_size` tokens.

    A piece is a number of whole blocks, or a part of a single block.
    """
    first, last = window
    step = max_size // block * block if block <= max_size else block
    for start in range(first, last, step):
        stop = min(start + step, last)
        for begin in range(start, stop, max_size if block > max_size else step):
            yield begin, min(begin + max_size, stop) if block > max_size else stop


def _clip(columns: Span, spans: Sequence[Span], block: int) -> Span:
    """Return the part of a tile's columns from the first to the last in any of the spans, in whole blocks.

    >>> _clip((512, 1024), [(0, 4), (530, 600)], 16), _clip((512, 1024), [(0, 4)], 16)
    ((528, 608), (512, 512))
    """
    start, stop = columns
    cuts = [(max(start, first), min(stop, last)) for first, last in spans if first < stop and start < last]
    if not cuts:
        return start, start
    first, last = min(cut[0] for cut in cuts), max(cut[1] for cut in cuts)
    return first - (first - start) % block, min(last + (start - last) % block, stop)


class _Accumulator(abc.ABC):
    """Accumulator of one statistic over tiles of log weights and weights, [batch, heads, rows, columns]."""

    def __init__(self, request: ProfileRequest) -> None:
        self.request = request
        self.batch, self.heads = request.query.shape[:2]
        self.height, self.width = (stop - start for start, stop in (request.rows, request.columns))

    def zeros(self, *shape: int) -> Tensor:
        request = self.request
        return torch.zeros(self.batch, self.heads, *shape, dtype=request.accumulation_dtype, device=request.key.device)

    def row_slice(self, rows: Span) -> slice:
        return slice(rows[0] - self.request.rows[0], rows[1] - self.request.rows[0])

    def column_slice(self, columns: Span) -> slice:
        return slice(columns[0] - self.request.columns[0], columns[1] - self.request.columns[0])

    @abc.abstractmethod
    def update(self, log_weights: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        """Add a tile."""

    def finish_rows(self, rows: Span) -> None:  # noqa: B027, optional
        """Finish these rows, all of whose columns have been added."""

    @abc.abstractmethod
    def compute(self) -> dict[str, Tensor]:
        """Return the results by their names in `AttentionProfile`."""


class _Received(_Accumulator):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.sums = self.zeros(self.width)

    def update(self, log_weights: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        self.sums[..., self.column_slice(columns)] += weights.sum(2)

    def compute(self) -> dict[str, Tensor]:
        return {"received": self.sums}


class _Blocks(_Accumulator):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        assert request.block is not None
        self.block = request.block
        self.map = self.zeros(*request.map_shape)

    def update(self, log_weights: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        by_max = self.request.pool == "max"
        pooled = weights
        target = self.map
        for axis, size, cut in (
            (3, self.block[1], self.column_slice(columns)),
            (2, self.block[0], self.row_slice(rows)),
        ):
            # A tile covers whole blocks or is inside one; only the last block of an axis may be smaller.
            count = blocks_of(cut.stop - cut.start, size)
            missing = count * size - (cut.stop - cut.start)
            if size == 1:  # a block of one token
                pass
            elif count == 1:
                pooled = pooled.amax(axis, keepdim=True) if by_max else pooled.sum(axis, keepdim=True)
            else:
                pooled = pad(pooled, (0, missing) if axis == 3 else (0, 0, 0, missing)) if missing else pooled
                pooled = pooled.unflatten(axis, (count, size))
                pooled = pooled.amax(axis + 1) if by_max else pooled.sum(axis + 1)
            target = target.narrow(axis, cut.start // size, count)
        if by_max:
            torch.maximum(target, pooled, out=target)
        else:
            target += pooled

    def compute(self) -> dict[str, Tensor]:
        return {"block_map": self.map}


class _Offsets(_Accumulator):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.histogram = self.zeros(OFFSET_BINS)
        self.edges = torch.tensor([NEAR << k for k in range(FAR_BINS)], device=request.key.device)

    def bins(self, offset: Tensor) -> Tensor:
        """Return the bin of each offset."""
        num_edges = torch.bucketize(offset.abs(), self.edges)  # number of bin edges below it
        centre = NEAR + FAR_BINS
        beyond = torch.where(offset > 0, centre + NEAR + num_edges, centre - NEAR - num_edges)
        return torch.where(num_edges == 0, centre + offset, beyond)

    def update(self, log_weights: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        positions = self.request.positions
        if positions.query_positions is not None:
            bins = self.bins(positions.distance_tile(rows, columns)).flatten(1).expand(self.batch, -1)
            for histogram, index, tile in zip(self.histogram, bins, weights, strict=True):
                histogram.index_add_(1, index, tile.flatten(1))
            return
        # Offsets are constant along diagonals. Rows are padded to one column more than there are diagonals, and their
        # elements read again as rows of one column less: each row is then shifted right by one against the row before
        # it, and diagonals are columns.
        height, width = weights.shape[2:]
        skewed = pad(weights.flip(2), (0, height)).flatten(2)[..., : height * (height + width - 1)]
        diagonals = skewed.unflatten(2, (height, height + width - 1)).sum(2)
        first = columns[0] - (rows[1] - 1) - positions.offset
        bins = self.bins(torch.arange(first, first + height + width - 1, device=weights.device))
        self.histogram.index_add_(2, bins, diagonals)

    def compute(self) -> dict[str, Tensor]:
        return {"offsets": self.histogram}


class _Argmax(_Accumulator):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.best = self.zeros(self.height).fill_(-torch.inf)
        self.keys = torch.full(self.best.shape, -1, dtype=torch.int64, device=self.best.device)

    def update(self, log_weights: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        tile_max, index = log_weights.max(-1)
        cut = self.row_slice(rows)
        # Tiles are processed from left to right, so a tie keeps the lower key.
        better = tile_max > self.best[..., cut]
        self.best[..., cut] = torch.where(better, tile_max, self.best[..., cut])
        self.keys[..., cut] = torch.where(better, index + columns[0], self.keys[..., cut])

    def compute(self) -> dict[str, Tensor]:
        return {"argmax": self.keys}


class _Top(_Accumulator):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.values = self.zeros(self.height, request.topk).fill_(-torch.inf)  # log weights
        self.keys = torch.full(self.values.shape, -1, dtype=torch.int64, device=self.values.device)

    def update(self, log_weights: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        cut, count = self.row_slice(rows), self.request.topk
        values = torch.cat([self.values[:, :, cut], log_weights], -1)
        index = torch.arange(columns[0], columns[1], device=log_weights.device).expand(log_weights.shape)
        keys = torch.cat([self.keys[:, :, cut], index], -1)
        # torch.topk does not specify the order of ties, so the lowest keys among equals are selected beforehand.
        kth = values.topk(count, -1).values[..., -1:]
        above, equal = values > kth, values == kth
        selected = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
        values, order = torch.where(selected, values, -torch.inf).topk(count, -1)
        self.values[:, :, cut], self.keys[:, :, cut] = sort_top_keys(values, keys.gather(-1, order))

    def compute(self) -> dict[str, Tensor]:
        return {"top_keys": self.keys, "top_weights": self.values.exp()}


def sort_top_keys(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row by descending value, ties by ascending key; keys with value -inf become -1."""
    keys = torch.where(values == -torch.inf, -1, keys)
    keys, order = keys.sort(-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, keys.gather(-1, by_value)


class _KeySet(_Accumulator):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.mass = self.zeros(self.height)

    def update(self, log_weights: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        assert self.request.key_set is not None
        members = self.request.key_set[:, None, slice(*columns), None].to(weights.dtype)
        self.mass[..., self.row_slice(rows)] += (weights @ members).squeeze(-1)

    def compute(self) -> dict[str, Tensor]:
        return {"key_set_mass": self.mass}


class _HeadPairs(_Accumulator):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        assert request.head_pairs is not None
        self.pairs = request.head_pairs
        # Sums over rows of the divergence and the distance, and the number of rows.
        self.sums = request.query.new_zeros(3, self.batch, len(self.pairs), dtype=request.accumulation_dtype)
        self.divergence: Tensor | None = None
        self.has_keys: Tensor | None = None

    def update(self, log_weights: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        if self.divergence is None or self.has_keys is None:
            self.divergence = weights.new_zeros(self.batch, len(self.pairs), rows[1] - rows[0])
            self.has_keys = torch.zeros_like(self.divergence, dtype=torch.bool)
        sees_keys = (log_weights != -torch.inf).any(-1)  # in this tile
        step = max(1, self.heads)  # chunks of as many pairs as there are heads, to bound the memory of a tile
        for start in range(0, len(self.pairs), step):
            cut = slice(start, start + step)
            head_a, head_b = self.pairs[cut].unbind(-1)
            self.divergence[:, cut] += _divergence(weights[:, head_a], weights[:, head_b]).sum(-1)
            self.has_keys[:, cut] |= sees_keys[:, head_a] | sees_keys[:, head_b]

    def finish_rows(self, rows: Span) -> None:
        if self.divergence is None or self.has_keys is None:
            return
        has_keys = self.has_keys.to(self.divergence.dtype)
        self.sums += torch.stack([(x * has_keys).sum(-1) for x in (self.divergence, self.divergence.sqrt(), has_keys)])
        self.divergence = self.has_keys = None

    def compute(self) -> dict[str, Tensor]:
        return mean_divergences(self.sums)


def mean_divergences(sums: Tensor) -> dict[str, Tensor]:
    """Divide the sums over rows of divergence and distance, [3, batch, pairs], by the number of rows, their third."""
    divergence, distance, count = sums
    count = count.clamp_min(1)
    return {"head_divergence": divergence / count, "head_distance": distance / count}


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the terms of the Jensen-Shannon divergence of p and q, in nats.

    With the mean m = (p + q) / 2 and x = (p - q) / (p + q) a term is m ((1 + x) log(1 + x) + (1 - x) log(1 - x)) / 2.
    For small x the two logarithms cancel, and the series m (x²/2 + x⁴/12 + x⁶/30 + ...) is accurate instead.
    """
    total = p + q
    x = (p - q) / torch.where(total == 0, 1.0, total)
    exact = torch.xlogy(1 + x, 1 + x) + torch.xlogy(1 - x, 1 - x)
    square = x * x
    series = torch.zeros_like(x)
    for k in range(8, 0, -1):
        series = (series + 1.0 / (2 * k * (2 * k - 1))) * square
    return total * torch.where(square < 0.04, series, exact / 2) / 2

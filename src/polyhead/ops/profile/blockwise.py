"""The profile in tiles of plain PyTorch: any device, any mask, memory that grows with n and not with n².

Each tile of logits is computed once, in [batch, heads, rows, columns], and every statistic that was asked for takes its
part of it. Query heads that share a KV head are folded into its rows, so that no key is repeated.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyhead.ops.common.visibility import Span
from polyhead.ops.profile.request import FAR_BINS, NEAR, OFFSET_BINS, ProfileRequest

_TILE_ELEMENTS = 1 << 20  # logits of one tile, all heads together: 4 MB, fewer are slower by what each call costs
_TILE_COLUMNS = 512
_THIN = 64


def run(request: ProfileRequest) -> dict[str, Tensor]:
    """The fields of `AttentionProfile` that need tiles, by name; `block_map` holds sums or maxima."""
    parts: list[_Part] = []
    if request.received:
        parts.append(_Received(request))
    if request.block is not None:
        parts.append(_Blocks(request))
    if request.offsets:
        parts.append(_Offsets(request))
    if request.argmax:
        parts.append(_Argmax(request))
    if request.topk:
        parts.append(_Top(request))
    if request.key_set is not None:
        parts.append(_KeySet(request))
    if request.head_pairs is not None:
        parts.append(_HeadPairs(request))
    dtype = request.accumulation_dtype
    batch, heads, _, head_dim = request.query.shape
    kv_heads = request.key.shape[1]
    scale = request.scale.to(dtype)[:, None, None] if isinstance(request.scale, Tensor) else request.scale
    visibility = request.visibility
    block = request.block or (1, 1)
    height, width = _tile_sides(request)
    key = request.key.flatten(0, 1)
    for rows in _cuts(request.rows, block[0], height):
        query = request.query[:, :, slice(*rows)].to(dtype) * scale
        query = query.reshape(batch * kv_heads, -1, head_dim)
        # A row with nothing to attend to has an infinite one here, so that its weights are exactly 0.
        logsumexp = request.logsumexp[:, :, slice(*rows), None].to(dtype)
        shift = torch.where(logsumexp == -torch.inf, torch.inf, logsumexp)
        spans = [request.columns] if visibility is None else visibility.spans(rows)
        for columns in _cuts(request.columns, block[1], width):
            if not any(first < columns[1] and columns[0] < last for first, last in spans):
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
            tile = tile.sub_(shift)
            if allowed is not None:
                tile = tile.masked_fill_(~allowed, -torch.inf)
            weights = tile.exp()
            for part in parts:
                part.take(tile, weights, rows, columns)
        for part in parts:
            part.end_rows(rows)
    found: dict[str, Tensor] = {}
    for part in parts:
        found |= part.found()
    return found


def _tile_sides(request: ProfileRequest) -> tuple[int, int]:
    """The height and width of a tile; longer than others where the window is thin, a row of a long text for one."""
    rows, columns = (max(1, stop - start) for start, stop in (request.rows, request.columns))
    most = _TILE_ELEMENTS // max(request.query.shape[0] * request.query.shape[1], 1)
    width = min(_TILE_COLUMNS, columns)
    height = max(16, min(1024, most // width))
    if rows <= _THIN:
        width = min(max(width, most // rows), columns)
    elif columns <= _THIN and not request.offsets:  # which lay a tile's diagonals side by side, as many as it is high
        height = max(height, most // columns)
    return height, width


def _cuts(window: Span, block: int, most: int) -> Iterator[Span]:
    """A window in pieces of about `most` tokens, none of which holds a part of a block and a part of another."""
    first, last = window
    step = most // block * block if block <= most else block
    for start in range(first, last, step):
        stop = min(start + step, last)
        for begin in range(start, stop, most if block > most else step):
            yield begin, min(begin + most, stop) if block > most else stop


class _Part(abc.ABC):
    """One statistic: it takes each tile of log weights and weights, [batch, heads, rows, columns], and adds it up."""

    def __init__(self, request: ProfileRequest) -> None:
        self.request = request
        self.batch, self.heads = request.query.shape[:2]
        self.height, self.width = (stop - start for start, stop in (request.rows, request.columns))

    def zeros(self, *shape: int) -> Tensor:
        request = self.request
        return torch.zeros(self.batch, self.heads, *shape, dtype=request.accumulation_dtype, device=request.key.device)

    def of_rows(self, rows: Span) -> slice:
        return slice(rows[0] - self.request.rows[0], rows[1] - self.request.rows[0])

    def of_columns(self, columns: Span) -> slice:
        return slice(columns[0] - self.request.columns[0], columns[1] - self.request.columns[0])

    @abc.abstractmethod
    def take(self, logs: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        """Add a tile."""

    def end_rows(self, rows: Span) -> None:  # noqa: B027, only some have anything to do here
        """All columns of these rows have been taken."""

    @abc.abstractmethod
    def found(self) -> dict[str, Tensor]:
        """What was added up, by the names of `AttentionProfile`."""


class _Received(_Part):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.sums = self.zeros(self.width)

    def take(self, logs: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        self.sums[..., self.of_columns(columns)] += weights.sum(2)

    def found(self) -> dict[str, Tensor]:
        return {"received": self.sums}


class _Blocks(_Part):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        assert request.block is not None
        self.block = request.block
        self.map = self.zeros(*request.map_shape)

    def take(self, logs: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        by_max = self.request.pool == "max"
        pooled = weights
        target = self.map
        for axis, size, cut in ((3, self.block[1], self.of_columns(columns)), (2, self.block[0], self.of_rows(rows))):
            # A tile holds whole blocks or lies within one; only the last block of an axis may be cut short.
            count = -(-(cut.stop - cut.start) // size)
            missing = count * size - (cut.stop - cut.start)
            if count == 1:
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

    def found(self) -> dict[str, Tensor]:
        return {"block_map": self.map}


class _Offsets(_Part):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.histogram = self.zeros(OFFSET_BINS)
        self.edges = torch.tensor([NEAR << k for k in range(FAR_BINS)], device=request.key.device)

    def bins(self, offset: Tensor) -> Tensor:
        """The bin of each offset."""
        far = torch.bucketize(offset.abs(), self.edges)  # how many edges lie below it
        centre = NEAR + FAR_BINS
        beyond = torch.where(offset > 0, centre + NEAR + far, centre - NEAR - far)
        return torch.where(far == 0, centre + offset, beyond)

    def take(self, logs: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        places = self.request.places
        if places.query_positions is not None:
            bins = self.bins(places.distance_tile(rows, columns)).flatten(1).expand(self.batch, -1)
            for histogram, index, tile in zip(self.histogram, bins, weights, strict=True):
                histogram.index_add_(1, index, tile.flatten(1))
            return
        # Offsets are constant along diagonals. Rows of one more column than there are diagonals, read as rows of as
        # many as there are, stand one further to the right each: diagonals become columns.
        height, width = weights.shape[2:]
        skewed = pad(weights.flip(2), (0, height)).flatten(2)[..., : height * (height + width - 1)]
        diagonals = skewed.unflatten(2, (height, height + width - 1)).sum(2)
        first = columns[0] - (rows[1] - 1) - places.offset
        bins = self.bins(torch.arange(first, first + height + width - 1, device=weights.device))
        self.histogram.index_add_(2, bins, diagonals)

    def found(self) -> dict[str, Tensor]:
        return {"offsets": self.histogram}


class _Argmax(_Part):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.best = self.zeros(self.height).fill_(-torch.inf)
        self.keys = torch.full(self.best.shape, -1, dtype=torch.int64, device=self.best.device)

    def take(self, logs: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        largest, index = logs.max(-1)
        cut = self.of_rows(rows)
        # Tiles come from left to right, so that a tie leaves the lower key where it is.
        better = largest > self.best[..., cut]
        self.best[..., cut] = torch.where(better, largest, self.best[..., cut])
        self.keys[..., cut] = torch.where(better, index + columns[0], self.keys[..., cut])

    def found(self) -> dict[str, Tensor]:
        return {"argmax": self.keys}


class _Top(_Part):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.values = self.zeros(self.height, request.topk).fill_(-torch.inf)
        self.keys = torch.full(self.values.shape, -1, dtype=torch.int64, device=self.values.device)

    def take(self, logs: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        cut, count = self.of_rows(rows), self.request.topk
        values = torch.cat([self.values[:, :, cut], logs], -1)
        index = torch.arange(columns[0], columns[1], device=logs.device).expand(logs.shape)
        keys = torch.cat([self.keys[:, :, cut], index], -1)
        # Which of several equal ones topk takes is not said, so the lowest keys are marked before it may choose.
        least = values.topk(count, -1).values[..., -1:]
        above, equal = values > least, values == least
        wanted = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
        values, places = torch.where(wanted, values, -torch.inf).topk(count, -1)
        self.values[:, :, cut], self.keys[:, :, cut] = in_order(values, keys.gather(-1, places))

    def found(self) -> dict[str, Tensor]:
        return {"top_keys": self.keys, "top_weights": self.values.exp()}


def in_order(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The largest values of each row first, the lowest key first among equals, -1 for the key of nothing at all."""
    keys = torch.where(values == -torch.inf, -1, keys)
    keys, order = keys.sort(-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, keys.gather(-1, by_value)


class _KeySet(_Part):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        self.mass = self.zeros(self.height)

    def take(self, logs: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        assert self.request.key_set is not None
        members = self.request.key_set[:, None, slice(*columns), None].to(weights.dtype)
        self.mass[..., self.of_rows(rows)] += (weights @ members).squeeze(-1)

    def found(self) -> dict[str, Tensor]:
        return {"key_set_mass": self.mass}


class _HeadPairs(_Part):
    def __init__(self, request: ProfileRequest) -> None:
        super().__init__(request)
        assert request.head_pairs is not None
        self.pairs = request.head_pairs
        # Sums over the rows of the divergence and the distance, and how many rows there were.
        self.sums = request.query.new_zeros(3, self.batch, len(self.pairs), dtype=request.accumulation_dtype)
        self.divergence: Tensor | None = None
        self.seen: Tensor | None = None

    def take(self, logs: Tensor, weights: Tensor, rows: Span, columns: Span) -> None:
        if self.divergence is None or self.seen is None:
            self.divergence = weights.new_zeros(self.batch, len(self.pairs), rows[1] - rows[0])
            self.seen = torch.zeros_like(self.divergence, dtype=torch.bool)
        filled = (logs != -torch.inf).any(-1)
        step = max(1, self.heads)  # as many pairs at a time as there are heads, so that the tile stays a tile
        for start in range(0, len(self.pairs), step):
            cut = slice(start, start + step)
            one, other = self.pairs[cut].unbind(-1)
            self.divergence[:, cut] += _divergence(weights[:, one], weights[:, other]).sum(-1)
            self.seen[:, cut] |= filled[:, one] | filled[:, other]

    def end_rows(self, rows: Span) -> None:
        if self.divergence is None or self.seen is None:
            return
        seen = self.seen.to(self.divergence.dtype)
        self.sums += torch.stack([(x * seen).sum(-1) for x in (self.divergence, self.divergence.sqrt(), seen)])
        self.divergence = self.seen = None

    def found(self) -> dict[str, Tensor]:
        return mean_divergences(self.sums)


def mean_divergences(sums: Tensor) -> dict[str, Tensor]:
    divergence, distance, count = sums
    count = count.clamp_min(1)
    return {"head_divergence": divergence / count, "head_distance": distance / count}


def _divergence(one: Tensor, other: Tensor) -> Tensor:
    """The terms of the Jensen-Shannon divergence, in nats.

    With the mean m = (p + q) / 2 and x = (p - q) / (p + q) a term is m ((1 + x) log(1 + x) + (1 - x) log(1 - x)) / 2.
    For small x the two logarithms cancel, and its series m (x²/2 + x⁴/12 + x⁶/30 + ...) is what is exact.
    """
    total = one + other
    x = (one - other) / torch.where(total == 0, 1.0, total)
    exact = torch.xlogy(1 + x, 1 + x) + torch.xlogy(1 - x, 1 - x)
    square = x * x
    series = torch.zeros_like(x)
    for k in range(8, 0, -1):
        series = (series + 1.0 / (2 * k * (2 * k - 1))) * square
    return total * torch.where(square < 0.04, series, exact / 2) / 2

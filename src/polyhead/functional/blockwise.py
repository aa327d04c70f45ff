"""The formula in tiles with an online softmax: any device, any option, memory that grows with n and not with n².

The forward keeps a running maximum, sum and output for a block of rows; the backward recomputes each tile from the
log-sum-exp. A second derivative replays the tiles on the autograd tape (and there alone memory grows with n²).

Inside, the query heads that share a key head are folded into its rows: queries are [pairs, group, queries, head_dim]
and keys [pairs, keys, head_dim], where a pair is one (batch, key head). No key is ever repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.functional.dropout import draw_seed, keep_tile
from polyhead.functional.guard import without_broken, without_broken_queries
from polyhead.functional.request import AttentionOutput, AttentionRequest
from polyhead.functional.visibility import Span, Visibility

_TILE_ELEMENTS = 1 << 20  # logits of one tile, all heads together
_TILE_COLUMNS = 512


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    return ["its tiles give no statistics yet"] if request.statistics is not None else []


def run(request: AttentionRequest) -> AttentionOutput:
    dtype = request.accumulation_dtype
    scale = request.scale
    query, key, value = (x.to(dtype) for x in (request.query, request.key, request.value))
    query_poison, poison = None, None
    if request.visibility is not None and not request.finite:
        query, query_poison = without_broken_queries(query)
        key, value, poison = without_broken(key, value)
    # The scale is folded into the queries here, on the tape, so that a learned scale has its gradient.
    query = query * (scale.to(dtype)[:, None, None] if isinstance(scale, Tensor) else scale)
    seed = draw_seed(query.device) if request.dropout and request.seed is None else request.seed
    tiling = _Tiling(request, seed, query_poison, poison)
    sinks = None if request.sinks is None else request.sinks.to(dtype)
    output, logsumexp = _Blockwise.apply(tiling, query, key, value, sinks, *tiling.bias_tensors)
    weights = tiling.weights(query, key, logsumexp) if request.weights else None
    return AttentionOutput(output.to(request.query.dtype), logsumexp, weights, backend="blockwise")


class _Tiling:
    """What is fixed for one call: sizes, options, and how the work is cut into tiles."""

    def __init__(
        self, request: AttentionRequest, seed: Tensor | None, query_poison: Tensor | None, poison: Tensor | None
    ) -> None:
        self.batch, self.heads, self.kv_heads, self.queries, self.keys = request.sizes
        self.group = self.heads // self.kv_heads
        self.visibility = request.visibility
        self.softcap = request.softcap
        self.dropout = request.dropout
        self.seed = seed
        self.query_poison = None if query_poison is None else self.fold(query_poison)  # [pairs, group, queries]
        self.poison = None if poison is None else poison.flatten(0, 1)  # [pairs, keys]
        self.bias_tensors = [] if self.visibility is None else self.visibility.bias_tensors
        self.columns = min(_TILE_COLUMNS, max(self.keys, 1))
        self.rows = max(16, min(1024, _TILE_ELEMENTS // max(self.batch * self.heads * self.columns, 1)))

    def row_blocks(self) -> Iterator[Span]:
        for start in range(0, self.queries, self.rows):
            yield start, min(start + self.rows, self.queries)

    def column_blocks(self, rows: Span) -> Iterator[Span]:
        spans = [(0, self.keys)] if self.visibility is None else self.visibility.spans(rows)
        for first, last in spans:
            for start in range(first, last, self.columns):
                yield start, min(start + self.columns, last)

    def fold(self, x: Tensor) -> Tensor:
        """[batch, heads, queries, ...] to [pairs, group, queries, ...]."""
        return x.reshape(self.batch * self.kv_heads, self.group, *x.shape[2:])

    def logits(
        self, query_rows: Tensor, key: Tensor, visibility: Visibility | None, rows: Span, columns: Span
    ) -> tuple[Tensor, Tensor | None]:
        """One tile of logits with hidden ones at -inf, [pairs, group * rows, columns], and the slope of the softcap."""
        tile = torch.bmm(query_rows, key[:, columns[0] : columns[1]].transpose(1, 2))
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(tile / self.softcap)
            slope = 1 - bent * bent
            tile = self.softcap * bent
        if visibility is None:
            return tile, slope
        bias = visibility.bias_tile(rows, columns, tile.dtype)
        if bias is not None:
            tile = tile + self._pairs(bias, rows, columns)
        if self.poison is not None:
            tile = tile + self.poison[:, None, columns[0] : columns[1]]
        if self.query_poison is not None:
            tile = tile + self.query_poison[:, :, rows[0] : rows[1]].flatten(1)[..., None]
        allowed = visibility.allowed_tile(rows, columns)
        if allowed is not None:
            tile = tile.masked_fill(~self._pairs(allowed, rows, columns), -torch.inf)
        return tile, slope

    def _pairs(self, tile: Tensor, rows: Span, columns: Span) -> Tensor:
        """[batch or 1, heads or 1, rows or 1, columns] spread over the rows of a tile."""
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        if tile.shape[0] == tile.shape[1] == 1 and self.group == 1:
            return tile[0]
        spread = tile.expand(self.batch, self.heads, height, width)
        return spread.reshape(self.batch * self.kv_heads, self.group * height, width)

    def keep(self, rows: Span, columns: Span) -> Tensor | None:
        if not self.dropout or self.seed is None:
            return None
        keep = keep_tile(self.seed, self.dropout, self.batch, self.heads, rows, columns)
        return keep.view(self.batch * self.kv_heads, self.group * (rows[1] - rows[0]), columns[1] - columns[0])

    def dropped(self, tile: Tensor, keep: Tensor | None) -> Tensor:
        return tile if keep is None else torch.where(keep, tile / (1 - self.dropout), 0.0)

    def weights(self, query: Tensor, key: Tensor, logsumexp: Tensor) -> Tensor:
        """The weights themselves, [batch, heads, queries, keys], from the log-sum-exp; on the tape."""
        everything = (0, self.queries), (0, self.keys)
        tile, _ = self.logits(self.fold(query).flatten(1, 2), key.flatten(0, 1), self.visibility, *everything)
        tile = tile.view(self.batch, self.heads, self.queries, self.keys)
        return torch.exp(tile - torch.where(logsumexp == -torch.inf, torch.inf, logsumexp)[..., None])


def _forward_tiles(
    tiling: _Tiling, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, visibility: Visibility | None
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, queries, value_dim] and log-sum-exp [batch, heads, queries]; differentiable by the tape."""
    query, key, value = tiling.fold(query), key.flatten(0, 1), value.flatten(0, 1)
    pairs, group = query.shape[:2]
    outputs, logsumexps = [], []
    for rows in tiling.row_blocks():
        height = rows[1] - rows[0]
        query_rows = query[:, :, rows[0] : rows[1]].flatten(1, 2)
        if sinks is None:
            largest = query.new_full((pairs, group * height, 1), -torch.inf)
            total = torch.zeros_like(largest)
        else:
            sink = sinks.view(1, tiling.kv_heads, group, 1).expand(tiling.batch, -1, -1, height)
            sink = sink.reshape(pairs, group * height, 1)
            largest = sink.detach()
            total = torch.exp(sink - torch.where(largest == -torch.inf, 0.0, largest))
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        gathered = value.new_zeros((pairs, group * height, value.shape[-1]))
        for columns in tiling.column_blocks(rows):
            tile, _ = tiling.logits(query_rows, key, visibility, rows, columns)
            previous, largest = largest, torch.maximum(largest, tile.detach().amax(-1, keepdim=True))
            shift = torch.where(largest == -torch.inf, 0.0, largest)
            decay = torch.exp(previous - shift)
            tile = tile.sub_(shift).exp_()
            total = total * decay + tile.sum(-1, keepdim=True)
            kept = tiling.dropped(tile, tiling.keep(rows, columns))
            gathered = torch.baddbmm(gathered * decay, kept, value[:, columns[0] : columns[1]])
        empty = total == 0
        total = torch.where(empty, 1.0, total)
        outputs.append((gathered / total).unflatten(1, (group, height)))
        logsumexps.append(torch.where(empty, -torch.inf, shift + torch.log(total)).view(pairs, group, height))
    output = torch.cat(outputs, 2) if outputs else value.new_zeros((pairs, group, 0, value.shape[-1]))
    logsumexp = torch.cat(logsumexps, 2) if logsumexps else query.new_zeros((pairs, group, 0))
    shape = (tiling.batch, tiling.heads, tiling.queries)
    return output.view(*shape, value.shape[-1]), logsumexp.view(shape)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiling: _Tiling, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        output, logsumexp = _forward_tiles(tiling, query, key, value, sinks, tiling.visibility)
        ctx.tiling = tiling
        ctx.save_for_backward(query, key, value, sinks, output, logsumexp, *biases)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, logsumexp, *biases = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        # Whatever arrives at an empty row is selected away, so that a NaN there does not meet a weight of zero.
        grad_output = torch.where((logsumexp == -torch.inf)[..., None], 0.0, grad_output)
        inputs = [query, key, value, sinks, *biases]
        if torch.is_grad_enabled():
            grads = _taped_backward(ctx.tiling, inputs, needed, (grad_output, grad_logsumexp))
        else:
            grads = _backward_tiles(ctx.tiling, inputs, needed, output, logsumexp, grad_output, grad_logsumexp)
        return None, *grads


def _taped_backward(
    tiling: _Tiling, inputs: Sequence[Tensor | None], needed: Sequence[bool], grads: tuple[Tensor, Tensor]
) -> list[Tensor | None]:
    """The gradients as functions that can be differentiated again."""
    query, key, value, sinks, *biases = inputs
    assert query is not None and key is not None and value is not None
    visibility = _over_biases(tiling, biases)
    outputs = _forward_tiles(tiling, query, key, value, sinks, visibility)
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if need and x is not None else None for x, need in zip(inputs, needed, strict=True)]


def _backward_tiles(
    tiling: _Tiling,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    output: Tensor,
    logsumexp: Tensor,
    grad_output: Tensor,
    grad_logsumexp: Tensor,
) -> list[Tensor | None]:
    query, key, value, sinks, *biases = inputs
    assert query is not None and key is not None and value is not None
    visibility = _over_biases(tiling, biases)
    # What every weight of a row has in common: sum_j p_j dp_j, less what flows in through the log-sum-exp.
    common = (output * grad_output).sum(-1) - grad_logsumexp
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape
    query, key, value = tiling.fold(query), key.flatten(0, 1), value.flatten(0, 1)
    grad_output, common, logsumexp = tiling.fold(grad_output), tiling.fold(common), tiling.fold(logsumexp)
    pairs, group = query.shape[:2]
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    grad_biases = [
        torch.zeros_like(x) if need and x is not None else None for x, need in zip(biases, needed[4:], strict=True)
    ]
    for rows in tiling.row_blocks():
        cut = (slice(None), slice(None), slice(*rows))
        height = rows[1] - rows[0]
        query_rows = query[cut].flatten(1, 2)
        grad_rows = grad_output[cut].flatten(1, 2)
        common_rows = common[cut].reshape(pairs, group * height, 1)
        shift = logsumexp[cut].reshape(pairs, group * height, 1)
        shift = torch.where(shift == -torch.inf, torch.inf, shift)  # an empty row has weights of exactly 0
        grad_query_rows = torch.zeros_like(query_rows)
        for columns in tiling.column_blocks(rows):
            tile, slope = tiling.logits(query_rows, key, visibility, rows, columns)
            is_broken = tiling.poison is not None or tiling.query_poison is not None
            hidden = tile == -torch.inf if is_broken else None
            weights = tile.sub_(shift).exp_()
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            keep = tiling.keep(rows, columns)
            grad_value[:, slice(*columns)] += torch.bmm(tiling.dropped(weights, keep).transpose(1, 2), grad_rows)
            grad_tile = tiling.dropped(torch.bmm(grad_rows, value[:, slice(*columns)].transpose(1, 2)), keep)
            grad_tile = (grad_tile - common_rows).mul_(weights)
            for index, grad_bias in enumerate(grad_biases):
                if grad_bias is not None and visibility is not None:
                    _add_bias_grad(tiling, visibility, index, grad_bias, grad_tile, rows, columns)
            if slope is not None:
                grad_tile = grad_tile * slope
            grad_query_rows = torch.baddbmm(grad_query_rows, grad_tile, key[:, slice(*columns)])
            grad_key[:, slice(*columns)] += torch.bmm(grad_tile.transpose(1, 2), query_rows)
        grad_query[cut] = grad_query_rows.unflatten(1, (group, height))
    grad_sinks = None
    if sinks is not None and needed[3]:
        shape = (tiling.batch, tiling.heads, tiling.queries)
        share = torch.exp(sinks.view(1, -1, 1) - logsumexp.reshape(shape))
        grad_sinks = -(share * common.reshape(shape)).sum((0, 2))
    grads = [
        grad_query.view(query_shape),
        grad_key.view(key_shape),
        grad_value.view(value_shape),
        grad_sinks,
        *grad_biases,
    ]
    return [grad if need else None for grad, need in zip(grads, needed, strict=True)]


def _over_biases(tiling: _Tiling, biases: Sequence[Tensor | None]) -> Visibility | None:
    """The visibility over the tensors that autograd saved, which a taped backward must differentiate."""
    if tiling.visibility is None or not biases:
        return tiling.visibility
    return tiling.visibility.with_bias_tensors([x for x in biases if x is not None])


def _add_bias_grad(
    tiling: _Tiling, visibility: Visibility, index: int, grad: Tensor, grad_tile: Tensor, rows: Span, columns: Span
) -> None:
    """Sum a tile's gradient into the gradient of the bias it came from."""
    tile = grad_tile.view(tiling.batch, tiling.heads, rows[1] - rows[0], columns[1] - columns[0])
    if index < len(visibility.biases):
        for axis in range(3):
            if grad.shape[axis] == 1:
                tile = tile.sum(axis, keepdim=True)
        target = grad if grad.shape[2] == 1 else grad[:, :, slice(*rows)]
        target[..., slice(*columns)] += tile.to(grad.dtype)
        return
    places = visibility.relative_index(visibility.relative_biases[index - len(visibility.biases)], rows, columns)
    tile = (
        tile.sum(0) if places.ndim == 2 or places.shape[0] == 1 else tile.transpose(0, 1)
    )  # [heads, (batch,) rows, columns]
    tile = tile.sum(0, keepdim=True) if grad.shape[0] == 1 else tile
    grad.index_add_(1, places.flatten(), tile.flatten(1).to(grad.dtype))

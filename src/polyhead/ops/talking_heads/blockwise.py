"""Talking heads in tiles of plain PyTorch: any device, forward and backward in memory that grows with n.

A tile holds some rows and columns of every head, so that mixing heads is a matrix product. One walk over the columns
finds the log-sum-exp of every mixed map, a second the output: the mix takes weights that are final. The backward takes
two walks as well, the first for the share of each row that its softmax subtracts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported
from polyhead.ops.common.combined_weights import CombinedWeights
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.common.tile_statistics import RowSums
from polyhead.ops.common.tiles import TILE_ELEMENTS, Tiling
from polyhead.ops.common.tracing import TRANSFORMED, is_transformed
from polyhead.ops.common.visibility import Span
from polyhead.ops.talking_heads.request import TalkingRequest, cleaned

_DEVICE_ELEMENTS = 1 << 25  # logits of a tile off the CPU, where a larger one is faster


def unsupported_reasons(request: TalkingRequest) -> list[str]:
    reasons = ["the weights are never all there at once in tiles"] if request.plain.weights else []
    return [*reasons, TRANSFORMED] if is_transformed() else reasons


def run(request: TalkingRequest) -> AttentionOutput:
    tiles, tensors = _prepared(request)
    output, logsumexp, *found = _Talking.apply(tiles, *tensors)
    rows = None
    if tiles.statistics is not None:
        rows = RowStatistics(**dict(zip(tiles.statistics.names, found, strict=True)))
    return AttentionOutput(output.to(request.plain.query.dtype), logsumexp, statistics=rows, backend="blockwise")


@torch.no_grad()
def mixed_weights(request: TalkingRequest) -> CombinedWeights:
    tiles, (query, key, value, logits_mix, weights_mix) = _prepared(request)
    _, logsumexp, totals, _ = _forward(tiles, query, key, value[..., :0], logits_mix, weights_mix)
    signed, absolute, largest = (torch.zeros_like(logsumexp) for _ in range(3))
    for rows in tiles.row_blocks():
        own = slice(*rows)
        for columns in tiles.column_blocks(rows):
            _, _, logits = tiles.tile(query, key, logits_mix, rows, columns)
            mixed = mix(_weights(logits, totals, rows), weights_mix)
            signed[:, :, own] += mixed.sum(-1)
            absolute[:, :, own] += mixed.abs().sum(-1)
            largest[:, :, own] = torch.maximum(largest[:, :, own], mixed.abs().amax(-1))
    return CombinedWeights(signed, absolute, largest)


class _Tiles(Tiling):
    """How one call is cut into tiles, and the tiles of its logits."""

    def __init__(self, request: TalkingRequest, query_poison: Tensor | None, key_poison: Tensor | None) -> None:
        super().__init__(request.plain)
        self.scale = request.scale
        self.query_tokens, self.key_tokens = query_poison, key_poison  # [batch, queries] and [batch, keys]
        elements = TILE_ELEMENTS if request.plain.query.device.type == "cpu" else _DEVICE_ELEMENTS
        self.rows = max(16, min(1024, elements // max(self.batch * self.heads * self.columns, 1)))

    def tile(
        self, query: Tensor, key: Tensor, logits_mix: Tensor, rows: Span, columns: Span
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Scores, who sees whom, and mixed logits with hidden ones at -inf: [batch, heads, rows, columns]."""
        scores = self.product(query[:, :, slice(*rows)], key[:, :, slice(*columns)].transpose(-1, -2)) * self.scale
        logits = mix(scores, logits_mix)
        if self.query_tokens is not None:
            logits = logits + self.query_tokens[:, None, slice(*rows), None]
        if self.key_tokens is not None:
            logits = logits + self.key_tokens[:, None, None, slice(*columns)]
        allowed = None if self.visibility is None else self.visibility.allowed_tile(rows, columns)
        return scores, allowed, logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """[batch, heads, m, k] times [batch, kv_heads, k, n]; heads of a group share what stands on the right."""
        if self.group == 1:
            return left @ right
        batch, heads, rows, width = left.shape
        folded = left.reshape(batch, self.kv_heads, self.group * rows, width) @ right
        return folded.view(batch, heads, rows, right.shape[-1])

    def over_group(self, x: Tensor) -> Tensor:
        """[batch, heads, ...] summed over the heads that share a KV head."""
        return x if self.group == 1 else x.unflatten(1, (self.kv_heads, self.group)).sum(2)


def mix(tile: Tensor, matrix: Tensor) -> Tensor:
    """From heads (the first axis of the matrix) to heads: [batch, heads, rows, columns]."""
    return (matrix.t() @ tile.flatten(2)).view(tile.shape)


def _crossed(one: Tensor, other: Tensor) -> Tensor:
    """What two tiles have in common, head by head: [heads of one, heads of the other]."""
    return (one.flatten(2) @ other.flatten(2).transpose(1, 2)).sum(0)


def _weights(logits: Tensor, totals: Tensor, rows: Span) -> Tensor:
    """Of some rows, from their shift and total, as from the log-sum-exp they would be coarse where logits are large; 0
    where a key is hidden, in a row that is NaN as well."""
    shift, total = totals[:, :, :, slice(*rows), None]
    return torch.where(logits == -torch.inf, 0.0, torch.exp(logits - shift) / total)


def _prepared(request: TalkingRequest) -> tuple[_Tiles, list[Tensor]]:
    plain, clean = request.plain, cleaned(request.plain)
    dtype = plain.accumulation_dtype
    value = clean.value.view_as(clean.value) if clean.value is clean.key else clean.value  # Dynamo takes none twice
    tensors = (clean.query, clean.key, value, request.logits_mix, request.weights_mix)
    return _Tiles(request, clean.query_poison, clean.key_poison), [x.to(dtype) for x in tensors]


class _Talking(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiles: _Tiles, query: Tensor, key: Tensor, value: Tensor, logits_mix: Tensor, weights_mix: Tensor
    ) -> tuple[Tensor, ...]:
        output, logsumexp, totals, statistics = _forward(tiles, query, key, value, logits_mix, weights_mix)
        ctx.tiles, ctx.versions = tiles, tiles.versions()
        ctx.save_for_backward(query, key, value, logits_mix, weights_mix, logsumexp, totals)
        ctx.mark_non_differentiable(logsumexp, *statistics.values())
        return output, logsumexp, *statistics.values()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BackendUnsupported("blockwise", ['tiles of talking heads have no second derivative; "reference" has'])
        ctx.tiles.check_versions(ctx.versions)
        return None, *_backward(ctx.tiles, grad, *ctx.saved_tensors)


def _forward(
    tiles: _Tiles, query: Tensor, key: Tensor, value: Tensor, logits_mix: Tensor, weights_mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Output, log-sum-exp, shifts and totals [2, batch, heads, queries], and the statistics of every softmax."""
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    logsumexp = query.new_full(query.shape[:3], -torch.inf)
    totals = query.new_ones(2, *query.shape[:3])
    names = () if tiles.statistics is None else tiles.statistics.names
    statistics = {name: torch.zeros_like(logsumexp) for name in names}
    for rows in tiles.row_blocks():
        own = slice(*rows)
        total, shift, found = _row_totals(tiles, query, key, logits_mix, rows)
        logsumexp[:, :, own] = torch.where(total == 0, -torch.inf, shift + torch.log(total))
        totals[0, :, :, own], totals[1, :, :, own] = shift, torch.where(total == 0, 1.0, total)
        for name, x in found.items():
            statistics[name][:, :, own] = x
        if not value.shape[3]:
            continue
        for columns in tiles.column_blocks(rows):
            _, _, logits = tiles.tile(query, key, logits_mix, rows, columns)
            mixed = mix(_weights(logits, totals, rows), weights_mix)
            output[:, :, own] += tiles.product(mixed, value[:, :, slice(*columns)])
    return output, logsumexp, totals, statistics


def _row_totals(
    tiles: _Tiles, query: Tensor, key: Tensor, logits_mix: Tensor, rows: Span
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of some rows the sum of exponentials, what was subtracted in them, and the statistics."""
    shape = (*query.shape[:2], rows[1] - rows[0])
    largest, total = query.new_full(shape, -torch.inf), query.new_zeros(shape)
    shift = torch.zeros_like(total)
    sums = None if tiles.statistics is None else RowSums(tiles, rows, None, query, blocks=False)
    for columns in tiles.column_blocks(rows):
        _, allowed, logits = tiles.tile(query, key, logits_mix, rows, columns)
        masked = allowed is not None
        highest = logits.amax(-1)
        if sums is not None:
            sums.look(logits, columns, highest, masked=masked)
        previous, largest = largest, torch.maximum(largest, highest)
        before, shift = shift, torch.where(largest == -torch.inf, 0.0, largest)
        decay = torch.exp(previous - shift)
        shifted = logits - shift[..., None]
        exponentials = torch.exp(shifted)
        row_sums = exponentials.sum(-1)
        if sums is not None:
            kept = [x[..., None] for x in (row_sums, decay, before - shift, total)]
            sums.add(exponentials, shifted, kept[0], columns, *kept[1:], masked=masked)
        total = total * decay + row_sums
    safe = torch.where(total == 0, 1.0, total)
    return total, shift, {} if sums is None else sums.finish(safe, shift)


def _backward(
    tiles: _Tiles,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits_mix: Tensor,
    weights_mix: Tensor,
    logsumexp: Tensor,
    totals: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and both mixes."""
    grad_query, grad_key, grad_value = (torch.zeros_like(x) for x in (query, key, value))
    grad_logits_mix, grad_weights_mix = torch.zeros_like(logits_mix), torch.zeros_like(weights_mix)
    # Whatever arrives at an empty row is selected away, so that a NaN there does not meet a weight of zero.
    grad = torch.where((logsumexp == -torch.inf)[..., None], 0.0, grad)
    logits_back, weights_back = logits_mix.t(), weights_mix.t()
    for rows in tiles.row_blocks():
        own = slice(*rows)
        grad_rows = grad[:, :, own]
        delta = torch.zeros_like(logsumexp[:, :, own])
        for columns in tiles.column_blocks(rows):
            _, _, logits = tiles.tile(query, key, logits_mix, rows, columns)
            weights = _weights(logits, totals, rows)
            grad_mixed = tiles.product(grad_rows, value[:, :, slice(*columns)].transpose(-1, -2))
            grad_weights_mix += _crossed(weights, grad_mixed)
            delta += (weights * mix(grad_mixed, weights_back)).sum(-1)
        for columns in tiles.column_blocks(rows):
            cut = slice(*columns)
            scores, allowed, logits = tiles.tile(query, key, logits_mix, rows, columns)
            weights = _weights(logits, totals, rows)
            mixed = mix(weights, weights_mix)
            grad_value[:, :, cut] += tiles.over_group(mixed.transpose(-1, -2) @ grad_rows)
            grad_mixed = tiles.product(grad_rows, value[:, :, cut].transpose(-1, -2))
            grad_logits = weights * (mix(grad_mixed, weights_back) - delta[..., None])
            if allowed is not None:
                grad_logits = grad_logits.masked_fill(~allowed, 0.0)
            grad_logits_mix += _crossed(scores, grad_logits)
            grad_scores = mix(grad_logits, logits_back) * tiles.scale
            grad_query[:, :, own] += tiles.product(grad_scores, key[:, :, cut])
            grad_key[:, :, cut] += tiles.over_group(grad_scores.transpose(-1, -2) @ query[:, :, own])
    return grad_query, grad_key, grad_value, grad_logits_mix, grad_weights_mix

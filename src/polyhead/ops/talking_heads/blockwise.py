"""Talking heads in tiles of plain PyTorch: any device, memory linear in the sequence length.

A tile has some rows and columns of every head, so that mixing heads is a matrix product. A first pass over the columns
computes the row max and sum of the mixed logits, and a second one the output, because mixing weights needs final ones.
The backward has two passes as well: the softmax gradient subtracts a term of each row, `delta`, which the first one
computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported
from polyhead.ops.common.combined_weights import CombinedWeights
from polyhead.ops.common.request import AttentionOutput, as_output
from polyhead.ops.common.tile_statistics import RowSums
from polyhead.ops.common.tiles import TILE_ELEMENTS, Tiling
from polyhead.ops.common.tracing import TRANSFORMED, is_transformed
from polyhead.ops.common.validation import without_autocast
from polyhead.ops.common.visibility import Span
from polyhead.ops.talking_heads.request import TalkingRequest, remove_nonfinite

_DEVICE_ELEMENTS = 1 << 25  # logits of a tile on devices other than the CPU, where larger tiles are faster


def unsupported_reasons(request: TalkingRequest) -> list[str]:
    reasons = ["tiles never materialise the full weights"] if request.attention.weights else []
    return [*reasons, TRANSFORMED] if is_transformed() else reasons


def run(request: TalkingRequest) -> AttentionOutput:
    tiles, tensors = _prepare(request)
    output, logsumexp, *row_stats = _Talking.apply(tiles, *tensors)
    names = () if tiles.statistics is None else tiles.statistics.names
    return as_output((output.to(request.attention.query.dtype), logsumexp, *row_stats), names, "blockwise")


@torch.no_grad()
def mixed_weights(request: TalkingRequest) -> CombinedWeights:
    """Return sums and maximum of the mixed weights of each row."""
    tiles, (query, key, value, logits_mix, weights_mix) = _prepare(request)
    # With a value of width 0, the forward stops after the first pass.
    _, logsumexp, softmax_state, _ = _forward(tiles, query, key, value[..., :0], logits_mix, weights_mix)
    signed, absolute, max_abs = (torch.zeros_like(logsumexp) for _ in range(3))
    for rows in tiles.row_blocks():
        row_slice = slice(*rows)
        for columns in tiles.column_blocks(rows):
            _, _, logits = tiles.tile(query, key, logits_mix, rows, columns)
            mixed = mix(_weights(logits, softmax_state, rows), weights_mix)
            signed[:, :, row_slice] += mixed.sum(-1)
            absolute[:, :, row_slice] += mixed.abs().sum(-1)
            max_abs[:, :, row_slice] = torch.maximum(max_abs[:, :, row_slice], mixed.abs().amax(-1))
    return CombinedWeights(signed, absolute, max_abs)


class _Tiles(Tiling):
    """Tiling of one call, which computes tiles of scores and mixed logits."""

    def __init__(self, request: TalkingRequest, query_poison: Tensor | None, key_poison: Tensor | None) -> None:
        super().__init__(request.attention)
        self.scale = request.scale
        # Poison (see `FiniteInputs`) per token, [batch, queries] and [batch, keys]; that of `Tiling` would be per head.
        self.query_poison_tokens, self.key_poison_tokens = query_poison, key_poison
        elements = TILE_ELEMENTS if request.attention.query.device.type == "cpu" else _DEVICE_ELEMENTS
        self.rows = max(16, min(1024, elements // max(self.batch * self.heads * self.columns, 1)))

    def tile(
        self, query: Tensor, key: Tensor, logits_mix: Tensor, rows: Span, columns: Span
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return a tile of scores, its visibility and its mixed logits, [batch, heads, rows, columns].

        Scores are scaled dot products before mixing. Masked logits are -inf.
        """
        scores = self.product(query[:, :, slice(*rows)], key[:, :, slice(*columns)].transpose(-1, -2)) * self.scale
        logits = mix(scores, logits_mix)
        if self.query_poison_tokens is not None:
            logits = logits + self.query_poison_tokens[:, None, slice(*rows), None]
        if self.key_poison_tokens is not None:
            logits = logits + self.key_poison_tokens[:, None, None, slice(*columns)]
        allowed = None if self.visibility is None else self.visibility.allowed_tile(rows, columns)
        return scores, allowed, logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return [batch, heads, m, k] @ [batch, kv_heads, k, n]; heads of a group share the right operand."""
        if self.group == 1:
            return left @ right
        batch, heads, rows, width = left.shape
        folded = left.reshape(batch, self.kv_heads, self.group * rows, width) @ right
        return folded.view(batch, heads, rows, right.shape[-1])

    def sum_over_group(self, x: Tensor) -> Tensor:
        """Sum [batch, heads, ...] over the heads that share a KV head."""
        return x if self.group == 1 else x.unflatten(1, (self.kv_heads, self.group)).sum(2)


def mix(tile: Tensor, matrix: Tensor) -> Tensor:
    """Mix the heads of a tile [batch, heads, rows, columns]: head j becomes the sum over i of matrix[i, j] * head i."""
    return (matrix.t() @ tile.flatten(2)).view(tile.shape)


def _head_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of the heads of two tiles, summed over the batch: [heads of a, heads of b]."""
    return (a.flatten(2) @ b.flatten(2).transpose(1, 2)).sum(0)


def _weights(logits: Tensor, softmax_state: Tensor, rows: Span) -> Tensor:
    """Return the softmax weights of a tile; masked keys have weight 0 even in rows whose other weights are NaN.

    They are computed from row max and sum, as subtracting the log-sum-exp would be imprecise for large logits.
    """
    m_safe, l_i = softmax_state[:, :, :, slice(*rows), None]
    return torch.where(logits == -torch.inf, 0.0, torch.exp(logits - m_safe) / l_i)


def _prepare(request: TalkingRequest) -> tuple[_Tiles, list[Tensor]]:
    inputs, clean = request.attention, remove_nonfinite(request.attention)
    dtype = inputs.accumulation_dtype
    # Dynamo does not support the same tensor twice among the arguments of an autograd function.
    value = clean.value.view_as(clean.value) if clean.value is clean.key else clean.value
    tensors = (clean.query, clean.key, value, request.logits_mix, request.weights_mix)
    return _Tiles(request, clean.query_poison, clean.key_poison), [x.to(dtype) for x in tensors]


class _Talking(torch.autograd.Function):
    """Output, log-sum-exp and statistics of talking heads; the backward recomputes the tiles."""

    @staticmethod
    def forward(
        ctx: Any, tiles: _Tiles, query: Tensor, key: Tensor, value: Tensor, logits_mix: Tensor, weights_mix: Tensor
    ) -> tuple[Tensor, ...]:
        output, logsumexp, softmax_state, statistics = _forward(tiles, query, key, value, logits_mix, weights_mix)
        ctx.tiles, ctx.versions = tiles, tiles.versions()
        ctx.save_for_backward(query, key, value, logits_mix, weights_mix, logsumexp, softmax_state)
        ctx.mark_non_differentiable(logsumexp, *statistics.values())
        return output, logsumexp, *statistics.values()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BackendUnsupported(
                "blockwise", ['tiles of talking heads have no second derivative; backend="reference" has one']
            )
        ctx.tiles.check_versions(ctx.versions)
        with without_autocast(grad.device.type):  # of a backward inside its context
            return None, *_backward(ctx.tiles, grad, *ctx.saved_tensors)


def _forward(
    tiles: _Tiles, query: Tensor, key: Tensor, value: Tensor, logits_mix: Tensor, weights_mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return output, log-sum-exp, softmax state and the row statistics of the softmax weights.

    The softmax state is row max and sum, [2, batch, heads, queries]; 0 and 1 for rows without visible keys.
    """
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    logsumexp = query.new_full(query.shape[:3], -torch.inf)
    softmax_state = query.new_ones(2, *query.shape[:3])
    names = () if tiles.statistics is None else tiles.statistics.names
    statistics = {name: torch.zeros_like(logsumexp) for name in names}
    for rows in tiles.row_blocks():
        row_slice = slice(*rows)
        l_i, m_safe, row_stats = _row_softmax_state(tiles, query, key, logits_mix, rows)
        logsumexp[:, :, row_slice] = torch.where(l_i == 0, -torch.inf, m_safe + torch.log(l_i))
        softmax_state[0, :, :, row_slice], softmax_state[1, :, :, row_slice] = m_safe, torch.where(l_i == 0, 1.0, l_i)
        for name, x in row_stats.items():
            statistics[name][:, :, row_slice] = x
        if not value.shape[3]:
            continue
        for columns in tiles.column_blocks(rows):
            _, _, logits = tiles.tile(query, key, logits_mix, rows, columns)
            mixed = mix(_weights(logits, softmax_state, rows), weights_mix)
            output[:, :, row_slice] += tiles.product(mixed, value[:, :, slice(*columns)])
    return output, logsumexp, softmax_state, statistics


def _row_softmax_state(
    tiles: _Tiles, query: Tensor, key: Tensor, logits_mix: Tensor, rows: Span
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of exponentials of some rows, the row max that they are relative to, and the statistics.

    In rows without visible keys the sum and the row max `m_safe` are 0.
    """
    shape = (*query.shape[:2], rows[1] - rows[0])
    m_i, l_i = query.new_full(shape, -torch.inf), query.new_zeros(shape)
    m_safe = torch.zeros_like(l_i)
    stats_accumulator = None if tiles.statistics is None else RowSums(tiles, rows, None, query, blocks=False)
    for columns in tiles.column_blocks(rows):
        _, allowed, logits = tiles.tile(query, key, logits_mix, rows, columns)
        masked = allowed is not None
        tile_max = logits.amax(-1)
        if stats_accumulator is not None:
            stats_accumulator.add_logits(logits, columns, tile_max, masked=masked)
        previous_m, m_i = m_i, torch.maximum(m_i, tile_max)
        previous_m_safe, m_safe = m_safe, torch.where(m_i == -torch.inf, 0.0, m_i)
        alpha = torch.exp(previous_m - m_safe)
        shifted_logits = logits - m_safe[..., None]
        p = torch.exp(shifted_logits)
        tile_sum = p.sum(-1)
        if stats_accumulator is not None:
            column_terms = [x[..., None] for x in (tile_sum, alpha, previous_m_safe - m_safe, l_i)]
            stats_accumulator.add(p, shifted_logits, column_terms[0], columns, *column_terms[1:], masked=masked)
        l_i = l_i * alpha + tile_sum
    safe_l = torch.where(l_i == 0, 1.0, l_i)
    return l_i, m_safe, {} if stats_accumulator is None else stats_accumulator.finish(safe_l, m_safe)


def _backward(
    tiles: _Tiles,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits_mix: Tensor,
    weights_mix: Tensor,
    logsumexp: Tensor,
    softmax_state: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and both mixes."""
    grad_query, grad_key, grad_value = (torch.zeros_like(x) for x in (query, key, value))
    grad_logits_mix, grad_weights_mix = torch.zeros_like(logits_mix), torch.zeros_like(weights_mix)
    # Gradients of rows without visible keys are zeroed: zero weights times a NaN would be NaN.
    grad = torch.where((logsumexp == -torch.inf)[..., None], 0.0, grad)
    logits_mix_t, weights_mix_t = logits_mix.t(), weights_mix.t()
    for rows in tiles.row_blocks():
        row_slice = slice(*rows)
        grad_rows = grad[:, :, row_slice]
        delta = torch.zeros_like(logsumexp[:, :, row_slice])
        for columns in tiles.column_blocks(rows):
            _, _, logits = tiles.tile(query, key, logits_mix, rows, columns)
            weights = _weights(logits, softmax_state, rows)
            grad_mixed = tiles.product(grad_rows, value[:, :, slice(*columns)].transpose(-1, -2))
            grad_weights_mix += _head_products(weights, grad_mixed)
            delta += (weights * mix(grad_mixed, weights_mix_t)).sum(-1)
        for columns in tiles.column_blocks(rows):
            column_slice = slice(*columns)
            scores, allowed, logits = tiles.tile(query, key, logits_mix, rows, columns)
            weights = _weights(logits, softmax_state, rows)
            mixed = mix(weights, weights_mix)
            grad_value[:, :, column_slice] += tiles.sum_over_group(mixed.transpose(-1, -2) @ grad_rows)
            grad_mixed = tiles.product(grad_rows, value[:, :, column_slice].transpose(-1, -2))
            grad_logits = weights * (mix(grad_mixed, weights_mix_t) - delta[..., None])
            if allowed is not None:
                grad_logits = grad_logits.masked_fill(~allowed, 0.0)
            grad_logits_mix += _head_products(scores, grad_logits)
            grad_scores = mix(grad_logits, logits_mix_t) * tiles.scale
            grad_query[:, :, row_slice] += tiles.product(grad_scores, key[:, :, column_slice])
            grad_key[:, :, column_slice] += tiles.sum_over_group(grad_scores.transpose(-1, -2) @ query[:, :, row_slice])
    return grad_query, grad_key, grad_value, grad_logits_mix, grad_weights_mix

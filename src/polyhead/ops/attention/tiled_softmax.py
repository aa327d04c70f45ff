"""Tiled attention with an online softmax: forward, backward and row statistics in memory linear in n.

As in FlashAttention (Dao et al. 2022, arXiv:2205.14135), the forward keeps a running max, sum and output for a block of
rows, and the backward recomputes each tile. A second derivative replays the tiles under autograd, the only case in
which memory grows with n².

On a CPU the matrix products and the exponential dominate; every other pass over a tile, done in place, costs a tenth of
one of them or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.common.request import StatisticsRequest
from polyhead.ops.common.statistics import LINEAR, RowStatistics
from polyhead.ops.common.tile_statistics import EXP_UNDERFLOW, RowSums, factors, magnitude
from polyhead.ops.common.tiles import Part, Tiling, slices_of_biases
from polyhead.ops.common.tracing import may_overwrite
from polyhead.ops.common.validation import without_autocast
from polyhead.ops.common.visibility import Span, Visibility


@dataclass(slots=True, eq=False)
class TiledOutput:
    """Result of the tiles, each [batch, heads, queries]; the output also has value_dim."""

    output: Tensor | None  # None without values
    logsumexp: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)
    # Saved for the backward: max and sum of each row's softmax, and the first columns of the tiles that contain the max
    # logit and the max |logit|, by the names of these statistics.
    row_max: Tensor | None = None
    row_sum: Tensor | None = None
    blocks: dict[str, Tensor] = field(default_factory=dict)


def attend(
    tiling: Tiling, query: Tensor, key: Tensor, value: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor | None, Tensor, RowStatistics | None]:
    """Return output, log-sum-exp and the requested statistics, all differentiable.

    Without values there is no output: `sdpa`, whose kernels return the output alone, calls it so for the statistics.
    """
    is_recorded = torch.is_grad_enabled()
    if is_recorded and not torch.compiler.is_compiling():
        inputs = (query, key, value, sinks, *tiling.bias_tensors)
        is_recorded = any(x is not None and x.requires_grad for x in inputs)
    if not is_recorded:
        with torch.no_grad():
            outputs = _forward(tiling, query, key, value, sinks, blocks=False)
        statistics = None if tiling.statistics is None else RowStatistics(**outputs.statistics)
        return outputs.output, outputs.logsumexp, statistics
    value = None if value is None else value.view_as(value) if value is key else value  # Dynamo rejects aliased inputs
    results = _Attention.apply(tiling, query, key, value, sinks, *tiling.bias_tensors)
    output = None if value is None else results[0]
    logsumexp, *rest = results if value is None else results[1:]
    if tiling.statistics is None:
        return output, logsumexp, None
    return output, logsumexp, RowStatistics(**dict(zip(tiling.statistics.names, rest, strict=True)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tiling: Tiling,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        sinks: Tensor | None,
        *biases: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs = _forward(tiling, query, key, value, sinks, blocks=any(ctx.needs_input_grad))
        ctx.tiling, ctx.versions = tiling, tiling.versions()
        ctx.blocks = tuple(outputs.blocks)
        statistics = tuple(outputs.statistics.values())
        ctx.save_for_backward(
            query,
            key,
            value,
            sinks,
            outputs.output,
            outputs.logsumexp,
            outputs.row_max,
            outputs.row_sum,
            *statistics,
            *outputs.blocks.values(),
            *biases,
        )
        if "visible_keys" in outputs.statistics:
            ctx.mark_non_differentiable(outputs.statistics["visible_keys"])
        ctx.set_materialize_grads(False)
        return (*(() if outputs.output is None else (outputs.output,)), outputs.logsumexp, *statistics)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tiling = ctx.tiling
        tiling.check_versions(ctx.versions)
        query, key, value, sinks, output, logsumexp, row_max, row_sum, *rest = ctx.saved_tensors
        names = () if tiling.statistics is None else tiling.statistics.names
        statistics = dict(zip(names, rest, strict=False))
        blocks = dict(zip(ctx.blocks, rest[len(names) :], strict=False))
        inputs = [query, key, value, sinks, *rest[len(names) + len(blocks) :]]
        needed = ctx.needs_input_grad[1:]
        # Gradients of empty rows are set to 0, so that a NaN there is not multiplied by a weight of zero.
        empty = logsumexp == -torch.inf
        grads = tuple(
            None if x is None else torch.where(empty if x.ndim == 3 else empty[..., None], 0.0, x) for x in grads
        )
        with without_autocast(query.device.type):  # of a backward inside its context
            if torch.is_grad_enabled():
                return None, *_differentiable_backward(tiling, inputs, needed, grads)
            outputs = TiledOutput(output, logsumexp, statistics, row_max, row_sum, blocks)
            return None, *_backward(tiling, inputs, needed, outputs, grads)


# ---- forward


def _forward(
    tiling: Tiling, query: Tensor, key: Tensor, value: Tensor | None, sinks: Tensor | None, *, blocks: bool
) -> TiledOutput:
    """Run the forward part by part."""
    tiling = tiling.with_workspace()
    parts = tiling.parts()
    if len(parts) <= 1:
        return _forward_tiles(tiling, query, key, value, sinks, tiling.visibility, blocks=blocks)
    result: TiledOutput | None = None
    for part in parts:
        part_output = _forward_tiles(
            part_tiling := tiling.of(part),
            query[part.batch, part.heads],
            key[part.batch, part.kv_heads],
            None if value is None else value[part.batch, part.kv_heads],
            None if sinks is None else sinks[part.heads],
            part_tiling.visibility,
            blocks=blocks,
        )
        result = _allocate_like(tiling, part_output) if result is None else result
        for target, tensor in zip(_tensors(result), _tensors(part_output), strict=True):
            target[part.batch, part.heads] = tensor
    assert result is not None
    return result


def _allocate_like(tiling: Tiling, part: TiledOutput) -> TiledOutput:
    """Allocate the output of all parts, with the dtypes and trailing axes of one part's output."""

    def allocate(x: Tensor | None) -> Any:
        return None if x is None else x.new_empty((tiling.batch, tiling.heads, *x.shape[2:]))

    statistics = {name: allocate(x) for name, x in part.statistics.items()}
    return TiledOutput(
        allocate(part.output),
        allocate(part.logsumexp),
        statistics,
        allocate(part.row_max),
        allocate(part.row_sum),
        {name: allocate(x) for name, x in part.blocks.items()},
    )


def _tensors(outputs: TiledOutput) -> list[Tensor]:
    tensors = (outputs.output, outputs.logsumexp, outputs.row_max, outputs.row_sum)
    return [x for x in (*tensors, *outputs.statistics.values(), *outputs.blocks.values()) if x is not None]


def _forward_tiles(
    tiling: Tiling,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
    visibility: Visibility | None,
    *,
    blocks: bool,
) -> TiledOutput:
    """Run the forward of one part; differentiable by autograd."""
    query, transposed_key = tiling.fold(query), tiling.transposed(key)
    value = None if value is None else value.flatten(0, 1)
    row_outputs = [
        _attend_rows(tiling, query, transposed_key, value, sinks, visibility, rows, blocks=blocks)
        for rows in tiling.row_blocks()
    ] or [_attend_rows(tiling, query, transposed_key, value, sinks, visibility, (0, 0), blocks=blocks)]
    if len(row_outputs) == 1:
        return row_outputs[0]

    def concat(tensors: list[Any]) -> Any:
        return None if tensors[0] is None else torch.cat(tensors, 2)

    return TiledOutput(
        concat([x.output for x in row_outputs]),
        concat([x.logsumexp for x in row_outputs]),
        {name: concat([x.statistics[name] for x in row_outputs]) for name in row_outputs[0].statistics},
        concat([x.row_max for x in row_outputs]),
        concat([x.row_sum for x in row_outputs]),
        {name: concat([x.blocks[name] for x in row_outputs]) for name in row_outputs[0].blocks},
    )


def _attend_rows(
    tiling: Tiling,
    query: Tensor,
    transposed_key: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
    visibility: Visibility | None,
    rows: Span,
    *,
    blocks: bool,
) -> TiledOutput:
    """Attend with one block of rows over all its visible keys."""
    query_rows = tiling.rows_of(query, rows)
    shape = (tiling.batch, tiling.heads, rows[1] - rows[0])
    # The online softmax has no state before the first tile, unless it is a learned sink.
    running_max: Tensor | None = None
    row_max: Tensor | None = None
    row_sum: Tensor | None = None
    acc: Tensor | None = None
    sink: Tensor | None = None
    if sinks is not None:
        sink = sinks.view(1, -1, 1).expand(shape)
        column = sink.reshape(*query_rows.shape[:2], 1)
        running_max = column.detach()
        row_max = _zero_if_empty(running_max)
        row_sum = torch.exp(column - row_max)
    row_stats = None
    if tiling.statistics is not None:
        row_stats = RowSums(tiling, rows, sink, query, blocks=blocks)
    for columns in tiling.column_blocks(rows):
        tile, _, masked = tiling.logits(query_rows, transposed_key, visibility, rows, columns)
        tile_max = tile.detach().amax(-1, keepdim=True)
        if row_stats is not None:
            row_stats.add_logits(tile, columns, tile_max, masked=masked)
        previous_max, previous_row_max = running_max, row_max
        running_max = tile_max if previous_max is None else torch.maximum(previous_max, tile_max)
        row_max = _zero_if_empty(running_max)
        decay = None if previous_max is None else torch.exp(previous_max - row_max)
        shifted = tile.sub_(row_max) if may_overwrite() else tile - row_max
        needs_shifted = row_stats is not None and row_stats.needs_entropy
        tile = tiling.exponential(shifted, keep=needs_shifted)
        tile_sum = tile.sum(-1, keepdim=True)
        if row_stats is not None:
            max_change = None if previous_row_max is None else previous_row_max - row_max
            row_stats.add(tile, shifted, tile_sum, columns, decay, max_change, row_sum, masked=masked)
        row_sum = tile_sum if row_sum is None or decay is None else row_sum * decay + tile_sum
        if value is not None:
            dropped = tiling.apply_dropout(tile, tiling.keep(rows, columns))
            value_rows = value[:, columns[0] : columns[1]]
            if acc is None or decay is None:
                acc = torch.bmm(dropped, value_rows)
            elif may_overwrite():
                acc.mul_(decay).baddbmm_(dropped, value_rows)
            else:
                acc = torch.baddbmm(acc * decay, dropped, value_rows)
    if row_max is None or row_sum is None:
        row_max = row_sum = query.new_zeros((*query_rows.shape[:2], 1))
    if acc is None and value is not None:
        acc = value.new_zeros((*query_rows.shape[:2], value.shape[-1]))
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1.0)
    output = None if acc is None else (acc / row_sum).view(*shape, acc.shape[-1])
    logsumexp = (row_max + torch.log(row_sum)).masked_fill(empty, -torch.inf).view(shape)
    row_max, row_sum = row_max.view(shape), row_sum.view(shape)
    outputs = TiledOutput(output, logsumexp, row_max=row_max, row_sum=row_sum)
    if row_stats is not None:
        outputs.statistics = row_stats.finish(row_sum, row_max)
        outputs.blocks = {
            name: x
            for name, x in (("max_logit", row_stats.max_logit_block), ("max_abs_logit", row_stats.max_abs_block))
            if x is not None
        }
    return outputs


def _zero_if_empty(running_max: Tensor) -> Tensor:
    """Return the running max of each row, and 0 instead of -inf."""
    return running_max.nan_to_num(torch.nan, torch.inf, 0.0)


# ---- backward


def _differentiable_backward(
    tiling: Tiling, inputs: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again."""
    query, key, value, sinks, *biases = inputs
    assert query is not None and key is not None
    visibility = _with_saved_biases(tiling, biases)
    outputs = _forward_tiles(tiling, query, key, value, sinks, visibility, blocks=False)
    tensors = [x for x in (outputs.output, outputs.logsumexp) if x is not None] + list(outputs.statistics.values())
    pairs = [(x, grad) for x, grad in zip(tensors, grads, strict=True) if grad is not None and x.requires_grad]
    differentiated = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    if not pairs:
        return [None] * len(inputs)
    results = iter(
        torch.autograd.grad(
            [x for x, _ in pairs], differentiated, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(results) if need and x is not None else None for x, need in zip(inputs, needed, strict=True)]


def _with_saved_biases(tiling: Tiling, biases: Sequence[Tensor | None]) -> Visibility | None:
    """Return the visibility with the bias tensors that autograd saved, for a second derivative."""
    if tiling.visibility is None or not biases:
        return tiling.visibility
    return tiling.visibility.with_bias_tensors([x for x in biases if x is not None])


def _backward(
    tiling: Tiling,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    outputs: TiledOutput,
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of the inputs that need one, computed part by part."""
    query, key, value, sinks, *biases = inputs
    assert query is not None and key is not None
    has_output = outputs.output is not None
    row_grads, grad_sinks = _row_gradients(
        tiling, outputs, sinks, grads[0] if has_output else None, grads[int(has_output) :]
    )
    grad_query, grad_key = torch.empty_like(query), torch.zeros_like(key)
    grad_value = None if value is None else torch.zeros_like(value)
    grad_biases = [
        torch.zeros_like(x, dtype=_sum_dtype(x, outputs.logsumexp)) if need and x is not None else None
        for x, need in zip(biases, needed[4:], strict=True)
    ]
    visibility = _with_saved_biases(tiling, biases)
    tiling = tiling.with_workspace()
    for part in tiling.parts():
        part_tiling = tiling.of(part)
        _backward_tiles(
            part_tiling,
            part_tiling.visibility if part_tiling is not tiling else visibility,
            query[part.batch, part.heads],
            key[part.batch, part.kv_heads],
            None if value is None else value[part.batch, part.kv_heads],
            row_grads.of(part),
            grad_query[part.batch, part.heads],
            grad_key[part.batch, part.kv_heads],
            None if grad_value is None else grad_value[part.batch, part.kv_heads],
            slices_of_biases(visibility, grad_biases, part),
        )
    rounded = [
        None if grad is None or x is None else grad.to(x.dtype) for grad, x in zip(grad_biases, biases, strict=True)
    ]
    results = [grad_query, grad_key, grad_value, grad_sinks, *rounded]
    return [grad if need else None for grad, need in zip(results, needed, strict=True)]


def _sum_dtype(bias: Tensor, like: Tensor) -> torch.dtype:
    """Return the dtype of a bias's gradient: float64 if it sums over rows or pairs at a distance."""
    is_sum_over_rows = bias.ndim == 2 or bias.shape[2] == 1  # a table, or one row for all queries
    return torch.float64 if is_sum_over_rows and bias.device.type != "mps" else like.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _RowGradients:
    """Gradients of the rows, reduced to the few numbers per row that a tile needs.

    With weights p, dp_j = dO . v_j, logits minus row max x, row sum l, and gradients g_F of linear statistics
    F = sum_j p_j f_j, the gradient of logit j is

        ds_j = p_j [dp_j + common + entropy_coef * x_j + sum_F g_F f_j] + gradients of the maxima at their argmax.

    All but the last term is divided by l here, row by row, so that a tile needs exp(x) alone: weights computed from the
    log-sum-exp would be inaccurate where logits are large.
    """

    row_max: Tensor
    common: Tensor
    entropy_coef: Tensor | None
    grad_output: Tensor | None
    linear: dict[str, Tensor]
    argmax_grads: dict[str, tuple[Tensor, Tensor]]  # as `TiledOutput.blocks`, and the gradient at the argmax

    def of(self, part: Part) -> _RowGradients:
        """Return the gradients of the rows of a part."""
        index = (part.batch, part.heads)
        return _RowGradients(
            self.row_max[index],
            self.common[index],
            None if self.entropy_coef is None else self.entropy_coef[index],
            None if self.grad_output is None else self.grad_output[index],
            {name: x[index] for name, x in self.linear.items()},
            {name: (block[index], grad[index]) for name, (block, grad) in self.argmax_grads.items()},
        )


def _row_gradients(
    tiling: Tiling,
    outputs: TiledOutput,
    sinks: Tensor | None,
    grad_output: Tensor | None,
    grads: Sequence[Tensor | None],
) -> tuple[_RowGradients, Tensor | None]:
    """Return the gradients of the rows, and the gradient of the learned sinks [heads].

    `grads` are those of the log-sum-exp and of the statistics in their order.
    """
    row_sum, row_max, stats = outputs.row_sum, outputs.row_max, outputs.statistics
    assert row_sum is not None and row_max is not None
    names = () if tiling.statistics is None else tiling.statistics.names
    grad_logsumexp, *rest = grads
    stat_grads = {name: grad for name, grad in zip(names, rest, strict=True) if grad is not None}
    common = torch.zeros_like(row_sum) if grad_logsumexp is None else grad_logsumexp
    if grad_output is not None and outputs.output is not None:
        common = common - (outputs.output * grad_output).sum(-1)
    for name in ("entropy", "confidence", "learned_sink_mass", *LINEAR):
        if name in stat_grads:
            common = common - stat_grads[name] * stats[name]
    grad_sinks = None if sinks is None else _grad_sinks(sinks, row_max, row_sum, common, stat_grads, stats)
    entropy_coef: Tensor | None = None
    if "entropy" in stat_grads:
        common = common + stat_grads["entropy"] * torch.log(row_sum)
        entropy_coef = -stat_grads["entropy"] / row_sum
    argmax_grads = {}
    grad_max = stat_grads.get("max_logit")
    if "confidence" in stat_grads:
        grad_confidence = stat_grads["confidence"] * stats["confidence"]
        grad_max = grad_confidence if grad_max is None else grad_max + grad_confidence
    if grad_max is not None:
        argmax_grads["max_logit"] = (outputs.blocks["max_logit"], grad_max)
    if "max_abs_logit" in stat_grads:
        argmax_grads["max_abs_logit"] = (outputs.blocks["max_abs_logit"], stat_grads["max_abs_logit"])
    row_grads = _RowGradients(
        row_max,
        common / row_sum,
        entropy_coef,
        None if grad_output is None else grad_output / row_sum[..., None],
        {name: grad / row_sum for name, grad in stat_grads.items() if name in LINEAR},
        argmax_grads,
    )
    return row_grads, grad_sinks


def _grad_sinks(
    sinks: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    common: Tensor,
    stat_grads: dict[str, Tensor],
    stats: dict[str, Tensor],
) -> Tensor:
    """Return the gradient of the learned sinks.

    A sink is one more term of each row's sum and entropy, without value or position.
    """
    logit = sinks.view(1, -1, 1) - row_max
    share = torch.exp(logit) / row_sum
    grad = common
    if "entropy" in stat_grads:
        grad = grad - stat_grads["entropy"] * torch.where(share == 0, 0.0, logit - torch.log(row_sum))
    result = share * grad
    if "learned_sink_mass" in stat_grads:
        result = result + stat_grads["learned_sink_mass"] * stats["learned_sink_mass"]
    sum_dtype = torch.float64 if result.device.type != "mps" else result.dtype
    return result.sum((0, 2), dtype=sum_dtype).to(sinks.dtype)


def _backward_tiles(
    tiling: Tiling,
    visibility: Visibility | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    row_grads: _RowGradients,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor | None,
    grad_biases: Sequence[Tensor | None],
) -> None:
    """Write the gradients of one part into `grad_query`, `grad_key`, `grad_value` and `grad_biases`."""
    transposed_key = tiling.transposed(key)
    transposed_value = None if value is None or row_grads.grad_output is None else tiling.transposed(value)
    key, query = key.flatten(0, 1), tiling.fold(query)
    has_poison = tiling.poison is not None or tiling.query_poison is not None
    key_sums = torch.zeros_like(transposed_key)  # [pairs, head_dim, keys], the fastest layout of the products
    value_sums = None if transposed_value is None else torch.zeros_like(transposed_value)

    def column(x: Tensor) -> Tensor:
        return tiling.rows_of(tiling.fold(x)[..., None], rows)

    for rows in tiling.row_blocks():
        query_rows = tiling.rows_of(query, rows)
        row_max, common = column(row_grads.row_max), column(row_grads.common)
        entropy_coef = None if row_grads.entropy_coef is None else column(row_grads.entropy_coef)
        grad_rows = None if row_grads.grad_output is None else tiling.rows_of(tiling.fold(row_grads.grad_output), rows)
        query_sums = torch.zeros_like(query_rows)
        for columns in tiling.column_blocks(rows):
            key_slice = slice(*columns)
            tile, tanh_logits, masked = tiling.logits(query_rows, transposed_key, visibility, rows, columns)
            hidden = tile == -torch.inf if has_poison else None
            argmax_grads = _argmax_grads(tiling, row_grads, tile, rows, columns, masked=masked)
            shifted = tile.sub_(row_max)
            weights = tiling.exponential(shifted, keep=entropy_coef is not None)
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            grad_buffer = tiling.buffer("gradients", weights.shape, weights)
            if transposed_value is None or grad_rows is None or value_sums is None:
                grad_tile = torch.empty_like(weights) if grad_buffer is None else grad_buffer
                grad_tile.copy_(common)
            else:
                keep = tiling.keep(rows, columns)
                dropped = tiling.apply_dropout(weights, keep)
                value_sums[:, :, key_slice] += torch.bmm(grad_rows.transpose(1, 2), dropped)
                grad_tile = torch.bmm(grad_rows, transposed_value[:, :, key_slice], out=grad_buffer)
                grad_tile = tiling.apply_dropout(grad_tile, keep).add_(common)
            if entropy_coef is not None:
                grad_tile.addcmul_(shifted.clamp_(min=EXP_UNDERFLOW) if masked else shifted, entropy_coef)
            if tiling.statistics is not None and len(row_grads.linear):
                _add_linear(tiling, row_grads, tiling.statistics, grad_tile, rows, columns)
            grad_tile.mul_(weights)
            if hidden is not None:
                grad_tile.masked_fill_(hidden, 0.0)
            for i_key, grad in argmax_grads:
                grad_tile.scatter_add_(-1, i_key, grad)
            for index, grad_bias in enumerate(grad_biases):
                if grad_bias is not None and visibility is not None:
                    _add_bias_grad(tiling, visibility, index, grad_bias, grad_tile, rows, columns)
            if tanh_logits is not None:
                grad_tile.mul_(1 - tanh_logits * tanh_logits)
            query_sums.baddbmm_(grad_tile, key[:, key_slice])
            key_sums[:, :, key_slice] += torch.bmm(query_rows.transpose(1, 2), grad_tile)
        grad_query[:, :, rows[0] : rows[1]] = tiling.by_head(query_sums)
    grad_key.copy_(key_sums.transpose(1, 2).view(tiling.batch, tiling.kv_heads, *key.shape[1:]))
    if grad_value is not None and value_sums is not None:
        grad_value.copy_(value_sums.transpose(1, 2).reshape(grad_value.shape))


def _argmax_grads(
    tiling: Tiling, row_grads: _RowGradients, tile: Tensor, rows: Span, columns: Span, *, masked: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return the argmax of each row in this tile and its gradient, 0 if it is in another tile."""
    result = []
    for name, (block, grad) in row_grads.argmax_grads.items():
        is_in_tile = tiling.fold(block)[:, :, rows[0] : rows[1]].flatten(1)[..., None] == columns[0]
        grad_logit = torch.where(is_in_tile, tiling.rows_of(tiling.fold(grad)[..., None], rows), 0.0)
        i_key = (tile if name == "max_logit" else magnitude(tile, masked=masked)).max(-1, keepdim=True).indices
        if name == "max_abs_logit":
            grad_logit = grad_logit * tile.gather(-1, i_key).sign()
        result.append((i_key, grad_logit))
    return result


def _add_linear(
    tiling: Tiling, row_grads: _RowGradients, request: StatisticsRequest, grad_tile: Tensor, rows: Span, columns: Span
) -> None:
    """Add the gradients of the linear statistics, sum_F g_F f_j, to a tile."""
    by_head = tiling.by_head(grad_tile)
    for name, factor in factors(request, tuple(row_grads.linear), rows, columns, grad_tile):
        by_head.addcmul_(factor, row_grads.linear[name][:, :, rows[0] : rows[1], None])


def _add_bias_grad(
    tiling: Tiling, visibility: Visibility, index: int, grad: Tensor, grad_tile: Tensor, rows: Span, columns: Span
) -> None:
    """Add a tile's gradient to the gradient of its bias."""
    tile = tiling.by_head(grad_tile)
    if index < len(visibility.biases):
        for axis in range(3):
            if grad.shape[axis] == 1:
                tile = tile.sum(axis, keepdim=True)
        target = grad if grad.shape[2] == 1 else grad[:, :, slice(*rows)]
        target[..., slice(*columns)] += tile.to(grad.dtype)
        return
    i_table = visibility.relative_index(visibility.relative_biases[index - len(visibility.biases)], rows, columns)
    # [heads, (batch,) rows, columns]
    tile = tile.sum(0) if i_table.ndim == 2 or i_table.shape[0] == 1 else tile.transpose(0, 1)
    tile = tile.sum(0, keepdim=True) if grad.shape[0] == 1 else tile
    grad.index_add_(1, i_table.flatten(), tile.flatten(1).to(grad.dtype))

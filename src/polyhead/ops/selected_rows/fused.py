"""Fused backend of `ragged_attention`: support checks, custom operators and the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported
from polyhead.ops.attention import fused
from polyhead.ops.attention.fused import _flat, _mask, _names, _no_gradients, _no_second_derivative, _row_poison
from polyhead.ops.common.kernel_masks import pack
from polyhead.ops.common.kernels.availability import has_hopper_kernels
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.nonfinite import without_broken
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import LINEAR, RowStatistics
from polyhead.ops.common.tracing import is_traced
from polyhead.ops.selected_rows.request import RaggedRequest

# Their gradient goes to one key per row, whose index the forward does not store.
_MAXIMA = ("max_logit", "max_abs_logit", "confidence")
_PER_KEY = ("entropy", *LINEAR)


def unsupported_reasons(request: RaggedRequest) -> list[str]:
    full_request = request.full_request
    reasons = fused.unsupported_reasons(full_request)
    tensors = [x for x in (full_request.scale,) if isinstance(x, Tensor)]
    tensors += [] if full_request.visibility is None else full_request.visibility.bias_tensors
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        reasons.append("the kernels for selected rows have no gradient of a bias, a table or a scale per head")
    return reasons


def run(request: RaggedRequest) -> AttentionOutput:
    full_request = request.full_request
    key, value, visibility, requested = (
        full_request.key,
        full_request.value,
        full_request.visibility,
        full_request.statistics,
    )
    num_queries = full_request.query.shape[2]
    bias, table = None, None
    if visibility is None:
        mask = MaskArguments(offset=key.shape[2] - num_queries)
    else:
        poison = None
        if not full_request.finite:
            key, value, poison = without_broken(key, value)
        mask = pack(visibility, poison=poison, for_columns=request.needs_grad)
        bias, table = mask.bias, mask.table
    scale, head_scale = (
        (1.0, full_request.scale) if isinstance(full_request.scale, Tensor) else (full_request.scale, None)
    )
    names = () if requested is None else requested.names
    tensors, numbers = _flat(mask)
    traced = is_traced(request.query)
    call: Any = _forward_operator if traced else _RaggedFunction.apply if request.needs_grad else _forward
    output, logsumexp, *row_stats = call(
        *(_with_dense_rows(x) for x in (request.query, key, value)),
        request.positions,
        request.offsets,
        num_queries,
        request.by_head,
        scale,
        head_scale,
        full_request.softcap,
        full_request.sinks,
        bias,
        table,
        tensors,
        numbers,
        ",".join(names),
        1 if requested is None else requested.sink_keys,
        0 if requested is None else requested.window,
    )
    rows = dict(zip(names, row_stats, strict=True))
    if "visible_keys" in rows:
        rows["visible_keys"] = rows["visible_keys"].detach()
    statistics = None if requested is None else RowStatistics(**rows)
    return AttentionOutput(output, logsumexp, statistics=statistics, backend="fused")


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor positions, Tensor offsets, SymInt num_queries, bool by_head, "
    "float scale, Tensor? head_scale, float? softcap, Tensor? sinks, Tensor? bias, Tensor? table, "
    "Tensor?[] mask_tensors, SymInt[] mask_numbers, str names, SymInt sink_keys, SymInt window"
)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    offsets: Tensor,
    num_queries: int,
    by_head: bool,
    scale: float,
    head_scale: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    mask_tensors: list[Tensor | None],
    mask_numbers: list[int],
    names: str,
    sink_keys: int,
    window: int,
) -> list[Tensor]:
    """Return output, log-sum-exp and the statistics in the order of their names."""
    from polyhead.ops.selected_rows.kernels.forward import ragged_forward

    requested, mask = _names(names), _mask(mask_tensors, mask_numbers, bias, table)
    is_plain = softcap is None and sinks is None and head_scale is None and scale > 0
    if is_plain and has_hopper_kernels(query.device):
        from polyhead.ops.selected_rows.kernels import forward_hopper

        if forward_hopper.can_serve(query, key, value, offsets, num_queries, mask, requested):
            output, logsumexp, statistics = forward_hopper.ragged_forward(
                query,
                key,
                value,
                positions,
                offsets,
                num_queries=num_queries,
                by_head=by_head,
                scale=scale,
                left=mask.left,
                right=mask.right,
                row_poison=None if mask.poison is None else _row_poison(mask.poison, mask, num_queries),
                names=requested,
            )
            return [output, logsumexp, *(statistics[name] for name in requested)]
    output, logsumexp, statistics = ragged_forward(
        query,
        key,
        value,
        positions,
        offsets,
        num_queries=num_queries,
        by_head=by_head,
        scale=scale,
        head_scale=head_scale,
        softcap=softcap,
        sinks=sinks,
        mask=mask,
        names=requested,
        sink_keys=sink_keys,
        window=window,
    )
    return [output, logsumexp, *(statistics[name] for name in requested)]


_forward_operator = torch.library.custom_op(
    "polyhead::ragged_attention_forward", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]"
)(_forward)


@_forward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    total = query.shape[0]
    count = 1 + len(_names(options[-3]))
    rows = [query.new_empty((total,), dtype=torch.float32) for _ in range(count)]
    return [query.new_empty((total, value.shape[3])), *rows]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, num_queries, by_head, scale, head_scale, softcap, sinks, bias, table = inputs[:13]
    mask_tensors, mask_numbers, names, sink_keys, window = inputs[13:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, head_scale, sinks, bias, table, *output, *mask_tensors)
    ctx.numbers = num_queries, by_head, scale, softcap, mask_numbers, names, sink_keys, window
    ctx.results = len(output)
    ctx.lists = [_no_gradients(x) for x in (mask_tensors, mask_numbers)]


def _backward_of_forward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, positions, offsets, head_scale, sinks, bias, table, *rest = ctx.saved_tensors
    (output, logsumexp, *statistics), mask_tensors = rest[: ctx.results], rest[ctx.results :]
    num_queries, by_head, scale, softcap, mask_numbers, names, sink_keys, window = ctx.numbers
    grad_stats = dict(zip(_names(names), grads[2:], strict=True))
    if any(grad_stats.get(name) is not None for name in _MAXIMA):
        raise BackendUnsupported(
            "fused",
            [
                f"the kernels for selected rows have no gradient of {', '.join(_MAXIMA)}; "
                'detach them, or use backend="blockwise"'
            ],
        )
    backward = _backward_operator if torch.is_grad_enabled() or is_traced(query) else _backward
    grad_query, grad_key, grad_value, *sink_grads = backward(
        query,
        key,
        value,
        positions,
        offsets,
        num_queries,
        by_head,
        scale,
        head_scale,
        softcap,
        sinks,
        bias,
        table,
        mask_tensors,
        mask_numbers,
        names,
        sink_keys,
        window,
        torch.zeros_like(output) if grads[0] is None else grads[0],
        output,
        logsumexp,
        statistics,
        grads[1],
        [None if name == "visible_keys" else x for name, x in grad_stats.items()],
    )
    grad_sinks = sink_grads[0] if len(sink_grads) else None
    return grad_query, grad_key, grad_value, *(None,) * 7, grad_sinks, None, None, *ctx.lists, *(None,) * 3


_forward_operator.register_autograd(_backward_of_forward, setup_context=_setup_context)


class _RaggedFunction(torch.autograd.Function):
    """The forward operator as an autograd function.

    It has no `setup_context`, for which PyTorch inspects the signature in every call.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        output = tuple(_forward(*arguments))
        _setup_context(ctx, arguments, list(output))
        ctx.lists = (None, None)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _backward_of_forward(ctx, list(grads))


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    offsets: Tensor,
    num_queries: int,
    by_head: bool,
    scale: float,
    head_scale: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    mask_tensors: list[Tensor | None],
    mask_numbers: list[int],
    names: str,
    sink_keys: int,
    window: int,
    grad_output: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    statistics: list[Tensor],
    grad_logsumexp: Tensor | None,
    grad_statistics: list[Tensor | None],
) -> list[Tensor]:
    """Return the gradients of query, key and value, and of the sinks if there are any."""
    from polyhead.ops.attention.kernels.backward import _sinks_gradient
    from polyhead.ops.selected_rows.kernels.backward import ragged_backward

    requested = _names(names)
    values = dict(zip(requested, statistics, strict=True))
    gradients = {name: x.contiguous() for name, x in zip(requested, grad_statistics, strict=True) if x is not None}
    full = _FullRows(positions, offsets, key.shape[0], num_queries, by_head)
    by_key = {name: full.scatter(x) for name, x in gradients.items() if name in _PER_KEY}
    if grad_logsumexp is not None:
        gradients["logsumexp"] = grad_logsumexp.contiguous()
    grad_query, grad_key, grad_value, constant = ragged_backward(
        grad_output.contiguous(),
        query,
        key,
        value,
        positions,
        offsets,
        output,
        logsumexp,
        num_queries=num_queries,
        by_head=by_head,
        scale=scale,
        head_scale=head_scale,
        softcap=softcap,
        has_sinks=sinks is not None,
        mask=_mask(mask_tensors, mask_numbers, bias, table),
        row_gradients=gradients,
        row_values=values,
        full_gradients=by_key,
        sink_keys=sink_keys,
        window=window,
    )
    grads = [grad_query, *(fused._laid_out_like(grad, x) for grad, x in ((grad_key, key), (grad_value, value)))]
    if sinks is not None:
        sink_stats = [name for name in ("entropy", "learned_sink_mass") if name in gradients]
        by_row = [{str(name): full.scatter(x[name]) for name in sink_stats} for x in (gradients, values)]
        weights = full.scatter(logsumexp, -torch.inf), full.scatter(constant)
        grads.append(_sinks_gradient(sinks, *weights, *by_row))
    return grads


_backward_operator = torch.library.custom_op(
    "polyhead::ragged_attention_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor grad_output, Tensor output, Tensor logsumexp, Tensor[] statistics, "
    "Tensor? grad_logsumexp, Tensor?[] grad_statistics) -> Tensor[]",
)(_backward)


@_backward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    sinks = options[7]
    fresh = [torch.empty_like(x) for x in (key, value)] + ([] if sinks is None else [torch.empty_like(sinks)])
    return [query.new_empty(query.shape), *fresh]


_backward_operator.register_autograd(_no_second_derivative)


class _FullRows:
    """Scatter of the selected rows to all rows of all heads."""

    def __init__(self, positions: Tensor, offsets: Tensor, batch: int, num_queries: int, by_head: bool) -> None:
        pairs = offsets.shape[0] - 1
        self._shape = (batch, pairs // batch, num_queries)
        self._rows = positions, offsets, by_head
        self._index: Tensor | None = None

    def _flat_index(self) -> Tensor:
        """Return the index of each row in [batch * heads * num_queries].

        Padding rows get the index past the end.
        """
        if self._index is None:
            positions, offsets, by_head = self._rows
            batch, heads, num_queries = self._shape
            row = torch.arange(positions.shape[0], device=positions.device, dtype=offsets.dtype)
            pair = torch.searchsorted(offsets, row, right=True) - 1
            full_pair = pair % batch * heads + pair // batch if by_head else pair
            index = full_pair * num_queries + positions
            self._index = torch.where(row < offsets[-1], index, batch * heads * num_queries)
        return self._index

    def scatter(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Scatter one number per row [total] to [batch, heads, num_queries].

        Rows that are not selected get `fill`.
        """
        batch, heads, num_queries = self._shape
        count = batch * heads * num_queries
        full = x.new_full((count + 1,), fill)
        full[self._flat_index()] = x
        return full[:count].view(self._shape)

"""Fused backend of `ragged_attention`: support checks, custom operators and the gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported
from polyhead.ops.attention import fused
from polyhead.ops.common import kernel_call
from polyhead.ops.common.kernel_call import FLAT, KernelCall, laid_out_like, row_poison, with_dense_rows
from polyhead.ops.common.kernels.availability import has_hopper_kernels
from polyhead.ops.common.request import AttentionOutput, as_output
from polyhead.ops.common.statistics import LINEAR, MAXIMA
from polyhead.ops.common.tracing import is_traced
from polyhead.ops.selected_rows.request import RaggedRequest
from polyhead.ops.selected_rows.rows import SelectedRows

_PER_KEY = ("entropy", *LINEAR)  # statistics whose gradient has a different term for each key of a row


def unsupported_reasons(request: RaggedRequest) -> list[str]:
    full_request = request.full_request
    reasons = fused.unsupported_reasons(full_request)
    tensors = [x for x in (full_request.scale,) if isinstance(x, Tensor)]
    tensors += [] if full_request.visibility is None else full_request.visibility.bias_tensors
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        reasons.append("the kernels for selected rows have no gradient of a bias, a table or a scale per head")
    return reasons


def run(request: RaggedRequest) -> AttentionOutput:
    call = fused.as_call(request.full_request, request.query, for_columns=request.needs_grad)
    query, key, value = (with_dense_rows(x) for x in (call.query, call.key, call.value))
    call = replace(call, query=query, key=key, value=value)
    if is_traced(request.query):
        results = _forward_operator(*request.rows, *call.flat())
    elif request.needs_grad:
        results = _RaggedFunction.apply(*request.rows, *call.flat(), (request.rows, call))
    else:
        results = _compute(request.rows, call)
    return as_output(results, call.names)


def _compute(rows: SelectedRows, call: KernelCall) -> list[Tensor]:
    """Return output, log-sum-exp and the statistics in the order of their names."""
    if call.is_plain and call.scale > 0 and has_hopper_kernels(call.query.device):
        from polyhead.ops.selected_rows.kernels import forward_hopper

        if forward_hopper.can_serve(rows, call):
            poison = row_poison(call.mask, rows.num_queries)
            output, logsumexp, statistics = forward_hopper.ragged_forward(rows, call, row_poison=poison)
            return [output, logsumexp, *statistics.values()]
    from polyhead.ops.selected_rows.kernels.forward import ragged_forward

    output, logsumexp, statistics = ragged_forward(rows, call)
    return [output, logsumexp, *statistics.values()]


_ROWS = len(SelectedRows._fields)
_ARGUMENTS = f"Tensor positions, Tensor offsets, SymInt num_queries, bool by_head, {kernel_call.SCHEMA}"


def _forward(*arguments: Any) -> list[Tensor]:
    return _compute(SelectedRows(*arguments[:_ROWS]), KernelCall.from_flat(arguments[_ROWS:]))


_forward_operator = torch.library.custom_op(
    "polyhead::ragged_attention_forward", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]"
)(_forward)


@_forward_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    query, _, value, *options = arguments[_ROWS:]
    rows = kernel_call.fake_rows(query, 1 + len(kernel_call.split_names(options[-3])))
    return [query.new_empty((query.shape[0], value.shape[3])), *rows]


def _backward_of_forward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments, given those of its results."""
    arguments, (output, logsumexp, *statistics) = kernel_call.saved_call(ctx)
    grad_stats = dict(zip(kernel_call.split_names(arguments[-3]), grads[2:], strict=True))
    if any(grad_stats.get(name) is not None for name in MAXIMA):
        raise BackendUnsupported(
            "fused",
            [
                f"the kernels for selected rows have no gradient of {', '.join(MAXIMA)}; "
                'detach them, or use backend="blockwise"'
            ],
        )
    backward = _backward_operator if torch.is_grad_enabled() or is_traced(output) else _backward
    grad_query, grad_key, grad_value, *sink_grads = backward(
        *arguments,
        torch.zeros_like(output) if grads[0] is None else grads[0],
        output,
        logsumexp,
        statistics,
        grads[1],
        [None if name == "visible_keys" else x for name, x in grad_stats.items()],
    )
    grad_sinks = sink_grads[0] if len(sink_grads) else None
    return *(None,) * _ROWS, *kernel_call.flat_gradients(ctx, grad_query, grad_key, grad_value, sinks=grad_sinks)


_forward_operator.register_autograd(_backward_of_forward, setup_context=kernel_call.save_call)


_RaggedFunction = kernel_call.eager_function("_RaggedFunction", _compute, _backward_of_forward)


def _backward(*arguments: Any) -> list[Tensor]:
    """Return the gradients of query, key and value, and of the sinks if there are any."""
    from polyhead.ops.attention.kernels.backward import sinks_gradient
    from polyhead.ops.selected_rows.kernels.backward import ragged_backward

    rows, call = SelectedRows(*arguments[:_ROWS]), KernelCall.from_flat(arguments[_ROWS : _ROWS + FLAT])
    grad_output, output, logsumexp, statistics, grad_logsumexp, grad_statistics = arguments[_ROWS + FLAT :]
    values = dict(zip(call.names, statistics, strict=True))
    gradients = {name: x.contiguous() for name, x in zip(call.names, grad_statistics, strict=True) if x is not None}
    full = _FullRows(rows, call.key.shape[0])
    by_key = {name: full.scatter(x) for name, x in gradients.items() if name in _PER_KEY}
    if grad_logsumexp is not None:
        gradients["logsumexp"] = grad_logsumexp.contiguous()
    grad_query, grad_key, grad_value, constant = ragged_backward(
        rows,
        call,
        grad_output.contiguous(),
        output,
        logsumexp,
        row_gradients=gradients,
        row_values=values,
        full_gradients=by_key,
    )
    grads = [grad_query, laid_out_like(grad_key, call.key), laid_out_like(grad_value, call.value)]
    if call.sinks is not None:
        sink_stats = [name for name in ("entropy", "learned_sink_mass") if name in gradients]
        by_row = [{str(name): full.scatter(x[name]) for name in sink_stats} for x in (gradients, values)]
        full_rows = full.scatter(logsumexp, -torch.inf), full.scatter(constant)
        grads.append(sinks_gradient(call.sinks, *full_rows, *by_row))
    return grads


_backward_operator = torch.library.custom_op(
    "polyhead::ragged_attention_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor grad_output, Tensor output, Tensor logsumexp, Tensor[] statistics, "
    "Tensor? grad_logsumexp, Tensor?[] grad_statistics) -> Tensor[]",
)(_backward)


@_backward_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    query, key, value, _, _, _, sinks, *_ = arguments[_ROWS:]
    fresh = [torch.empty_like(x) for x in (key, value)] + ([] if sinks is None else [torch.empty_like(sinks)])
    return [query.new_empty(query.shape), *fresh]


_backward_operator.register_autograd(kernel_call.no_second_derivative("blockwise"))


class _FullRows:
    """Scatter of the selected rows to all rows of all heads."""

    def __init__(self, rows: SelectedRows, batch: int) -> None:
        pairs = rows.offsets.shape[0] - 1
        self._shape = (batch, pairs // batch, rows.num_queries)
        self._rows = rows
        self._index: Tensor | None = None

    def _flat_index(self) -> Tensor:
        """Return the index of each row in [batch * heads * num_queries].

        Padding rows get the index past the end.
        """
        if self._index is None:
            positions, offsets, _, by_head = self._rows
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

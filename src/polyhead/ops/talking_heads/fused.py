"""Fused backend of talking heads: support checks, and operators for autograd and compilers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.ops.attention.kernels.outputs import output_like
from polyhead.ops.common.combined_weights import COMBINED, CombinedWeights
from polyhead.ops.common.kernel_call import (
    eager_function,
    fake_rows,
    laid_out_like,
    no_second_derivative,
    split_names,
    with_dense_rows,
)
from polyhead.ops.common.kernel_masks import mask_reasons, pack
from polyhead.ops.common.kernels.availability import IS_INTERPRETED, device_reasons
from polyhead.ops.common.kernels.mask_arguments import MASK_SCHEMA, MaskArguments
from polyhead.ops.common.kernels.sizes import padded_dim
from polyhead.ops.common.request import AttentionOutput, AttentionRequest, as_output
from polyhead.ops.common.statistics import kernel_reasons
from polyhead.ops.common.tracing import TRANSFORMED, is_traced, is_transformed
from polyhead.ops.talking_heads.request import FiniteInputs, TalkingRequest, remove_nonfinite

if TYPE_CHECKING:
    from polyhead.ops.talking_heads.kernels.launch import Problem

# Maximum of heads times 16-bit channels of a program, which keeps its rows of all heads and their accumulators on chip.
_MAX_WIDTH = 2048
_CAPABILITY = (9, 0)  # for its shared memory
_FEW_QUERIES = 32  # up to which tiles of plain PyTorch are faster


def unsupported_reasons(request: TalkingRequest) -> list[str]:
    inputs, query = request.attention, request.attention.query
    reasons = device_reasons(query.device, required=_CAPABILITY)
    if query.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"the kernels take float16 or bfloat16, got {query.dtype}")
    heads, width = query.shape[1], max(query.shape[3], inputs.value.shape[3])
    if not inputs.value.shape[3] or padded_dim(heads) * padded_dim(width) > _MAX_WIDTH:
        reasons.append(
            f"the kernels keep all heads on chip, up to {_MAX_WIDTH} heads times channels (each rounded up to a power "
            f"of two of at least 16), got {heads} heads of {query.shape[3]} and {inputs.value.shape[3]}"
        )
    if inputs.weights:
        reasons.append("the kernels never materialise the weights")
    if inputs.statistics is not None:
        reasons += kernel_reasons("talking heads", inputs.statistics.names)
    if is_transformed():
        reasons.append(TRANSFORMED)
    return reasons + mask_reasons(inputs.visibility)


def is_slower(request: TalkingRequest) -> bool:
    """Return True if there are too few rows, as in decoding.

    A single program per sequence would then read all keys.
    """
    return request.attention.query.shape[2] <= _FEW_QUERIES and not IS_INTERPRETED


def run(request: TalkingRequest) -> AttentionOutput:
    inputs, clean, mask = _prepare(request)
    requested = inputs.statistics
    # Only results that are returned need logits more precise than the inputs; see `kernels.launch.forward`.
    split = requested is not None or inputs.logsumexp
    # Calling a custom operator costs as much host time as launching a kernel, and twice that with autograd.
    traced = is_traced(inputs.query)
    arguments = (*_arguments(request, clean, mask), split)
    if request.needs_grad and not traced:
        output, logsumexp = _TalkingFunction.apply(*arguments, arguments)
    else:
        output, logsumexp = (_forward_operator if traced else _forward)(*arguments)
    names: tuple[str, ...] = ()
    row_stats: Sequence[Tensor] = ()
    if requested is not None:
        names = requested.names
        row_stats = (_statistics_operator if traced else _statistics)(
            *(x.detach() if isinstance(x, Tensor) else x for x in arguments[:-1]),
            logsumexp.detach(),
            ",".join(names),
            requested.sink_keys,
            requested.window,
        )
    return as_output((output, logsumexp, *row_stats), names)


@torch.no_grad()
def mixed_weights(request: TalkingRequest) -> CombinedWeights:
    _, clean, mask = _prepare(request)
    arguments = _arguments(request, clean, mask)
    traced = is_traced(request.attention.query)
    _, logsumexp = (_forward_operator if traced else _forward)(*arguments, True)
    compute = _statistics_operator if traced else _statistics
    return CombinedWeights(*compute(*arguments, logsumexp, ",".join(COMBINED), 1, 0))


def _prepare(request: TalkingRequest) -> tuple[AttentionRequest, FiniteInputs, MaskArguments]:
    """Return the attention request, its tensors without NaN and Inf, and its packed mask."""
    inputs = request.attention
    visibility = inputs.visibility
    if visibility is None:
        return inputs, remove_nonfinite(inputs), MaskArguments(offset=inputs.key.shape[2] - inputs.query.shape[2])
    return inputs, remove_nonfinite(inputs), pack(visibility, for_columns=request.needs_grad)


def _arguments(request: TalkingRequest, clean: FiniteInputs, mask: MaskArguments) -> tuple[Any, ...]:
    """Return the leading arguments of every operator, of the types of `_INPUTS`."""
    inputs = (clean.query, clean.key, clean.value, request.logits_mix, request.weights_mix, request.scale)
    return *inputs, *mask.flat(), clean.query_poison, clean.key_poison


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor logits_mix, Tensor weights_mix, float scale, "
    f"{MASK_SCHEMA}, Tensor? query_poison, Tensor? key_poison"
)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits_mix: Tensor,
    weights_mix: Tensor,
    scale: float,
    bias: Tensor | None,
    table: Tensor | None,
    mask_tensors: Sequence[Tensor | None],
    mask_numbers: Sequence[int],
    query_poison: Tensor | None,
    key_poison: Tensor | None,
) -> Problem:
    from polyhead.ops.talking_heads.kernels.launch import Problem
    from polyhead.ops.talking_heads.kernels.tiles import Poison

    mask = MaskArguments.from_flat(bias, table, mask_tensors, mask_numbers)
    poisons = (None if x is None else x.float().contiguous() for x in (query_poison, key_poison))
    query, key, value = (with_dense_rows(x) for x in (query, key, value))
    return Problem(query, key, value, logits_mix, weights_mix, scale, mask, Poison(*poisons))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from polyhead.ops.talking_heads.kernels.launch import forward

    *inputs, split = arguments
    return forward(_problem(*inputs), split=split)


def _statistics(*arguments: Any) -> list[Tensor]:
    from polyhead.ops.talking_heads.kernels.launch import statistics

    *inputs, logsumexp, names, sink_keys, window = arguments
    requested = split_names(names)
    row_stats = statistics(_problem(*inputs), logsumexp, requested, sink_keys, window)
    return [row_stats[name] for name in requested]


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from polyhead.ops.talking_heads.kernels.launch import backward

    *inputs, grad, logsumexp = arguments
    # Gradients of rows without visible keys are zeroed: zero weights times a NaN would be NaN.
    grad = with_dense_rows(torch.where((logsumexp == -torch.inf)[..., None], 0.0, grad))
    grads = backward(_problem(*inputs), grad, logsumexp)
    tensors = inputs[:5]
    results = [laid_out_like(grad, x) for grad, x in zip(grads, tensors, strict=True)]
    return results[0], results[1], results[2], results[3], results[4]


def _operator(name: str, schema: str, body: Any) -> Any:
    return torch.library.custom_op(f"polyhead::{name}", body, mutates_args=(), schema=schema)


_forward_operator = _operator("talking_forward", f"({_INPUTS}, bool split) -> (Tensor, Tensor)", _forward)
_statistics_operator = _operator(
    "talking_statistics",
    f"({_INPUTS}, Tensor logsumexp, str names, SymInt sink_keys, SymInt window) -> Tensor[]",
    _statistics,
)
_backward_operator = _operator(
    "talking_backward",
    f"({_INPUTS}, Tensor grad, Tensor logsumexp) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
)


@_forward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return output_like(with_dense_rows(query), value.shape[3]), *fake_rows(query, 1)


@_statistics_operator.register_fake
def _(query: Tensor, *options: Any) -> list[Tensor]:
    return fake_rows(query, len(split_names(options[-3])))


@_backward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, logits_mix: Tensor, weights_mix: Tensor, *options: Any) -> Any:
    return tuple(torch.empty_like(x) for x in (query, key, value, logits_mix, weights_mix))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, logits_mix, weights_mix, scale, bias, table, tensors, numbers, *poisons, _ = inputs
    ctx.save_for_backward(query, key, value, logits_mix, weights_mix, bias, table, *tensors, *poisons, output[1])
    ctx.options = (scale, numbers)
    ctx.set_materialize_grads(False)


def _backward_of_forward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments, given that of its output; the log-sum-exp has none."""
    *inputs, query_poison, key_poison, logsumexp = ctx.saved_tensors
    scale, numbers = ctx.options
    grads: Sequence[Tensor | None] = [None] * 5
    if grad is not None:
        rest = (scale, *inputs[5:7], inputs[7:], numbers, query_poison, key_poison)
        backward = _backward_operator if torch.is_grad_enabled() or is_traced(inputs[0]) else _backward
        grads = backward(*inputs[:5], *rest, grad, logsumexp)
    return *grads, *([None] * 8)


_TalkingFunction = eager_function(
    "_TalkingFunction", _forward, lambda ctx, grads: _backward_of_forward(ctx, *grads), _setup_context
)
_forward_operator.register_autograd(_backward_of_forward, setup_context=_setup_context)
_backward_operator.register_autograd(no_second_derivative("reference"))

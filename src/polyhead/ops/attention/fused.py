"""polyhead's own kernels as a backend: supported requests, and operators for autograd and compilers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.attention import fused_backward
from polyhead.ops.attention.kernels.outputs import output_like
from polyhead.ops.common import kernel_call
from polyhead.ops.common.dropout import draw_seed
from polyhead.ops.common.kernel_call import FLAT, SCHEMA, KernelCall, row_poison, with_dense_rows
from polyhead.ops.common.kernel_masks import mask_reasons, pack
from polyhead.ops.common.kernels.availability import device_reasons, has_hopper_kernels
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.nonfinite import without_nonfinite
from polyhead.ops.common.request import AttentionOutput, AttentionRequest, as_output
from polyhead.ops.common.statistics import kernel_reasons
from polyhead.ops.common.tracing import TRANSFORMED, is_traced, is_transformed
from polyhead.ops.decode.fused import MOST_QUERIES, CacheArguments, decode, decode_reasons

LARGEST_DIM = 256


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    query = request.query
    reasons = device_reasons(query.device)
    if query.dtype is torch.float64:
        reasons.append("our kernels take float16, bfloat16 or float32, got torch.float64")
    head_dim, value_dim = query.shape[-1], request.value.shape[-1]
    if head_dim > LARGEST_DIM or not 0 < value_dim <= LARGEST_DIM:
        reasons.append(f"our kernels take head and value dims from 1 to {LARGEST_DIM}, got {head_dim} and {value_dim}")
    if request.weights:
        reasons.append("our kernels never materialise the weights")
    if request.statistics is not None:
        reasons += kernel_reasons("attention", request.statistics.names)
    if is_transformed():
        reasons.append(TRANSFORMED)
    if torch.are_deterministic_algorithms_enabled() and request.needs_grad and _learns_shared_bias(request):
        reasons.append(
            "our kernels sum the gradient of a bias or a table in a varying order, and deterministic "
            "algorithms were requested"
        )
    return reasons + mask_reasons(request.visibility)


def _learns_shared_bias(request: AttentionRequest) -> bool:
    """Return True if a broadcast bias or a table needs a gradient, which is then a sum over blocks."""
    visibility = request.visibility
    if visibility is None:
        return False
    full_shape = request.query.shape[:3]
    shared = [bias for bias in visibility.biases if bias.shape[:3] != full_shape]
    return any(x.requires_grad for x in (*shared, *(term.table for term in visibility.relative_biases)))


def kernel(request: AttentionRequest) -> str:
    """Return a description of the kernel that would run."""
    name = "our decode kernel" if _is_decode(request, request.needs_grad) else "our kernel"
    name += ", statistics in the same pass" if request.statistics is not None else ""
    return f"{name}, on {request.query.device.type}"


def run(request: AttentionRequest) -> AttentionOutput:
    needs_grad = request.needs_grad
    if _is_decode(request, needs_grad):
        return _decode(request)
    # Calling an operator takes as much Python time as launching a kernel, twice that if gradients are recorded.
    is_direct = not needs_grad and not is_traced(request.query)
    call = _hopper_call(request) if is_direct else None
    if call is not None:
        return as_output(compute(call, finite=request.finite or request.visibility is None), call.names)
    call = as_call(request, request.query, for_columns=needs_grad)
    if is_direct:
        results = compute(call)
    elif needs_grad and not is_traced(request.query):
        results = _Attention.apply(*call.flat(), (call,))
    else:
        results = _forward_operator(*call.flat())
    return as_output(results, call.names)


def _is_decode(request: AttentionRequest, needs_grad: bool) -> bool:
    """Return True for a few last queries without gradients: the decode kernels split their keys over the device."""
    query, key, visibility = request.query, request.key, request.visibility
    queries = query.shape[2]
    if needs_grad or request.dropout or not 0 < queries <= MOST_QUERIES or queries > key.shape[2]:
        return False
    is_band = visibility is None or visibility.is_band
    return is_band and not decode_reasons(query, CacheArguments(key, request.value))


def _decode(request: AttentionRequest) -> AttentionOutput:
    """Run the decode kernels, which keep non-finite keys from rows that do not see them: no cleaning is needed."""
    visibility, requested = request.visibility, request.statistics
    scale, head_scale = (1.0, request.scale) if isinstance(request.scale, Tensor) else (request.scale, None)
    options: dict[str, Any] = {"softcap": request.softcap, "sinks": request.sinks}
    if visibility is not None:
        options |= {"left": visibility.left, "right": visibility.right, "first_keys": visibility.sinks}
    if requested is not None:
        options |= {"names": requested.names, "sink_keys": requested.sink_keys, "window": requested.window}
    cache = CacheArguments(request.key, request.value)
    output, logsumexp, statistics = decode(
        request.query, cache, scale=scale, head_scale=head_scale, is_supported=True, **options
    )
    return as_output([output, logsumexp, *statistics.values()], tuple(statistics))


def as_call(request: AttentionRequest, query: Tensor, *, for_columns: bool, clean: bool = True) -> KernelCall:
    """Return a request as kernels take it: non-finite keys and values replaced, if `clean`, and the mask packed.

    `for_columns`: as in `pack`; True if the backward will run.
    """
    key, value, visibility, requested = request.key, request.value, request.visibility, request.statistics
    if visibility is None:
        mask = MaskArguments(offset=key.shape[2] - request.query.shape[2])
    else:
        poison = None
        if clean and not request.finite:
            key, value, poison = without_nonfinite(key, value)
        mask = pack(visibility, poison=poison, for_columns=for_columns)
    scale, head_scale = (1.0, request.scale) if isinstance(request.scale, Tensor) else (request.scale, None)
    seed = None
    if request.dropout:
        seed = draw_seed(query.device) if request.seed is None else request.seed
    names: tuple[str, ...] = ()
    sink_keys, window = 1, 0
    if requested is not None:
        names, sink_keys, window = requested.names, requested.sink_keys, requested.window
    options = (scale, head_scale, request.softcap, request.sinks, request.dropout, seed, names, sink_keys, window)
    return KernelCall(query, key, value, mask, *options)


def compute(call: KernelCall, *, finite: bool = True) -> list[Tensor]:
    """Return output, log-sum-exp and the statistics in the order of their names, from the fastest suitable kernel.

    `finite=False` is supported by the Hopper kernel only: keys and values may be non-finite and were not replaced, so
    that the rows concerned are recomputed; see `forward_hopper.forward`.
    """
    query, key, value = call.query, call.key, call.value
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        query, key, value = (with_dense_rows(x) for x in (query, key, value))
        call = replace(call, query=query, key=key, value=value)
    split = _hopper_names(call)
    if split is not None:
        from polyhead.ops.attention.kernels import forward_hopper, local_mass

        in_kernel, separate = split
        poison = row_poison(call.mask, query.shape[2])
        output, logsumexp, statistics = forward_hopper.forward(call, row_poison=poison, names=in_kernel, finite=finite)
        if len(separate):
            statistics |= local_mass.masses(call, logsumexp, names=separate)
        return [output, logsumexp, *map(statistics.__getitem__, call.names)]
    from polyhead.ops.attention.kernels.forward import forward

    output, logsumexp, statistics, _ = forward(call)
    return [output, logsumexp, *statistics.values()]


def _hopper_names(call: KernelCall) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the statistics that the Hopper kernel and a separate one compute; None if another kernel must run.

    The weights on a few keys (`local_mass.STATISTICS`) are not computed in the loop of that kernel, and cost almost
    nothing in a separate one.
    """
    if not (call.is_plain and call.scale > 0 and has_hopper_kernels(call.query.device)):
        return None
    from polyhead.ops.attention.kernels import forward_hopper, local_mass

    in_kernel, separate = _split_names(call.names, local_mass.STATISTICS)
    if len(separate) and not local_mass.can_serve(call):
        in_kernel, separate = call.names, ()
    return (in_kernel, separate) if forward_hopper.can_serve(call, in_kernel) else None


def hopper_call(request: AttentionRequest) -> KernelCall | None:
    """Return the call of a request without gradients if the Hopper kernel computes its output and all statistics."""
    if _is_decode(request, needs_grad=False):
        return None
    call = _hopper_call(request)
    return call if call is not None and _hopper_names(call) == (call.names, ()) else None


def _hopper_call(request: AttentionRequest) -> KernelCall | None:
    """Return the call if the Hopper kernel computes its output; non-finite keys and values are not replaced.

    A second kernel may compute some of the statistics, unlike in `hopper_call`.
    """
    visibility = request.visibility
    if not has_hopper_kernels(request.query.device) or not (visibility is None or visibility.is_band):
        return None
    call = as_call(request, request.query, for_columns=False, clean=False)
    return None if _hopper_names(call) is None else call


@functools.cache
def _split_names(names: tuple[str, ...], subset: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the names into those outside and those inside a subset."""
    return tuple(name for name in names if name not in subset), tuple(name for name in names if name in subset)


def _forward(*arguments: Any) -> list[Tensor]:
    return compute(KernelCall.from_flat(arguments))


_forward_operator = torch.library.custom_op(
    "polyhead::attention_forward", mutates_args=(), schema=f"({SCHEMA}) -> Tensor[]"
)(_forward)


@_forward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    output = output_like(with_dense_rows(query), value.shape[3])
    return [output, *kernel_call.fake_rows(query, 1 + len(kernel_call.split_names(options[-3])))]


def _run_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments, given those of its results."""
    flat, (output, logsumexp, *statistics) = kernel_call.saved_call(ctx)
    needed = [ctx.needs_input_grad[i] for i in (4, 6, 7, 8)]  # head_scale, sinks, bias and table
    grad_output = torch.zeros_like(output) if grads[0] is None else grads[0]
    backward = _backward_operator if torch.is_grad_enabled() or is_traced(output) else _backward
    grad_query, grad_key, grad_value, *learned = backward(
        *flat, grad_output, output, logsumexp, grads[1], grads[2:], statistics, needed
    )
    learned_grads = iter(learned)
    optional = (next(learned_grads) if need else None for need in needed)
    return kernel_call.flat_gradients(ctx, grad_query, grad_key, grad_value, *optional)


_forward_operator.register_autograd(_run_backward, setup_context=kernel_call.save_call)


_Attention = kernel_call.eager_function("_Attention", compute, _run_backward)


def attend_under_band(call: KernelCall, *, finite: bool) -> AttentionOutput:
    """Run the Hopper kernel, with gradients, for a call that `hopper_call` returns.

    `finite`: keys and values are known to be finite, or there is no mask, so that they need not be replaced. At small
    sizes the host takes longer than the kernels, and an autograd node with few arguments takes less host time than the
    operator.
    """
    results = _BandAttention.apply(call.query, call.key, call.value, call, finite)
    return as_output(results, call.names)


class _BandAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: KernelCall, finite: bool
    ) -> tuple[Tensor, ...]:
        from polyhead.ops.attention.kernels import forward_hopper

        mask, poison = call.mask, None
        if not finite:
            key, value, poison = without_nonfinite(key, value)
            mask = mask._replace(poison=poison)
        call = KernelCall(query, key, value, mask, call.scale, names=call.names)
        rows = row_poison(mask, query.shape[2])
        output, logsumexp, statistics = forward_hopper.forward(call, row_poison=rows, names=call.names)
        results = output, logsumexp, *statistics.values()
        # Absent gradients stay None: which gradients are present decides which kernel can run.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, poison, *results)
        ctx.options = call.mask._replace(poison=None), call.scale, call.names
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, poison, output, logsumexp, *statistics = ctx.saved_tensors
        mask, scale, names = ctx.options
        call = KernelCall(query, key, value, mask._replace(poison=poison), scale, names=names)
        grad_output = torch.zeros_like(output) if grads[0] is None else grads[0]
        results = grad_output, output, logsumexp, grads[1], list(grads[2:]), statistics, [False] * 4
        if torch.is_grad_enabled():
            return *_backward_operator(*call.flat(), *results), None, None
        return *fused_backward.gradients(call, *results), None, None


def _backward(*arguments: Any) -> list[Tensor]:
    return fused_backward.gradients(KernelCall.from_flat(arguments[:FLAT]), *arguments[FLAT:])


_backward_operator = torch.library.custom_op(
    "polyhead::attention_backward",
    mutates_args=(),
    schema=f"({SCHEMA}, Tensor grad_output, Tensor output, Tensor logsumexp, Tensor? grad_logsumexp, "
    "Tensor?[] grad_statistics, Tensor?[] statistics, bool[] needed) -> Tensor[]",
)(_backward)


@_backward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    _, head_scale, _, sinks, bias, table, *_ = options
    learned = (x for x, need in zip((head_scale, sinks, bias, table), options[-1], strict=True) if need)
    return [torch.empty_like(x) for x in (query, key, value, *learned)]


_backward_operator.register_autograd(kernel_call.no_second_derivative("blockwise"))

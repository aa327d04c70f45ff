"""cuDNN's attention backward, on execution plans that no other code in the process builds.

PyTorch caches the execution plans of cuDNN's backward by the sizes and strides of query, key and value, but not by
the strides of the output and of its gradient. A call whose output gradient has another layout than that of the call
that built the plan gets wrong gradients, without an error (docs/attention.md has a reproduction). The cache is
thread-local, so our calls run in a separate thread, where the output and its gradient always have the layout derived
from that of the query. PyTorch does not document that the cache is thread-local, so this is tested once per process
and device.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.attention.alignment import aligned
from polyhead.ops.common.tracing import is_traced, is_transformed

# Batch x heads x queries x keys x head_dim from which cuDNN's backward is worth waking another thread. On an H200 in
# bfloat16, forward and backward of PyTorch's flash kernel take as long as cuDNN's in its thread at 2^35, where both are
# bound by the host, and 1.5 to 1.8 times as long from 1.9 * 2^35 on.
MIN_MULTIPLY_ADDS = 3 << 34
_is_thread_local: dict[int, bool] = {}  # by device: the result of `_has_separate_plans`
_backward_operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def is_worth_it(query: Tensor, key: Tensor) -> bool:
    """Return True if the call is large enough for cuDNN's backward to be faster, despite its thread."""
    return query.numel() * key.shape[2] >= MIN_MULTIPLY_ADDS


def is_available(query: Tensor) -> bool:
    """Return True if gradients can be computed on separate plans; the caller checks sizes and dtypes."""
    if not query.is_cuda or is_traced(query) or is_transformed() or torch.are_deterministic_algorithms_enabled():
        return False
    device = query.get_device()
    if device not in _is_thread_local and not torch.cuda.is_current_stream_capturing():
        _is_thread_local[device] = _has_separate_plans(device)
    return _is_thread_local.get(device, False)


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Attend with cuDNN's forward; the gradients come from `backward`."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(query, key, value, causal, scale)


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; the output may come from any forward.

    `logsumexp` is float32 [batch, heads, queries].
    """
    tensors = (grad_output, query, key, value, output, logsumexp)
    stream = torch.cuda.current_stream(query.device)
    return _worker_thread().submit(_run_with_layout, stream, *tensors, causal, scale).result()


def _has_separate_plans(device: int) -> bool:
    """Return True if the cache is thread-local: a plan of another layout in another thread does not affect ours."""
    generator = torch.Generator(f"cuda:{device}").manual_seed(0)
    random = torch.randn((4, 1, 264, 2, 64), device=f"cuda:{device}", dtype=torch.bfloat16, generator=generator)
    query, key, value, grad_output = random.transpose(2, 3)
    scale, stream = 0.125, torch.cuda.current_stream(device)
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        q, k, v, grad = (x.double() for x in (query, key, value, grad_output))
        logits = q @ k.mT * scale
        weights = logits.softmax(-1)
        output = weights @ v
        grad_logits = weights * (grad @ v.mT - (grad * output).sum(-1, keepdim=True)) * scale
        exact = grad_logits @ k, grad_logits.mT @ q, weights.mT @ grad
        rounded, logsumexp = output.to(query.dtype), logits.logsumexp(-1).float()
        with ThreadPoolExecutor(1) as other:
            tensors = (grad_output.contiguous(), query, key, value, _with_layout_of(rounded, query), logsumexp)
            other.submit(_run_backward, stream, *tensors, False, scale).result()
        computed = backward(grad_output, query, key, value, rounded, logsumexp, False, scale)
        return all(
            float((actual - expected).norm() / expected.norm()) < 0.05
            for actual, expected in zip(computed, exact, strict=True)
        )


@functools.cache
def _worker_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="polyhead-cudnn-backward")


def _run_with_layout(
    stream: torch.cuda.Stream,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.stream(stream), torch.no_grad():
        query, key, value = aligned(query, key, value)
        output, grad_output = aligned(_with_layout_of(output, query), _with_layout_of(grad_output, query))
    return _run_backward(stream, grad_output, query, key, value, output, *rest)


def _run_backward(
    stream: torch.cuda.Stream,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call PyTorch's operator, on a plan of the calling thread.

    It does not read the seed and offset of dropout at a rate of 0; sequence offsets exist for nested tensors only.
    """
    with torch.cuda.stream(stream), torch.no_grad():
        unused = torch.zeros((), dtype=torch.int64, device=query.device)
        return _backward_operator(
            *(grad_output, query, key, value, output, logsumexp.contiguous()[..., None]),
            *(unused, unused, None, None, None, query.shape[2], key.shape[2], 0.0, causal),
            scale=scale,
        )


def _with_layout_of(x: Tensor, query: Tensor) -> Tensor:
    """Return `x` in a dense layout whose axes are ordered by the query's strides."""
    order = sorted(range(x.dim() - 1), key=lambda axis: query.stride(axis), reverse=True)
    strides, step = [1] * x.dim(), x.shape[-1]
    for axis in reversed(order):
        strides[axis] = step
        step *= x.shape[axis]
    if x.stride() == tuple(strides):
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
        output, logsumexp, *_ = torch._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.causal, ctx.scale = causal, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        rows = logsumexp.reshape(query.shape[:3])
        return (*backward(grad_output, query, key, value, output, rows, ctx.causal, ctx.scale), None, None)

"""Calls of a layer to be timed: a forward, a training step, or decoding one token with a filled cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.costs.calibration.timing import Call
from polyhead.costs.workload import Workload
from polyhead.layers import MultiHeadAttention, MultiHeadConfig, PreallocatedCache

CHUNK = 1 << 26  # maximum number of cache elements filled at once, to limit memory


def layer_call(config: MultiHeadConfig, work: Workload, *, device: torch.device, dtype: torch.dtype) -> Call:
    """Return a function that runs `work` once on a layer built from `config`, with random weights and tokens."""
    layer = config.build(device=device, dtype=dtype)
    tokens = torch.randn(work.batch, work.queries, config.embed_dim, device=device, dtype=dtype)
    if work.training:
        return _training(layer, tokens)
    layer.eval().requires_grad_(False)
    if work.past:
        return _decode(layer, tokens, work.past)

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(tokens).output

    return forward


def _training(layer: MultiHeadAttention, tokens: Tensor) -> Call:
    inputs, grad_output = tokens.requires_grad_(), torch.randn_like(tokens)
    differentiated = [inputs, *layer.parameters()]

    def step() -> None:
        for tensor in differentiated:
            tensor.grad = None
        layer(inputs).output.backward(grad_output)

    return step


def _decode(layer: MultiHeadAttention, tokens: Tensor, past: int) -> Call:
    layout, batch = layer.layout, tokens.shape[0]
    options: dict[str, Any] = {"dtype": tokens.dtype, "device": tokens.device}
    cache = PreallocatedCache.for_layout(layout, batch_size=batch, capacity=past + 1, **options)
    chunk_tokens = max(1, CHUNK // (batch * layout.num_kv_heads * layout.head_dim))
    with torch.no_grad():
        for first in range(0, past, chunk_tokens):
            size = (batch, layout.num_kv_heads, min(chunk_tokens, past - first), layout.head_dim)
            cache.append(torch.randn(size, **options), torch.randn(size, **options))

    def step() -> Tensor:
        with torch.no_grad():
            cache.crop(past)  # drops the token of the previous call, without copying data
            return layer(tokens, cache=cache).output

    return step

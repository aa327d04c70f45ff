"""Functions to be timed: each does one piece of work as layers do it, or runs a whole layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.costs.calibration.timing import Call
from polyhead.costs.measuring.gpu import TIMES_L2, l2_bytes
from polyhead.costs.work import AttentionCore, Piece, Product, Traffic
from polyhead.costs.workload import Workload
from polyhead.layers import MultiHeadAttention, MultiHeadConfig, PreallocatedCache
from polyhead.masks import Mask
from polyhead.ops.attention import attention
from polyhead.ops.decode.api import cached_attention, cached_reasons
from polyhead.ops.decode.fused import CacheArguments, decode_runs_on

MAX_COPIES = 24  # of a KV cache; reading the others evicts each from L2 before it is read again
MAX_FILLED = 1 << 26  # elements of keys that fill a cache at once; more are appended in chunks, to limit memory


def _without_grad(function: Call) -> Call:
    def call() -> object:
        with torch.no_grad():
            return function()

    return call


# ---- pieces of work


def timed_calls(piece: Piece, device: torch.device, *, copies: int | None = None) -> list[Call]:
    """Return one call or, for decoding on a GPU, one for each of several caches, to be timed in turn.

    Each cache is then read from memory, not from L2. `copies` overrides the number of caches.
    """
    with torch.no_grad():
        if isinstance(piece, Product):
            return [_product(piece, device)]
        if isinstance(piece, Traffic):
            return [_traffic(piece, device)]
        if piece.direction == "decode":
            return [_decode(piece, device) for _ in range(copies or _copies(piece, device))]
        return [(_forward if piece.direction == "forward" else _backward)(piece, device)]


def _product(piece: Product, device: torch.device) -> Call:
    left = torch.randn(piece.rows, piece.inner, device=device, dtype=piece.dtype)
    right = torch.randn(piece.columns, piece.inner, device=device, dtype=piece.dtype)
    return _without_grad(lambda: F.linear(left, right))


def _traffic(piece: Traffic, device: torch.device) -> Call:
    source = torch.randn(max(piece.bytes // 8, 1), device=device)  # float32: 4 bytes read and 4 written per element
    target = torch.empty_like(source)
    # Not a copy, which a copy engine may do: positions, norms and gates are kernels.
    return lambda: torch.neg(source, out=target)


def _heads(piece: AttentionCore, device: torch.device) -> list[Tensor]:
    """Return queries, keys and values as a projection leaves them: tokens before heads in memory."""
    sizes = [
        (piece.queries, piece.heads, piece.head_dim),
        (piece.keys, piece.kv_heads, piece.head_dim),
        (piece.keys, piece.kv_heads, piece.value_dim),
    ]
    return [torch.randn(piece.batch, *size, device=device, dtype=piece.dtype).transpose(1, 2) for size in sizes]


def _attend(piece: AttentionCore, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, mask=_mask(piece), finite=True).output


def _mask(piece: AttentionCore) -> Mask | None:
    """Return the mask as layers pass it: `Mask.causal()` for `Mask.window(right=0)`."""
    return Mask.causal() if piece.left is None and piece.right == 0 else piece.mask


def _forward(piece: AttentionCore, device: torch.device) -> Call:
    tensors = _heads(piece, device)
    return _without_grad(lambda: _attend(piece, *tensors))


def _backward(piece: AttentionCore, device: torch.device) -> Call:
    leaves = [x.detach().requires_grad_() for x in _heads(piece, device)]
    with torch.enable_grad():
        output = _attend(piece, *leaves)
    upstream = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True)


def _copies(piece: AttentionCore, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return max(1, min(MAX_COPIES, -(-TIMES_L2 * l2_bytes(device) // max(piece.bytes, 1))))


def _decode(piece: AttentionCore, device: torch.device) -> Call:
    """Decode as a layer does: with our decode kernels where they support the call, else with `attention`."""
    query = torch.randn(piece.batch, piece.heads, piece.queries, piece.head_dim, device=device, dtype=piece.dtype)
    sizes = (piece.batch, piece.kv_heads, piece.keys)
    key, value = (torch.randn(*sizes, d, device=device, dtype=piece.dtype) for d in (piece.head_dim, piece.value_dim))
    cache, mask = CacheArguments(key, value), _mask(piece)
    if not decode_runs_on(query) or len(cached_reasons(query, cache, piece.keys, mask=mask)):
        return _without_grad(lambda: _attend(piece, query, key, value))
    return _without_grad(lambda: cached_attention(query, cache, piece.keys, mask=mask).output)


# ---- layers


def layer_call(config: MultiHeadConfig, work: Workload, *, device: torch.device, dtype: torch.dtype) -> Call:
    """Return a function that runs `work` once on a layer built from `config`, with random weights and tokens.

    The work is a forward, a training step, or decoding one token over a filled cache.
    """
    layer = config.build(device=device, dtype=dtype)
    tokens = torch.randn(work.batch, work.queries, config.embed_dim, device=device, dtype=dtype)
    if work.training:
        return _training(layer, tokens)
    layer.eval().requires_grad_(False)
    if work.past:
        return _layer_decode(layer, tokens, work.past)
    return _without_grad(lambda: layer(tokens).output)


def _training(layer: MultiHeadAttention, tokens: Tensor) -> Call:
    inputs, grad_output = tokens.requires_grad_(), torch.randn_like(tokens)
    differentiated = [inputs, *layer.parameters()]

    def step() -> None:
        for tensor in differentiated:
            tensor.grad = None
        layer(inputs).output.backward(grad_output)

    return step


def _layer_decode(layer: MultiHeadAttention, tokens: Tensor, past: int) -> Call:
    layout, batch = layer.layout, tokens.shape[0]
    options: dict[str, Any] = {"dtype": tokens.dtype, "device": tokens.device}
    cache = PreallocatedCache.for_layout(layout, batch_size=batch, capacity=past + 1, **options)
    chunk_tokens = max(1, MAX_FILLED // (batch * layout.num_kv_heads * layout.head_dim))
    with torch.no_grad():
        for first in range(0, past, chunk_tokens):
            size = (batch, layout.num_kv_heads, min(chunk_tokens, past - first), layout.head_dim)
            cache.append(torch.randn(size, **options), torch.randn(size, **options))

    def step() -> Tensor:
        cache.crop(past)  # drops the token of the previous call, without copying data
        return layer(tokens, cache=cache).output

    return _without_grad(step)

"""From a piece of work to a call that does it, through the functions that layers use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.costs.calibration.timing import Call
from polyhead.costs.measuring.l2_cache import TIMES_L2, l2_bytes
from polyhead.costs.work import AttentionCore, Piece, Product
from polyhead.masks import Mask
from polyhead.ops.attention import attention
from polyhead.ops.decode.api import cached_attention, cached_reasons
from polyhead.ops.decode.fused import CacheArguments, decode_runs_on

MOST_COPIES = 24  # of a cache, so that none is found in the L2 when its turn comes again


def calls_of(piece: Piece, device: torch.device, *, copies: int | None = None) -> list[Call]:
    """One call, or several that do the same with other data where the data is to come from memory."""
    with torch.no_grad():
        if isinstance(piece, Product):
            return [_product(piece, device)]
        if isinstance(piece, AttentionCore):
            if piece.direction == "decode":
                return [_decode(piece, device) for _ in range(copies or _copies(piece, device))]
            if piece.direction == "forward":
                return [_forward(piece, device)]
            return [_backward(piece, device)]
        source = torch.randn(max(piece.bytes // 8, 1), device=device)
        target = torch.empty_like(source)
        # A kernel as positions, norms and gates are; a plain copy may be left to another engine.
        return [lambda: torch.neg(source, out=target)]


def _product(piece: Product, device: torch.device) -> Call:
    left = torch.randn(piece.rows, piece.inner, device=device, dtype=piece.dtype)
    right = torch.randn(piece.columns, piece.inner, device=device, dtype=piece.dtype)

    def call() -> Tensor:
        with torch.no_grad():
            return F.linear(left, right)

    return call


def _heads(piece: AttentionCore, device: torch.device) -> list[Tensor]:
    """Queries, keys and values as a projection leaves them: tokens before heads in memory."""
    sizes = [
        (piece.queries, piece.heads, piece.head_dim),
        (piece.keys, piece.kv_heads, piece.head_dim),
        (piece.keys, piece.kv_heads, piece.value_dim),
    ]
    return [torch.randn(piece.batch, *size, device=device, dtype=piece.dtype).transpose(1, 2) for size in sizes]


def _attend(piece: AttentionCore, tensors: Sequence[Tensor]) -> Tensor:
    query, key, value = tensors
    return attention(query, key, value, mask=_mask(piece), finite=True).output


def _mask(piece: AttentionCore) -> Mask | None:
    if piece.left is None and piece.right == 0:
        return Mask.causal()
    return piece.mask


def _forward(piece: AttentionCore, device: torch.device) -> Call:
    tensors = _heads(piece, device)

    def call() -> Tensor:
        with torch.no_grad():
            return _attend(piece, tensors)

    return call


def _backward(piece: AttentionCore, device: torch.device) -> Call:
    leaves = [x.detach().requires_grad_() for x in _heads(piece, device)]
    with torch.enable_grad():
        output = _attend(piece, leaves)
    upstream = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True)


def _copies(piece: AttentionCore, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return max(1, min(MOST_COPIES, -(-TIMES_L2 * l2_bytes(device) // max(piece.bytes, 1))))


def _decode(piece: AttentionCore, device: torch.device) -> Call:
    """As a layer does it: our kernels over the cache's own memory where they run, `attention` elsewhere."""
    query = torch.randn(piece.batch, piece.heads, piece.queries, piece.head_dim, device=device, dtype=piece.dtype)
    sizes = (piece.batch, piece.kv_heads, piece.keys)
    held = [torch.randn(*sizes, d, device=device, dtype=piece.dtype) for d in (piece.head_dim, piece.value_dim)]
    cache, mask = CacheArguments(held[0], held[1]), _mask(piece)
    if not decode_runs_on(query) or len(cached_reasons(query, cache, piece.keys, mask=mask)):
        return lambda: attention(query, *held, mask=mask, finite=True).output

    def call() -> Tensor:
        with torch.no_grad():
            return cached_attention(query, cache, piece.keys, mask=mask).output

    return call

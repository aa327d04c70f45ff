"""Decoding one token with a preallocated cache: its time, and that a step copies nothing that grows with the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polyhead
from benchmarks.layer_speed.agreement import formula
from benchmarks.layer_speed.contenders import OURS, PLAIN, FusedQKV, Polyhead, Shape, Weights
from benchmarks.measuring.agreement import hold
from benchmarks.measuring.calls import without_gradients
from benchmarks.measuring.cases import Case, Entrants, Pair, Run
from polyhead.layers.kv_cache import PreallocatedCache

BARE = "fused QKV + slice + SDPA"
ONLY_ATTENTION = "SDPA on the slice alone"
LARGEST = 8192  # the cached tokens of the longest row; a step's cost beyond is the same again


class BytesWritten(TorchDispatchMode):
    """Counts the bytes that operators write: new memory they return, and memory they change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        arguments = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        held = {x.untyped_storage().data_ptr() for x in arguments}
        mutated = func._schema.is_mutable
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (mutated or x.untyped_storage().data_ptr() not in held):
                self.total += x.nbytes
        return out


def decode(run: Run, shape: Shape) -> Iterator[Case]:
    """Yield one new token per sequence after `tokens` cached ones, at most LARGEST."""
    tokens = min(shape.tokens, LARGEST)
    weights = Weights.random(shape, device=run.device, dtype=run.dtype, seed=run.seed)
    ours = Polyhead(weights, PLAIN).eval().layer
    bare = FusedQKV(weights, PLAIN).eval()
    x = run.inputs(shape.batch, tokens + 1, shape.embed_dim, salt=8)
    prompt, new = x[:, :tokens].contiguous(), x[:, tokens:].contiguous()  # as an embedding gives them
    with torch.no_grad():
        cache = _filled(ours, prompt, capacity=tokens + 1)
        key, value = (buffer.clone() for buffer in cache._buffers)
        exact, plain = (_last_token(x.to(dtype), weights.to(dtype)) for dtype in (torch.float64, x.dtype))
        query = torch.randn_like(key[:, :, :1])
    found = Entrants()
    for name, call in {OURS: _step(ours, cache, new, tokens), BARE: _bare_step(bare, key, value, new)}.items():
        found.enter(name, functools.partial(without_gradients, call), functools.partial(_check, name, exact, plain))
    found.enter(ONLY_ATTENTION, lambda: without_gradients(lambda: F.scaled_dot_product_attention(query, key, value)))
    written = {length: bytes_of_step(run, ours, shape, length) for length in (tokens // 4, tokens)}
    short, long = written.values()
    if long > short:
        found.failures.append(f"a step writes {short} bytes at {tokens // 4} tokens and {long} at {tokens}")
    pairs = [Pair(OURS, BARE), Pair(OURS, ONLY_ATTENTION)]
    yield found.case("decode one token", shape, pairs, notes={"cached_tokens": tokens, "bytes_written": written})


def _last_token(x: Tensor, weights: Weights) -> Tensor:
    """Return the output of the last token by the formula."""
    last = torch.tensor([x.shape[1] - 1], device=x.device)
    return formula(x, weights.weight, weights.bias, weights.heads, PLAIN, last)


def _check(name: str, exact: Tensor, plain: Tensor, output: Tensor) -> None:
    hold(f"{name}: the decoded token", output, exact, plain)


def bytes_of_step(run: Run, layer: polyhead.MultiHeadAttention, shape: Shape, cached: int) -> int:
    """Return the bytes that operators write in one decoding step after `cached` tokens."""
    with torch.no_grad():
        cache = _filled(layer, run.inputs(shape.batch, cached, shape.embed_dim, salt=9), capacity=cached + 1)
        new = run.inputs(shape.batch, 1, shape.embed_dim, salt=10)
        with BytesWritten() as counter:
            layer(new, cache=cache, mask=polyhead.Mask.causal())
    return counter.total


def _filled(layer: polyhead.MultiHeadAttention, prompt: Tensor, *, capacity: int) -> PreallocatedCache:
    cache = PreallocatedCache.for_layout(
        layer.layout, batch_size=prompt.shape[0], dtype=prompt.dtype, device=prompt.device, capacity=capacity
    )
    layer(prompt, cache=cache, mask=polyhead.Mask.causal())
    return cache


def _step(
    layer: polyhead.MultiHeadAttention, cache: PreallocatedCache, new: Tensor, tokens: int
) -> Callable[[], Tensor]:
    def call() -> Tensor:
        cache.crop(tokens)  # forgets the token of the step before; moves nothing
        return layer(new, cache=cache, mask=polyhead.Mask.causal()).output

    return call


def _bare_step(module: FusedQKV, key: Tensor, value: Tensor, new: Tensor) -> Callable[[], Tensor]:
    """Hand-written baseline: project, write into the slice, attend, project."""
    batch, heads, slots, head_dim = key.shape

    def call() -> Tensor:
        q, k, v = module.qkv(new).view(batch, 1, 3, heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        key[:, :, slots - 1 :].copy_(k)
        value[:, :, slots - 1 :].copy_(v)
        mixed = F.scaled_dot_product_attention(q, key, value)
        return module.output(mixed.transpose(1, 2).reshape(new.shape))

    return call

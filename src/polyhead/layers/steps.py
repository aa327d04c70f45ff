"""Steps that layers of every head arrangement take alike: their own mask, where tokens stand, what a cache holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers.kv_cache import CacheView, KVCache
from polyhead.layers.positions import BiasesLogits
from polyhead.layers.positions.biases import BiasesByDistance
from polyhead.masks import Mask, is_readable
from polyhead.ops.attention import AttentionOutput, Statistics
from polyhead.ops.decode.api import cached_attention, cached_reasons
from polyhead.ops.decode.fused import CacheArguments
from polyhead.ops.uneven_groups import uneven_cached_attention

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class CallOptions:
    """What a call asks of its attention beside the tensors and the mask."""

    dropout: float
    seed: int | Tensor | None
    backend: str
    weights: bool
    statistics: Statistics | None
    logsumexp: bool
    head_gate: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Nothing that the decode kernels do not have."""
        return self.backend in ("auto", "fused") and not (self.weights or self.dropout or self.seed is not None)


def keeps_cache(forward: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A layer's `forward` that leaves its cache as it was where it raises, so that the call can be made again."""

    @functools.wraps(forward)
    def call(*tensors: Arguments.args, **options: Arguments.kwargs) -> Result:
        cache = options.get("cache")
        if not isinstance(cache, KVCache):
            return forward(*tensors, **options)
        with cache.unchanged_on_failure():
            return forward(*tensors, **options)

    return call


def position_bias(positions: BiasesLogits, queries: int, span: int, like: Tensor, given: Mask | None) -> Mask:
    """The bias of a layer's positions, as far as `given`, the mask of its caller, says that tokens are apart."""
    options: dict[str, Any] = {"device": like.device, "dtype": torch.float64 if like.dtype is torch.float64 else None}
    if given is not None and given.placed is not None and isinstance(positions, BiasesByDistance):
        options["max_distance"] = _max_distance(*given.placed)
    bias: Mask = positions(queries, span, **options)
    return bias


def _max_distance(queries: Tensor, keys: Tensor) -> int:
    if not (is_readable(queries) and is_readable(keys)):
        raise OptionError(
            "a bias by distance has to know how far stated positions are apart, got Mask.positions on "
            f"{queries.device} that cannot be read without waiting or breaking a graph; state them on the CPU"
        )
    if not queries.numel() or not keys.numel():
        return 0
    (first, last), (first_key, last_key) = ((int(x.clamp_min(0).min()), int(x.max())) for x in (queries, keys))
    return max(last - first_key, last_key - first, 0)


def own_mask(causal: bool, window: int | None) -> Mask | None:
    """The mask of a layer that is causal or sees a window, whatever is given to its calls."""
    mask = Mask.causal() if causal else None
    if window is None:
        return mask
    if not causal:
        raise OptionError(
            f"window counts the keys up to the query, so it needs causal=True, got window {window} without it; "
            "for a two-sided window give forward mask=Mask.window(left=, right=)"
        )
    return Mask.window(window)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """In the precision of the norm's own weight, which under autocast is not that of the heads."""
    return norm(x.to(norm.get_parameter("weight").dtype)).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, sequence, heads * dim] to [batch, heads, sequence, dim], without moving anything."""
    if not x.numel():  # `view` cannot infer the last axis of nothing
        return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def first_position(cache: KVCache | None, queries: int, device: torch.device) -> int | Tensor:
    """Where new tokens stand: behind what the cache holds, or at 0."""
    if cache is None or not cache.lengths:
        return 0
    return cache.next_positions(queries, device=device) if cache.is_ragged else cache.lengths[0]


def decoded(
    q: Tensor,
    view: CacheView,
    mask: Mask | None,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    statistics: Statistics | None,
    storage: CacheArguments | None = None,
    key_heads: tuple[int, ...] | None = None,
) -> AttentionOutput | None:
    """A few new tokens over the cache's own memory, or over a part of it; None where our kernels cannot serve it."""
    held = (q, view.storage if storage is None else storage, view.num_keys)
    if key_heads is not None:
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "statistics": statistics}
        return uneven_cached_attention(*held, key_heads, mask=mask, **options)
    if len(cached_reasons(*held, mask=mask, scale=scale, sinks=sinks)):
        return None
    return cached_attention(*held, mask=mask, scale=scale, softcap=softcap, sinks=sinks, statistics=statistics)

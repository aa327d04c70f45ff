"""Steps shared by all attention layers: masks, positions, norms, initialisation, head reshapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers import checks
from polyhead.layers.kv_cache import KVCache
from polyhead.layers.positions import BiasesLogits
from polyhead.layers.positions.biases import BiasesByDistance
from polyhead.masks import Mask, is_readable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def layer_forward(forward: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a layer's `forward` to refuse the masks of PyTorch's layer, and to restore the cache if it raises."""

    @functools.wraps(forward)
    def call(*tensors: Arguments.args, **options: Arguments.kwargs) -> Result:
        if "attn_mask" in options or "key_padding_mask" in options:
            raise OptionError(
                "a layer takes one mask, mask=, got attn_mask or key_padding_mask of torch.nn.MultiheadAttention; use "
                "mask=Mask.from_torch(attn_mask, key_padding_mask), or polyhead.layers.torch_compat.MultiheadAttention"
            )
        cache = options.get("cache")
        if not isinstance(cache, KVCache):
            return forward(*tensors, **options)
        with cache.unchanged_on_failure():
            return forward(*tensors, **options)

    return call


def check_no_padding(mask: Mask, cache: KVCache, num_tokens: int) -> None:
    """Raise `OptionError` unless `mask` has no right padding among the new tokens, all of which are cached."""
    for term in mask.padding:
        if term.side == "left":
            continue  # precedes the cached tokens too, so the masks of later calls can hide it
        if is_readable(term.keys) and (term.queries is None or is_readable(term.queries)):
            keys, queries = term.keys.tolist(), [] if term.queries is None else term.queries.tolist()
            cached = cache.lengths or (0,) * len(keys)
            ends = [length + num_tokens for length in cached]
            if all(x >= end for x, end in zip(keys, ends, strict=False)) and all(x >= num_tokens for x in queries):
                continue
        raise OptionError(
            f"padding of a call with a cache is passed as lengths=, got {mask!r} and no lengths, with which the cache "
            "would store the padding; use layer(x, cache=cache, lengths=[...]), the number of non-padding tokens of "
            "each sequence in x"
        )


def check_hides_masked_keys(mask: Mask | None) -> None:
    """Raise `OptionError` if `mask` cannot hide the keys that an earlier mask of a cache hid."""
    if mask is None or not (mask.padding or mask.packed or mask.allowed or mask.biases or mask.placed is not None):
        raise OptionError(
            "every call with a cache that holds masked keys needs a mask over all keys that hides them, got "
            f"{'none' if mask is None else repr(mask)}, after a call whose mask hid keys such as padding on the left; "
            "pad on the right and pass lengths=, which does not store padding"
        )


def hides_keys(mask: Mask) -> bool:
    """Return True if the mask hides keys whatever the query: padding on the left, documents, a mask or bias by key.

    A mask with a row for each query is read where that needs no synchronisation.
    """
    if len(mask.packed) > 0 or any(term.side == "left" for term in mask.padding):
        return True
    if mask.placed is not None and is_readable(mask.placed[1]) and bool((mask.placed[1] < 0).any()):
        return True
    return any(_hides_a_key(term) for term in (*mask.allowed, *mask.biases))


def _hides_a_key(term: Tensor) -> bool:
    if term.shape[2] == 1:
        return True
    if not is_readable(term) or not term.shape[2]:
        return False
    visible = term if term.dtype is torch.bool else term.detach() != -torch.inf
    return not bool(visible.flatten(1, 2).any(1).all())


def position_bias(positions: BiasesLogits, queries: int, span: int, like: Tensor, caller_mask: Mask | None) -> Mask:
    """Return the bias of a layer's position module for `queries` queries and `span` keys.

    A bias by distance covers all distances between the explicit positions of `caller_mask`, if it has any.
    """
    options: dict[str, Any] = {"device": like.device, "dtype": torch.float64 if like.dtype is torch.float64 else None}
    if caller_mask is not None and caller_mask.placed is not None and isinstance(positions, BiasesByDistance):
        options["max_distance"] = _max_distance(*caller_mask.placed)
    bias: Mask = positions(queries, span, **options)
    return bias


def _max_distance(queries: Tensor, keys: Tensor) -> int:
    if not (is_readable(queries) and is_readable(keys)):
        raise OptionError(
            "a relative bias needs the largest distance between explicit positions, got Mask.positions on "
            f"{queries.device} that cannot be read without a synchronisation or a graph break; pass them on the CPU"
        )
    if not queries.numel() or not keys.numel():
        return 0
    # Keys at negative positions are masked; clamped to 0, they can only enlarge the result.
    (first, last), (first_key, last_key) = ((int(x.clamp_min(0).min()), int(x.max())) for x in (queries, keys))
    return max(last - first_key, last_key - first, 0)


def layer_mask(causal: bool, window: int | None) -> Mask | None:
    """Return the mask of a layer's `causal` and `window` options, None without either."""
    mask = Mask.causal() if causal else None
    if window is None:
        return mask
    if not causal:
        raise OptionError(
            f"window counts the keys up to the query, so it needs causal=True, got window {window} without it; "
            "for a two-sided window pass mask=Mask.window(left=, right=) to forward"
        )
    return Mask.window(window)


def apply_norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Apply a norm, if there is one, in the dtype of its weight, which under autocast differs from that of heads."""
    if norm is None:
        return x
    weight: Tensor = norm.weight  # type: ignore[assignment]
    return norm(x.to(weight.dtype)).to(x.dtype)


def init_linear(linear: nn.Linear | None) -> None:
    """Initialise a projection, if there is one: weights Glorot-uniformly, the bias with zeros."""
    if linear is None:
        return
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def qk_norms(
    kind: Literal["rms", "layer"] | None, head_dim: int, **options: Any
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the norms of each head's queries and keys; `options` are device and dtype."""
    checks.check_one_of("qk_norm", kind, ("rms", "layer", None))
    if kind is None:
        return None, None
    norm: Callable[..., nn.Module] = nn.RMSNorm if kind == "rms" else nn.LayerNorm
    return norm(head_dim, **options), norm(head_dim, **options)


def reset_norms(*norms: nn.Module | None) -> None:
    """Reinitialise the norms made by `qk_norms`."""
    for norm in norms:
        if isinstance(norm, nn.RMSNorm | nn.LayerNorm):
            norm.reset_parameters()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return a view of [batch, sequence, heads * dim] as [batch, heads, sequence, dim]."""
    if not x.numel():  # `view` cannot infer the last axis of an empty tensor
        return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def first_position(cache: KVCache | None, queries: int, device: torch.device) -> int | Tensor:
    """Return the position of the first new token, or for a ragged cache those of all new tokens [batch, queries]."""
    if cache is None or not cache.lengths:
        return 0
    return cache.next_positions(queries, device=device) if cache.is_ragged else cache.lengths[0]

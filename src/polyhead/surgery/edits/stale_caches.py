"""Refuse KV caches that a transformers model filled, or sized, before its heads were edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import CacheError
from polyhead.observation.transformers_models import is_pretrained
from polyhead.surgery.adapters.attention_layer import modules_around

# Attribute of a model that has edited layers: their KV heads, by index in a cache and by whether that is a cache of
# cross-attention. None where two layers have one index. The model is checked, not each layer: a call without a cache
# costs one check.
CACHED_HEADS = "polyhead_cached_heads"
_CROSS_NAMES = ("cross", "encoder_attn", "encdec")


def refuse_stale_cache(model: nn.Module, args: object, arguments: Mapping[str, Any]) -> None:
    """Forward pre-hook of models with edited layers: raise `CacheError` if a cache has other numbers of KV heads."""
    cache = arguments.get("past_key_values")
    if cache is None or torch.compiler.is_compiling():
        return
    for (index, is_cross), (name, expected) in getattr(model, CACHED_HEADS).items():
        of_kind = getattr(cache, "cross_attention_cache" if is_cross else "self_attention_cache", cache)
        keys = _cached_keys(of_kind, index)
        if keys is not None and expected is not None and keys.shape[1] != expected:
            raise CacheError(
                f"a cache must have as many KV heads as its layer, {expected} in {name!r} since its heads were "
                f"edited, got a cache with {keys.shape[1]}; start with a new cache and pass all tokens again"
            )


def model_around(model: nn.Module, path: str) -> nn.Module | None:
    """Return the innermost model of transformers that contains a layer, by which its cache is passed."""
    return next((x for x in modules_around(model, path) if is_pretrained(x)), None)


def cached_heads(model: nn.Module, path: str, module: nn.Module, heads: int) -> dict[tuple[int, bool], Any]:
    """Return the KV heads by place in a cache with those of one more edited layer.

    Args:
        model: the model around the layer.
        path: path of the layer.
        module: the layer.
        heads: its KV heads.
    """
    before: dict[tuple[int, bool], Any] = getattr(model, CACHED_HEADS, {})
    index = vars(module).get("layer_idx")
    if not isinstance(index, int):
        return before
    place = index, any(name in path.rpartition(".")[2].lower() for name in _CROSS_NAMES)
    is_shared = place in before and before[place][0] != path
    return {**before, place: (path, None if is_shared else heads)}


def _cached_keys(cache: Any, index: int) -> Tensor | None:
    """Return a layer's keys in a cache of transformers, [batch, kv_heads, tokens, head_dim]; None if it has none."""
    layers = getattr(cache, "layers", ())
    keys = getattr(layers[index], "keys", None) if index < len(layers) else None
    return keys if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel() else None

"""Previews of edits: the counts that they would change, and whether a native class can hold the edited model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.costs import Workload, estimate_cost
from polyhead.costs.layouts.hf_families import WINDOWED
from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers import MultiHeadConfig
from polyhead.observation.transformers_models import is_pretrained
from polyhead.sources.models import kind_of
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.edits.applying import changed, edits_by_layer
from polyhead.surgery.edits.head_edits import HeadEdit, checked_edits
from polyhead.surgery.edits.stale_caches import model_around
from polyhead.surgery.native.fitting import NativeFit, fit_edited
from polyhead.surgery.options import OTHER_FORMS


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Head counts and costs: parameters of the projections, FLOPs of one call, KV cache bytes per token.

    Heads of an encoder have no cache.
    """

    heads: int = 0
    kv_heads: int = 0
    parameters: int = 0
    flops: int = 0
    cache_bytes_per_token: int = 0

    def __add__(self, other: HeadCounts) -> HeadCounts:
        return HeadCounts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class LayerPreview:
    """Counts of one attention layer, before and after the edits."""

    path: str
    before: HeadCounts
    after: HeadCounts


@dataclass(frozen=True, slots=True)
class Preview:
    """Counts of every editable attention layer; `before` and `after` are their sums."""

    layers: tuple[LayerPreview, ...]

    @property
    def before(self) -> HeadCounts:
        return sum((layer.before for layer in self.layers), HeadCounts())

    @property
    def after(self) -> HeadCounts:
        return sum((layer.after for layer in self.layers), HeadCounts())


def preview(model: nn.Module, edits: Sequence[HeadEdit], *, work: Workload | None = None) -> Preview:
    """Count heads, parameters and FLOPs before and after `apply(model, edits)`; raises as `apply` would.

    Args:
        work: the call whose FLOPs are counted, 512 tokens by default. Cross-attention is counted with a source as long
            as its queries.
        model: the model, which is unchanged.
        edits: edits, in order.

    Returns:
        Counts before and after, by layer and in total.

    Raises:
        OptionError: an edit refers to layers or heads that do not exist, or is not possible.

    >>> from polyhead.layers import MultiHeadAttention
    >>> from polyhead.surgery import PruneHeads
    >>> counted = preview(MultiHeadAttention(12, 4), [PruneHeads(layer=0, heads=(1,))])
    >>> counted.before.parameters, counted.after.parameters, counted.after.heads
    (624, 471, 3)
    """
    work = Workload.forward(512) if work is None else work
    layers = find_layers(model)
    uncached = uncached_layers(model, layers)
    edited = {layer.path: layer_edits for layer, layer_edits in edits_by_layer(layers, checked_edits(edits))}
    previews = []
    for layer in layers:
        if layer.refusals:
            continue
        heads = read_heads(model, layer, device="meta")
        after = changed(layer, heads, edited[layer.path]) if layer.path in edited else heads
        counts = (_count(layer, x, work) for x in (heads, after))
        if layer.path in uncached:
            counts = (dataclasses.replace(x, cache_bytes_per_token=0) for x in counts)
        previews.append(LayerPreview(layer.path, *counts))
    return Preview(tuple(previews))


def uncached_layers(model: nn.Module, layers: Sequence[AttentionLayer]) -> frozenset[str]:
    """Return the paths of a transformers model's layers that keep no KV cache: those of an encoder.

    The encoder of images or audio in a causal model is one whose attention takes no cache.
    """
    if not is_pretrained(model):
        return frozenset()
    kind = kind_of(model)
    uncached = {layer.path for layer in layers if not _takes_cache(layer)}
    if kind in ("encoder", "masked"):
        uncached |= {layer.path for layer in layers if not _is_in_decoder(model, layer)}
    elif kind == "encoder-decoder":
        encoder = set(map(id, model.get_encoder().modules()))  # type: ignore[operator]  # every such model has one
        uncached |= {layer.path for layer in layers if id(layer.module) in encoder}
    return frozenset(uncached)


def _takes_cache(layer: AttentionLayer) -> bool:
    """Return whether the forward of a layer's module takes a KV cache, under any of the names in use."""
    names = inspect.signature(inspect.unwrap(type(layer.module).forward)).parameters
    return any("past" in name or name in ("cache", "kv_cache") for name in names)


def _is_in_decoder(model: nn.Module, layer: AttentionLayer) -> bool:
    """Return whether the innermost transformers model around a layer is a decoder, such as that of a LlavaModel."""
    inner = model_around(model, layer.path)
    return inner is not None and kind_of(inner) == "decoder"


def _count(layer: AttentionLayer, heads: HeadWeights, work: Workload) -> HeadCounts:
    layout: HeadLayout = heads.layout
    causal, window = _causal_and_window(layer)
    dtype: torch.dtype = heads.query.dtype
    cost = estimate_cost(MultiHeadConfig(**layout.to_dict(), causal=causal, window=window), work, dtype=dtype)
    # Count actual biases: in some families only some of the projections have one.
    return HeadCounts(
        layout.num_heads, layout.num_kv_heads, heads.num_parameters, cost.forward.total, cost.cache_bytes_per_token
    )


def _causal_and_window(layer: AttentionLayer) -> tuple[bool, int | None]:
    """Return whether a layer is causal and, if it is, its sliding window in keys; None without one."""
    module: Any = layer.module
    if layer.is_ours:
        causal = module.mask is not None and module.mask.right == 0
        return causal, module.mask.left + 1 if causal and module.mask.left is not None else None
    if not getattr(module, "is_causal", False):
        return False, None
    config = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    is_windowed = getattr(config, "model_type", None) in WINDOWED
    if kinds is not None and isinstance(index, int):
        is_windowed = kinds[index] == "sliding_attention"
    return True, getattr(config, "sliding_window", None) if is_windowed else None


def fit_after(model: nn.Module, edits: Sequence[HeadEdit]) -> NativeFit:
    """Fit the native class to the heads that a transformers model would have after these edits."""
    layers = find_layers(model)
    layouts: dict[str, HeadLayout] = {}
    parameters: dict[str, Tensor] = {}
    for layer, layer_edits in edits_by_layer(layers, checked_edits(edits)):
        heads = changed(layer, read_heads(model, layer, device="meta"), layer_edits)
        layouts[layer.path] = heads.layout
        parameters |= pack_heads(model, layer, heads)
    return fit_edited(model, layers, layouts, parameters)


def check_edits(model: nn.Module, edits: Sequence[HeadEdit], form: str) -> None:
    """Raise `OptionError` for edits that are not possible, or after which no native config has the uniform form."""
    preview(model, edits)
    if form == "uniform" and (rule := fit_after(model, edits).rule):
        raise OptionError(f"plain transformers must load the uniform form: {rule}; {OTHER_FORMS}")

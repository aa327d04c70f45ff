"""Pad layers with zero heads so that a native transformers class computes the same function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.geometry import HeadLayout
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import KV_PARTS, HeadWeights, pack_heads, read_heads
from polyhead.surgery.native.configs import ConfigChange, configs_of, head_count_changes
from polyhead.surgery.native.fitting import NativeFit, build_native, tensor_mismatch

Sources = tuple[int | None, ...]
_PER_HEAD = ("query", "output", "query_bias")


@dataclass(frozen=True, slots=True)
class Padding:
    """Source of each head and KV head of a padded layer: an index into the original, None for zeros.

    A KV head may appear several times where the larger layer has smaller groups.
    """

    heads: Sources
    key_heads: Sources

    @property
    def zeros(self) -> int:
        """Number of zero heads, which take time and contribute nothing."""
        return self.heads.count(None)

    @property
    def repeated(self) -> int:
        """Number of extra copies of KV heads."""
        sources = [key for key in self.key_heads if key is not None]
        return len(sources) - len(set(sources))

    def pad(self, heads: HeadWeights) -> HeadWeights:
        """Return the padded heads. A zero head contributes nothing because its output matrix is zero."""

        def select(x: Tensor, sources: Sources) -> Tensor:
            return torch.stack([x.new_zeros(x.shape[1:]) if source is None else x[source] for source in sources])

        group_size = len(self.heads) // len(self.key_heads)
        parts: dict[str, Any] = {name: select(x, self.heads) for name, x in _present(heads, _PER_HEAD)}
        parts |= {name: select(x, self.key_heads) for name, x in _present(heads, KV_PARTS)}
        key_heads = tuple(head // group_size for head in range(len(self.heads)))
        made_of = tuple(() if source is None else heads.made_of[source] for source in self.heads)
        return replace(heads, **parts, key_heads=key_heads, origins=self.heads, made_of=made_of)

    def unpad(self, padded: HeadWeights, layout: HeadLayout) -> HeadWeights:
        """Return the original heads of a padded layer, bit for bit."""
        heads = [self.heads.index(head) for head in range(layout.num_heads)]
        keys = [self.key_heads.index(key) for key in range(layout.num_kv_heads)]
        parts: dict[str, Tensor | None] = dict.fromkeys(("query_bias", "key_bias", "value_bias"))
        parts |= {name: x[heads] for name, x in _present(padded, _PER_HEAD)}
        parts |= {name: x[keys] for name, x in _present(padded, KV_PARTS)}
        return HeadWeights.unedited(layout, **parts, output_bias=padded.output_bias)


def place_heads(layout: HeadLayout, num_heads: int, num_kv_heads: int) -> Padding | None:
    """Place a layer's heads into a larger layer, group by group; None if they do not fit.

    >>> place_heads(HeadLayout(24, 3, key_heads=(0, 1, 1), head_dim=4), 6, 3)
    Padding(heads=(0, None, 1, 2, None, None), key_heads=(0, 1, None))
    """
    group_size = num_heads // num_kv_heads
    heads: list[int | None] = []
    keys: list[int | None] = []
    for key in range(layout.num_kv_heads):
        readers = [head for head in range(layout.num_heads) if layout.key_head(head) == key]
        for start in range(0, len(readers), group_size):
            group = readers[start : start + group_size]
            heads += [*group, *[None] * (group_size - len(group))]
            keys.append(key)
    missing = num_kv_heads - len(keys)
    if missing < 0:
        return None
    return Padding((*heads, *[None] * (group_size * missing)), (*keys, *[None] * missing))


@dataclass(frozen=True, slots=True, eq=False)
class PaddedFit(NativeFit):
    """A native model whose layers can hold all heads of a model, and the padding of each layer by path."""

    paddings: Mapping[str, Padding] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """Describe the zero and repeated heads; empty if there are none."""
        zeros = sum(padding.zeros for padding in self.paddings.values())
        repeated = sum(padding.repeated for padding in self.paddings.values())
        parts = [_counted(zeros, "head of zeros", "heads of zeros")] if zeros else []
        parts += [_counted(repeated, "KV head repeated", "KV heads repeated")] if repeated else []
        return f", with {' and '.join(parts)}: no time is saved" if parts else ""

    def tensors(self, model: nn.Module, layers: Sequence[AttentionLayer]) -> dict[str, Tensor]:
        """Return the padded weights, by their names in the model."""
        padded: dict[str, Tensor] = {}
        for layer in layers:
            if layer.path in self.paddings:
                padded |= pack_heads(self.built, layer, self.paddings[layer.path].pad(read_heads(model, layer)))
        return padded


def fit_padded(model: Any, layers: Sequence[AttentionLayer]) -> PaddedFit:
    """Return the smallest native model that the heads of a model fit into, or the rule that was violated.

    Found by building the model's own config first, then configs with other head counts, smallest first: larger than the
    own config only if that one does not fit.
    """
    best = _attempt(model, layers, ())
    for path, config in configs_of(model.config):
        of_config = [layer.layout for layer in layers if getattr(layer.module, "config", None) is config]
        layouts = [layout for layout in of_config if layout is not None]
        if not layouts or len(layouts) < len(of_config) or len({layout.head_dim for layout in layouts}) > 1:
            continue
        for heads, kv_heads in _candidates(layouts, config, grow=best.built is None):
            requested = head_count_changes(path, config, heads, kv_heads, layouts[0].head_dim)
            attempt = _attempt(model, layers, (*best.changes, *requested))
            if attempt.built is not None:
                best = attempt
                break
    return best


def _candidates(layouts: Sequence[HeadLayout], config: Any, *, grow: bool) -> Iterator[tuple[int, int]]:
    """Yield (heads, KV heads) pairs that all these layers fit into, smallest first.

    `grow` also yields pairs that are not smaller than those of `config`, up to twice as many heads as a layer has.
    """
    config_heads = int(getattr(config, "num_attention_heads", 0) or 0)
    config_total = config_heads + int(getattr(config, "num_key_value_heads", config_heads) or config_heads)
    max_heads = max(config_heads, 2 * max(layout.num_heads for layout in layouts)) if grow else config_heads
    group_sizes = range(1, max_heads + 1) if hasattr(config, "num_key_value_heads") else range(1, 2)
    sizes = [(size * keys, keys) for size in group_sizes for keys in range(1, max_heads // size + 1)]
    # At equal size prefer fewer KV heads, for a smaller KV cache.
    for heads, keys in sorted(sizes, key=lambda size: (sum(size), size[1])):
        if (grow or heads + keys < config_total) and all(place_heads(layout, heads, keys) for layout in layouts):
            yield heads, keys


def _attempt(model: Any, layers: Sequence[AttentionLayer], changes: Sequence[ConfigChange]) -> PaddedFit:
    """Build a native model with changed config values and place the heads of every layer into it."""
    built = build_native(model, changes)
    if isinstance(built, str):
        return PaddedFit(rule=built)
    built_layers = {layer.path: layer for layer in find_layers(built)}
    paddings: dict[str, Padding] = {}
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for layer in layers:
        if layer.layout is None:
            continue
        padded_layer = built_layers[layer.path]
        if padded_layer.layout is None:
            return PaddedFit(
                rule=f"{type(layer.module).__name__} built from its config cannot be edited: {padded_layer.refusals[0]}"
            )
        capacity = padded_layer.layout
        padding = place_heads(layer.layout, capacity.num_heads, capacity.num_kv_heads)
        if padding is None or capacity.head_dim != layer.layout.head_dim:
            return PaddedFit(
                rule=f"a config of {type(model).__name__} holds {capacity.num_heads} heads of {capacity.head_dim} "
                f"channels over {capacity.num_kv_heads} KV heads, but {layer.path} has {layer.layout.num_heads} of "
                f"{layer.layout.head_dim}"
            )
        if capacity != layer.layout:
            paddings[layer.path] = padding
            heads = padding.pad(read_heads(model, layer, device="meta"))
            shapes |= {name: tuple(x.shape) for name, x in pack_heads(built, layer, heads).items()}
    mismatch = tensor_mismatch(built, shapes)
    return PaddedFit(rule=mismatch) if mismatch else PaddedFit(built, tuple(changes), paddings=paddings)


def _counted(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _present(heads: HeadWeights, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return the tensors that are not None: biases are optional."""
    return [(name, x) for name in names if (x := getattr(heads, name)) is not None]

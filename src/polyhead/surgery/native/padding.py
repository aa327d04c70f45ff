"""Zero heads put beside those that a layer has, so that a native class has room for them and computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import CheckpointError
from polyhead.geometry import HeadLayout
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.native.configs import ConfigChange, configs_of, head_count_changes
from polyhead.surgery.native.fitting import NativeFit, build_native

Places = tuple[int | None, ...]
_PER_HEAD = ("query", "output", "query_bias")
_PER_KV_HEAD = ("key", "value", "key_bias", "value_bias")


@dataclass(frozen=True, slots=True)
class Padding:
    """Which head of a layer stands at each place of a larger one, and which KV head; None for a head of zeros.

    A KV head may stand at several places, where the larger layer has smaller groups.
    """

    heads: Places
    key_heads: Places

    @property
    def zeros(self) -> int:
        """How many heads are computed for nothing."""
        return self.heads.count(None)

    @property
    def repeated(self) -> int:
        """How many KV heads are computed again."""
        real = [key for key in self.key_heads if key is not None]
        return len(real) - len(set(real))

    def pad(self, heads: HeadWeights) -> HeadWeights:
        """The larger layer. A head of zeros writes nothing, whatever it reads, since its output matrix is zero."""

        def spread(x: Tensor, places: Places) -> Tensor:
            return torch.stack([x.new_zeros(x.shape[1:]) if place is None else x[place] for place in places])

        size = len(self.heads) // len(self.key_heads)
        parts: dict[str, Any] = {name: spread(x, self.heads) for name, x in _present(heads, _PER_HEAD)}
        parts |= {name: spread(x, self.key_heads) for name, x in _present(heads, _PER_KV_HEAD)}
        key_heads = tuple(place // size for place in range(len(self.heads)))
        made_of = tuple(() if place is None else heads.made_of[place] for place in self.heads)
        return replace(heads, **parts, key_heads=key_heads, origins=self.heads, made_of=made_of)

    def unpad(self, padded: HeadWeights, layout: HeadLayout) -> HeadWeights:
        """The heads of the layer that was padded, bit for bit."""
        heads = [self.heads.index(head) for head in range(layout.num_heads)]
        keys = [self.key_heads.index(key) for key in range(layout.num_kv_heads)]
        parts: dict[str, Any] = {name: x[heads] for name, x in _present(padded, _PER_HEAD)}
        parts |= {name: x[keys] for name, x in _present(padded, _PER_KV_HEAD)}
        key_heads = tuple(layout.key_head(head) for head in range(layout.num_heads))
        made_of = tuple((head,) for head in range(layout.num_heads))
        return replace(padded, **parts, key_heads=key_heads, origins=tuple(range(layout.num_heads)), made_of=made_of)

    def to_dict(self) -> dict[str, list[int | None]]:
        return {"heads": list(self.heads), "key_heads": list(self.key_heads)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Padding:
        try:
            return cls(tuple(found["heads"]), tuple(found["key_heads"]))
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"a padding lists heads and key_heads, got {found!r}") from error


def place_heads(layout: HeadLayout, num_heads: int, num_kv_heads: int) -> Padding | None:
    """Where the heads of a layer go among so many, each group of readers together; None where they have no room.

    >>> place_heads(HeadLayout(24, 3, key_heads=(0, 1, 1), head_dim=4), 6, 3)
    Padding(heads=(0, None, 1, 2, None, None), key_heads=(0, 1, None))
    """
    size = num_heads // num_kv_heads
    heads: list[int | None] = []
    keys: list[int | None] = []
    for key in range(layout.num_kv_heads):
        readers = [head for head in range(layout.num_heads) if layout.key_head(head) == key]
        for start in range(0, len(readers), size):
            group = readers[start : start + size]
            heads += [*group, *[None] * (size - len(group))]
            keys.append(key)
    missing = num_kv_heads - len(keys)
    if missing < 0:
        return None
    return Padding((*heads, *[None] * (size * missing)), (*keys, *[None] * missing))


@dataclass(frozen=True, slots=True, eq=False)
class PaddedFit(NativeFit):
    """A native class with room for all heads of a model, and where they go."""

    paddings: Mapping[str, Padding] = field(default_factory=dict)

    @property
    def in_words(self) -> str:
        """What of the larger model is for nothing."""
        zeros = sum(padding.zeros for padding in self.paddings.values())
        repeated = sum(padding.repeated for padding in self.paddings.values())
        told = [_counted(zeros, "head of zeros", "heads of zeros")] if zeros else []
        told += [_counted(repeated, "KV head repeated", "KV heads repeated")] if repeated else []
        return f", with {' and '.join(told)}: no time is saved" if told else ""

    def tensors(self, model: nn.Module, layers: Sequence[AttentionLayer]) -> dict[str, Tensor]:
        """The padded weights, by their names in the model."""
        found: dict[str, Tensor] = {}
        for layer in layers:
            if layer.path in self.paddings:
                found |= pack_heads(self.built, layer, self.paddings[layer.path].pad(read_heads(model, layer)))
        return found


def fit_padded(model: Any, layers: Sequence[AttentionLayer]) -> PaddedFit:
    """The smallest native class that the heads of a model can be put into; found by building."""
    best = _attempt(model, layers, ())
    for path, config in configs_of(model.config):
        readers = [layer.layout for layer in layers if getattr(layer.module, "config", None) is config]
        known = [layout for layout in readers if layout is not None]
        if not known or len(known) < len(readers) or len({layout.head_dim for layout in known}) > 1:
            continue
        for heads, kv_heads in _candidates(known, config, grow=best.built is None):
            requested = head_count_changes(path, config, heads, kv_heads, known[0].head_dim)
            found = _attempt(model, layers, (*best.changes, *requested))
            if found.built is not None:
                best = found
                break
    return best


def _candidates(layouts: Sequence[HeadLayout], config: Any, *, grow: bool) -> Iterator[tuple[int, int]]:
    """Numbers of heads and KV heads that all these layers have room in, the smallest first."""
    here = int(getattr(config, "num_attention_heads", 0) or 0)
    now = here + int(getattr(config, "num_key_value_heads", here) or here)
    most = max(here, 2 * max(layout.num_heads for layout in layouts)) if grow else here
    groups = range(1, most + 1) if hasattr(config, "num_key_value_heads") else range(1, 2)
    sizes = [(size * keys, keys) for size in groups for keys in range(1, most // size + 1)]
    # Of equal sizes the one with fewer KV heads, which leave less in a cache.
    for heads, keys in sorted(sizes, key=lambda size: (sum(size), size[1])):
        if (grow or heads + keys < now) and all(place_heads(layout, heads, keys) for layout in layouts):
            yield heads, keys


def _attempt(model: Any, layers: Sequence[AttentionLayer], changes: Sequence[ConfigChange]) -> PaddedFit:
    built = build_native(model, changes)
    if isinstance(built, str):
        return PaddedFit(rule=built)
    in_config = {layer.path: layer for layer in find_layers(built)}
    paddings: dict[str, Padding] = {}
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for layer in layers:
        if layer.layout is None:
            continue
        larger = in_config[layer.path]
        if larger.layout is None:
            return PaddedFit(rule=f"{type(layer.module).__name__} of its config cannot run: {larger.refusals[0]}")
        room = larger.layout
        placed = place_heads(layer.layout, room.num_heads, room.num_kv_heads)
        if placed is None or room.head_dim != layer.layout.head_dim:
            return PaddedFit(
                rule=f"a config of {type(model).__name__} has room for {room.num_heads} heads of {room.head_dim} "
                f"channels over {room.num_kv_heads} KV heads, and {layer.path} has {layer.layout.num_heads} of "
                f"{layer.layout.head_dim}"
            )
        if room != layer.layout:
            paddings[layer.path] = placed
            heads = placed.pad(read_heads(model, layer, device="meta"))
            shapes |= {name: tuple(x.shape) for name, x in pack_heads(built, layer, heads).items()}
    found = {name: tuple(x.shape) for name, x in built.state_dict().items()}
    for name in sorted(set(shapes) | set(found)):
        if shapes.get(name) != found.get(name):
            told = "no such tensor" if name not in found else f"one of shape {list(found[name])}"
            return PaddedFit(rule=f"{type(model).__name__} of its config has {told} for {name}")
    return PaddedFit(built, tuple(changes), paddings=paddings)


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _present(heads: HeadWeights, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Those that there are: some biases may be none."""
    return [(name, x) for name in names if (x := getattr(heads, name)) is not None]

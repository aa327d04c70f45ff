"""The attention layers of a whole model as one value: which kinds of layer, and how many of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from polyhead.errors import OptionError
from polyhead.layers.config import AttentionConfig


@dataclass(frozen=True)
class LayerGroup:
    """`layers` attention layers that are made alike."""

    config: AttentionConfig
    layers: int

    def __post_init__(self) -> None:
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise OptionError(f"layers must be an integer of at least 1, got {self.layers!r}")


@dataclass(frozen=True)
class ModelLayout:
    """How the heads of a model lie, layer by layer, as far as it decides what they cost.

    `context` is the longest sequence that the model says it was made for, `dtype` and `cache_dtype` what its config
    says of its numbers; None where it says nothing. `notes` tell what was left out or taken from elsewhere.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    context: int | None = None
    dtype: torch.dtype | None = None
    cache_dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise OptionError(f"a model has at least one attention layer, got {self.name} without any")

    @classmethod
    def of(cls, config: AttentionConfig, layers: int = 1, *, name: str = "layer") -> ModelLayout:
        """A model whose layers are all alike."""
        return cls(name, (LayerGroup(config, layers),))

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    @property
    def config(self) -> AttentionConfig:
        """The kind of layer that there are most of; the first of them, where there are as many."""
        return max(self.groups, key=lambda group: group.layers).config

    def directed(self, causal: bool | None) -> ModelLayout:
        """The same with layers that look back alone or both ways, and a note of it; None leaves them as they are."""
        if causal is None or all(getattr(group.config, "causal", None) is causal for group in self.groups):
            return self
        groups = tuple(LayerGroup(_directed(group.config, causal), group.layers) for group in self.groups)
        return replace(self, groups=groups, notes=(*self.notes, requested_for(causal)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "groups": [{"layers": group.layers, "config": group.config.to_dict()} for group in self.groups],
            "context": self.context,
            "dtype": dtype_name(self.dtype),
            "cache_dtype": dtype_name(self.cache_dtype),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> ModelLayout:
        groups, context, notes = found.get("groups"), found.get("context"), found.get("notes") or []
        if not isinstance(groups, list) or not isinstance(notes, list):
            raise OptionError(f"groups and notes of a model are lists, got groups {groups!r} and notes {notes!r}")
        if context is not None and (isinstance(context, bool) or not isinstance(context, int) or context < 1):
            raise OptionError(f"the context of a model must be a positive integer or null, got {context!r}")
        dtypes = {name: named_dtype(found[name]) if found.get(name) else None for name in ("dtype", "cache_dtype")}
        read = tuple(_group(number, group) for number, group in enumerate(groups))
        return cls(str(found.get("name", "")), read, context, **dtypes, notes=tuple(map(str, notes)))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def requested_for(causal: bool) -> str:
    """The note of a model that is counted with another mask than its own."""
    own, seen = ("see later ones", "no later ones") if causal else ("see no later ones", "later ones too")
    return f"tokens of this model {own}; they are counted as seeing {seen}, as was asked"


def check_window(window: int | None, *, causal: bool) -> None:
    if window is not None and not causal:
        raise OptionError(
            f"a window is counted for tokens that see no later ones, got a window of {window} in layers whose tokens "
            "do; count them as causal, or without their window"
        )


def _directed(config: AttentionConfig, causal: bool) -> AttentionConfig:
    if not any(x.name == "causal" for x in fields(config)):
        raise OptionError(
            f"{type(config).__name__} has no field causal that could be set, got causal {causal}; leave it out"
        )
    check_window(getattr(config, "window", None), causal=causal)
    changed: AttentionConfig = replace(config, causal=causal)  # type: ignore[call-arg]
    return changed


def _group(number: int, found: Any) -> LayerGroup:
    if not isinstance(found, Mapping) or not {"layers", "config"} <= found.keys():
        raise OptionError(f"a group of layers is an object with layers and config, got {found!r} as group {number}")
    return LayerGroup(AttentionConfig.from_dict(found["config"]), found["layers"])


def grouped(configs: Iterable[AttentionConfig]) -> tuple[LayerGroup, ...]:
    """Layers in their order as groups of those that are alike, the first kind first."""
    counts: dict[AttentionConfig, int] = {}
    for config in configs:
        counts[config] = counts.get(config, 0) + 1
    return tuple(LayerGroup(config, count) for config, count in counts.items())


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_SHORT |= {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def named_dtype(name: str) -> torch.dtype:
    """The dtype of that name.

    >>> named_dtype("bf16"), named_dtype("torch.float32")
    (torch.bfloat16, torch.float32)
    """
    text = str(name).removeprefix("torch.").lower()
    found = getattr(torch, _SHORT.get(text, text), None)
    if not isinstance(found, torch.dtype):
        raise OptionError(f"a dtype is float32, bfloat16, float16, float8_e4m3fn or int8; got {name!r}")
    return found


def dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")

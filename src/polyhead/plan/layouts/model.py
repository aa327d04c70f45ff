"""The attention layers of a whole model as one value: which kinds of layer, and how many of each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
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
    def from_dict(cls, found: dict[str, Any]) -> ModelLayout:
        groups = tuple(LayerGroup(AttentionConfig.from_dict(x["config"]), x["layers"]) for x in found["groups"])
        dtypes = {name: named_dtype(found[name]) if found.get(name) else None for name in ("dtype", "cache_dtype")}
        return cls(found["name"], groups, found.get("context"), **dtypes, notes=tuple(found.get("notes", ())))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


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

"""`ModelLayout`: the attention layers of a model, as configs and the number of layers with each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from polyhead.costs.parameters import Parameters, count_parameters
from polyhead.costs.quantities import check_count, dtype_name, named_dtype
from polyhead.errors import OptionError
from polyhead.layers.config import AttentionConfig


@dataclass(frozen=True)
class LayerGroup:
    """Attention layers with the same config; `layers` is their number."""

    config: AttentionConfig
    layers: int

    def __post_init__(self) -> None:
        check_count("layers", self.layers, least=1)


@dataclass(frozen=True)
class ModelLayout:
    """Attention layers of a model: everything that affects their cost.

    `context` is the maximum context length in the model's config, `dtype` and `cache_dtype` are its dtypes of weights
    and of the KV cache; None if the config does not contain them. `other_parameters` are those outside attention
    (embeddings, feed-forward layers, norms), None if unknown. `notes` report what was ignored or taken from defaults.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    context: int | None = None
    dtype: torch.dtype | None = None
    cache_dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()
    other_parameters: int | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            raise OptionError(f"a model must have at least one attention layer, got {self.name} without any")

    @classmethod
    def of(cls, config: AttentionConfig, layers: int = 1, *, name: str = "layer") -> ModelLayout:
        """Return a model of `layers` layers with one config.

        Args:
            config: config of every layer.
            layers: number of layers.
            name: name of the model, for tables.
        """
        return cls(name, (LayerGroup(config, layers),))

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    @property
    def config(self) -> AttentionConfig:
        """Most common config of a layer; the first of equally common ones."""
        return max(self.groups, key=lambda group: group.layers).config

    @property
    def is_causal(self) -> bool:
        """True if every layer is causal, so that the model can decode."""
        return all(getattr(group.config, "causal", False) for group in self.groups)

    @cached_property
    def parameters(self) -> Parameters:
        """Parameters of all attention layers."""
        groups = (count_parameters(group.config).times(group.layers) for group in self.groups)
        return sum(groups, Parameters(0, 0, 0, 0, 0))

    def with_parameters(self, total: int | None) -> ModelLayout:
        """Return the layout with `other_parameters`.

        Args:
            total: parameters of the whole model, those of attention included; None if unknown.
        """
        return self if total is None else replace(self, other_parameters=max(0, total - self.parameters.total))

    def with_causal(self, causal: bool | None) -> ModelLayout:
        """Return the model with causal or bidirectional layers, and a note about it; None changes nothing.

        Args:
            causal: True for causal layers, False for bidirectional ones, None for no change.
        """
        if causal is None or all(getattr(group.config, "causal", None) is causal for group in self.groups):
            return self
        groups = tuple(LayerGroup(_with_causal(group.config, causal), group.layers) for group in self.groups)
        return replace(self, groups=groups, notes=(*self.notes, causal_note(causal)))

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as a dictionary of JSON types."""
        return {
            "name": self.name,
            "groups": [{"layers": group.layers, "config": group.config.to_dict()} for group in self.groups],
            "context": self.context,
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
            "cache_dtype": None if self.cache_dtype is None else dtype_name(self.cache_dtype),
            "notes": list(self.notes),
            "other_parameters": self.other_parameters,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ModelLayout:
        """Return the layout that `to_dict` wrote.

        Args:
            content: the dictionary.
        """
        groups, context, notes = content.get("groups"), content.get("context"), content.get("notes") or []
        if not isinstance(groups, list) or not isinstance(notes, list):
            raise OptionError(f"groups and notes must be lists, got groups {groups!r} and notes {notes!r}")
        other = content.get("other_parameters")
        for name, number, least in (("context", context, 1), ("other_parameters", other, 0)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
                sign = "positive" if least else "non-negative"
                raise OptionError(f"{name} must be a {sign} integer or null, got {number!r}")
        dtypes = {name: named_dtype(content[name]) if content.get(name) else None for name in ("dtype", "cache_dtype")}
        layer_groups = tuple(_read_group(number, group) for number, group in enumerate(groups))
        name, notes = str(content.get("name", "")), tuple(map(str, notes))
        return cls(name, layer_groups, context, **dtypes, notes=notes, other_parameters=other)

    def to_json(self) -> str:
        """Return the layout as JSON text."""
        return json.dumps(self.to_dict(), indent=2)


def causal_note(causal: bool) -> str:
    """Return the note on a model whose cost is counted with another mask than its own."""
    actual, counted = ("bidirectional", "causal") if causal else ("causal", "bidirectional")
    return f"this model is {actual}; counted as {counted}, as requested"


def check_window(window: int | None, *, causal: bool) -> None:
    if window is not None and not causal:
        raise OptionError(
            f"a window needs causal layers, got a window of {window} in bidirectional layers; count them as causal, "
            "or without the window"
        )


def _with_causal(config: AttentionConfig, causal: bool) -> AttentionConfig:
    if not any(x.name == "causal" for x in fields(config)):
        raise OptionError(f"{type(config).__name__} has no field `causal`, got causal {causal}; omit it")
    check_window(getattr(config, "window", None), causal=causal)
    changed: AttentionConfig = replace(config, causal=causal)  # type: ignore[call-arg]
    return changed


def _read_group(number: int, content: Any) -> LayerGroup:
    if not isinstance(content, Mapping) or not {"layers", "config"} <= content.keys():
        raise OptionError(f"group {number} must be an object with layers and config, got {content!r}")
    return LayerGroup(AttentionConfig.from_dict(content["config"]), content["layers"])


def grouped(configs: Iterable[AttentionConfig]) -> tuple[LayerGroup, ...]:
    """Group equal configs, in order of first appearance."""
    return tuple(LayerGroup(config, count) for config, count in Counter(configs).items())

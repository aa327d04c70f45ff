"""Find the transformers config that describes edited heads by building its class and comparing."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.geometry import HeadLayout
from polyhead.surgery.adapters.attention_layer import AttentionLayer, key_map_of
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.native.configs import ConfigChange, config_at, configs_of, head_count_changes


@dataclass(frozen=True, slots=True, eq=False)
class NativeFit:
    """A native model on the meta device with the required shapes, or the rule that was violated.

    `changes` are the config values that differ from the model's own.
    """

    built: Any = None
    changes: tuple[ConfigChange, ...] = ()
    rule: str = ""


def fit_edited(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    layouts: Mapping[str, HeadLayout],
    parameters: Mapping[str, Tensor],
) -> NativeFit:
    """Fit the native class to the heads that a transformers model would have after an edit.

    `layouts` are those of the edited layers by path and `parameters` their new weights by name. A config has one number
    of heads for all layers that read it, and many families derive the head width from it.
    """
    requested = _needed_changes(model, layers, layouts)
    rule = requested if isinstance(requested, str) else _key_map_rule(layers, layouts)
    if isinstance(requested, str) or rule:
        return NativeFit(rule=rule)
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    all_layouts = {layer.path: layouts.get(layer.path, layer.layout) for layer in layers}
    return fit_native(model, requested, {path: x for path, x in all_layouts.items() if x is not None}, shapes)


def fit_uniform(model: nn.Module, layers: Sequence[AttentionLayer]) -> NativeFit:
    """Fit the native class to the heads that a model has now."""
    layouts = {layer.path: layer.layout for layer in layers if layer.layout is not None}
    if rule := _key_map_rule(layers, layouts):
        return NativeFit(rule=rule)
    unchanged = fit_native(model, (), layouts)
    if unchanged.built is not None:
        return unchanged
    requested = _needed_changes(model, layers, {})
    if isinstance(requested, str):
        return NativeFit(rule=requested)
    return fit_native(model, requested, layouts) if requested else unchanged


def fit_native(
    model: nn.Module,
    changes: Sequence[ConfigChange],
    layouts: Mapping[str, HeadLayout],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> NativeFit:
    """Compare the native class of a changed config with the model's tensors and head layouts.

    `shapes` overrides the shapes of tensors that will differ from the model's.
    """
    built = build_native(model, changes)
    if isinstance(built, str):
        return NativeFit(rule=built)
    in_config = {layer.path: layer for layer in find_layers(built)}
    for path, layout in layouts.items():
        layer = in_config.get(path)
        if layer is None:
            return NativeFit(rule=f"{type(model).__name__} built from its config has no attention layer {path}")
        if layer.layout is None:
            return NativeFit(
                rule=f"{type(layer.module).__name__} built from its config cannot be edited: {layer.refusals[0]}"
            )
        if layer.layout != layout:
            return NativeFit(
                rule=f"a config of {type(model).__name__} gives {_describe(layer.layout)} where {path} has "
                f"{_describe(layout)}"
            )
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()} | dict(shapes or {})
    mismatch = tensor_mismatch(built, expected)
    return NativeFit(rule=mismatch) if mismatch else NativeFit(built, tuple(changes))


def tensor_mismatch(built: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the first tensor in which a native class differs from these shapes, in words; empty if there is none."""
    actual = {name: tuple(x.shape) for name, x in built.state_dict().items()}
    for name in sorted(set(shapes) | set(actual)):
        if shapes.get(name) != actual.get(name):
            has = f"{name} of shape {list(actual[name])}" if name in actual else f"no {name}"
            expected = f"one of shape {list(shapes[name])}" if name in shapes else "none"
            return f"{type(built).__name__} built from its config has {has}, but the model has {expected}"
    return ""


def build_native(model: Any, changes: Sequence[ConfigChange]) -> Any:
    """Build the native class on the meta device from a JSON round trip of its config, or return why not.

    Some rules are enforced only on reading: Llama's live config accepts any number of heads, `from_dict` does not.
    """
    config = copy.deepcopy(model.config)
    try:
        for change in changes:
            setattr(config_at(config, change.path), change.name, change.after)
        config = type(config).from_dict(json.loads(config.to_json_string()))
        with torch.random.fork_rng(devices=[]), torch.device("meta"), without_init():
            return type(model)(config)
    except Exception as error:  # noqa: BLE001 - classes raise all kinds of errors for configs they reject
        reason = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
        return f"{type(model).__name__} cannot be built: {reason.rstrip('.') or type(error).__name__}"


def without_init() -> AbstractContextManager[None]:
    """Context manager that builds transformers models without random weight initialisation."""
    from transformers import initialization

    context: AbstractContextManager[None] = initialization.no_init_weights()
    return context


def _needed_changes(
    model: Any, layers: Sequence[AttentionLayer], layouts: Mapping[str, HeadLayout]
) -> tuple[ConfigChange, ...] | str:
    """Return the config changes for these layouts (by default the current ones), or why none exist."""
    changes: list[ConfigChange] = []
    for path, config in configs_of(model.config):
        readers = [layer for layer in layers if getattr(layer.module, "config", None) is config]
        target = {layer.path: layouts.get(layer.path, layer.layout) for layer in readers}
        if not readers or None in target.values() or (len(layouts) and not set(target) & set(layouts)):
            continue
        sizes: dict[tuple[int, int, int], list[str]] = {}
        several = len({layer.stack for layer in readers}) > 1
        for layer in readers:
            if (x := target[layer.path]) is not None:
                name = layer.path if several else str(layer.number)
                sizes.setdefault((x.num_heads, x.num_kv_heads, x.head_dim), []).append(name)
        if len(sizes) > 1:
            return f"all layers need the same number of heads, got {_by_layer(sizes)}"
        if len(layouts) and all(layer.layout == target[layer.path] for layer in readers):
            continue
        changes += head_count_changes(path, config, *next(iter(sizes)))
    return tuple(changes)


def _by_layer(sizes: Mapping[tuple[int, int, int], Sequence[str]]) -> str:
    """Describe layers of several sizes, the most frequent one last: 7 (layers 0, 2) and 8 (the others)."""
    grouped = any(heads != kv_heads for heads, kv_heads, _ in sizes)
    *rare, (frequent, _) = sorted(sizes.items(), key=lambda item: len(item[1]))

    def words(size: tuple[int, int, int]) -> str:
        dim = f" of {size[2]} channels" if len({head_dim for *_, head_dim in sizes}) > 1 else ""
        return f"{size[0]}{dim}{f' over {size[1]} KV heads' if grouped else ''}"

    counts = [f"{words(x)} (layer{'s'[: len(y) - 1]} {', '.join(y)})" for x, y in rare]
    return f"{', '.join(counts)} and {words(frequent)} (the others)"


def _key_map_rule(layers: Sequence[AttentionLayer], layouts: Mapping[str, HeadLayout]) -> str:
    """Return why native attention cannot read the KV heads of these layouts, by path; empty if it can."""
    for layer in layers:
        layout = layouts.get(layer.path)
        key_heads = None if layout is None else key_map_of(layer, layout)
        if layout is None or key_heads is None:
            continue
        if layout.key_heads is None:
            return (
                f"native {type(layer.module).__name__} has one KV head per head, but {layer.path} has "
                f"{_describe(layout)}"
            )
        return f"native attention reads KV heads in order and in equal groups, but {layer.path} reads {list(key_heads)}"
    return ""


def _describe(layout: HeadLayout) -> str:
    heads = "head" if layout.num_heads == 1 else "heads"
    return f"{layout.num_heads} {heads} of {layout.head_dim} channels over {layout.num_kv_heads} KV heads"

"""Which config of transformers describes edited heads: decided by building the native class from it and comparing."""

from __future__ import annotations

import copy
import json
import sys
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
    """A model of the native class on the meta device that has the shapes that were asked for; or the rule that failed.

    `changes` are what its config has that the model's own has not.
    """

    built: Any = None
    changes: tuple[ConfigChange, ...] = ()
    rule: str = ""


def config_changes(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    layouts: Mapping[str, HeadLayout],
    parameters: Mapping[str, Tensor],
) -> tuple[ConfigChange, ...]:
    """What to write into the model's config so that its native class has these heads; nothing where none can say it.

    `layouts` are those of the edited layers by path and `parameters` their new weights by name. A config says one
    number of heads for all the layers that read it, and many families derive the width of a head from it.
    """
    if not is_transformers_model(model):
        return ()
    requested = _needed_changes(model, layers, layouts)
    if isinstance(requested, str) or not requested:
        return ()
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    kept = {layer.path: layouts.get(layer.path, layer.layout) for layer in layers}
    return fit_native(model, requested, {path: x for path, x in kept.items() if x is not None}, shapes).changes


def fit_uniform(model: nn.Module, layers: Sequence[AttentionLayer]) -> NativeFit:
    """The native class with the heads that a model has, as it is."""
    layouts = {layer.path: layer.layout for layer in layers if layer.layout is not None}
    for layer in layers:
        if layer.layout is not None and (key_heads := key_map_of(layer, layer.layout)) is not None:
            if layer.layout.key_heads is None:
                return NativeFit(
                    rule=f"native {type(layer.module).__name__} has a KV head for every head, and {layer.path} "
                    f"has {_describe(layer.layout)}"
                )
            return NativeFit(
                rule=f"native attention reads KV heads in even groups and in their order, and {layer.path} reads "
                f"{list(key_heads)}"
            )
    as_it_is = fit_native(model, (), layouts)
    if as_it_is.built is not None:
        return as_it_is
    requested = _needed_changes(model, layers, {})
    if isinstance(requested, str):
        return NativeFit(rule=requested)
    return fit_native(model, requested, layouts) if requested else as_it_is


def fit_native(
    model: nn.Module,
    changes: Sequence[ConfigChange],
    layouts: Mapping[str, HeadLayout],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> NativeFit:
    """The native class of a changed config, held against the tensors of the model and the layouts of its layers.

    `shapes` are those of tensors that are to differ from the model's.
    """
    built = build_native(model, changes)
    if isinstance(built, str):
        return NativeFit(rule=built)
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items()} | dict(shapes or {})
    found = {name: tuple(x.shape) for name, x in built.state_dict().items()}
    for name in sorted(set(wanted) ^ set(found)):
        there = "has no" if name in wanted else "has a tensor"
        return NativeFit(rule=f"{type(model).__name__} of its config {there} {name}")
    in_config = {layer.path: layer for layer in find_layers(built)}
    for path, layout in layouts.items():
        layer = in_config[path]
        if layer.layout is None:
            return NativeFit(rule=f"{type(layer.module).__name__} of its config cannot run: {layer.refusals[0]}")
        if layer.layout != layout:
            return NativeFit(
                rule=f"a config of {type(model).__name__} makes {_describe(layer.layout)} where {path} has "
                f"{_describe(layout)}"
            )
    for name, shape in wanted.items():
        if found[name] != shape:
            return NativeFit(
                rule=f"{type(model).__name__} of its config has {name} of shape {list(found[name])}, not {list(shape)}"
            )
    return NativeFit(built, tuple(changes))


def build_native(model: Any, changes: Sequence[ConfigChange]) -> Any:
    """The native class on the meta device, its config read from JSON as `from_pretrained` reads it; or why it is none.

    Some rules hold only there: Llama's config takes any number of heads while it lives, and is refused when it is read.
    """
    config = copy.deepcopy(model.config)
    try:
        for change in changes:
            setattr(config_at(config, change.path), change.name, change.after)
        config = type(config).from_dict(json.loads(config.to_json_string()))
        with torch.random.fork_rng(devices=[]), torch.device("meta"), without_init():
            return type(model)(config)
    except Exception as error:  # noqa: BLE001 - every class has rules of its own, and any that is broken says no
        words = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
        return f"{type(model).__name__} cannot be built: {words or type(error).__name__}"


def without_init() -> AbstractContextManager[None]:
    """While it lasts, models of transformers are built without filling their weights with random numbers."""
    from transformers import initialization

    found: AbstractContextManager[None] = initialization.no_init_weights()
    return found


def is_transformers_model(model: nn.Module) -> bool:
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _needed_changes(
    model: Any, layers: Sequence[AttentionLayer], layouts: Mapping[str, HeadLayout]
) -> tuple[ConfigChange, ...] | str:
    """What each config must say so that its readers have these heads, those they have by default; or why none can."""
    changes: list[ConfigChange] = []
    for path, config in configs_of(model.config):
        readers = [layer for layer in layers if getattr(layer.module, "config", None) is config]
        kept = {layer.path: layouts.get(layer.path, layer.layout) for layer in readers}
        if not readers or None in kept.values() or (len(layouts) and not set(kept) & set(layouts)):
            continue
        sizes = {(x.num_heads, x.num_kv_heads, x.head_dim): name for name, x in kept.items() if x is not None}
        mapped = [layer.path for layer in readers if (x := kept[layer.path]) is not None and key_map_of(layer, x)]
        if len(sizes) > 1:
            told = [f"{heads} over {kv_heads} KV heads in {name}" for (heads, kv_heads, _), name in sizes.items()]
            return (
                f"a {type(config).__name__} says one number of heads for all its layers, and there are "
                + ", ".join(told[:2])
                + (", ..." if len(told) > 2 else "")
            )
        if mapped:
            return f"no config says which KV heads {mapped[0]} reads"
        if len(layouts) and all(layer.layout == kept[layer.path] for layer in readers):
            continue
        changes += head_count_changes(path, config, *next(iter(sizes)))
    return tuple(changes)


def _describe(layout: HeadLayout) -> str:
    heads = "head" if layout.num_heads == 1 else "heads"
    return f"{layout.num_heads} {heads} of {layout.head_dim} channels over {layout.num_kv_heads} KV heads"

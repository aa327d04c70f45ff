"""Which config of transformers describes edited heads: decided by building the stock class from it and comparing."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.geometry import HeadLayout
from polyhead.surgery.anatomy import AttentionLayer, key_map_of
from polyhead.surgery.forms import HEAD_WIDTHS
from polyhead.surgery.records import ConfigChange


def config_changes(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    layouts: Mapping[str, HeadLayout],
    parameters: Mapping[str, Tensor],
) -> tuple[ConfigChange, ...]:
    """What to write into the model's config so that its stock class has these heads; nothing where none can say it.

    `layouts` are those of the edited layers by path and `parameters` their new weights by name. A config says one
    number of heads for all the layers that read it, and many families derive the width of a head from it.
    """
    if not is_transformers_model(model):
        return ()
    changes = []
    for path, config in _configs(model.config):
        readers = [layer for layer in layers if getattr(layer.module, "config", None) is config]
        kept = [layouts.get(layer.path, layer.layout) for layer in readers]
        if not any(layer.path in layouts for layer in readers) or None in kept:
            continue
        sizes = {(x.num_heads, x.num_kv_heads, x.head_dim) for x in kept if x is not None}
        mapped = any(x is not None and key_map_of(layer, x) for layer, x in zip(readers, kept, strict=True))
        if len(sizes) > 1 or mapped:
            return ()
        if all(layer.layout == x for layer, x in zip(readers, kept, strict=True)):
            continue
        changes += list(_asked(path, config, *sizes.pop()))
    return tuple(changes) if changes and _builds(model, layers, layouts, parameters, changes) else ()


def is_transformers_model(model: nn.Module) -> bool:
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def config_at(config: Any, path: str) -> Any:
    """The config that `ConfigChange.path` names."""
    for name in path.split(".") if path else ():
        config = getattr(config, name)
    return config


def _configs(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _configs(inner, f"{path}.{name}" if path else name)


def _asked(path: str, config: Any, heads: int, kv_heads: int, head_dim: int) -> Iterator[ConfigChange]:
    values = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    for name, value in values.items():
        there = hasattr(config, name)
        before = getattr(config, name, None)
        if before != value and (there or name == "head_dim"):
            yield ConfigChange(path, name, before, value, there)


def _builds(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    layouts: Mapping[str, HeadLayout],
    parameters: Mapping[str, Tensor],
    changes: Sequence[ConfigChange],
) -> bool:
    """Whether the stock class, built from the changed config, has the shapes of the edited model and its head width."""
    config = copy.deepcopy(model.config)
    try:
        for change in changes:
            setattr(config_at(config, change.path), change.name, change.after)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            built = type(model)(config)
    except Exception:  # noqa: BLE001 - every class has rules of its own, and any that is broken says no
        return False
    wanted = {name: tuple(parameters.get(name, p).shape) for name, p in model.named_parameters()}
    if wanted != {name: tuple(p.shape) for name, p in built.named_parameters()}:
        return False
    for layer in layers:
        layout = layouts.get(layer.path)
        module = built.get_submodule(layer.path)
        widths = [getattr(module, name) for name in HEAD_WIDTHS if isinstance(getattr(module, name, None), int)]
        if layout is not None and widths[:1] != [layout.head_dim]:
            return False
    return True

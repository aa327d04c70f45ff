"""Original heads of edited layers, stored as an attribute of attention modules and in the model's config.

In memory, the module attribute takes precedence. The config of a transformers model stores the same data, so that it
survives `save_pretrained` and `from_pretrained`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadOrigins

ATTRIBUTE = "polyhead_origins"  # name of the attribute of an attention module
IN_CONFIG = "polyhead_heads"  # name of the entry of a config, a dictionary by module path


def origins_of(model: nn.Module, path: str, module: nn.Module, num_heads: int) -> HeadOrigins | None:
    """Return the origins of an attention module's current heads; None for a layer that was not edited.

    `path` is the path of the module in the model.
    """
    origins: HeadOrigins | None = getattr(module, ATTRIBUTE, None)
    if origins is None:
        return _in_configs(model, path, num_heads)
    if len(origins.heads) != num_heads:
        raise OptionError(
            f"heads can only be traced through edits of polyhead.surgery, got {path!r} with {num_heads} heads, of "
            f"which the last edit left {len(origins.heads)}; undo the later change"
        )
    return origins


def config_entry(origins: dict[str, HeadOrigins]) -> dict[str, Any] | None:
    """Return the config entry that describes the edited layers; None if there are none."""
    return {
        path: layer_origins.to_dict() for path, layer_origins in origins.items() if not layer_origins.is_unedited
    } or None


def is_edited(model: nn.Module) -> bool:
    """Return whether any layer of the model has edited heads."""
    return any(
        hasattr(module, ATTRIBUTE) or getattr(getattr(module, "config", None), IN_CONFIG, None)
        for module in model.modules()
    )


def _in_configs(model: nn.Module, path: str, num_heads: int) -> HeadOrigins | None:
    """Look up a layer in the config of the outermost model around it that has an entry."""
    names = path.split(".")
    inner: Any = model
    for place in range(len(names)):
        config = getattr(inner, "config", None)
        if getattr(config, IN_CONFIG, None):
            return _in_config(config, ".".join(names[place:]), num_heads)
        inner = getattr(inner, names[place], None)
    return None


def _in_config(config: Any, path: str, num_heads: int) -> HeadOrigins | None:
    """Look up a layer in the config; paths may differ by a prefix if the config was saved by another class."""
    entries = getattr(config, IN_CONFIG)
    if not isinstance(entries, dict):
        raise OptionError(f"{IN_CONFIG} in a config must map layer paths to entries, got {entries!r}")
    matches = [x for name, x in entries.items() if name == path or f".{path}".endswith(f".{name}")]
    matches = matches or [x for name, x in entries.items() if f".{name}".endswith(f".{path}")]
    if not matches:
        return None
    try:
        origins = HeadOrigins.from_dict(matches[0])
    except ShapeError as error:
        raise OptionError(f"{IN_CONFIG} in a config must list the original heads, got for {path}: {error}") from None
    # A model that was newly created from this config has other numbers of heads, all of them original.
    return origins if len(matches) == 1 and len(origins.heads) == num_heads else None

"""The original heads of an edited layer, as a model carries them: on its modules, and in its config for files.

The attribute of a module is what counts while a model lives. The config has the same for a model of transformers, so
that it goes wherever `save_pretrained` and `from_pretrained` take it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadOrigins

ATTRIBUTE = "polyhead_origins"  # of an attention module
IN_CONFIG = "polyhead_heads"  # by the path of the module


def origins_of(model: nn.Module, path: str, module: nn.Module, num_heads: int) -> HeadOrigins | None:
    """The origins of the heads that an attention module has now; None for a layer that was not edited.

    `path` leads from the model to the module.
    """
    found: HeadOrigins | None = getattr(module, ATTRIBUTE, None)
    if found is None:
        return _in_config(getattr(model, "config", None), path, num_heads)
    if len(found.heads) != num_heads:
        raise OptionError(
            f"heads keep their identity in edits of polyhead.surgery, got {path!r} with {num_heads} heads, which such "
            f"an edit left with {len(found.heads)}; undo what changed them since"
        )
    return found


def config_entry(origins: dict[str, HeadOrigins]) -> dict[str, Any] | None:
    """What a config says of the edited layers; None where there are none."""
    return {path: one.to_dict() for path, one in origins.items() if not one.is_unedited} or None


def is_edited(model: nn.Module) -> bool:
    """Whether a model has a layer whose heads were edited."""
    on_modules = any(hasattr(module, ATTRIBUTE) for module in model.modules())
    return on_modules or bool(getattr(getattr(model, "config", None), IN_CONFIG, None))


def _in_config(config: Any, path: str, num_heads: int) -> HeadOrigins | None:
    """As a config says it, which may be that of another class, whose paths begin with a name more or less."""
    entries = getattr(config, IN_CONFIG, None)
    if not entries:
        return None
    if not isinstance(entries, dict):
        raise OptionError(f"{IN_CONFIG} of a config lists layers by their paths, got {entries!r}")
    told = [x for name, x in entries.items() if name == path or f".{path}".endswith(f".{name}")]
    told = told or [x for name, x in entries.items() if f".{name}".endswith(f".{path}")]
    if not told:
        return None
    try:
        found = HeadOrigins.from_dict(told[0])
    except ShapeError as error:
        raise OptionError(f"{IN_CONFIG} of a config says where heads came from, got for {path}: {error}") from None
    # A model that was only built from this config has heads of its own.
    return found if len(told) == 1 and len(found.heads) == num_heads else None

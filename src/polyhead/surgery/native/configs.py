"""Head counts in model configs, and changes to them as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead.errors import OptionError
from polyhead.files import short

NAMES = ("num_attention_heads", "num_key_value_heads", "head_dim")  # the config values that edits change
MAX_VALUE = 1 << 24


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A changed value of a model's config; `path` names a nested config, such as "text_config".

    `model` is the path of the transformers model inside the edited module, empty if that is one itself.
    """

    path: str
    name: str
    before: Any
    after: Any
    was_there: bool = True
    model: str = ""

    def __post_init__(self) -> None:
        """Reject names other than head counts: a change may come from a file and is applied with setattr."""
        if self.name not in NAMES or not all(part.isidentifier() and part[0] != "_" for part in self._parts()):
            raise OptionError(
                f"a config change must be of {', '.join(NAMES)}, in the config or one nested in it, got "
                f"{short(self.name)} in {short(self.path)}"
            )
        for value in (self.before, self.after):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_VALUE
            ):
                raise OptionError(f"{self.name} of a config must be 1 to {MAX_VALUE:,}, got {short(value)}")

    def _parts(self) -> list[str]:
        return str(self.path).split(".") if self.path else []


def config_at(config: Any, path: str) -> Any:
    """Return the (nested) config that `ConfigChange.path` names."""
    for name in path.split(".") if path else ():
        inner = getattr(config, name, None) if name in config.sub_configs else None
        if inner is None:
            raise OptionError(
                f"{type(config).__name__} has the nested configs {list(config.sub_configs)}, got {short(name)}"
            )
        config = inner
    return config


def configs_of(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a config and its nested configs, with their paths."""
    yield path, config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from configs_of(inner, f"{path}.{name}" if path else name)


def head_count_changes(path: str, config: Any, heads: int, kv_heads: int, head_dim: int) -> tuple[ConfigChange, ...]:
    """Return the changes that give a config these head counts."""
    values = dict(zip(NAMES, (heads, kv_heads, head_dim), strict=True))
    changes = []
    for name, value in values.items():
        exists = hasattr(config, name)
        before = getattr(config, name, None)
        if before != value and (exists or name == "head_dim"):
            changes.append(ConfigChange(path, name, before, value, exists))
    return tuple(changes)


def join_changes(first: Sequence[ConfigChange], second: Sequence[ConfigChange]) -> tuple[ConfigChange, ...]:
    """Combine successive config changes into one change per value."""
    joined = {(change.model, change.path, change.name): change for change in first}
    for change in second:
        place = change.model, change.path, change.name
        earlier = joined.get(place, change)
        joined[place] = dataclasses.replace(earlier, after=change.after)
    return tuple(joined.values())

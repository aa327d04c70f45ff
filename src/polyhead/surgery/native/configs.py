"""What the configs of a model say of its heads, and changes of them as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead.errors import OptionError
from polyhead.files import short

NAMES = ("num_attention_heads", "num_key_value_heads", "head_dim")  # all that an edit changes in a config
MOST = 1 << 24


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One value of a model's config. `path` is empty, or names a config inside it, as in "text_config"."""

    path: str
    name: str
    before: Any
    after: Any
    was_there: bool = True

    def __post_init__(self) -> None:
        """Refuse every name but those of heads: a change may come from a file, and is written with setattr."""
        if self.name not in NAMES or not all(part.isidentifier() and part[0] != "_" for part in self._parts()):
            raise OptionError(
                f"a change of a config is of {', '.join(NAMES)}, in it or in a config inside it, got "
                f"{short(self.name)} in {short(self.path)}"
            )
        for value in (self.before, self.after):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST):
                raise OptionError(f"{self.name} of a config is 1 to {MOST:,}, got {short(value)}")

    def _parts(self) -> list[str]:
        return str(self.path).split(".") if self.path else []


def config_at(config: Any, path: str) -> Any:
    """The config that `ConfigChange.path` names."""
    for name in path.split(".") if path else ():
        inner = getattr(config, name, None) if name in config.sub_configs else None
        if inner is None:
            raise OptionError(f"{type(config).__name__} has the configs {list(config.sub_configs)}, got {short(name)}")
        config = inner
    return config


def configs_of(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A config and those inside it, with their paths."""
    yield path, config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from configs_of(inner, f"{path}.{name}" if path else name)


def head_count_changes(path: str, config: Any, heads: int, kv_heads: int, head_dim: int) -> tuple[ConfigChange, ...]:
    """What a config must say so that its layers have these heads."""
    values = dict(zip(NAMES, (heads, kv_heads, head_dim), strict=True))
    changes = []
    for name, value in values.items():
        there = hasattr(config, name)
        before = getattr(config, name, None)
        if before != value and (there or name == "head_dim"):
            changes.append(ConfigChange(path, name, before, value, there))
    return tuple(changes)


def join_changes(first: Sequence[ConfigChange], second: Sequence[ConfigChange]) -> tuple[ConfigChange, ...]:
    """Changes of a config made one after the other, as one change of each value."""
    joined = {(change.path, change.name): change for change in first}
    for change in second:
        known = joined.get((change.path, change.name), change)
        joined[change.path, change.name] = dataclasses.replace(known, after=change.after)
    return tuple(joined.values())

"""What the configs of a model say of its heads, and changes of them as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One value of a model's config. `path` is empty, or names a config inside it, as in "text_config"."""

    path: str
    name: str
    before: Any
    after: Any
    was_there: bool = True


def config_at(config: Any, path: str) -> Any:
    """The config that `ConfigChange.path` names."""
    for name in path.split(".") if path else ():
        config = getattr(config, name)
    return config


def configs_of(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A config and those inside it, with their paths."""
    yield path, config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from configs_of(inner, f"{path}.{name}" if path else name)


def ask_for(path: str, config: Any, heads: int, kv_heads: int, head_dim: int) -> tuple[ConfigChange, ...]:
    """What a config must say so that its layers have these heads."""
    values = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
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

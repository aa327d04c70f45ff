"""Check that folders are the shards of one run: all of them, each once, complete, and of the same origin."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyhead.errors import OptionError
from polyhead.files import as_type, refusing
from polyhead.inspection.run_files import OBSERVATIONS, check_shards
from polyhead.inspection.settings import Settings
from polyhead.inspection.text_pass import shard_of
from polyhead.observation import read_facts
from polyhead.sources import Shard

_NAMED = 32  # missing shards in an error
# What merging needs to know of a shard, and its types.
_FACTS: dict[str, Any] = {
    "settings": Mapping[str, Any],
    "shard": Any,  # `shard_of` reads it
    "batches": int,
    "digest": str | None,
    "tokens": int,
    "complete": bool,
    "versions": Mapping[str, str],
    "model": str,
    "text": str,
}


def checked_shards(folders: Sequence[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the files and facts of all shards of one run in order; raise if they are not exactly that."""
    if not folders:
        raise OptionError("merge-runs needs the folders of all shards of a run, got none")
    check_shards(folders)
    shards: dict[Shard, tuple[Path, dict[str, Any]]] = {}
    for folder in folders:
        path = folder / OBSERVATIONS
        facts = _facts_of(path)
        shard = shard_of(path, facts)
        if shard in shards:
            raise OptionError(f"each shard is merged once, got shard {shard} in {shards[shard][0].parent} and {folder}")
        shards[shard] = path, facts
    ordered = sorted(shards, key=lambda shard: (shard.count, shard.index))
    first, last = ordered[0], ordered[-1]
    if first.count != last.count:
        raise OptionError(
            f"shards must be of one run, got shard {first} in {shards[first][0].parent} and {last} in "
            f"{shards[last][0].parent}"
        )
    if first.count == 1:
        raise OptionError(f"merge-runs merges shards, got {folders[0]}, a run over the whole text")
    if absent := first.count - len(shards):
        missing = (
            str(shard) for shard in map(Shard, itertools.count(), itertools.repeat(first.count)) if shard not in shards
        )
        named = ", ".join(itertools.islice(missing, min(absent, _NAMED)))
        more = f" and {absent - _NAMED} more" if absent > _NAMED else ""
        raise OptionError(f"merge-runs needs all {first.count} shards, got no shard {named}{more}")
    for shard in ordered:
        _check_same(*shards[first], *shards[shard])
    if unfinished := [shards[shard][0].parent for shard in ordered if not shards[shard][1]["complete"]]:
        raise OptionError(
            f"all shards must be complete, got a part of {', '.join(map(str, unfinished))}; continue it with: polyhead "
            f"inspect --resume {unfinished[0]}"
        )
    return [shards[shard] for shard in ordered]


def _facts_of(path: Path) -> dict[str, Any]:
    """Return the facts of a shard; raise if one is missing or of another type."""
    facts = read_facts(path)
    if missing := [name for name in _FACTS if name not in facts]:
        raise OptionError(f"a shard records its {missing[0]}, got {path.parent}, a run of an earlier version")
    with refusing(path, "a shard is read as `polyhead inspect --shard` wrote it"):
        Settings.from_dict(facts["settings"])
        return {**facts, **{name: as_type(facts[name], kind, name) for name, kind in _FACTS.items()}}


def _check_same(path: Path, facts: Mapping[str, Any], other_path: Path, other: Mapping[str, Any]) -> None:
    """Raise if two shards are of different models, texts, settings or versions."""
    one, two = path.parent, other_path.parent
    for name, what in (("model", "model (weights and config)"), ("text", "text, tokenizer and contexts")):
        if facts[name] != other[name]:
            raise OptionError(f"shards must be of the same {what}, got another in {two} than in {one}")
    for name, value in _comparable(facts).items():
        if (got := _comparable(other).get(name)) != value:
            raise OptionError(f"shards must have the same {name}, got {value!r} in {one} and {got!r} in {two}")


def _comparable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return versions and settings on which a result depends; a model and a text are compared by their fingerprints."""
    settings = dataclasses.asdict(Settings.from_dict(facts["settings"]))
    settings["device"] = settings["device"].partition(":")[0]  # each process may have a GPU of its own
    for name in ("model", "text", "field"):
        del settings[name]
    return {**{f"version of {name}": version for name, version in facts["versions"].items()}, **settings}

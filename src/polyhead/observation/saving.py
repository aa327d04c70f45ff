"""Observations in a file: everything that was gathered, bit for bit, and nothing half-written."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.files import as_type, build, check_regular, read_tensors, refusing
from polyhead.observation.collectors import Collector, CollectorState
from polyhead.observation.observations import Observations
from polyhead.observation.renamed import current_name
from polyhead.observation.statistics import NAMES, AttentionSite, SiteStatistics, Wanted

FORMAT = 2  # 1 had other names for some statistics
_KEY = "polyhead.observations"
_RULE = "observations are read as polyhead saved them"


def save(path: str | os.PathLike[str], observations: Observations, facts: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file that says in its header what its tensors are; `facts` stand there as well, as JSON.

    It replaces what was there in one step: whoever reads the path finds the old file or the new one, whole.
    """
    from safetensors.torch import save as serialise

    tensors: dict[str, Tensor] = {}
    statistics = {x.site: x for x in observations.sites}
    sites = []
    for index, site in enumerate(dict.fromkeys([*observations.calls, *statistics, *observations.collected])):
        described: dict[str, Any] = {**site.to_dict(), "calls": observations.calls.get(site, 0)}
        parts: dict[str, dict[str, Tensor]] = {}
        if site in statistics:
            described |= {"heads": statistics[site].heads, "columns": statistics[site].columns}
            parts["statistics"] = statistics[site].state()
        collected = observations.collected.get(site, {})
        described["collected"] = list(collected)
        parts |= {f"gathered.{name}": value.state() for name, value in collected.items()}
        for part, state in parts.items():
            tensors |= {f"{index}.{part}.{name}": x.detach().cpu().clone() for name, x in state.items()}
        sites.append(described)
    header = {"format": FORMAT, "wanted": asdict(observations.wanted), "sites": sites, "facts": dict(facts or {})}
    write_whole(Path(path), serialise(tensors, {_KEY: json.dumps(header)}))


def load(path: str | os.PathLike[str], collect: Sequence[Collector] = ()) -> Observations:
    """Read a file that `save` wrote; `collect` are the gatherers whose values it holds."""
    facts = _header(path)
    tensors, _ = read_tensors(path, _RULE)
    with refusing(path, _RULE):
        return _observations(path, facts, tensors, collect)


def _observations(
    path: str | os.PathLike[str], facts: Mapping[str, Any], tensors: Mapping[str, Tensor], collect: Sequence[Collector]
) -> Observations:
    wanted = build(Wanted, facts["wanted"])
    found = {collector.name: collector for collector in collect}
    sites, collected, calls = [], {}, {}
    for index, described in enumerate(facts["sites"]):
        site = AttentionSite.from_dict(described)
        calls[site] = as_type(described["calls"], int, "calls")
        if "columns" in described:
            state = _part(tensors, f"{index}.statistics.")
            sites.append(_statistics(site, described["heads"], described["columns"], state))
        values = {}
        for name in described["collected"]:
            if name not in found:
                raise OptionError(
                    f"{str(path)!r} holds what {name!r} gathered, got gatherers {', '.join(found) or 'none'}"
                )
            values[name] = _value(found[name], site, _part(tensors, f"{index}.gathered.{name}."))
        collected[site] = values
    return Observations(wanted, tuple(sites), collected, calls)


def read_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts that a file was saved with."""
    with refusing(path, _RULE):
        facts: dict[str, Any] = as_type(_header(path)["facts"], Mapping[str, Any], "facts")
        return facts


def _header(path: str | os.PathLike[str]) -> dict[str, Any]:
    from safetensors import safe_open

    with refusing(path, "observations are read from a safetensors file"):
        check_regular(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            header = (file.metadata() or {}).get(_KEY)
    if header is None:
        raise OptionError(f"observations are read from a file that polyhead saved, got {str(path)!r}, another one")
    with refusing(path, _RULE):
        found: dict[str, Any] = as_type(json.loads(header), Mapping[str, Any], "the header")
        if found["format"] == 1:
            return _upgraded(found)
        if found["format"] != FORMAT:
            raise OptionError(
                f"this version reads observations of format {FORMAT}, got format {found['format']} in {str(path)!r}"
            )
    return found


def _upgraded(header: Mapping[str, Any]) -> dict[str, Any]:
    """Header of format 1 as one of format 2."""
    wanted = {**header["wanted"], "names": [current_name(name) for name in header["wanted"]["names"]]}
    sites = [{**site, "collected": site["gathered"]} for site in header["sites"]]
    for site in sites:
        if "columns" in site:
            site["columns"] = [current_name(name) for name in site["columns"]]
    return {**header, "format": FORMAT, "wanted": wanted, "sites": sites}


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step; where that fails, as on a full disk, what was there is as it was."""
    try:
        _write_whole(path, content)
    except OSError as error:
        raise OptionError(
            f"a file is written where there is room and permission, got {path}: {error.strerror or error}"
        ) from error


def _write_whole(path: Path, content: bytes) -> None:
    if path.exists() and not path.is_file():
        raise OSError(None, "it is there already, and no regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    # Readable for whoever may read other new files here, which a temporary file of `tempfile` is not.
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def _statistics(site: AttentionSite, heads: Any, columns: Any, state: Mapping[str, Tensor]) -> SiteStatistics:
    heads, columns = as_type(heads, tuple[int, ...], "heads"), as_type(columns, tuple[str, ...], "columns")
    unknown = [name for name in columns if name not in NAMES]
    if unknown or any(not 0 <= head < site.num_heads for head in heads):
        raise OptionError(
            f"statistics are of the heads 0 to {site.num_heads - 1} and of known names, got {heads} and {columns}"
        )
    for name, x in state.items():
        if x.shape != (len(columns), len(heads)) or not x.is_floating_point():
            raise OptionError(
                f"{name} of {site.name!r} has a number for each of {len(columns)} statistics and {len(heads)} heads, "
                f"got shape {list(x.shape)} of {x.dtype}"
            )
    return SiteStatistics.empty(site, heads, columns).with_state(state)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _value(collector: Collector, site: AttentionSite, state: Mapping[str, Tensor]) -> CollectorState:
    empty = collector.empty(site, torch.device("cpu"))
    if empty is None:
        raise OptionError(f"{collector.name!r} gathers nothing at {site.name!r}, got a file in which it did")
    return empty.with_state(state)

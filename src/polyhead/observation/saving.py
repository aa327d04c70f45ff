"""Save and load observations as safetensors files, bit-exact and written atomically."""

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
from polyhead.observation.accumulators import with_prefix
from polyhead.observation.collectors import Collector, CollectorState
from polyhead.observation.observations import Observations
from polyhead.observation.renamed import current_name
from polyhead.observation.statistics import NAMES, AttentionSite, SiteStatistics, StatisticsRequest

FORMAT = 2  # format 1 used other names for some statistics
_KEY = "polyhead.observations"
_RULE = "observations must be a file saved by polyhead"


def save(path: str | os.PathLike[str], observations: Observations, facts: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file whose header describes its tensors and contains `facts` as JSON.

    The file is replaced atomically: readers see either the old or the new file.

    Args:
        path: the file.
        observations: `session.observations`.
        facts: anything to store as JSON with them.
    """
    from safetensors.torch import save as serialise

    header, tensors = to_tensors(observations)
    header["facts"] = dict(facts or {})
    write_atomically(Path(path), serialise(_unshared(tensors), {_KEY: json.dumps(header)}))


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous and each alone in its memory, as safetensors requires."""
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, x in tensors.items():
        owned[name] = x = x.detach().cpu()
        storage = x.untyped_storage()
        if not x.is_contiguous() or storage.nbytes() != x.nbytes or storage.data_ptr() in storages:
            owned[name] = x.clone(memory_format=torch.contiguous_format)
        storages.add(storage.data_ptr())
    return owned


def to_tensors(observations: Observations) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a header of JSON types and named tensors, from which `from_tensors` restores the observations."""
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
            tensors |= {f"{index}.{part}.{name}": x for name, x in state.items()}
        sites.append(described)
    return {"format": FORMAT, "wanted": asdict(observations.wanted), "sites": sites}, tensors


def load(path: str | os.PathLike[str], collect: Sequence[Collector] = ()) -> Observations:
    """Read a file written by `save`; `collect` lists the collectors whose states it contains.

    Args:
        path: the file.
        collect: the collectors of the session that was saved.

    Returns:
        The observations, on the CPU.
    """
    header = _header(path)
    tensors, _ = read_tensors(path, _RULE)
    with refusing(path, _RULE):
        return from_tensors(str(path), header, tensors, collect)


def on_cpu(observations: Observations, collect: Sequence[Collector]) -> Observations:
    """Return observations with all tensors on the CPU, as those of a file."""
    header, tensors = to_tensors(observations)
    return from_tensors("this process", header, {name: x.cpu() for name, x in tensors.items()}, collect)


def from_tensors(
    source: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor], collect: Sequence[Collector]
) -> Observations:
    """Return the observations that `to_tensors` described; `source` is named in errors."""
    wanted = build(StatisticsRequest, header["wanted"])
    collectors = {collector.name: collector for collector in collect}
    sites, collected, calls = [], {}, {}
    for index, described in enumerate(header["sites"]):
        site = AttentionSite.from_dict(described)
        calls[site] = as_type(described["calls"], int, "calls")
        if "columns" in described:
            state = with_prefix(tensors, f"{index}.statistics.")
            sites.append(_statistics(site, described["heads"], described["columns"], state))
        values = {}
        for name in described["collected"]:
            if name not in collectors:
                raise OptionError(
                    f"{source!r} contains states of the collector {name!r}, got collectors "
                    f"{', '.join(collectors) or 'none'}; pass it as collect=[...]"
                )
            values[name] = _value(collectors[name], site, with_prefix(tensors, f"{index}.gathered.{name}."))
        collected[site] = values
    return Observations(wanted, tuple(sites), collected, calls)


def read_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the facts that a file was saved with.

    Args:
        path: file written by `save`.
    """
    with refusing(path, _RULE):
        facts: dict[str, Any] = as_type(_header(path)["facts"], Mapping[str, Any], "facts")
        return facts


def _header(path: str | os.PathLike[str]) -> dict[str, Any]:
    from safetensors import safe_open

    with refusing(path, "observations must be a safetensors file"):
        check_regular(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            header = (file.metadata() or {}).get(_KEY)
    if header is None:
        raise OptionError(f"{_RULE}, got {str(path)!r} without its header")
    with refusing(path, _RULE):
        fields: dict[str, Any] = as_type(json.loads(header), Mapping[str, Any], "the header")
        if fields["format"] == 1:
            return _upgraded(fields)
        if fields["format"] != FORMAT:
            raise OptionError(
                f"this version reads observations of format {FORMAT}, got format {fields['format']} in {str(path)!r}"
            )
    return fields


def _upgraded(header: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a header of format 1 to format 2."""
    wanted = {**header["wanted"], "names": [current_name(name) for name in header["wanted"]["names"]]}
    sites = [{**site, "collected": site["gathered"]} for site in header["sites"]]
    for site in sites:
        if "columns" in site:
            site["columns"] = [current_name(name) for name in site["columns"]]
    return {**header, "format": FORMAT, "wanted": wanted, "sites": sites}


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically; on failure, such as a full disk, the previous file is unchanged."""
    try:
        _write_whole(path, content)
    except OSError as error:
        raise OptionError(
            f"the file must be writable and fit on the disk, got {path}: {error.strerror or error}"
        ) from error


def _write_whole(path: Path, content: bytes) -> None:
    if path.exists() and not path.is_file():
        raise OSError(None, "it exists and is no regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    # Permissions follow the umask; files made by `tempfile` would be readable by their owner only.
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
            f"statistics must have heads from 0 to {site.num_heads - 1} and known names, got {heads} and {columns}"
        )
    for name, x in state.items():
        if x.shape != (len(columns), len(heads)) or not x.is_floating_point():
            raise OptionError(
                f"{name} of {site.name!r} must be floating point [{len(columns)} statistics, {len(heads)} heads], "
                f"got shape {list(x.shape)} of {x.dtype}"
            )
    return SiteStatistics.empty(site, heads, columns).with_state(state)


def _value(collector: Collector, site: AttentionSite, state: Mapping[str, Tensor]) -> CollectorState:
    empty = collector.empty(site, torch.device("cpu"))
    if empty is None:
        raise OptionError(f"{collector.name!r} does not collect {site.name!r}, got a file with a state for it")
    return empty.with_state(state)

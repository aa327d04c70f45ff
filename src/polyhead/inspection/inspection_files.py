"""Saving and loading of inspections: the table in Parquet, matrices in safetensors, the rest in JSON.

In JSON, a dataclass is an object with its fields, a site is its index in `sites`, a head is [site, head], and NaN is
null. Sentences are for readers of the file and are not read back. Files are written atomically.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from polyhead.analysis.roles import RoleScore
from polyhead.errors import OptionError
from polyhead.files import (
    as_type,
    build,
    check_pyarrow,
    parquet_bytes,
    read_columns,
    read_json,
    read_tensors,
    refusing,
    short,
)
from polyhead.inspection.earlier_formats import upgraded, upgraded_columns
from polyhead.inspection.heads import Head
from polyhead.inspection.result import Inspection
from polyhead.inspection.run_files import INSPECTION, MATRICES, PICTURES, TABLE, check_saved
from polyhead.inspection.settings import Settings
from polyhead.inspection.validation import check_facts, check_head, check_run, check_sites, check_table, check_tensors
from polyhead.inspection.wording import Finding, Reason
from polyhead.observation import AttentionSite, HeadProfile
from polyhead.observation.accumulators import with_prefix
from polyhead.observation.renamed import current_name
from polyhead.observation.saving import write_atomically
from polyhead.observation.statistics import LOCATION

FORMAT = 8  # `earlier_formats` upgrades 2 to 7; 1 is no longer supported
# Fields of an inspection in the JSON file, next to `settings` and `facts`. Their tensors, and all other fields, are in
# the other files.
_IN_JSON = ("roles", "pairs", "findings", "head_maps", "top_keys", "examples")
_PREFIXES = {"spectra": "spectrum.", "influence": "influence.", "halves": "halves."}  # of tensors, by field
# Sentences that are written beside the fields of a value.
_SENTENCES: dict[type, tuple[str, Callable[[Any], str]]] = {
    Finding: ("text", str),
    Reason: ("text", str),
    RoleScore: ("evidence", attrgetter("evidence")),
}
_RULE = "an inspection is read as `polyhead inspect --save` wrote it"


def save_inspection(folder: str | os.PathLike[str], inspection: Inspection) -> None:
    """Write an inspection; the JSON file is written last, so that its presence implies the others.

    An earlier JSON file is removed first: if writing is interrupted, it would be read with the table of another run.

    Args:
        folder: folder to write to; it is created.
        inspection: the result of `polyhead.inspect`.
    """
    from safetensors.torch import save as serialise

    sites = list(
        dict.fromkeys([*inspection.table.sites, *inspection.relations, *inspection.head_maps, *inspection.spectra])
    )
    index = {site: number for number, site in enumerate(sites)}
    folder = Path(folder)
    check_pyarrow(folder / TABLE)
    (folder / INSPECTION).unlink(missing_ok=True)
    write_atomically(folder / TABLE, parquet_bytes(inspection.table.to_arrow()))
    write_atomically(folder / MATRICES, serialise(_contiguous(_numbered(inspection.relations, index))))
    write_atomically(folder / PICTURES, serialise(_contiguous(_pictures(inspection, index))))
    rest = {
        "format": FORMAT,
        "sites": [site.to_dict() for site in sites],
        "statistics": inspection.table.names,
        **{name: _as_json(getattr(inspection, name), index) for name in ("settings", "facts", *_IN_JSON)},
    }
    text = json.dumps(rest, indent=1, ensure_ascii=False) + "\n"
    # A lone surrogate, as in a path that is not UTF-8, is written as a JSON escape.
    write_atomically(folder / INSPECTION, text.encode("utf-8", errors="backslashreplace"))


def load_inspection(folder: str | os.PathLike[str]) -> Inspection:
    """Read what `save_inspection` wrote; raise an error that names the file if one is damaged.

    Args:
        folder: folder of the run.

    Returns:
        The inspection; of a run that was saved by an earlier version, too.

    Raises:
        OptionError: the folder is not that of a run, or a file is damaged.

    >>> import torch, polyhead
    >>> from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
    >>> tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes
    >>> config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> import tempfile
    >>> from polyhead.inspection import load_inspection, save_inspection
    >>> text, options = ["the cat sat on the mat. " * 20], {"context": 64, "tokens": 256, "importance": "none"}
    >>> found = polyhead.inspect(model, text, tokenizer=tokenizer, chance=False, **options)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_inspection(folder, found)
    ...     loaded = load_inspection(folder)
    >>> torch.equal(loaded.table["entropy"], found.table["entropy"])
    True
    """
    folder = Path(folder)
    check_saved(folder)
    rest = read_json(folder / INSPECTION, _RULE)
    if rest.get("format") not in range(2, FORMAT + 1):
        raise OptionError(
            f"this version reads inspections of format 2 to {FORMAT}, "
            f"got {short(rest.get('format'))} in {folder / INSPECTION}; "
            "run `polyhead inspect --save` again, with another folder"
        )
    with refusing(folder / INSPECTION, _RULE):
        rest = rest if rest["format"] == FORMAT else upgraded(rest)
        sites = [AttentionSite.from_dict(site) for site in rest["sites"]]
        check_sites(sites)
        names = tuple(map(current_name, as_type(rest["statistics"], tuple[str, ...], "statistics")))
    matrices, _ = read_tensors(folder / MATRICES, _RULE)
    with refusing(folder / MATRICES, _RULE):
        relations = _read(_by_number(matrices), _hints(Inspection)["relations"], sites)
    pictures, _ = read_tensors(folder / PICTURES, _RULE)
    with refusing(folder / TABLE, _RULE):
        table = _table(folder / TABLE, sites, names, earlier=rest["format"] < 7)
    with refusing(folder / INSPECTION, _RULE):
        inspection = _inspection(rest, sites, table, relations, pictures)
    with refusing(folder / TABLE, _RULE):
        check_table(inspection)
    with refusing(folder / INSPECTION, _RULE):
        check_run(inspection)
    with refusing(folder / PICTURES, _RULE):
        check_tensors(inspection)
    return inspection


def _inspection(
    rest: Mapping[str, Any],
    sites: list[AttentionSite],
    table: HeadProfile,
    relations: Mapping[AttentionSite, Mapping[str, Tensor]],
    pictures: Mapping[str, Tensor],
) -> Inspection:
    values: dict[str, Any] = {name: rest[name] for name in _IN_JSON}
    values["head_maps"] = {
        number: {**x, **{name: pictures[f"{number}.{name}"] for name in ("map", "offsets")}}
        for number, x in rest["head_maps"].items()
    }
    values["examples"] = [
        {**x, "weights": dict(sorted(with_prefix(pictures, f"example.{number}.").items(), key=lambda x: int(x[0])))}
        for number, x in enumerate(rest["examples"])
    ]
    values |= {name: _by_number(with_prefix(pictures, prefix)) for name, prefix in _PREFIXES.items()}
    values = {name: _read(x, _hints(Inspection)[name], sites) for name, x in values.items()}
    settings, facts = Settings.from_dict(rest["settings"]), check_facts(rest["facts"])
    return build(Inspection, {"settings": settings, "facts": facts, "table": table, "relations": relations, **values})


# ---- JSON


def _as_json(x: Any, index: Mapping[AttentionSite, int]) -> Any:
    """Return a value as JSON can express it, without fields that hold tensors, or None if that is their default."""
    if isinstance(x, AttentionSite):
        return index[x]
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(_as_json(name, index)): _as_json(value, index) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_as_json(value, index) for value in x]
    if not is_dataclass(x):
        return x
    values = {}
    for field in fields(x):
        value = getattr(x, field.name)
        has_tensors = any(isinstance(y, Tensor) for y in (value.values() if isinstance(value, Mapping) else (value,)))
        if not has_tensors and not (value is None and field.default is None):
            values[field.name] = _as_json(value, index)
    if type(x) in _SENTENCES:
        name, sentence = _SENTENCES[type(x)]
        values[name] = sentence(x)
    return values


def _read(x: Any, wanted: Any, sites: list[AttentionSite]) -> Any:
    """Return a JSON value as the annotated type; what does not fit is left to the checks of `build`."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is AttentionSite:
        return _at(sites, int(x) if isinstance(x, str) else x)
    if x is None:  # NaN for `float | None` as well: a None there is the default, which is not written
        return math.nan if float in (wanted, *inner) else None
    if origin is UnionType:
        return _read(x, inner[0], sites)
    if origin is Mapping and isinstance(x, Mapping):
        return {_read(name, inner[0], sites): _read(value, inner[1], sites) for name, value in x.items()}
    if origin is tuple and isinstance(x, list):
        kinds = inner[:1] * len(x) if inner[1:] == (...,) else inner
        values = tuple(_read(value, kind, sites) for value, kind in zip(x, kinds, strict=True))
        if wanted == Head:
            check_head(values)
        return values
    if not isinstance(wanted, type) or not is_dataclass(wanted):
        return x
    if isinstance(x, Mapping):
        sentence, _ = _SENTENCES.get(wanted, ("", str))
        x = {name: _read(y, _hints(wanted).get(name), sites) for name, y in x.items() if name != sentence}
    return build(wanted, x)


_hints = cache(get_type_hints)


def _at(sites: list[AttentionSite], number: int) -> AttentionSite:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(sites):
        raise OptionError(f"a site index must be below {len(sites)}, the number of sites, got {short(number)}")
    return sites[number]


# ---- tensors and the table


def _pictures(inspection: Inspection, index: Mapping[AttentionSite, int]) -> dict[str, Tensor]:
    maps = {site: {"map": x.map, "offsets": x.offsets} for site, x in inspection.head_maps.items()}
    pictures = _numbered(maps, index)
    for field, prefix in _PREFIXES.items():
        pictures |= {f"{prefix}{name}": x for name, x in _numbered(getattr(inspection, field), index).items()}
    for number, example in enumerate(inspection.examples):
        pictures |= {f"example.{number}.{index[site]}": weights for site, weights in example.weights.items()}
    return pictures


def _numbered(
    tensors: Mapping[AttentionSite, Mapping[str, Tensor]], index: Mapping[AttentionSite, int]
) -> dict[str, Tensor]:
    """Return the tensors of sites by names such as `3.cosine`; `_by_number` reverses it."""
    return {f"{index[site]}.{name}": x for site, of_site in tensors.items() for name, x in of_site.items()}


def _by_number(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    by_number: dict[str, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        number, _, inner = name.partition(".")
        by_number.setdefault(number, {})[inner] = x
    return by_number


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}


def _table(path: Path, sites: list[AttentionSite], names: tuple[str, ...], *, earlier: bool) -> HeadProfile:
    cells, _ = read_columns(path, _RULE)
    cells = upgraded_columns(cells) if earlier else cells
    where = {(site.name, site.kind): site for site in sites}
    rows = []
    for place in zip(cells["site"], cells["kind"], strict=True):
        if place not in where:
            raise OptionError(f"the rows of the table are heads of the sites in {INSPECTION}, got {short(place)}")
        rows.append(where[place])
    columns = {
        current_name(name): torch.tensor(
            [math.nan if x is None else as_type(x, float, name) for x in column], dtype=torch.float64
        )
        for name, column in cells.items()
        if name not in LOCATION
    }
    return HeadProfile(tuple(rows), tuple(cells["head"]), names, columns)

"""Saving and loading of inspections: the table in Parquet, matrices in safetensors, the rest in JSON.

Files are written atomically.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.roles import HeadRoles, RoleScore
from polyhead.errors import OptionError
from polyhead.files import as_type, build, read_columns, read_json, read_tensors, refusing, short
from polyhead.inspection.earlier_formats import upgraded
from polyhead.inspection.example_weights import Example
from polyhead.inspection.head_maps import HeadMaps
from polyhead.inspection.heads import Group, Head, Pair, RedundancyThreshold
from polyhead.inspection.most_attended import TopKey
from polyhead.inspection.result import Inspection
from polyhead.inspection.settings import Settings
from polyhead.inspection.validation import check_facts, check_run, check_sites, check_table, check_tensors
from polyhead.inspection.wording import Finding, Reason
from polyhead.observation import AttentionSite, HeadProfile
from polyhead.observation.renamed import current_name
from polyhead.observation.saving import write_atomically

FORMAT = 4  # 3 had texts instead of fields, 2 other names for some statistics; 1 is no longer supported
OBSERVATIONS = "observations.safetensors"  # collector states, from which a run is resumed
TABLE = "heads.parquet"
REST = "inspection.json"
MATRICES = "relations.safetensors"
PICTURES = "pictures.safetensors"  # maps, offsets, spectra, and the weights of the examples
FILES = (OBSERVATIONS, TABLE, REST, MATRICES, PICTURES)
_RULE = "an inspection is read as `polyhead inspect --save` wrote it"


def save_inspection(folder: Path, inspection: Inspection) -> None:
    """Write an inspection; the JSON file is written last, so that its presence implies the others.

    An earlier JSON file is removed first: if writing is interrupted, it would be read with the table of another run.
    """
    from safetensors.torch import save as serialise

    sites = list(
        dict.fromkeys([*inspection.table.sites, *inspection.relations, *inspection.looks, *inspection.spectra])
    )
    index = {site: number for number, site in enumerate(sites)}
    matrices = {
        f"{index[site]}.{name}": matrix.detach().cpu().clone()
        for site, found in inspection.relations.items()
        for name, matrix in found.items()
    }
    (folder / REST).unlink(missing_ok=True)
    write_atomically(folder / TABLE, _parquet(inspection.table))
    write_atomically(folder / MATRICES, serialise(matrices))
    write_atomically(folder / PICTURES, serialise(_pictures(inspection, index)))
    rest = {
        "format": FORMAT,
        "settings": inspection.settings.to_dict(),
        "facts": dict(inspection.facts),
        "sites": [site.to_dict() for site in sites],
        "statistics": inspection.table.names,
        "roles": [
            {"site": index[x.site], "head": x.head, "scores": [_score_dict(score) for score in x.scores]}
            for x in inspection.roles
        ],
        "likeness": None if inspection.likeness is None else asdict(inspection.likeness),
        "groups": [
            {"heads": [_place(index, head) for head in group.heads], "least": group.least}
            for group in inspection.groups
        ],
        "pairs": [
            {
                "one": _place(index, pair.one),
                "other": _place(index, pair.other),
                "guess": pair.guess,
                "cosine": pair.cosine,
            }
            for pair in inspection.pairs
        ],
        "findings": [
            {
                "kind": finding.kind,
                "heads": [_place(index, head) for head in finding.heads],
                "column": finding.column,
                "values": dict(finding.values),
                "stacked": finding.stacked,
                "text": str(finding),
            }
            for finding in inspection.findings
        ],
        "looks": {str(index[site]): {"block": looks.block} for site, looks in inspection.looks.items()},
        "top_keys": {
            str(index[site]): [[asdict(key) for key in head] for head in heads]
            for site, heads in inspection.top_keys.items()
        },
        "examples": [{"title": x.title, "queries": x.queries, "keys": x.keys} for x in inspection.examples],
    }
    text = json.dumps(_plain(rest), indent=1, ensure_ascii=False) + "\n"
    # A lone surrogate, as in a path that is not UTF-8, is written as a JSON escape.
    write_atomically(folder / REST, text.encode("utf-8", errors="backslashreplace"))


def load_inspection(folder: Path) -> Inspection:
    """Read what `save_inspection` wrote; raise an error that names the file if one is damaged."""
    if not (folder / REST).exists():
        unfinished = (folder / OBSERVATIONS).exists()
        raise OptionError(
            f"an inspection is a folder that `polyhead inspect --save` wrote, got {folder}"
            + (", whose run is not finished; continue it with --resume" if unfinished else "")
        )
    rest = read_json(folder / REST, _RULE)
    if rest.get("format") not in (2, 3, FORMAT):
        raise OptionError(
            f"this version reads inspections of format {FORMAT}, got {short(rest.get('format'))} in {folder}; "
            "run `polyhead inspect --save` again, with another folder"
        )
    with refusing(folder / REST, _RULE):
        rest = rest if rest["format"] == FORMAT else upgraded(rest)
        sites = [AttentionSite.from_dict(site) for site in rest["sites"]]
        check_sites(sites)
        names = tuple(map(current_name, as_type(rest["statistics"], tuple[str, ...], "statistics")))
    matrices: dict[AttentionSite, dict[str, Tensor]] = {}
    found, _ = read_tensors(folder / MATRICES, _RULE)
    with refusing(folder / MATRICES, _RULE):
        for name, matrix in found.items():
            number, _, what = name.partition(".")
            matrices.setdefault(_at(sites, int(number)), {})[what] = matrix
    pictures, _ = read_tensors(folder / PICTURES, _RULE)
    with refusing(folder / TABLE, _RULE):
        table = _table(folder / TABLE, sites, names)
    with refusing(folder / REST, _RULE):
        inspection = _inspection(rest, sites, table, matrices, pictures)
    with refusing(folder / TABLE, _RULE):
        check_table(inspection)
    with refusing(folder / REST, _RULE):
        check_run(inspection)
    with refusing(folder / PICTURES, _RULE):
        check_tensors(inspection)
    return inspection


def _inspection(
    rest: Mapping[str, Any],
    sites: list[AttentionSite],
    table: HeadProfile,
    matrices: Mapping[AttentionSite, Mapping[str, Tensor]],
    pictures: Mapping[str, Tensor],
) -> Inspection:
    def head(place: list[int]) -> Head:
        return _at(sites, place[0]), place[1]

    return Inspection(
        Settings.from_dict(rest["settings"]),
        check_facts(rest["facts"]),
        table,
        tuple(
            HeadRoles(_at(sites, x["site"]), x["head"], tuple(_score(score) for score in x["scores"]))
            for x in rest["roles"]
        ),
        None if rest["likeness"] is None else build(RedundancyThreshold, _numbers(rest["likeness"])),
        tuple(
            Group(tuple(head(x) for x in group["heads"]), as_type(_number(group["least"]), float, "least"))
            for group in rest["groups"]
        ),
        tuple(
            Pair(
                head(x["one"]),
                head(x["other"]),
                as_type(_number(x["guess"]), float, "guess"),
                as_type(_number(x["cosine"]), float, "cosine"),
            )
            for x in rest["pairs"]
        ),
        matrices,
        tuple(
            Finding(
                x["kind"],
                tuple(head(place) for place in x["heads"]),
                current_name(x["column"]) if isinstance(x["column"], str) else x["column"],
                x["values"],
                x["stacked"],
            )
            for x in rest["findings"]
        ),
        {
            _at(sites, int(number)): HeadMaps(
                as_type(x["block"], int, "block"), pictures[f"{number}.map"], pictures[f"{number}.offsets"]
            )
            for number, x in rest["looks"].items()
        },
        tuple(
            Example(
                as_type(x["title"], str, "title"),
                as_type(x["queries"], tuple[str, ...], "queries"),
                as_type(x["keys"], tuple[str, ...], "keys"),
                _weights(pictures, sites, number),
            )
            for number, x in enumerate(rest["examples"])
        ),
        {
            _at(sites, int(number)): tuple(tuple(build(TopKey, _numbers(key)) for key in head) for head in heads)
            for number, heads in rest["top_keys"].items()
        },
        _spectra(pictures, sites),
    )


def _at(sites: list[AttentionSite], number: int) -> AttentionSite:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(sites):
        raise OptionError(f"a site index must be below {len(sites)}, the number of sites, got {short(number)}")
    return sites[number]


def _pictures(inspection: Inspection, index: Mapping[AttentionSite, int]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for site, looks in inspection.looks.items():
        found |= {f"{index[site]}.map": looks.map, f"{index[site]}.offsets": looks.offsets}
    for site, spectra in inspection.spectra.items():
        found |= {f"spectrum.{index[site]}.{name}": x for name, x in spectra.items()}
    for number, example in enumerate(inspection.examples):
        found |= {f"example.{number}.{index[site]}": weights for site, weights in example.weights.items()}
    return {name: x.detach().cpu().contiguous() for name, x in found.items()}


def _weights(pictures: Mapping[str, Tensor], sites: list[AttentionSite], number: int) -> dict[AttentionSite, Tensor]:
    prefix = f"example.{number}."
    found = {name.removeprefix(prefix): x for name, x in pictures.items() if name.startswith(prefix)}
    return {_at(sites, int(index)): found[index] for index in sorted(found, key=int)}


def _spectra(pictures: Mapping[str, Tensor], sites: list[AttentionSite]) -> dict[AttentionSite, dict[str, Tensor]]:
    found: dict[AttentionSite, dict[str, Tensor]] = {}
    for name, x in pictures.items():
        kind, _, rest = name.partition(".")
        if kind == "spectrum":
            number, _, circuit = rest.partition(".")
            found.setdefault(_at(sites, int(number)), {})[circuit] = x
    return found


def _place(index: Mapping[AttentionSite, int], head: Head) -> list[int]:
    return [index[head[0]], head[1]]


def _parquet(table: HeadProfile) -> bytes:
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table.to_arrow(), buffer)
    return buffer.getvalue()


def _table(path: Path, sites: list[AttentionSite], names: tuple[str, ...]) -> HeadProfile:
    found, _ = read_columns(path, _RULE)
    where = {(site.name, site.kind): site for site in sites}
    rows = []
    for place in zip(found["site"], found["kind"], strict=True):
        if place not in where:
            raise OptionError(f"the rows of the table are heads of the sites in {REST}, got {short(place)}")
        rows.append(where[place])
    columns = {
        current_name(name): torch.tensor([as_type(_number(x), float, name) for x in column], dtype=torch.float64)
        for name, column in found.items()
        if name not in ("site", "kind", "stack", "layer", "head", "original_head")
    }
    return HeadProfile(tuple(rows), tuple(found["head"]), names, columns)


def _score_dict(score: RoleScore) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(score).items() if value is not None}
    return {**fields, "evidence": score.evidence}  # the text is for readers of the file


def _score(found: Mapping[str, Any]) -> RoleScore:
    return build(RoleScore, _numbers({name: x for name, x in found.items() if name != "evidence"}))


def _plain(x: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(x, Reason):
        return {"kind": x.kind, "fields": _plain(x.fields), "text": str(x)}
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(name): _plain(value) for name, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, list | tuple) else x


def _number(x: float | None) -> float:
    return math.nan if x is None else x


def _numbers(score: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if x is None else x for name, x in score.items()}

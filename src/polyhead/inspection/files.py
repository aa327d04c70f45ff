"""An inspection in a folder: the table in Parquet, matrices in safetensors, the rest in JSON; no file half-written."""

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
from polyhead.inspection.result import Group, Head, Inspection, Likeness, Pair
from polyhead.inspection.settings import Settings
from polyhead.observatory import AttentionSite, HeadProfile
from polyhead.observatory.saving import write_whole

FORMAT = 1
OBSERVATIONS = "observations.safetensors"  # what was gathered, from which a run goes on
TABLE = "heads.parquet"
REST = "inspection.json"
MATRICES = "relations.safetensors"


def save_inspection(folder: Path, inspection: Inspection) -> None:
    """Write an inspection; the JSON file comes last, so that where it is, the others are."""
    from safetensors.torch import save as serialise

    sites = list(dict.fromkeys([*inspection.table.sites, *inspection.relations]))
    index = {site: number for number, site in enumerate(sites)}
    matrices = {
        f"{index[site]}.{name}": matrix.detach().cpu().clone()
        for site, found in inspection.relations.items()
        for name, matrix in found.items()
    }
    write_whole(folder / TABLE, _parquet(inspection.table))
    write_whole(folder / MATRICES, serialise(matrices))
    rest = {
        "format": FORMAT,
        "settings": inspection.settings.to_dict(),
        "facts": dict(inspection.facts),
        "sites": [asdict(site) for site in sites],
        "statistics": inspection.table.names,
        "roles": [
            {"site": index[x.site], "head": x.head, "scores": [asdict(score) for score in x.scores]}
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
        "findings": inspection.findings,
    }
    write_whole(folder / REST, (json.dumps(_plain(rest), indent=1, ensure_ascii=False) + "\n").encode())


def load_inspection(folder: Path) -> Inspection:
    """Read what `save_inspection` wrote."""
    from safetensors.torch import load_file

    if not (folder / REST).exists():
        unfinished = (folder / OBSERVATIONS).exists()
        raise OptionError(
            f"an inspection is a folder that `polyhead inspect --save` wrote, got {folder}"
            + (", of which the run is not finished; go on with --resume" if unfinished else "")
        )
    rest = json.loads((folder / REST).read_text(encoding="utf-8"))
    if rest["format"] != FORMAT:
        raise OptionError(f"this version reads inspections of format {FORMAT}, got {rest['format']} in {folder}")
    sites = [AttentionSite(**site) for site in rest["sites"]]
    matrices: dict[AttentionSite, dict[str, Tensor]] = {}
    for name, matrix in load_file(folder / MATRICES).items():
        number, _, what = name.partition(".")
        matrices.setdefault(sites[int(number)], {})[what] = matrix

    def head(place: list[int]) -> Head:
        return sites[place[0]], place[1]

    return Inspection(
        Settings.from_dict(rest["settings"]),
        rest["facts"],
        _table(folder / TABLE, sites, tuple(rest["statistics"])),
        tuple(
            HeadRoles(sites[x["site"]], x["head"], tuple(RoleScore(**_numbers(score)) for score in x["scores"]))
            for x in rest["roles"]
        ),
        None if rest["likeness"] is None else Likeness(**rest["likeness"]),
        tuple(Group(tuple(head(x) for x in group["heads"]), group["least"]) for group in rest["groups"]),
        tuple(Pair(head(x["one"]), head(x["other"]), _number(x["guess"]), _number(x["cosine"])) for x in rest["pairs"]),
        matrices,
        tuple(rest["findings"]),
    )


def _place(index: Mapping[AttentionSite, int], head: Head) -> list[int]:
    return [index[head[0]], head[1]]


def _parquet(table: HeadProfile) -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(table.rows())), buffer)
    return buffer.getvalue()


def _table(path: Path, sites: list[AttentionSite], names: tuple[str, ...]) -> HeadProfile:
    import pyarrow.parquet

    found = pyarrow.parquet.read_table(path)
    where = {(site.name, site.kind): site for site in sites}
    rows = tuple(where[place] for place in zip(found["site"].to_pylist(), found["kind"].to_pylist(), strict=True))
    columns = {
        name: torch.tensor([_number(x) for x in found[name].to_pylist()], dtype=torch.float64)
        for name in found.column_names
        if name not in ("site", "kind", "stack", "layer", "head")
    }
    return HeadProfile(rows, tuple(found["head"].to_pylist()), names, columns)


def _plain(x: Any) -> Any:
    """What JSON can say: it has no NaN and no infinity."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(name): _plain(value) for name, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, list | tuple) else x


def _number(x: float | None) -> float:
    return math.nan if x is None else x


def _numbers(score: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if x is None else x for name, x in score.items()}

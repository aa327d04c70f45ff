"""What relates the heads of a layer, and the columns of the table that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis import circuits, relations
from polyhead.analysis.importance import Importance
from polyhead.analysis.redundancy import redundancy
from polyhead.inspection.result import Group, Likeness
from polyhead.observatory import AttentionSite, Gathered, HeadProfile, Wiring
from polyhead.observatory.contributions import SiteContributions
from polyhead.observatory.head_moments import HeadMoments

SiteColumns = dict[AttentionSite, dict[str, Tensor]]


def relations_of(
    gathered: Mapping[AttentionSite, Mapping[str, Gathered]], wiring: Mapping[AttentionSite, Wiring]
) -> tuple[SiteColumns, SiteColumns]:
    """Matrices [heads, heads] and columns [heads] of each site whose output projection is known."""
    matrices: SiteColumns = {}
    columns: SiteColumns = {}
    for site, values in gathered.items():
        moments = _moments(values)
        found = wiring.get(site, Wiring())
        if moments is None:
            continue
        matrices[site] = {}
        columns[site] = _circuit_columns(found, site.num_heads)
        if site.num_heads > 1 and _enough(moments, 2 * moments.dim):
            matrices[site]["mutual_information"] = relations.mutual_information(moments)
        if found.output is None:
            continue
        output = found.output.detach().cpu().double()
        matrices[site]["cosine"] = relations.cosine(moments, output)
        matrices[site]["cka"] = relations.cka(moments, output)
        matrices[site]["subspace_overlap"] = relations.subspace_overlap(output)
        norm = relations.contribution_norm(moments, output)
        columns[site]["contribution"] = norm
        columns[site]["contribution_share"] = norm.square() / norm.square().sum()
        columns[site]["effective_rank"] = relations.effective_rank(moments, output)
    return matrices, columns


def _moments(values: Mapping[str, Gathered]) -> HeadMoments | None:
    found = values.get("contributions")
    if not isinstance(found, SiteContributions) or found.moments is None:
        return None
    return HeadMoments.from_state({name: x.cpu() for name, x in found.moments.state().items()})


def _enough(moments: HeadMoments, dims: int) -> bool:
    """Whether there are more tokens than numbers to explain, without which nothing Gaussian can be said."""
    return float(moments.count) > dims + 2


def _circuit_columns(wiring: Wiring, heads: int) -> dict[str, Tensor]:
    """The largest share of a circuit's strength that one direction has: 1 for a circuit of rank one."""
    columns = {}
    if wiring.query is not None and wiring.key is not None:
        query, key = _repeated(wiring.query, heads), _repeated(wiring.key, heads)
        columns["qk_top_share"] = _top_share(circuits.singular_values(query, key.mT))
    if wiring.value is not None and wiring.output is not None:
        value, output = _repeated(wiring.value, heads), _repeated(wiring.output, heads)
        columns["ov_top_share"] = _top_share(circuits.singular_values(value, output))
    return columns


def _repeated(matrices: Tensor, heads: int) -> Tensor:
    return matrices.detach().cpu().double().repeat_interleave(heads // matrices.shape[0], 0)


def _top_share(singular: Tensor) -> Tensor:
    squares = singular.square()
    return squares[:, 0] / squares.sum(-1)


def groups_of(
    matrices: Mapping[AttentionSite, Mapping[str, Tensor]], null: Mapping[AttentionSite, Tensor]
) -> dict[str, Any]:
    """Redundancy groups, layer by layer, by one threshold from the null of all layers."""
    nulls = [found for found in null.values() if len(found) > 1]
    if not len(nulls):
        return {}
    groups: list[Group] = []
    likeness = None
    for site, found in matrices.items():
        if "cosine" not in found or site.num_heads < 2:
            continue
        same = redundancy(found["cosine"], nulls)
        likeness = Likeness(same.threshold, same.null)
        for group in same.groups:
            index = torch.tensor(group)
            least = float(found["cosine"][index][:, index].min())
            groups.append(Group(tuple((site, head) for head in group), least))
    return {"likeness": likeness, "groups": tuple(groups)}


def widened(table: HeadProfile, columns: SiteColumns, importance: Importance | None) -> HeadProfile:
    """The table with a column for everything that is one number a head; NaN where it is not known."""
    names = list(dict.fromkeys(name for found in columns.values() for name in found))
    more: dict[str, Tensor] = {}
    for name in names:
        numbers = [
            float(columns[site][name][head]) if name in columns.get(site, {}) else float("nan")
            for site, head in zip(table.sites, table.heads, strict=True)
        ]
        more[name] = torch.tensor(numbers, dtype=torch.float64)
    if importance is not None:
        place = {row: index for index, row in enumerate(zip(importance.sites, importance.heads, strict=True))}
        for name in importance.columns:
            values = importance[name]
            numbers = [
                float(values[place[row]]) if row in place else float("nan")
                for row in zip(table.sites, table.heads, strict=True)
            ]
            more[name] = torch.tensor(numbers, dtype=torch.float64)
        names += [name for name in importance.columns if not name.endswith("_error")]
    return HeadProfile(table.sites, table.heads, (*table.names, *names), {**table.columns, **more})


def with_more(
    matrices: SiteColumns, distances: Mapping[AttentionSite, Tensor], importance: Importance | None
) -> SiteColumns:
    """And how differently heads look, and the overlap of their gradients, where these were measured."""
    found = {site: dict(values) for site, values in matrices.items()}
    for site, matrix in distances.items():
        found.setdefault(site, {})["attention_distance"] = matrix
    for site in () if importance is None else importance.overlaps:
        assert importance is not None
        found.setdefault(site, {})["gradient_overlap"] = importance.overlap(site).cpu()
    return found

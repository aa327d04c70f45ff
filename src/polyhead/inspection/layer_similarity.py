"""What relates the heads of a layer, and the columns of the table that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis import circuits, relations
from polyhead.analysis.importance import Importance
from polyhead.analysis.redundancy import redundancy
from polyhead.analysis.text_shares import text_shares
from polyhead.inspection.heads import Group, Likeness
from polyhead.observation import AttentionSite, CollectorState, HeadProfile, HeadProjections
from polyhead.observation.contributions import SiteContributions
from polyhead.observation.head_moments import HeadMoments
from polyhead.observation.role_evidence import HeadEvidence

SiteColumns = dict[AttentionSite, dict[str, Tensor]]
BESIDE = ("_error", "_chance")  # what stands beside a column and is none of the statistics itself


def relations_of(
    collected: Mapping[AttentionSite, Mapping[str, CollectorState]],
    head_projections: Mapping[AttentionSite, HeadProjections],
) -> tuple[SiteColumns, SiteColumns]:
    """Matrices [heads, heads] and columns [heads] of what the heads of each site say."""
    matrices: SiteColumns = {}
    columns: SiteColumns = {}
    for site, values in collected.items():
        moments = _moments(values)
        found = head_projections.get(site, HeadProjections())
        if moments is None:
            continue
        matrices[site] = {}
        columns[site] = {}
        if site.num_heads > 1 and _enough(moments, 2 * moments.dim):
            matrices[site]["mutual_information"] = relations.mutual_information(moments)
        if site.num_heads > 1 and _enough(moments, site.num_heads * moments.dim):
            together = relations.total_correlation(moments).cpu()
            columns[site]["total_correlation"] = together.expand(site.num_heads)
        if found.output is None:
            continue
        output = found.output.detach().cpu().double()
        matrices[site]["cosine"] = relations.cosine(moments, output)
        matrices[site]["cka"] = relations.cka(moments, output)
        matrices[site]["subspace_overlap"] = relations.subspace_overlap(output)
        norm = relations.contribution_norm(moments, output)
        columns[site]["output_norm"] = norm
        columns[site]["output_norm_share"] = norm.square() / norm.square().sum()
        columns[site]["effective_rank"] = relations.effective_rank(moments, output)
    return matrices, columns


def cosines_of(
    collected: Mapping[AttentionSite, Mapping[str, CollectorState]],
    head_projections: Mapping[AttentionSite, HeadProjections],
) -> dict[AttentionSite, Tensor]:
    """Of these only the cosines of what heads write, [heads, heads]."""
    found = {}
    for site, values in collected.items():
        moments, output = _moments(values), head_projections.get(site, HeadProjections()).output
        if moments is not None and output is not None:
            found[site] = relations.cosine(moments, output.detach().cpu().double())
    return found


def _moments(values: Mapping[str, CollectorState]) -> HeadMoments | None:
    found = values.get("contributions")
    if not isinstance(found, SiteContributions) or found.moments is None:
        return None
    return HeadMoments.from_state({name: x.cpu() for name, x in found.moments.state().items()})


def _enough(moments: HeadMoments, dims: int) -> bool:
    """Whether there are more tokens than numbers to explain, without which nothing Gaussian can be said."""
    return float(moments.count) > dims + 2


def spectra_of(head_projections: Mapping[AttentionSite, HeadProjections]) -> SiteColumns:
    """The singular values of each head's circuits, `qk` and `ov` [heads, head_dim], where its matrices are known."""
    found: SiteColumns = {}
    for site, matrices in head_projections.items():
        query, key, value, output = (
            None if x is None else _repeated(x, site.num_heads)
            for x in (matrices.query, matrices.key, matrices.value, matrices.output)
        )
        spectra = {}
        if query is not None and key is not None:
            spectra["qk"] = circuits.singular_values(query, key.mT)
        if value is not None and output is not None:
            spectra["ov"] = circuits.singular_values(value, output)
        if spectra:
            found[site] = spectra
    return found


def text_columns(collected: Mapping[AttentionSite, Mapping[str, CollectorState]]) -> SiteColumns:
    """What the evidence of roles says of kinds of tokens and parts of the text."""
    found = {site: values.get("evidence") for site, values in collected.items()}
    return {site: text_shares(evidence) for site, evidence in found.items() if isinstance(evidence, HeadEvidence)}


def circuit_columns(spectra: SiteColumns) -> SiteColumns:
    """The largest share of a circuit's strength that one direction has: 1 for a circuit of rank one."""
    return {
        site: {f"{name}_top_share": _top_share(singular) for name, singular in found.items()}
        for site, found in spectra.items()
    }


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


def widened(table: HeadProfile, parts: Sequence[SiteColumns], importance: Importance | None) -> HeadProfile:
    """The table with a column for everything that is one number a head; NaN where it is not known."""
    columns: SiteColumns = {}
    for part in parts:
        for site, found in part.items():
            columns[site] = {**columns.get(site, {}), **found}
    every = list(dict.fromkeys(name for part in parts for found in part.values() for name in found))
    names = [name for name in every if not name.endswith(BESIDE)]
    more: dict[str, Tensor] = {}
    for name in every:
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

"""Similarity and redundancy of the heads of a layer, and columns derived from outputs and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from polyhead.analysis import circuits, relations
from polyhead.analysis.importance import Importance
from polyhead.analysis.intervals import Z
from polyhead.analysis.pronouns import CUES, PronounTable
from polyhead.analysis.redundancy import ALONE, PREDICTABLE, predictable_shares, tokens_needed
from polyhead.analysis.roles import HeadRoles, evidence_of
from polyhead.analysis.text_shares import text_shares
from polyhead.inspection.heads import Head, has_stacks, named
from polyhead.inspection.vocabulary import score_column
from polyhead.inspection.wording import Reason
from polyhead.observation import AttentionSite, HeadProfile, HeadProjections
from polyhead.observation.collectors import Collected, states_of
from polyhead.observation.contributions import SiteContributions
from polyhead.observation.head_moments import HeadMoments

SiteTensors = dict[AttentionSite, dict[str, Tensor]]  # columns, matrices or spectra of the heads of a site, by name
SUFFIXES = ("_error", "_chance", "_score")  # columns that are not statistics: companions, scores of roles and probes


def relations_of(
    collected: Collected, head_projections: Mapping[AttentionSite, HeadProjections]
) -> tuple[SiteTensors, SiteTensors]:
    """Return matrices [heads, heads] and columns [heads] computed from head outputs and W_O, by site."""
    matrices: SiteTensors = {}
    columns: SiteTensors = {}
    for site, moments in _moments_of(collected).items():
        projections = head_projections.get(site, HeadProjections())
        matrices[site] = {}
        columns[site] = {}
        if site.num_heads > 1 and _enough(moments, 2 * moments.dim):
            matrices[site]["mutual_information"] = relations.mutual_information(moments)
        if site.num_heads > 1 and _enough(moments, site.num_heads * moments.dim):
            columns[site]["total_correlation"] = relations.total_correlation(moments).cpu().expand(site.num_heads)
        if projections.output is None:
            continue
        output = projections.output.detach().cpu().double()
        matrices[site]["cosine"] = relations.cosine(moments, output)
        matrices[site]["cka"] = relations.cka(moments, output)
        matrices[site]["subspace_overlap"] = relations.subspace_overlap(output)
        norm = relations.contribution_norm(moments, output)
        columns[site]["output_norm"] = norm
        columns[site]["output_norm_share"] = norm.square() / norm.square().sum()
        columns[site]["effective_rank"] = relations.effective_rank(moments, output)
    return matrices, columns


def add_predictable_shares(
    collected: Collected,
    head_projections: Mapping[AttentionSite, HeadProjections],
    matrices: SiteTensors,
    columns: SiteTensors,
) -> tuple[SiteTensors, Reason | None]:
    """Add how much of each head's output other heads predict.

    Returns:
        What all others and the best of them alone predict on each half of the text, [2, heads] by site, and the reason
        if tokens are too few at a site.
    """
    halves, reason = SiteTensors(), None
    for site, state in states_of(collected, "contributions", SiteContributions).items():
        output = head_projections.get(site, HeadProjections()).output
        one, other = map(_on_cpu, state.halves)
        known = one or other
        if output is None or known is None or site.num_heads < 2:
            continue
        needed, got = tokens_needed(known), int(min(one.count, other.count)) if one and other else 0
        if one is None or other is None or got < needed:
            reason = Reason("few_tokens", {"needed": needed, "got": got})
            continue
        shares = predictable_shares(one, other, output)
        matrices[site][PREDICTABLE], columns[site][PREDICTABLE] = shares.by_head, shares.by_others
        halves[site] = {PREDICTABLE: shares.halves, ALONE: shares.alone_halves}
    return halves, reason


def _moments_of(collected: Collected) -> dict[AttentionSite, HeadMoments]:
    """Return the second moments of head outputs by site, on the CPU."""
    states = states_of(collected, "contributions", SiteContributions)
    moments = {site: _on_cpu(state.moments) for site, state in states.items()}
    return {site: x for site, x in moments.items() if x is not None}


def _on_cpu(moments: HeadMoments | None) -> HeadMoments | None:
    return moments and HeadMoments(**{name: x.cpu() for name, x in moments.state().items()})


def non_finite_heads(collected: Collected) -> str:
    """Return the heads whose attention weights or outputs are NaN or Inf, e.g. "L1H3, L2H0-H7"; "" for none."""
    moments, names = _moments_of(collected), []
    stacked = has_stacks(evidence_of(collected))
    for site, evidence in evidence_of(collected).items():
        finite = evidence.column("sink_mass")[:, :-1].sum(0).isfinite().cpu()
        if site in moments:
            finite &= moments[site].mean.isfinite().all(-1)
        heads = (~finite).nonzero().flatten().tolist()
        everything = len(heads) == site.num_heads > 1
        of_site = [named((site, head), stacked=stacked) for head in heads]
        names += [f"{of_site[0]}-H{heads[-1]}"] if everything else of_site
    return ", ".join(names)


def _enough(moments: HeadMoments, dims: int) -> bool:
    """Return whether there are more tokens than dimensions, as the Gaussian estimates require."""
    return float(moments.count) > dims + 2


def spectra_of(head_projections: Mapping[AttentionSite, HeadProjections]) -> SiteTensors:
    """Return the singular values of the QK and OV circuits, `qk` and `ov` [heads, head_dim], where they are known."""
    by_site: SiteTensors = {}
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
            by_site[site] = spectra
    return by_site


def text_columns(collected: Collected) -> SiteTensors:
    """Return columns of attention to classes of tokens and parts of the text, from the role evidence."""
    return {site: text_shares(evidence) for site, evidence in evidence_of(collected).items()}


def circuit_columns(spectra: SiteTensors) -> SiteTensors:
    """Return the share of the largest squared singular value of each circuit: 1 for a circuit of rank one."""
    return {
        site: {f"{name}_top_share": _top_share(singular) for name, singular in of_site.items()}
        for site, of_site in spectra.items()
    }


def pronoun_columns(tables: Mapping[str, PronounTable], sites: Iterable[AttentionSite]) -> SiteTensors:
    """Return the pronoun score by what decides, e.g. `pronoun_gender_score`, with its standard error over templates."""
    columns: SiteTensors = {site: {} for site in sites}
    for cue in (cue for cue in CUES if cue in tables):
        for site, of_site in columns.items():
            entries = sorted((x for x in tables[cue].entries if x.site == site.name), key=lambda x: x.head)
            errors = [
                max(x.score - x.frames_low, x.frames_high - x.score) / Z for x in entries
            ]  # ends are cut at 0 and 1
            numbers = {"": [x.score for x in entries], "_error": errors, "_chance": [x.null for x in entries]}
            of_site |= {f"pronoun_{cue}_score{end}": torch.tensor(x, dtype=torch.float64) for end, x in numbers.items()}
    return columns


def role_columns(roles: Sequence[HeadRoles]) -> SiteTensors:
    """Return the score of every role, e.g. `induction_score`; NaN where it could not be measured."""
    columns: SiteTensors = {}
    for head in roles:
        of_site = columns.setdefault(head.site, {})
        for score in head.scores:
            missing = torch.full((head.site.num_heads,), torch.nan, dtype=torch.float64)
            of_site.setdefault(score_column(score.role), missing)[head.head] = score.score
    return columns


def _repeated(matrices: Tensor, heads: int) -> Tensor:
    return matrices.detach().cpu().double().repeat_interleave(heads // matrices.shape[0], 0)


def _top_share(singular: Tensor) -> Tensor:
    squares = singular.square()
    return squares[:, 0] / squares.sum(-1)


def extend_table(table: HeadProfile, parts: Sequence[SiteTensors], importance: Importance | None) -> HeadProfile:
    """Return the table extended by the columns of `parts` and of importance; NaN where a head has no value."""
    values: dict[str, dict[Head, float]] = {}  # by column
    for part in parts:
        for site, of_site in part.items():
            for name, column in of_site.items():
                values.setdefault(name, {}).update({(site, head): x for head, x in enumerate(column.tolist())})
    if importance is not None:
        heads = list(zip(importance.sites, importance.heads, strict=True))
        values |= {name: dict(zip(heads, importance[name].tolist(), strict=True)) for name in importance.columns}
    rows = list(zip(table.sites, table.heads, strict=True))
    more = {
        name: torch.tensor([by_head.get(row, math.nan) for row in rows], dtype=torch.float64)
        for name, by_head in values.items()
    }
    names = [name for name in values if not name.endswith(SUFFIXES)]
    return HeadProfile(table.sites, table.heads, (*table.names, *names), {**table.columns, **more})


def extend_matrices(
    matrices: SiteTensors, distances: Mapping[AttentionSite, Tensor], importance: Importance | None
) -> SiteTensors:
    """Return the matrices extended by attention distances and gradient overlaps, where they were measured."""
    extended = {site: dict(values) for site, values in matrices.items()}
    for site, matrix in distances.items():
        extended.setdefault(site, {})["attention_distance"] = matrix
    if importance is not None:
        for site in importance.overlaps:
            extended.setdefault(site, {})["gradient_overlap"] = importance.overlap(site).cpu()
    return extended

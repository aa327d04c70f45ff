"""Effect of each document on the values of the table, and their values on two halves of the documents."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.analysis.importance import Importance
from polyhead.analysis.intervals import halves, influence
from polyhead.analysis.roles import evidence_of
from polyhead.analysis.text_shares import SHARES
from polyhead.inspection.layer_similarity import SiteTensors
from polyhead.observation import HeadProfile
from polyhead.observation.collectors import Collected, states_of
from polyhead.observation.document_sums import SiteDocumentSums


def influence_of(collected: Collected, importance: Importance | None, table: HeadProfile) -> SiteTensors:
    """Return `analysis.intervals.influence` of the statistics of the table, [documents, heads], by site and name."""
    return _by_site(collected, importance, table, lambda sums, counts, _: influence(sums, counts))


def halves_of(collected: Collected, importance: Importance | None, table: HeadProfile) -> SiteTensors:
    """Return `analysis.intervals.halves` of the statistics of the table, [2, heads], by site and name."""
    return _by_site(collected, importance, table, halves)


def _by_site(
    collected: Collected,
    importance: Importance | None,
    table: HeadProfile,
    of: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> SiteTensors:
    """Return `of(sums, counts, documents)` of the statistics of the table, by site and name."""
    values: SiteTensors = {}
    names = table.names
    for site, state in states_of(collected, "documents", SiteDocumentSums).items():
        sums_of = {name: x.cpu() for name, x in state.totals.items() if name in names}
        values[site] = {name: of(x[..., 1], x[..., 0], state.documents) for name, x in sums_of.items()}
    for site, evidence in evidence_of(collected).items():
        for name, columns in SHARES.items():
            if name in names:
                sums, rows = (evidence.column(column)[:, :-1].cpu() for column in columns)
                values.setdefault(site, {})[name] = of(sums, rows, evidence.documents)
    if importance is not None:
        for name, totals in importance.totals.items():
            of_heads = of(totals, importance.weights[:, None], importance.documents.to(totals.device))
            for site in dict.fromkeys(importance.sites):
                of_site = torch.full((len(of_heads), site.num_heads), torch.nan, dtype=torch.float64)
                rows_of_site = [row for row, x in enumerate(importance.sites) if x == site]
                of_site[:, [importance.heads[row] for row in rows_of_site]] = of_heads[:, rows_of_site].cpu()
                values.setdefault(site, {})[name] = of_site
    return {site: {name: x.float().cpu() for name, x in values.get(site, {}).items()} for site in table.sites}

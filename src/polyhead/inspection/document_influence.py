"""Effect of each document on the values of the table, from which errors over documents and paired tests follow."""

from __future__ import annotations

import torch

from polyhead.analysis.importance import Importance
from polyhead.analysis.intervals import influence
from polyhead.analysis.roles import evidence_of
from polyhead.analysis.text_shares import SHARES
from polyhead.inspection.layer_similarity import SiteTensors
from polyhead.observation import HeadProfile
from polyhead.observation.collectors import Collected, states_of
from polyhead.observation.document_sums import SiteDocumentSums


def influence_of(collected: Collected, importance: Importance | None, table: HeadProfile) -> SiteTensors:
    """Return `analysis.intervals.influence` of the statistics of the table, [documents, heads], by site and name."""
    effects: SiteTensors = {}
    names = table.names
    for site, state in states_of(collected, "documents", SiteDocumentSums).items():
        effects[site] = {name: influence(x[..., 1], x[..., 0]) for name, x in state.totals.items() if name in names}
    for site, evidence in evidence_of(collected).items():
        for name, columns in SHARES.items():
            if name in names:
                sums, rows = (evidence.column(column)[:, :-1] for column in columns)
                effects.setdefault(site, {})[name] = influence(sums, rows)
    for name, totals in ({} if importance is None else importance.totals).items():
        assert importance is not None
        of_heads = influence(totals, importance.weights[:, None])
        for site in dict.fromkeys(importance.sites):
            of_site = torch.full((len(of_heads), site.num_heads), torch.nan, dtype=torch.float64)
            rows_of_site = [row for row, x in enumerate(importance.sites) if x == site]
            of_site[:, [importance.heads[row] for row in rows_of_site]] = of_heads[:, rows_of_site]
            effects.setdefault(site, {})[name] = of_site
    return {site: {name: x.float().cpu() for name, x in effects.get(site, {}).items()} for site in table.sites}

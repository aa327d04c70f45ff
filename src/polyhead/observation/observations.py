"""`Observations`: the result of one or more sessions, as a mergeable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from polyhead.errors import OptionError
from polyhead.observation.collectors import CollectorState
from polyhead.observation.head_profile import HeadProfile
from polyhead.observation.statistics import AttentionSite, SiteStatistics, StatisticsRequest, stack_order


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Statistics of a model's heads by site; merging two runs equals one run over both datasets."""

    wanted: StatisticsRequest
    sites: tuple[SiteStatistics, ...] = ()
    collected: Mapping[AttentionSite, Mapping[str, CollectorState]] = field(default_factory=dict)  # by collector name
    calls: Mapping[AttentionSite, int] = field(default_factory=dict)  # number of calls, observed or skipped

    def merge(self, other: Self) -> Self:
        """Return the observations of both; refused if the statistics or the sites of the model differ.

        Args:
            other: observations of the same model.
        """
        if self.wanted != other.wanted:
            raise OptionError(
                f"only observations of the same statistics can be merged, got {self.wanted} and {other.wanted}"
            )
        known: dict[tuple[str, str], AttentionSite] = {}
        for site in (site for x in (self, other) for site in (*(y.site for y in x.sites), *x.collected, *x.calls)):
            if (first := known.setdefault((site.name, site.kind), site)) != site:
                raise OptionError(
                    f"only observations of the same model can be merged, got {site.name!r} as {first} and as {site}; "
                    "layers are numbered in the order of their first call"
                )
        merged = {x.site: x for x in self.sites}
        for statistics in other.sites:
            own = merged.get(statistics.site)
            merged[statistics.site] = statistics if own is None else own.merge(statistics)
        collected = {site: dict(states) for site, states in self.collected.items()}
        for site, other_states in other.collected.items():
            states = collected.setdefault(site, {})
            for name, state in other_states.items():
                states[name] = states[name].merge(state) if name in states else state
        calls = {site: self.calls.get(site, 0) + other.calls.get(site, 0) for site in {**self.calls, **other.calls}}
        return type(self)(self.wanted, tuple(merged.values()), collected, calls)

    @property
    def profile(self) -> HeadProfile:
        """Table with one row per head, ordered by stack and layer. Synchronises with the device."""
        order = stack_order(x.site for x in self.sites)
        sites = sorted(self.sites, key=lambda x: order[x.site])
        names = [name for name in self.wanted.names if any(name in site.columns for site in self.sites)]
        rows = [(site.site, head) for site in sites for head in site.heads]
        computed = [(site.compute(), len(site.heads)) for site in sites]
        column_names = ("tokens", *(f"{name}{suffix}" for name in names for suffix in ("", "_std", "_max")))
        empty = torch.zeros(0, dtype=torch.float64)
        columns = {
            name: torch.cat(
                [
                    empty,
                    *(site_columns.get(name, empty.new_full((heads,), torch.nan)) for site_columns, heads in computed),
                ]
            )
            for name in column_names
        }
        return HeadProfile(tuple(site for site, _ in rows), tuple(head for _, head in rows), tuple(names), columns)

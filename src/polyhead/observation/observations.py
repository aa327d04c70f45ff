"""What sessions have gathered, as one value: merged with others, and laid out as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from polyhead.errors import OptionError
from polyhead.observation.collectors import CollectorState
from polyhead.observation.head_profile import HeadProfile
from polyhead.observation.statistics import AttentionSite, SiteStatistics, Wanted, stack_order


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Statistics of the heads of a model, site by site; merging those of two runs equals one run over both."""

    wanted: Wanted
    sites: tuple[SiteStatistics, ...] = ()
    collected: Mapping[AttentionSite, Mapping[str, CollectorState]] = field(
        default_factory=dict
    )  # by the gatherer's name
    calls: Mapping[AttentionSite, int] = field(default_factory=dict)  # how often each was called, watched or not

    def merge(self, other: Self) -> Self:
        if self.wanted != other.wanted:
            raise OptionError(f"only the same statistics can be merged, got {self.wanted} and {other.wanted}")
        found = {(x.site.name, x.site.kind): x for x in self.sites}
        for site in other.sites:
            name = (site.site.name, site.site.kind)
            if name in found and found[name].site != site.site:
                raise OptionError(
                    f"only observations of one model can be merged, got {name[0]!r} as {found[name].site} and as "
                    f"{site.site}; layers are numbered in the order of their first call"
                )
            found[name] = found[name].merge(site) if name in found else site
        collected = {site: dict(values) for site, values in self.collected.items()}
        for place, values in other.collected.items():
            there = collected.setdefault(place, {})
            for collector, value in values.items():
                there[collector] = there[collector].merge(value) if collector in there else value
        calls = {place: self.calls.get(place, 0) + other.calls.get(place, 0) for place in {**self.calls, **other.calls}}
        return type(self)(self.wanted, tuple(found.values()), collected, calls)

    @property
    def profile(self) -> HeadProfile:
        """One row a head, stack by stack and layer by layer. This is where a device is waited for."""
        order = stack_order(x.site for x in self.sites)
        sites = sorted(self.sites, key=lambda x: order[x.site])
        names = [name for name in self.wanted.names if any(name in site.columns for site in self.sites)]
        rows = [(site.site, head) for site in sites for head in site.heads]
        computed = [(site.compute(), len(site.heads)) for site in sites]
        wanted = ("tokens", *(f"{name}{suffix}" for name in names for suffix in ("", "_std", "_max")))
        empty = torch.zeros(0, dtype=torch.float64)
        columns = {
            name: torch.cat(
                [empty, *(found.get(name, empty.new_full((heads,), torch.nan)) for found, heads in computed)]
            )
            for name in wanted
        }
        return HeadProfile(tuple(site for site, _ in rows), tuple(head for _, head in rows), tuple(names), columns)

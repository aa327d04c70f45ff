"""Watching the heads of a running model: `observe`, and the mergeable values it gathers."""

from polyhead.observation.adapters import Adapter
from polyhead.observation.attention_maps import AttentionMaps
from polyhead.observation.collectors import Gathered, Gatherer, Notes
from polyhead.observation.contributions import Contributions
from polyhead.observation.forward_statistics import KeptStatistics, SiteRows
from polyhead.observation.head_distances import AttentionDistances
from polyhead.observation.head_profile import HeadProfile
from polyhead.observation.observations import Observations
from polyhead.observation.projections import Wiring, find_wiring
from polyhead.observation.routing_load import RoutingCounts, RoutingLoad
from polyhead.observation.saving import load, read_facts, save
from polyhead.observation.session import Session, observe
from polyhead.observation.statistics import AttentionSite

__all__ = [
    "Adapter",
    "AttentionDistances",
    "AttentionMaps",
    "AttentionSite",
    "Contributions",
    "Gathered",
    "Gatherer",
    "HeadProfile",
    "KeptStatistics",
    "Notes",
    "Observations",
    "RoutingCounts",
    "RoutingLoad",
    "Session",
    "SiteRows",
    "Wiring",
    "find_wiring",
    "load",
    "observe",
    "read_facts",
    "save",
]

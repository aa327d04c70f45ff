"""Watching the heads of a running model: `observe`, and the mergeable values it gathers."""

from polyhead.observatory.adapters import Adapter
from polyhead.observatory.contributions import Contributions
from polyhead.observatory.distances import AttentionDistances
from polyhead.observatory.gathering import Gathered, Gatherer, Notes
from polyhead.observatory.head_profile import HeadProfile
from polyhead.observatory.kept_statistics import KeptStatistics, SiteRows
from polyhead.observatory.maps import AttentionMaps
from polyhead.observatory.observations import Observations
from polyhead.observatory.routing import RoutingCounts, RoutingLoad
from polyhead.observatory.saving import load, read_facts, save
from polyhead.observatory.session import Session, observe
from polyhead.observatory.statistics import AttentionSite
from polyhead.observatory.wiring import Wiring, find_wiring

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

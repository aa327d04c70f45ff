"""Public names of `polyhead.observation`."""

from polyhead.observation.accumulators import Sums
from polyhead.observation.adapters import Adapter, AttentionNotifier
from polyhead.observation.attention_maps import AttentionMaps
from polyhead.observation.collectors import BatchMetadata, Collector, CollectorState
from polyhead.observation.contributions import Contributions
from polyhead.observation.forward_statistics import ForwardStatistics, SiteRows
from polyhead.observation.head_distances import AttentionDistances
from polyhead.observation.head_metrics import HeadMetrics, LayerQuantiles
from polyhead.observation.head_profile import HeadProfile
from polyhead.observation.intercepted_calls import SkippedCall
from polyhead.observation.observations import Observations
from polyhead.observation.projections import HeadProjections, find_projections
from polyhead.observation.routing_load import RoutingCounts, RoutingLoad
from polyhead.observation.saving import load, read_facts, save
from polyhead.observation.session import Session, observe
from polyhead.observation.statistics import AttentionSite

__all__ = [
    "Adapter",
    "AttentionDistances",
    "AttentionMaps",
    "AttentionNotifier",
    "AttentionSite",
    "BatchMetadata",
    "Collector",
    "CollectorState",
    "Contributions",
    "ForwardStatistics",
    "HeadMetrics",
    "HeadProfile",
    "HeadProjections",
    "LayerQuantiles",
    "Observations",
    "RoutingCounts",
    "RoutingLoad",
    "Session",
    "SiteRows",
    "SkippedCall",
    "Sums",
    "find_projections",
    "load",
    "observe",
    "read_facts",
    "save",
]

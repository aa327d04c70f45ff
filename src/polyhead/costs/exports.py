"""Public names of `polyhead.costs`."""

from polyhead.costs.cost import CostEstimate, estimate_cost, layer_work
from polyhead.costs.descriptions import describe
from polyhead.costs.descriptions.layer_description import LayerDescription
from polyhead.costs.layouts.layout_sources import from_sizes, read_layout
from polyhead.costs.layouts.model_layout import LayerGroup, ModelLayout
from polyhead.costs.memory import MemoryEstimate, estimate_memory, memory_caveats
from polyhead.costs.options import Ranks
from polyhead.costs.ranks_plan import Collective, HeadShare, RankPhase, RanksPlan
from polyhead.costs.work import AttentionCore, MatrixFlops, Product, Traffic, Work
from polyhead.costs.workload import Workload, visible_pairs

__all__ = [
    "AttentionCore",
    "Collective",
    "CostEstimate",
    "HeadShare",
    "LayerDescription",
    "LayerGroup",
    "MatrixFlops",
    "MemoryEstimate",
    "ModelLayout",
    "Product",
    "RankPhase",
    "Ranks",
    "RanksPlan",
    "Traffic",
    "Work",
    "Workload",
    "describe",
    "estimate_cost",
    "estimate_memory",
    "from_sizes",
    "layer_work",
    "memory_caveats",
    "read_layout",
    "visible_pairs",
]

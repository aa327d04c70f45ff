"""Cost model of attention layers: parameters, FLOPs, bytes, memory and time, from a config alone."""

# Imported for the functions they register.
from polyhead.costs import collaborative as collaborative
from polyhead.costs import differential as differential
from polyhead.costs import routed as routed
from polyhead.costs import talking as talking
from polyhead.costs import variant_work as variant_work
from polyhead.costs import variants as variants
from polyhead.costs.cost import CostEstimate, LayerCounts, MatrixFlops, count_layer, estimate_cost
from polyhead.costs.layer_work import layer_work
from polyhead.costs.layouts.model import LayerGroup, ModelLayout
from polyhead.costs.layouts.reading import from_sizes, read_layout
from polyhead.costs.memory import MemoryEstimate, estimate_memory, memory_doubts
from polyhead.costs.work import AttentionCore, Product, Traffic, Work
from polyhead.costs.workload import Workload, visible_pairs

__all__ = [
    "AttentionCore",
    "CostEstimate",
    "LayerCounts",
    "LayerGroup",
    "MatrixFlops",
    "MemoryEstimate",
    "ModelLayout",
    "Product",
    "Traffic",
    "Work",
    "Workload",
    "count_layer",
    "estimate_cost",
    "estimate_memory",
    "from_sizes",
    "layer_work",
    "memory_doubts",
    "read_layout",
    "visible_pairs",
]

"""What heads cost, before anything is built."""

# Imported for the counts and the work that they register.
from polyhead.plan import arrangement_work as arrangement_work
from polyhead.plan import arrangements as arrangements
from polyhead.plan import collaborative as collaborative
from polyhead.plan import differential as differential
from polyhead.plan import routed as routed
from polyhead.plan import talking as talking
from polyhead.plan.cost import CostEstimate, LayerCounts, MatrixFlops, count_layer, estimate_cost
from polyhead.plan.layer_work import layer_work
from polyhead.plan.layouts.model import LayerGroup, ModelLayout
from polyhead.plan.layouts.reading import from_sizes, read_layout
from polyhead.plan.memory import MemoryEstimate, estimate_memory, memory_doubts
from polyhead.plan.work import AttentionCore, Product, Traffic, Work
from polyhead.plan.workload import Workload, visible_pairs

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

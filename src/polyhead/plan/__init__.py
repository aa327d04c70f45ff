"""What heads cost, before anything is built."""

# Imported for the counts that they register.
from polyhead.plan import arrangements as arrangements
from polyhead.plan import collaborative as collaborative
from polyhead.plan import differential as differential
from polyhead.plan import routed as routed
from polyhead.plan import talking as talking
from polyhead.plan.cost import CostEstimate, LayerCounts, MatrixFlops, count_layer, estimate_cost
from polyhead.plan.workload import Workload, visible_pairs

__all__ = [
    "CostEstimate",
    "LayerCounts",
    "MatrixFlops",
    "Workload",
    "count_layer",
    "estimate_cost",
    "visible_pairs",
]

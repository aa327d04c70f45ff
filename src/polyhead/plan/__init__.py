"""What heads cost, before anything is built."""

# Imported for the counts that it registers.
from polyhead.plan import arrangements as arrangements
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

"""Counts of differential heads (Ye et al. 2024, "Differential Transformer")."""

from __future__ import annotations

from dataclasses import replace

from polyhead.costs.cost import LayerCounts, MatrixFlops, count_heads, count_layer
from polyhead.costs.workload import Workload
from polyhead.layers.variants.differential.config import DifferentialConfig


@count_layer.register
def count_differential(config: DifferentialConfig, work: Workload, pairs: int) -> LayerCounts:
    """Count two attention maps per head, each over half the channels: scores as usual, twice the rest."""
    layout = config.layout
    plain = count_heads(config, work, pairs, layout.num_heads * layout.value_dim)
    positions = config.positions
    extra = 4 * (layout.head_dim // 2) + (layout.num_heads if config.sinks else 0)  # lambda vectors, second sinks
    if positions is not None:
        extra += positions.num_parameters(config.turning) - positions.num_parameters(layout)
    return replace(
        plain,
        parameters=plain.parameters + extra,
        forward=plain.forward + MatrixFlops(values=plain.forward.values),
        exponentials=2 * plain.exponentials,
        weights=2 * plain.weights,
    )

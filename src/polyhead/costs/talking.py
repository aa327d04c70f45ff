"""Counts of talking heads (Shazeer et al. 2020, "Talking-Heads Attention")."""

from __future__ import annotations

from dataclasses import replace

from polyhead.costs.cost import LayerCounts, MatrixFlops, count_heads, count_layer
from polyhead.costs.workload import Workload
from polyhead.layers.variants.talking import TalkingHeadsConfig


@count_layer.register
def count_talking_heads(config: TalkingHeadsConfig, work: Workload, pairs: int) -> LayerCounts:
    """Count the formula; a fused forward computes the scores, their mix and the exponentials once more.

    A fused backward makes three passes over all pairs: for the delta of each softmax row, for the query gradients, and
    for the key and value gradients.
    """
    layout = config.layout
    plain = count_heads(config, work, pairs, layout.num_heads * layout.value_dim)
    mix = 2 * pairs * layout.num_heads**2
    scores, values = plain.forward.scores, plain.forward.values
    return replace(
        plain,
        parameters=plain.parameters + 2 * layout.num_heads**2,
        forward=plain.forward + MatrixFlops(mixing=2 * mix),
        recomputed=MatrixFlops(scores=3 * scores, values=2 * values, mixing=7 * mix),
    )

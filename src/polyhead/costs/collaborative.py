"""Counts of collaborative heads.

Cordonnier et al. 2020, "Multi-Head Attention: Collaborate Instead of Concatenate".
"""

from __future__ import annotations

from dataclasses import replace

from polyhead.costs.cost import LayerCounts, MatrixFlops, count_heads, count_layer
from polyhead.costs.workload import Workload
from polyhead.layers.variants.collaborative.config import CollaborativeConfig


@count_layer.register
def count_collaborative(config: CollaborativeConfig, work: Workload, pairs: int) -> LayerCounts:
    """Count projections to one shared width for queries and keys, which every head scores in full."""
    layout, shared = config.layout, config.shared_dim
    assert shared is not None
    plain = count_heads(config, work, pairs, layout.num_heads * layout.value_dim)
    wider = shared - layout.num_heads * layout.head_dim
    parameters = plain.parameters + layout.num_heads * shared  # the mixing vectors
    parameters += wider * (layout.embed_dim + layout.key_input_dim + (2 if config.bias else 0))
    if config.positions is not None:
        parameters += config.positions.num_parameters(config.turning) - config.positions.num_parameters(layout)
    tokens, new_keys = work.batch * work.queries, work.batch * work.new_keys
    scores = 2 * pairs * layout.num_heads * shared
    return replace(
        plain,
        parameters=parameters,
        forward=replace(
            plain.forward,
            projection=plain.forward.projection
            + 2 * wider * (tokens * layout.embed_dim + new_keys * layout.key_input_dim),
            scores=scores,
        ),
        recomputed=MatrixFlops(scores=scores),
        cache_numbers=shared + layout.num_heads * layout.value_dim,
        cache_scales=2,  # a cache sees keys and values as one head
    )

"""Counts of routed heads; if the number of heads per token varies, its maximum is counted."""

from __future__ import annotations

from polyhead.costs.cost import LayerCounts, MatrixFlops, count_layer
from polyhead.costs.workload import Workload
from polyhead.layers.variants.routed.config import RoutedConfig


@count_layer.register
def count_routed(config: RoutedConfig, work: Workload, pairs: int) -> LayerCounts:
    """Count routed heads: Q, attention and O scale with the heads per token; router, K and V do not."""
    layout = config.layout
    width, heads, kv_heads = layout.embed_dim, config.num_heads, layout.num_kv_heads
    per_head = kv_heads if config.shape == "shared" else 1  # queries per selected head
    queries, outputs = per_head * layout.head_dim, per_head * layout.value_dim  # channels per selected head
    keys_and_values = kv_heads * (layout.head_dim + layout.value_dim)
    routed = heads - config.always_on
    parameters = width * (heads * (queries + outputs) + keys_and_values + routed)
    parameters += heads * queries + keys_and_values if config.bias else 0
    parameters += width if config.output_bias else 0
    parameters += {None: 0, "rms": 2 * layout.head_dim, "layer": 4 * layout.head_dim}[config.qk_norm]
    parameters += heads if config.sinks else 0
    if config.positions is not None:
        parameters += config.positions.num_parameters(layout)
    tokens, new_keys, taken = work.batch * work.queries, work.batch * work.new_keys, config.most_heads
    rows = taken * per_head  # softmax rows per token
    scores = 2 * pairs * taken * queries
    return LayerCounts(
        parameters=parameters,
        forward=MatrixFlops(
            projection=2 * width * (tokens * (taken * queries + routed) + new_keys * keys_and_values),
            scores=scores,
            values=2 * pairs * taken * outputs,
            output=2 * tokens * taken * outputs * width,
        ),
        recomputed=MatrixFlops(scores=scores),
        exponentials=rows * (pairs + (tokens if config.sinks else 0)),
        weights=rows * pairs,
        cache_numbers=keys_and_values,
        cache_scales=2 * kv_heads,
    )

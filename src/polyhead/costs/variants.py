"""Counts of grouped, mixed and latent heads."""

from __future__ import annotations

from dataclasses import replace

from polyhead.costs.cost import LayerCounts, MatrixFlops, count_heads, count_layer
from polyhead.costs.workload import Workload
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.latent.forms import absorbing_is_cheaper
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig


@count_layer.register
def count_grouped_heads(config: GroupedHeadsConfig, work: Workload, pairs: int) -> LayerCounts:
    layout, hidden = config.layout, config.hidden_dim
    assert hidden is not None
    joined, tokens = layout.num_heads * layout.value_dim, work.batch * work.queries
    heads = count_heads(config, work, pairs, hidden)
    groups, up = joined**2 // config.num_groups, joined * hidden  # weights of all A_i together, and of W_1
    return replace(
        heads,
        parameters=heads.parameters + groups + up + (hidden if config.output_bias else 0),
        forward=heads.forward + MatrixFlops(mixing=2 * tokens * groups, output=2 * tokens * up),
    )


@count_layer.register
def count_head_mix(config: HeadMixConfig, work: Workload, pairs: int) -> LayerCounts:
    layout, rows = config.layout, config.num_rows
    assert rows is not None
    heads, dim, tokens = layout.num_heads, layout.value_dim, work.batch * work.queries
    plain = count_heads(config, work, pairs, rows * dim)
    parameters = rows * heads * (1 if config.mix == "heads" else dim**2)
    mixing = 2 * tokens * rows * heads * (dim if config.mix == "heads" else dim**2)
    row_pairs = 0 if config.row_attention is None else tokens * rows**2
    scores = 2 * row_pairs * dim
    if config.row_attention == "projected":
        parameters += 3 * dim * (dim + (1 if config.bias else 0))
        mixing += 3 * 2 * tokens * rows * dim**2
    return replace(
        plain,
        parameters=plain.parameters + parameters,
        forward=plain.forward + MatrixFlops(mixing=mixing + 2 * scores),  # scores, and as much for the values
        recomputed=plain.recomputed + MatrixFlops(mixing=scores),
        exponentials=plain.exponentials + row_pairs,
        weights=plain.weights + row_pairs,
    )


@count_layer.register
def count_latent(config: LatentConfig, work: Workload, pairs: int) -> LayerCounts:
    """Count latent attention (MLA, DeepSeek-V2, 2024), absorbed or expanded as the layer would choose."""
    layout = config.layout
    width, heads, rank, cache_width = layout.embed_dim, layout.num_heads, layout.kv_lora_rank, layout.cache_width
    nope, value = layout.qk_nope_head_dim, layout.value_head_dim
    queries, outputs, up = heads * layout.head_dim, heads * value, rank * heads * (nope + value)
    latent = layout.q_lora_rank
    into_queries = width * latent + latent * queries if latent else width * queries
    biases = ((latent or queries) + cache_width if config.bias else 0) + (width if config.output_bias else 0)
    parameters = into_queries + width * cache_width + up + outputs * width + biases + latent + rank
    parameters += heads if config.sinks else 0
    if config.positions is not None:
        parameters += config.positions.num_parameters(config.turning)
    cheaper = absorbing_is_cheaper(layout, work.queries, work.keys)
    absorbed = cheaper if config.form == "auto" else config.form == "absorbed"
    tokens, new_keys, keys = (work.batch * n for n in (work.queries, work.new_keys, work.keys))
    forward = MatrixFlops(projection=2 * tokens * into_queries + 2 * new_keys * width * cache_width)
    if absorbed:
        scores = 2 * pairs * heads * cache_width
        forward += MatrixFlops(2 * tokens * rank * heads * nope, scores, 2 * pairs * heads * rank)
        forward += MatrixFlops(output=2 * tokens * (rank + width) * outputs)
    else:
        # The cache stores latents, so every call expands all of them to keys and values.
        scores = 2 * pairs * queries
        forward += MatrixFlops(2 * keys * up, scores, 2 * pairs * outputs, output=2 * tokens * outputs * width)
    return LayerCounts(
        parameters=parameters,
        forward=forward,
        recomputed=MatrixFlops(scores=scores),
        exponentials=heads * (pairs + (tokens if config.sinks else 0)),
        weights=heads * pairs,
        cache_numbers=cache_width,
    )

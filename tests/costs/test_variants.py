"""Counts of the variants equal those of built layers, PyTorch's FLOP counter and real caches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import polyhead
from polyhead import Mask
from polyhead.costs import MatrixFlops, Workload, estimate_cost
from polyhead.errors import OptionError
from polyhead.layers import AttentionConfig, MultiHeadConfig, build_attention
from polyhead.layers.kv_cache.latent import PreallocatedLatentCache
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.latent.forms import form_products
from polyhead.layers.positions.config import ALiBiConfig, LearnedConfig, RotaryConfig
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig
from polyhead.layers.variants import mixing as mixing_layer
from tests.costs.pytorch_counts import (
    BATCH,
    EMBED,
    HEADS,
    KEYS,
    PAST,
    QUERIES,
    built_parameters,
    counted_flops,
    workloads,
)


def latent(**options: Any) -> LatentConfig:
    return LatentConfig(EMBED, HEADS, **{"kv_lora_rank": 9, "backend": "reference", **options})


def grouped(**options: Any) -> GroupedHeadsConfig:
    return GroupedHeadsConfig(EMBED, HEADS, **{"num_groups": 3, "backend": "reference", **options})


def mixed(**options: Any) -> HeadMixConfig:
    return HeadMixConfig(EMBED, HEADS, backend="reference", **options)


ROTARY = {"positions": RotaryConfig(interleaved=True), "qk_rope_head_dim": 4}
WIDE = {"qk_nope_head_dim": 7, "value_head_dim": 5}
CONFIGS: dict[str, AttentionConfig] = {
    "grouped": grouped(),
    "grouped, one group": grouped(num_groups=1, hidden_dim=13),
    "grouped, a group a head": grouped(num_groups=6, bias=False),
    "grouped, value_dim": grouped(value_dim=5, num_kv_heads=2, hidden_dim=13, output_bias=False),
    "grouped, linear, gated": grouped(activation="linear", output_gate="channel", qk_norm="rms"),
    "grouped, causal": grouped(causal=True, sinks=True, positions=ALiBiConfig(learnable=True)),
    "mixed": mixed(),
    "mixed, rows": mixed(num_rows=4, value_dim=5),
    "mixed, full": mixed(num_rows=4, mix="full", num_kv_heads=2),
    "mixed, projected": mixed(row_attention="projected", value_dim=5),
    "mixed, projected, no bias": mixed(num_rows=7, row_attention="projected", bias=False),
    "mixed, no attention among rows": mixed(row_attention=None, mix="full", causal=True),
    "latent": latent(),
    "latent, expanded": latent(form="expanded", **WIDE),
    "latent, absorbed": latent(form="absorbed", **WIDE),
    "latent, rotary": latent(**ROTARY),
    "latent, rotary, expanded": latent(form="expanded", **ROTARY, **WIDE),
    "latent, rotary, absorbed": latent(form="absorbed", **ROTARY, **WIDE),
    "latent, queries": latent(q_lora_rank=11, bias=False),
    "latent, queries, biases": latent(q_lora_rank=11, sinks=True, causal=True, **ROTARY),
    "latent, learned": latent(positions=LearnedConfig(29), output_bias=False),
    "latent, long rank": latent(kv_lora_rank=31, **WIDE),
    "latent, short rank": latent(kv_lora_rank=2, **WIDE),
}


@pytest.fixture(autouse=True)
def reference_among_rows(monkeypatch):
    """PyTorch counts no fused kernel of the CPU, so the rows of mixed heads attend by the formula too."""
    monkeypatch.setattr(mixing_layer, "attention", partial(polyhead.attention, backend="reference"))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_those_of_the_built_layer(config):
    assert estimate_cost(config, Workload.forward(QUERIES)).parameters == built_parameters(config)


@workloads
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matrix_flops_are_those_that_pytorch_counts(config, work):
    assert estimate_cost(config, work, form="materialised").matrix_flops == counted_flops(config, work)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_a_latent_layer_s_own_choice_of_form_rests_on_the_same_count(form):
    config = latent(form=form, **ROTARY, **WIDE)
    work = Workload.cross(QUERIES, KEYS, remembered=True)
    forward = estimate_cost(config, work).forward
    layout = config.layout
    aside = 2 * QUERIES * (EMBED * HEADS * layout.head_dim + HEADS * layout.value_head_dim * EMBED)
    assert forward.total - aside == 2 * form_products(layout, form, QUERIES, KEYS)


def test_latent_heads_are_counted_in_the_form_that_the_layer_takes():
    config = latent(**ROTARY, **WIDE)
    layer = build_attention(config)
    taken = set()
    for work in (Workload.cross(40, 40), Workload.prefill(40, past=3), Workload.decode(300)):
        chosen = layer.explain(work.queries, work.keys).chosen
        taken.add(chosen)
        assert estimate_cost(config, work) == estimate_cost(latent(form=chosen, **ROTARY, **WIDE), work)
    assert taken == {"expanded", "absorbed"}


def test_a_causal_mask_spares_scores_and_values_alone():
    for config in CONFIGS.values():
        work = Workload.forward(QUERIES)
        full = estimate_cost(config, work, form="materialised").forward
        causal = estimate_cost(config, work, mask=Mask.causal()).forward
        pairs, seen = QUERIES**2, QUERIES * (QUERIES + 1) // 2
        assert (causal.scores * pairs, causal.values * pairs) == (full.scores * seen, full.values * seen)
        assert (causal.projection, causal.mixing, causal.output) == (full.projection, full.mixing, full.output)


def test_a_fused_backward_computes_the_scores_among_rows_once_more_too():
    work = Workload.training_step(QUERIES, batch=BATCH)
    for row_attention, rows in (("plain", 4), (None, 0)):
        config = mixed(num_rows=4, row_attention=row_attention)
        fused, materialised = (estimate_cost(config, work, form=form) for form in ("fused", "materialised"))
        tokens, dim = BATCH * QUERIES, config.layout.value_dim
        again = MatrixFlops(scores=fused.forward.scores, mixing=2 * tokens * rows**2 * dim)
        assert fused.backward == materialised.backward + again
        assert materialised.exponentials == BATCH * HEADS * QUERIES**2 + tokens * rows**2


def test_grouped_heads_have_at_most_the_weights_of_plain_attention():
    plain = estimate_cost(MultiHeadConfig(512, 8, bias=False), Workload.forward(1)).parameters
    for groups in (2, 4, 8):
        config = GroupedHeadsConfig(512, 8, num_groups=groups, bias=False)
        assert 0 <= plain - estimate_cost(config, Workload.forward(1)).parameters < 2 * 512


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_latent_cache_takes_so_many_bytes(dtype):
    config = latent(**ROTARY)
    cost = estimate_cost(config, Workload.prefill(QUERIES, past=PAST, batch=BATCH), dtype=dtype)
    cache = PreallocatedLatentCache.for_layout(
        config.layout.absorbed, capacity=PAST + QUERIES, batch_size=BATCH, dtype=dtype
    )
    assert cost.cache_bytes == cache.nbytes
    assert cost.cache_bytes_per_token == (9 + 4) * dtype.itemsize
    with pytest.raises(OptionError, match="no int8 cache"):
        estimate_cost(config, Workload.decode(PAST), cache_dtype=torch.int8)


def test_grouped_and_mixed_heads_keep_the_cache_of_multi_head_attention():
    work = Workload.decode(PAST, batch=BATCH)
    plain = estimate_cost(MultiHeadConfig(EMBED, HEADS, num_kv_heads=2), work).cache_bytes
    assert estimate_cost(grouped(num_kv_heads=2), work).cache_bytes == plain
    assert estimate_cost(mixed(num_kv_heads=2, num_rows=4), work).cache_bytes == plain

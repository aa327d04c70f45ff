"""PyTorch's FLOP counter supports our operators, and its counts equal those of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import polyhead.costs.flop_formulas  # noqa: F401  for the formulas that it registers
from polyhead.costs import Workload, estimate_cost
from polyhead.layers import MultiHeadConfig, build_attention
from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.layers.variants.talking import TalkingHeadsConfig
from polyhead.ops.decode.fused import CacheArguments, decode
from polyhead.ops.selected_rows.row_products import RowGroups, spread_product

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM, VALUE = 3, 6, 2, 19, 23, 8, 16


def tensors(kv_heads: int = KV_HEADS) -> list[torch.Tensor]:
    shapes = ((HEADS, QUERIES, DIM), (kv_heads, KEYS, DIM), (kv_heads, KEYS, VALUE))
    return [torch.empty(BATCH, *shape, device="meta") for shape in shapes]


def counted(operator: Any, *arguments: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        operator(*arguments)
    return counter.get_total_flops()


def test_attention_and_its_gradient():
    query, key, value = tensors()
    output = torch.empty(BATCH, HEADS, QUERIES, VALUE, device="meta")
    rows = torch.empty(BATCH, HEADS, QUERIES, device="meta")
    options = (0.3, None, None, None, None, None, [], [], 0.0, None, "", 1, 0)
    pairs = BATCH * HEADS * QUERIES * KEYS
    forward = counted(torch.ops.polyhead.attention_forward, query, key, value, *options)
    assert forward == 2 * pairs * (DIM + VALUE)
    given = (query, key, value, *options, output, output, rows, None, [], [], [False] * 4)
    assert counted(torch.ops.polyhead.attention_backward, *given) == 2 * pairs * (3 * DIM + 2 * VALUE)


def test_talking_heads_and_their_gradient():
    query, key, value = tensors(HEADS)
    mix = torch.empty(HEADS, HEADS, device="meta")
    rows = torch.empty(BATCH, HEADS, QUERIES, device="meta")
    inputs = (query, key, value, mix, mix, 0.3, None, None, [], [], None, None)
    config = TalkingHeadsConfig(HEADS * DIM, HEADS, value_dim=VALUE)
    cost = estimate_cost(config, Workload.cross(QUERIES, KEYS, batch=BATCH, training=True))
    expected = [x.scores + x.values + x.mixing for x in (cost.forward, cost.backward)]
    assert counted(torch.ops.polyhead.talking_forward, *inputs, False) == expected[0]
    grad = torch.empty(BATCH, HEADS, QUERIES, VALUE, device="meta")
    assert counted(torch.ops.polyhead.talking_backward, *inputs, grad, rows) == expected[1]


def test_statistics_of_talking_heads_make_the_second_mix_where_it_is_requested():
    query, key, value = tensors(HEADS)
    mix = torch.empty(HEADS, HEADS, device="meta")
    rows = torch.empty(BATCH, HEADS, QUERIES, device="meta")
    inputs = (query, key, value, mix, mix, 0.3, None, None, [], [], None, None, rows)
    pairs = BATCH * HEADS * QUERIES * KEYS
    for names, mixes in (("entropy,mean_distance", 1), ("entropy,signed_mass", 2)):
        found = counted(torch.ops.polyhead.talking_statistics, *inputs, names, 1, 0)
        assert found == 2 * pairs * (DIM + mixes * HEADS)


def test_every_operator_of_ours_has_a_formula():
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "polyhead::" in name
    }
    assert len(names) >= 11
    names -= {"observe_heads", "keep_forward", "observe_gradients"}  # they report tensors
    assert {name for name in names if getattr(torch.ops.polyhead, name) not in flop_registry} == set()


# ---- what tensors say, and what is counted where they say nothing


def test_a_step_of_decoding_counts_every_slot_where_lengths_have_no_content():
    query, key, value = tensors()
    query = query[:, :, :2]
    lengths = torch.empty(BATCH, dtype=torch.int32, device="meta")
    found = counted(lambda: decode(query, CacheArguments(key, value, lengths), scale=1.0))
    assert found == 2 * BATCH * HEADS * 2 * KEYS * (DIM + VALUE)
    with FakeTensorMode(allow_non_fake_inputs=False):
        fakes = [torch.empty(x.shape) for x in (query, key, value)]
        fake_lengths = torch.full((BATCH,), 3, dtype=torch.int32)
        inputs = (*fakes, fake_lengths, *(None,) * 6, False, *(None,) * 3, 1.0, None, None, None, 0, 0, [], 1, 0, None)
        assert counted(torch.ops.polyhead.decode, *inputs) == found


def test_pages_count_as_slots_and_positions_as_tokens():
    formula = flop_registry[torch.ops.polyhead.decode]
    query = torch.empty(BATCH, HEADS, 2, DIM, device="meta")
    pages, pages_of_values = (torch.empty(40, 4, KV_HEADS, dim, device="meta") for dim in (DIM, VALUE))
    table = torch.empty(BATCH, 5, dtype=torch.int32, device="meta")
    one = 2 * HEADS * (DIM + VALUE)
    assert formula(query, pages, pages_of_values, None, None, None, None, table) == one * BATCH * 2 * 5 * 4
    lengths, new = torch.tensor([3, 20, 7]), torch.tensor([1, 2, 0])
    assert formula(query, pages, pages_of_values, lengths, new, None, None, table) == one * (3 + 2 * 20)
    _, key, value = tensors()
    position = torch.full((1, KEYS), -1)
    position[0, 3:9] = torch.arange(6)
    assert formula(query, key, value, None, None, position, torch.zeros(1, 2)) == one * BATCH * 2 * 6


def test_chosen_rows_count_up_to_the_last_offset():
    key, value = torch.empty(BATCH, 2, KEYS, DIM, device="meta"), torch.empty(BATCH, 2, KEYS, VALUE, device="meta")
    query, positions = torch.empty(17, DIM, device="meta"), torch.empty(17, dtype=torch.int32, device="meta")
    offsets = torch.tensor([0, 5, 5, 13])
    for name, per_pair in (("forward", DIM + VALUE), ("backward", 3 * DIM + 2 * VALUE)):
        formula = flop_registry[getattr(torch.ops.polyhead, f"ragged_attention_{name}")]
        assert formula(positions, offsets, KEYS, False, query, key, value) == 2 * 13 * KEYS * per_pair
        assert formula(positions, offsets.to("meta"), KEYS, False, query, key, value) == 2 * 17 * KEYS * per_pair


def test_products_of_chosen_rows_count_the_rows_that_meet_a_matrix():
    chosen = torch.tensor([[2, 0], [0, 1], [1, 1]])
    used = torch.tensor([[True, True], [True, False], [True, True]])
    x, matrices = torch.empty(3, DIM, device="meta"), torch.empty(3, DIM, VALUE, device="meta")
    groups = RowGroups.of(chosen, 3, used)
    for name in ("spread_product", "summed_product"):
        formula = flop_registry[getattr(torch.ops.polyhead, name)]
        assert formula(x, matrices, groups.order, groups.ends, 2, False) == 2 * 5 * DIM * VALUE
    outer = flop_registry[torch.ops.polyhead.row_outer_product]
    rows = torch.empty(6, VALUE, device="meta")
    assert outer(x, rows, groups.order, groups.ends, 2, False, True) == 2 * 5 * DIM * VALUE
    empty = RowGroups.of(torch.empty(3, 2, dtype=torch.int64, device="meta"), 3)
    assert counted(spread_product, x, matrices, empty) == 2 * 6 * DIM * VALUE


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_a_layer_of_routed_heads_without_content_has_the_flops_that_are_planned(training):
    config = RoutedConfig(DIM * HEADS, HEADS, top_k=2, always_on=1, num_kv_heads=KV_HEADS)
    layer = build_attention(config, device="meta")
    x = torch.empty(BATCH, QUERIES, DIM * HEADS, device="meta", requires_grad=training)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        output = layer(x, backend="reference").output
        if training:
            output.sum().backward()
    work = Workload(QUERIES, BATCH, training=training)
    assert counter.get_total_flops() == estimate_cost(config, work, form="materialised").matrix_flops


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_layer_on_our_kernels_has_the_flops_that_pytorch_counts(kv_heads, training):
    config = MultiHeadConfig(512, 8, num_kv_heads=kv_heads, backend="fused")
    layer = build_attention(config, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 96, 512, device="cuda", dtype=torch.bfloat16, requires_grad=training)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        output = layer(x).output
        if training:
            output.sum().backward()
    cost = estimate_cost(config, Workload(96, 2, training=training))
    assert counter.get_total_flops() == cost.matrix_flops

"""PyTorch's FLOP counter knows our operators, and what it counts for them is what the plan counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polyhead.plan.flop_formulas  # noqa: F401  for the formulas that it registers
from polyhead.layers.config import MultiHeadConfig, build_attention
from polyhead.layers.talking_heads_config import TalkingHeadsConfig
from polyhead.plan import Workload, estimate_cost

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
    given = (output, query, key, value, output, rows, *options, None, [], [], [False] * 4)
    assert counted(torch.ops.polyhead.attention_backward, *given) == 2 * pairs * (3 * DIM + 2 * VALUE)


def test_talking_heads_and_their_gradient():
    query, key, value = tensors(HEADS)
    mix = torch.empty(HEADS, HEADS, device="meta")
    rows = torch.empty(BATCH, HEADS, QUERIES, device="meta")
    inputs = (query, key, value, mix, mix, 0.3, [], [], [], None, None)
    config = TalkingHeadsConfig(HEADS * DIM, HEADS, value_dim=VALUE)
    cost = estimate_cost(config, Workload.cross(QUERIES, KEYS, batch=BATCH, training=True))
    expected = [x.scores + x.values + x.mixing for x in (cost.forward, cost.backward)]
    assert counted(torch.ops.polyhead.talking_forward, *inputs, False) == expected[0]
    grad = torch.empty(BATCH, HEADS, QUERIES, VALUE, device="meta")
    assert counted(torch.ops.polyhead.talking_backward, *inputs, grad, rows) == expected[1]


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

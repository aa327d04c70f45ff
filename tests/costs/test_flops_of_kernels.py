"""Whole layers on our kernels have the FLOPs that the plan counts: in Triton's interpreter and on a GPU.

A step of decoding is counted by what the cache holds, an attention of chosen rows by those that were chosen.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import polyhead.costs.flop_formulas  # noqa: F401  for the formulas that it registers
from polyhead.costs import AttentionCore, Workload, estimate_cost
from polyhead.layers import (
    AttentionConfig,
    GrowingCache,
    KVCache,
    LatentCache,
    LatentConfig,
    MultiHeadConfig,
    PagedCache,
    PreallocatedCache,
    PreallocatedLatentCache,
    QuantizedCache,
    RollingCache,
    build_attention,
)
from polyhead.layers.variants import (
    CollaborativeConfig,
    DifferentialConfig,
    GroupedHeadsConfig,
    HeadMixConfig,
    RoutedConfig,
)
from polyhead.ops.selected_rows.api import RaggedRows, ragged_attention
from polyhead.ops.talking_heads.api import talking_attention
from tests.ops.interpreter.interpreted import in_the_interpreter

BATCH, PAST, EMBED = 3, 6, 64
CAUSAL = {"causal": True, "backend": "fused"}
HEADS: dict[str, AttentionConfig] = {
    "plain": MultiHeadConfig(EMBED, 4, **CAUSAL),
    "grouped queries": MultiHeadConfig(EMBED, 4, num_kv_heads=2, value_dim=24, **CAUSAL),
    "uneven": MultiHeadConfig(EMBED, 4, key_heads=(0, 1, 1, 1), **CAUSAL),
    "grouped heads": GroupedHeadsConfig(EMBED, 4, num_groups=2, **CAUSAL),
    "differential": DifferentialConfig(EMBED, 4, num_kv_heads=2, **CAUSAL),
    "collaborative": CollaborativeConfig(EMBED, 4, shared_dim=40, **CAUSAL),
}
CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "preallocated": (PreallocatedCache, {"capacity": 11}),
    "paged": (PagedCache, {"num_pages": 12, "page_size": 4}),
    "int8": (QuantizedCache, {"capacity": 11}),
    "rolling": (RollingCache, {"window": PAST + 1}),
}


def counted(layer: Any, x: Tensor, **options: Any) -> tuple[int, set[str]]:
    """All FLOPs of a call, and the names of our operators that it met."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x, **options)
    found = counter.get_flop_counts()["Global"]
    return counter.get_total_flops(), {str(name) for name in found if str(name).startswith("polyhead.")}


def inputs(tokens: int, device: str) -> Tensor:
    return torch.randn(BATCH, tokens, EMBED, device=device)


def check_decode(config: AttentionConfig, cache: KVCache, device: str) -> None:
    layer = build_attention(config, device=device)
    with torch.no_grad():
        layer(inputs(PAST, device), cache=cache, backend="blockwise")
    expected = estimate_cost(config, Workload.decode(PAST, batch=BATCH)).matrix_flops
    assert counted(layer, inputs(1, device), cache=cache) == (expected, {"polyhead.decode"})


def check_caches(device: str = "cpu") -> None:
    """Every kind of heads over some cache, and every kind of cache under some heads."""
    over = {"plain": "rolling", "grouped queries": "paged", "differential": "int8", "collaborative": "paged"}
    for name, config in HEADS.items():
        kind, options = CACHES[over.get(name, "preallocated")]
        layout = build_attention(config, device="meta").cache_layout
        check_decode(config, kind.for_layout(layout, batch_size=BATCH, device=device, **options), device)


def check_lengths(device: str = "cpu") -> None:
    """Sequences of different lengths, and new tokens of which some are padding."""
    layer = build_attention(HEADS["grouped queries"], device=device)
    layout = layer.layout
    for kind in (PreallocatedCache, PagedCache):
        options = CACHES["preallocated" if kind is PreallocatedCache else "paged"][1]
        cache = kind.for_layout(layout, batch_size=BATCH, device=device, **options)
        with torch.no_grad():
            layer(inputs(5, device), cache=cache, lengths=[5, 2, 3], backend="blockwise")
        total, met = counted(layer, inputs(2, device), cache=cache, lengths=[2, 1, 2])
        assert met == {"polyhead.decode"}
        pairs = 2 * 7 + 1 * 3 + 2 * 5
        linear = estimate_cost(HEADS["grouped queries"], Workload(2, BATCH)).forward
        heads = layout.num_heads * (layout.head_dim + layout.value_dim)
        assert total == linear.projection + linear.output + 2 * pairs * heads


def check_latents(device: str = "cpu") -> None:
    sizes = {"kv_lora_rank": 48, "q_lora_rank": 24, "qk_nope_head_dim": 16, **CAUSAL}
    config = LatentConfig(EMBED, 4, form="absorbed", **sizes)
    wide = LatentConfig(EMBED, 4, form="absorbed", **{**sizes, "kv_lora_rank": 512})
    for latent in (config, wide):
        cache = PreallocatedLatentCache.for_layout(latent.layout.absorbed, capacity=9, batch_size=BATCH, device=device)
        check_decode(latent, cache, device)
        check_decode(latent, LatentCache(value_dim=latent.kv_lora_rank), device)


def check_routed(device: str = "cpu") -> None:
    """Chosen rows and their products, forward and backward."""
    for shape in ("shared", "full"):
        for training in (False, True):
            config = RoutedConfig(EMBED, 6, top_k=2, shape=shape, head_dim=16, backend="fused")
            layer, x = build_attention(config, device=device), inputs(7, device).requires_grad_(training)
            with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
                output = layer(x).output
                if training:
                    output.sum().backward()
            work = Workload(7, BATCH, training=training)
            assert counter.get_total_flops() == estimate_cost(config, work).matrix_flops


def check_slots(device: str = "cpu") -> None:
    """Routed heads over shared keys decode as slots."""
    config = RoutedConfig(EMBED, 6, top_k=2, num_kv_heads=2, head_dim=16, **CAUSAL)
    layer, cache = build_attention(config, device=device), GrowingCache()
    with torch.no_grad():
        layer(inputs(PAST, device), cache=cache, backend="blockwise")
    expected = estimate_cost(config, Workload.decode(PAST, batch=BATCH)).matrix_flops
    assert counted(layer, inputs(1, device), cache=cache)[0] == expected


def check_mixed_rows(device: str = "cpu") -> None:
    """Heads that attend to one another; among few rows on a GPU that is plain products."""
    config = HeadMixConfig(EMBED, 4, num_rows=3, row_attention="projected", **CAUSAL)
    cache = GrowingCache()
    layer = build_attention(config, device=device)
    with torch.no_grad():
        layer(inputs(PAST, device), cache=cache, backend="blockwise")
    expected = estimate_cost(config, Workload.decode(PAST, batch=BATCH)).matrix_flops
    assert counted(layer, inputs(1, device), cache=cache)[0] == expected


def check_chosen_rows(device: str = "cpu") -> None:
    """Forward and backward of rows that were chosen; the two behind the last offset are padding."""
    torch.manual_seed(0)
    query, key = torch.randn(9, 16, device=device), torch.randn(1, 2, 11, 16, device=device)
    value = torch.randn(1, 2, 11, 8, device=device)
    positions = torch.tensor([0, 3, 6, 1, 2, 4, 9, 0, 0], device=device)
    rows = RaggedRows(positions, torch.tensor([0, 3, 7], device=device))
    query, key, value = (x.requires_grad_() for x in (query, key, value))
    with FlopCounterMode(display=False) as counter:
        ragged_attention(query, key, value, rows, backend="fused").output.sum().backward()
    found = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    assert found == {
        "polyhead.ragged_attention_forward": 2 * 7 * 11 * (16 + 8),
        "polyhead.ragged_attention_backward": 2 * 7 * 11 * (3 * 16 + 2 * 8),
    }


def check_talking_backward(heads: int, dim: int) -> None:
    """The backward of talking heads, by the sizes of all products that its kernels make; tiles have no padding."""
    from triton.runtime.interpreter import InterpreterBuilder

    found = 0
    create_dot = InterpreterBuilder.create_dot

    def counting(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        nonlocal found
        found += 2 * a.data.size * b.data.shape[-1]
        return create_dot(self, a, b, *rest)

    query, key, value = (torch.randn(1, heads, 32, dim).bfloat16().requires_grad_() for _ in range(3))
    mixes = [torch.eye(heads, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    output = talking_attention(query, key, value, logits_mix=mixes[0], weights_mix=mixes[1], backend="fused").output
    with mock.patch.object(InterpreterBuilder, "create_dot", counting):
        output.sum().backward()
    core = AttentionCore("backward", 1, heads, heads, 32, 32, dim, dim, torch.bfloat16, mixing=True)
    assert found == core.flops


CHECKS = (check_caches, check_lengths, check_latents, check_routed, check_slots, check_mixed_rows, check_chosen_rows)


each = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@each
def test_in_the_interpreter_layers_have_the_flops_that_are_planned(check: Any) -> None:
    in_the_interpreter(check)


@pytest.mark.gpu
@each
def test_on_a_gpu_layers_have_the_flops_that_are_planned(check: Any) -> None:
    check("cuda")


@pytest.mark.parametrize(("heads", "dim"), [(16, 16), (16, 128)], ids=["narrow", "wide"])
def test_the_backward_of_talking_heads_counts_the_products_of_its_kernels(heads: int, dim: int) -> None:
    in_the_interpreter(check_talking_backward, heads, dim)

"""Peak memory, compared with every storage on the CPU and with the allocator on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import gc
import operator
from typing import Literal

import pytest
import torch

from polyhead.costs import Workload, estimate_cost, estimate_memory
from polyhead.costs.memory import MemoryEstimate
from polyhead.layers import AttentionConfig, MultiHeadConfig, build_attention
from polyhead.layers.kv_cache import PreallocatedCache
from polyhead.layers.positions.config import RotaryConfig
from tests.costs import storages

Phase = Literal["forward", "prefill", "training"]
MIB = 1 << 20


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("heads", [1, 4, 16])
def test_peak_of_materialised_weights_on_a_cpu_is_what_all_storages_take(heads, training):
    config = MultiHeadConfig(64, heads, bias=False, backend="reference")
    work = Workload(192, 2, training=training)
    found = estimate_memory(config, work, form="materialised", dtype=torch.float32, device="cpu")
    assert found.total == pytest.approx(storages.measured(config, work).peak, rel=0.05)


# ---- what depends on the number of heads


def test_the_memory_of_materialised_weights_grows_with_the_heads_and_that_of_fused_attention_does_not():
    work = Workload.forward(96, batch=2)
    for heads in (1, 2, 8, 64, 256):
        config = MultiHeadConfig(256, heads)
        assert estimate_cost(config, work, form="materialised").weights_bytes == 4 * heads * 2 * 96**2
        written, fused = (estimate_memory(config, work, form=form) for form in ("materialised", "fused"))
        assert written.weights == 3 * 4 * heads * 2 * 96**2
        assert fused.weights == 0
        # A log-sum-exp for each row is all that fused attention keeps of a head.
        assert fused.total - estimate_memory(MultiHeadConfig(256, 1), work).total <= 4 * (heads - 1) * 2 * 96


# ---- layers of a model


def test_layers_keep_their_activations_and_share_what_one_of_them_needs():
    config, work = MultiHeadConfig(64, 4, bias=False), Workload.training_step(50)
    one, two = (estimate_memory(config, work, layers=count) for count in (1, 2))
    assert two.parameters == 2 * one.parameters == 2 * 2 * estimate_cost(config, work).parameters
    assert two.gradients == 2 * one.gradients
    assert (two.transient, two.inputs) == (one.transient, one.inputs)
    assert two.kept == 2 * one.kept + 50 * 64 * 2
    idle = estimate_memory(config, Workload.forward(50), layers=7)
    assert (idle.kept, idle.gradients, idle.cache) == (0, 0, 0)
    added = one + estimate_memory(MultiHeadConfig(64, 4), work)
    assert (added.transient, added.kept) == (one.transient, two.kept)


def saved_by(configs: list[AttentionConfig], tokens: int) -> int:
    """Bytes that autograd saves for the backward of these layers in a row, besides parameters and the first input."""
    layers = [build_attention(config) for config in configs]
    x = torch.randn(1, tokens, configs[0].layout.embed_dim, requires_grad=True)
    own = {tensor.untyped_storage()._cdata for tensor in (x, *(p for layer in layers for p in layer.parameters()))}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in layers:
            x = layer(x).output
    return sum(storage.nbytes() for key, storage in saved.items() if key not in own)


def test_layers_of_equal_positions_share_the_tables_of_rope():
    tokens, dim = 256, 64  # tables grow by powers of two
    config = MultiHeadConfig(dim, 1, bias=False, causal=True, positions=RotaryConfig())
    longer = dataclasses.replace(config, positions=RotaryConfig(base=1e6))
    windowed = dataclasses.replace(config, window=100)
    table = 2 * 4 * tokens * dim  # cos and sin in float32

    def of(*layers: tuple[AttentionConfig, int]) -> MemoryEstimate:
        work, options = Workload.training_step(tokens), {"dtype": torch.float32, "device": "cpu"}
        return functools.reduce(
            operator.add, (estimate_memory(each, work, layers=count, **options) for each, count in layers)
        )

    cases = {
        "equal layers": (((config, 3),), table),
        "windows": (((config, 2), (windowed, 1)), table),
        "other wavelengths": (((config, 2), (longer, 1)), 2 * table),
    }
    for name, (layers, tables) in cases.items():
        found = of(*layers)
        assert found.table_bytes == tables, name
        real = saved_by([each for each, count in layers for _ in range(count)], tokens)
        assert found.kept + found.table_bytes == pytest.approx(real, rel=0.03), name
    one, many = of((config, 1)), of((config, 3))
    assert many.total - one.total == 2 * (one.kept + one.between + one.parameters + one.gradients)
    assert one.to_dict()["tables"] == table
    assert one.total == one.parameters + one.gradients + one.inputs + one.kept + one.transient + table
    source = Workload.cross(7, 300)
    assert estimate_memory(dataclasses.replace(config, causal=False), source).table_bytes == 2 * 4 * 512 * dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 19, 256, 257, 300, 1025, 5000, (1 << 16) - 1, 1 << 16, 70_001])
def test_tables_of_rope_grow_by_powers_of_two(tokens, dtype):
    positions = RotaryConfig(base=1e4 + tokens)  # a table of its own
    config = MultiHeadConfig(8, 1, bias=False, causal=True, positions=positions)
    rotary = build_attention(config, dtype=dtype).positions
    rotary.rotation(torch.zeros(1, 1, tokens, 8, dtype=dtype))
    table = rotary._table
    tensors = [*(x for x, _ in table._grown.values()), *table._recent[1]]
    stored = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())
    found = estimate_memory(config, Workload.training_step(tokens), dtype=dtype, device="cpu")
    assert found.table_bytes == stored


def test_a_token_behind_a_very_long_context_has_the_rows_of_its_own():
    config = MultiHeadConfig(8, 1, causal=True, positions=RotaryConfig())
    tables = [estimate_memory(config, Workload.decode(past)).table_bytes for past in (4999, 1 << 17)]
    assert tables == [2 * 4 * 8 * 8192, 2 * 4 * 8]


@pytest.mark.parametrize("form", ["fused", "materialised"])
@pytest.mark.parametrize(
    ("work", "cached"),
    [
        (Workload.forward(23, batch=3), False),
        (Workload.prefill(23, batch=3), True),
        (Workload.decode(past=22, batch=3), True),
        (Workload.training_step(23, batch=3), False),
    ],
    ids=["forward", "prefill", "decode", "training"],
)
def test_any_split_of_equal_layers_takes_what_they_take_at_once(work, cached, form):
    config = MultiHeadConfig(48, 6, num_kv_heads=2, causal=True, positions=RotaryConfig())

    def of(layers: int) -> MemoryEstimate:
        return estimate_memory(config, work, form=form, cached=cached, layers=layers)

    for split in ((2, 2), (1, 3), (3, 1), (1, 1, 1, 1), (2, 1, 1)):
        first, *others = (of(layers) for layers in split)
        assert sum(others, first) == of(4), split


def test_weights_of_layers_that_differ_live_at_once_only_where_a_backward_keeps_them():
    few, many = (MultiHeadConfig(48, heads, bias=False) for heads in (3, 6))
    copies = [4 * heads * 2 * 96**2 for heads in (3, 6)]

    def both(work: Workload) -> MemoryEstimate:
        return estimate_memory(few, work, form="materialised", layers=5) + estimate_memory(
            many, work, form="materialised", layers=7
        )

    forward = both(Workload.forward(96, batch=2))
    assert (forward.kept_weights, forward.weights) == (0, 3 * copies[1])
    training = both(Workload.training_step(96, batch=2))
    assert training.kept_weights == 2 * (5 * copies[0] + 7 * copies[1])
    assert training.weights == training.kept_weights + 4 * copies[1]
    for found in (forward, training):
        assert found.weights < found.kept + found.transient < found.total


def test_a_cache_is_in_it_where_there_is_one():
    config, work = MultiHeadConfig(64, 4, num_kv_heads=2, causal=True), Workload.decode(past=99, batch=3)
    found = estimate_memory(config, work, layers=5)
    cache = PreallocatedCache.for_layout(config.layout, capacity=100, batch_size=3, dtype=torch.bfloat16)
    assert found.cache == 5 * cache.nbytes
    assert estimate_memory(config, Workload.prefill(100, batch=3), cached=True, layers=5).cache == found.cache
    assert estimate_memory(config, Workload.prefill(100, batch=3), layers=5).cache == 0


# ---- on a GPU

LAYERS: dict[str, tuple[MultiHeadConfig, int, int]] = {  # batch, tokens
    "12x64": (MultiHeadConfig(768, 12, bias=False), 16, 1024),
    "16x64": (MultiHeadConfig(1024, 16), 8, 2048),
    "32/8x128": (MultiHeadConfig(4096, 32, num_kv_heads=8, bias=False), 1, 8192),
    "one head": (MultiHeadConfig(128, 1, bias=False), 8, 16384),
    "12x64, causal": (MultiHeadConfig(768, 12, bias=False, causal=True), 16, 1024),
    "16x64, causal": (MultiHeadConfig(1024, 16, causal=True), 64, 256),
    "16x128, finite": (MultiHeadConfig(2048, 16, bias=False, causal=True, finite=True), 2, 8192),
    "32x128, causal": (MultiHeadConfig(4096, 32, bias=False, causal=True), 1, 8192),
    "32/8x128, causal": (MultiHeadConfig(4096, 32, num_kv_heads=8, bias=False, causal=True), 1, 8192),
    "64/1x64, finite": (MultiHeadConfig(4096, 64, num_kv_heads=1, bias=False, causal=True, finite=True), 1, 8192),
    "16/8x128 of 1024": (MultiHeadConfig(1024, 16, num_kv_heads=8, head_dim=128, bias=False, causal=True), 4, 4096),
    "8/2x64 of 512, long": (MultiHeadConfig(512, 8, num_kv_heads=2, bias=False, causal=True), 1, 65536),
}
PHASES: tuple[Phase, ...] = ("forward", "prefill", "training")
CASES = [
    (name, phase) for name, (config, _, _) in LAYERS.items() for phase in PHASES if config.causal or phase != "prefill"
]


def measured(config: AttentionConfig, batch: int, tokens: int, phase: Phase, backend: str) -> int:
    """The most that the allocator gave out for the layer, its tensors and one call."""
    for _ in range(2):  # products take their workspaces in the first round, and keep them
        layer, x, gradient, cache, output = None, None, None, None, None
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        layer = build_attention(config, device="cuda", dtype=torch.bfloat16)
        layer.backend = backend
        x = torch.randn(batch, tokens, config.layout.embed_dim, device="cuda", dtype=torch.bfloat16)
        gradient = torch.randn_like(x) if phase == "training" else None
        if phase == "prefill":
            sizes = {"capacity": tokens, "batch_size": batch, "dtype": torch.bfloat16, "device": "cuda"}
            cache = PreallocatedCache.for_layout(config.layout, **sizes)
        x.requires_grad_(phase == "training")
        if gradient is not None:
            layer(x).output.backward(gradient)  # gradients of parameters are there from the step before
            x.grad = None
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(phase == "training"):
            output = layer(x, cache=cache).output
            if gradient is not None:
                output.backward(gradient)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


def requested(phase: Phase, batch: int, tokens: int) -> tuple[Workload, bool]:
    if phase == "training":
        return Workload.training_step(tokens, batch=batch), False
    return Workload.prefill(tokens, batch=batch), phase == "prefill"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_peak_on_a_gpu_is_what_the_allocator_gave_out(name, phase):
    config, batch, tokens = LAYERS[name]
    work, cached = requested(phase, batch, tokens)
    found = estimate_memory(config, work, cached=cached)
    peak = measured(config, batch, tokens, phase, "auto")
    assert abs(found.total - peak) <= max(8 * MIB, 0.05 * peak), (found, found.total / MIB, peak / MIB)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("heads", [4, 16])
def test_peak_of_materialised_weights_on_a_gpu(heads, phase):
    config = MultiHeadConfig(1024, heads, bias=False)
    work, _ = requested(phase, 1, 4096)
    found = estimate_memory(config, work, form="materialised")
    peak = measured(config, 1, 4096, phase, "reference")
    assert abs(found.total - peak) <= max(8 * MIB, 0.05 * peak), (found, found.total / MIB, peak / MIB)


def test_there_are_thirty_cases_for_the_gpu():
    assert len(CASES) >= 30

"""A layer with uneven groups equals one whose keys and values are repeated, in all that a layer does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import polyhead
from polyhead import KVCache, Mask, MultiHeadAttention
from polyhead.costs import Workload, estimate_cost
from polyhead.errors import CheckpointError, OptionError, ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers import AttentionConfig, MultiHeadConfig, build_attention, config_of
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache
from polyhead.layers.positions import ALiBi, Learned, Rotary, T5Bias
from polyhead.layers.variants import GroupedHeadsConfig
from polyhead.observation.projections import find_projections
from polyhead.ops import uneven_groups
from tests.error_budget import assert_within_error_budget

BATCH, LENGTH, EMBED, HEAD_DIM, VALUE = 3, 13, 23, 6, 5
MAP = (2, 0, 2, 3, 1, 2, 0)
HEADS, KV_HEADS = len(MAP), 4
DOUBLE = torch.float64


def close(actual: Any, expected: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def pair(**options: Any) -> tuple[MultiHeadAttention, MultiHeadAttention]:
    """A layer with uneven groups, and a layer that repeats its keys and values."""
    sizes = {"head_dim": HEAD_DIM, "value_dim": VALUE, "dtype": DOUBLE, **options}
    layer = MultiHeadAttention(EMBED, HEADS, key_heads=MAP, **sizes).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    twin = MultiHeadAttention(EMBED, HEADS, **sizes).double()
    state = {name: x for name, x in layer.state_dict().items() if name != "_extra_state"}
    for name in ("k_proj", "v_proj"):
        for part in ("weight", "bias"):
            rows = state[f"{name}.{part}"].unflatten(0, (KV_HEADS, -1))
            state[f"{name}.{part}"] = rows[list(MAP)].flatten(0, 1)
    twin.load_state_dict(state)
    return layer, twin


@pytest.fixture(params=[(0, 1 << 40), (1 << 40, 0)], ids=["one call", "by group size"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From how many queries on there is one call, and for how many keys a query."""
    for name, limit in zip(("MANY_QUERIES", "KEYS_A_QUERY"), request.param, strict=True):
        monkeypatch.setattr(uneven_groups, name, limit)


both_ways = pytest.mark.usefixtures("way")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


OPTIONS: dict[str, Any] = {
    "plain": dict,
    "causal window": lambda: {"causal": True, "window": 5},
    "rotary": lambda: {"positions": Rotary(HEAD_DIM)},
    "ALiBi": lambda: {"positions": ALiBi(HEADS), "causal": True},
    "T5": lambda: {"positions": T5Bias(HEADS)},
    "learned": lambda: {"positions": Learned(31, EMBED)},
    "norm, gate, sinks": lambda: {"qk_norm": "rms", "output_gate": "channel", "sinks": True},
}


@both_ways
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_gradients_are_those_of_repeated_keys(name: str, x: Tensor) -> None:
    layer, twin = pair(**OPTIONS[name]())
    gate, mask = torch.rand(BATCH, HEADS, dtype=DOUBLE), Mask.lengths([13, 7, 4])
    x.requires_grad_()
    ours, theirs = (module(x, mask=mask, head_gate=gate) for module in (layer, twin))
    close(ours.output, theirs.output)
    toward = torch.randn_like(ours.output)
    shared = ("q_proj", "out_proj", "sinks", "gate_proj", "q_norm", "positions")
    inputs = [[x, *(p for key, p in module.named_parameters() if key.startswith(shared))] for module in (layer, twin)]
    found, wanted = (
        torch.autograd.grad(result.output, tensors, toward, retain_graph=True)
        for result, tensors in zip((ours, theirs), inputs, strict=True)
    )
    close(found, wanted, 1e-10)
    # What one KV head learns is what its repetitions learn together.
    for linear, size in (("k_proj", HEAD_DIM), ("v_proj", VALUE)):
        (own,) = torch.autograd.grad(ours.output, getattr(layer, linear).weight, toward, retain_graph=True)
        (many,) = torch.autograd.grad(theirs.output, getattr(twin, linear).weight, toward, retain_graph=True)
        summed = torch.zeros(KV_HEADS, size, EMBED, dtype=DOUBLE)
        close(own, summed.index_add(0, torch.tensor(MAP), many.view(HEADS, size, EMBED)).flatten(0, 1), 1e-10)


@both_ways
def test_weights_and_statistics_are_in_the_users_order(x: Tensor) -> None:
    layer, twin = pair(causal=True)
    requested = {"weights": True, "statistics": True, "logsumexp": True}
    ours, theirs = layer(x, **requested), twin(x, **requested)
    close(ours.weights, theirs.weights)
    close(ours.logsumexp, theirs.logsumexp)
    close(dict(ours.statistics.items()), dict(theirs.statistics.items()))


@both_ways
def test_cross_attention_and_a_memory(x: Tensor) -> None:
    layer, twin = pair()
    source = torch.randn(BATCH, 7, EMBED, dtype=DOUBLE)
    memory = layer.remember(source)
    assert memory.key.shape == (BATCH, KV_HEADS, 7, HEAD_DIM)
    close(layer(x, memory).output, twin(x, source).output)


@both_ways
@pytest.mark.parametrize(
    ("kind", "own"),
    [(GrowingCache, {}), (PreallocatedCache, {"capacity": 17}), (PagedCache, {"num_pages": 19, "page_size": 4})],
)
def test_a_cache_keeps_each_key_head_once(kind: type[KVCache], own: dict[str, int], x: Tensor) -> None:
    layer, twin = pair(causal=True, positions=Rotary(HEAD_DIM))
    cache = kind.for_layout(layer.cache_layout, batch_size=BATCH, dtype=DOUBLE, **own)
    with torch.no_grad():
        parts = [layer(block, cache=cache).output for block in x.split([5, 1, 1, 4, 2], 1)]
        close(torch.cat(parts, 1), twin(x).output)
    assert cache.view().key.shape[1] == KV_HEADS


@both_ways
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_on_a_gpu_are_those_of_repeated_keys_within_the_error_budget(dtype: torch.dtype) -> None:
    layer, twin = (module.to("cuda") for module in pair(causal=True))
    x = torch.randn(BATCH, LENGTH, EMBED, device="cuda").to(dtype)
    layer, twin, wide = layer.to(dtype), twin.to(dtype), copy.deepcopy(twin).to(dtype).double()
    exact = wide(x.double(), backend="reference").output
    assert_within_error_budget(layer(x).output, exact=exact, plain=twin(x, backend="reference").output)


@both_ways
def test_who_watches_sees_heads_in_the_users_order(x: Tensor) -> None:
    layer, twin = pair(causal=True)
    profiles, wirings = [], []
    for module in (layer, twin):
        with polyhead.observe(module, statistics=("entropy", "mean_distance")) as session:
            module(x)
        profiles.append([[row["entropy"], row["mean_distance"]] for row in session.profile.rows()])
        wirings.append(next(iter(find_projections(module, lambda module=module: module(x)).values())))
    close(torch.tensor(profiles[0]), torch.tensor(profiles[1]), 1e-6)
    for name in ("query", "key", "value", "output"):
        close(getattr(wirings[0], name), getattr(wirings[1], name))


def test_heads_are_views_that_share(x: Tensor) -> None:
    layer, twin = pair()
    for i in range(HEADS):
        close(layer.heads[i].key, twin.heads[i].key)
        close(layer.heads[i].output, twin.heads[i].output)
    assert layer.heads[0].value.data_ptr() == layer.heads[2].value.data_ptr() == layer.heads[5].value.data_ptr()
    again = MultiHeadAttention.from_heads(list(twin.heads), key_heads=MAP, output_bias=twin.out_proj.bias)
    assert again.layout == layer.layout
    close(again(x).output, twin(x).output)
    with pytest.raises(OptionError, match="got different ones in heads 0 and 1"):
        MultiHeadAttention.from_heads(list(twin.heads), key_heads=(0, 0, 1, 2, 3, 1, 4))


def test_a_layout_tells_even_groups_from_uneven_ones() -> None:
    layout = HeadLayout(24, 6, key_heads=[0, 0, 0, 1, 2, 2])
    assert (layout.num_kv_heads, layout.key_heads, layout.key_head(4)) == (3, (0, 0, 0, 1, 2, 2), 2)
    assert HeadLayout.from_dict(layout.to_dict()) == layout
    assert HeadLayout(24, 6, key_heads=(0, 0, 1, 1, 2, 2)) == HeadLayout(24, 6, num_kv_heads=3)
    assert HeadLayout(24, 6, key_heads=(1, 1, 0, 0, 2, 2)).key_heads == (1, 1, 0, 0, 2, 2)
    assert "key_heads" not in HeadLayout(24, 6, num_kv_heads=3).to_dict()
    with pytest.raises(ShapeError, match="uneven groups have no single group_size"):
        _ = layout.group_size
    with pytest.raises(ShapeError, match="pass key_heads, the KV head that each head reads"):
        HeadLayout(24, 6, num_kv_heads=4)
    with pytest.raises(ShapeError, match="must read each of the 2 KV heads"):
        HeadLayout(24, 6, num_kv_heads=2, key_heads=(0, 0, 0, 1, 2, 2))


CONFIGS = {
    "plain": MultiHeadConfig(24, 6, key_heads=(0, 0, 0, 1, 2, 2), backend="reference"),
    "out of order": MultiHeadConfig(24, 6, key_heads=(1, 0, 0, 1, 2, 0), head_dim=5, causal=True, backend="reference"),
    "in groups with an MLP": GroupedHeadsConfig(24, 6, num_groups=3, key_heads=(1, 0, 0, 0, 0, 0), backend="reference"),
}


@both_ways
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_goes_through_json_and_counts(name: str) -> None:
    config = CONFIGS[name]
    assert AttentionConfig.from_json(config.to_json()) == config
    layer = build_attention(config)
    assert config_of(layer) == config
    cost = estimate_cost(config, Workload.training_step(7, batch=3), form="materialised")
    assert cost.parameters == sum(p.numel() for p in layer.parameters())
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(3, 7, 24, requires_grad=True)).output.sum().backward()
    assert cost.matrix_flops == counter.get_total_flops()
    layout = config.layout
    kept = layout.num_kv_heads * (layout.head_dim + layout.value_dim)
    assert estimate_cost(config, Workload.decode(5), dtype=torch.float32).cache_bytes_per_token == 4 * kept


def test_a_map_of_even_groups_is_no_map() -> None:
    assert MultiHeadConfig(24, 6, key_heads=(0, 0, 1, 1, 2, 2)) == MultiHeadConfig(24, 6, num_kv_heads=3)
    layer = MultiHeadAttention(24, 6, key_heads=(0, 0, 1, 1, 2, 2))
    assert layer.layout.key_heads is None
    assert "key_heads" not in repr(layer)
    assert "key_heads=(0, 0, 0, 1, 2, 2)" in repr(MultiHeadAttention(24, 6, key_heads=(0, 0, 0, 1, 2, 2)))


def test_a_checkpoint_of_another_map_is_refused() -> None:
    saved = MultiHeadAttention(24, 6, key_heads=(0, 0, 0, 1, 2, 2)).state_dict()
    MultiHeadAttention(24, 6, key_heads=(0, 0, 0, 1, 2, 2)).load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"key_heads\[2\] 0 where the layer has 1"):
        MultiHeadAttention(24, 6, key_heads=(0, 0, 1, 1, 1, 2)).load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"7 integers; got Tensor of shape \[13\]"):
        MultiHeadAttention(24, 6, num_kv_heads=3).load_state_dict(saved)


@both_ways
@torch.no_grad()  # what AOTAutograd makes of it, with gradients: tests/ops/test_uneven_groups.py
def test_it_compiles_in_one_graph() -> None:
    layer = pair(causal=True)[0].float()
    x = torch.randn(BATCH, LENGTH, EMBED)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x).output, layer(x).output)

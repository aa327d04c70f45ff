"""A layer tells of its heads what the formula says of them, with any cache, gate and grouping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import KVCache, Mask, MultiHeadAttention, Statistics, attention
from polyhead.errors import OptionError
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, QuantizedCache, RollingCache
from polyhead.layers.positions import ALiBi, Rotary
from polyhead.ops.attention import RowStatistics
from polyhead.ops.common.statistics import NAMES, POSITIONAL
from tests.ops.oracle import ON_THE_CPU

BATCH, LENGTH, KEYS, EMBED, HEADS, KV_HEADS, HEAD_DIM = 3, 29, 13, 23, 6, 2, 10
DOUBLE = torch.float64


def make(**options: Any) -> MultiHeadAttention:
    defaults: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": DOUBLE}
    layer = MultiHeadAttention(EMBED, HEADS, **{**defaults, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


def close(found: RowStatistics, expected: RowStatistics, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(dict(found.items()), dict(expected.items()), rtol=tolerance, atol=tolerance)


def from_weights(weights: Tensor) -> dict[str, Tensor]:
    """What the weights alone tell, queries and keys being the same tokens."""
    distance = torch.arange(weights.shape[-1]) - torch.arange(weights.shape[-2])[:, None]
    return {
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "confidence": weights.amax(-1),
        "mean_distance": (weights * distance.abs()).sum(-1),
        "mean_offset": (weights * distance).sum(-1),
        "mean_squared_distance": (weights * distance**2).sum(-1),
        "sink_mass": weights[..., 0],
        "self_mass": weights.diagonal(0, -2, -1),
        "window_mass": (weights * (distance.abs() <= 8)).sum(-1),
    }


@pytest.mark.parametrize("backend", [None, *ON_THE_CPU])
@pytest.mark.parametrize("causal", [False, True])
def test_statistics_of_a_layer_are_those_of_its_weights(x: Tensor, backend: str | None, causal: bool) -> None:
    layer = make(causal=causal)
    weights = layer(x, weights=True).weights
    result = layer(x, statistics=True, backend=backend)
    torch.testing.assert_close(result.output, layer(x).output)
    for name, expected in from_weights(weights).items():
        found = getattr(result.statistics, name)
        assert found.shape == (BATCH, HEADS, LENGTH)
        torch.testing.assert_close(found, expected, msg=name)
    assert result.statistics.learned_sink_mass is None


def test_a_call_may_ask_in_any_form(x: Tensor) -> None:
    layer = make(causal=True)
    everything = layer(x, statistics=True).statistics
    for requested in ("entropy", ("entropy",), ["entropy"], {"entropy"}, Statistics("entropy")):
        found = layer(x, statistics=requested).statistics
        assert [name for name, _ in found.items()] == ["entropy"]
        torch.testing.assert_close(found.entropy, everything.entropy)
    near = layer(x, statistics=Statistics("window_mass", "sink_mass", window=2, sink_keys=3)).statistics
    weights = layer(x, weights=True).weights
    torch.testing.assert_close(near.sink_mass, weights[..., :3].sum(-1))
    torch.testing.assert_close(near.window_mass, weights.tril(0).triu(-2).sum(-1))
    for nothing in (None, False, ()):
        assert layer(x, statistics=nothing).statistics is None


def test_the_gradient_of_a_statistic_reaches_the_projections(x: Tensor) -> None:
    layer = make(causal=True)
    grads = {}
    for backend in ("reference", "blockwise"):
        found = layer(x, statistics=("entropy", "max_logit", "mean_distance"), backend=backend).statistics
        loss = found.entropy.sum() + found.max_logit.square().sum() + found.mean_distance.sum()
        grads[backend] = torch.autograd.grad(loss, (layer.q_proj.weight, layer.k_proj.weight))
        assert all(float(grad.abs().max()) > 0.1 for grad in grads[backend])
    torch.testing.assert_close(grads["blockwise"], grads["reference"])


@pytest.mark.parametrize("gate", [None, "head", "channel"])
def test_gates_change_the_output_and_no_statistic(x: Tensor, gate: str | None) -> None:
    layer = make(causal=True, output_gate=gate)
    plain = layer(x, statistics=True)
    gated = layer(x, statistics=True, head_gate=torch.rand(HEADS, dtype=DOUBLE))
    assert not torch.equal(plain.output, gated.output)
    close(gated.statistics, plain.statistics, 0.0)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_shared_keys_are_told_of_every_query_head(x: Tensor, kv_heads: int) -> None:
    layer = make(num_kv_heads=kv_heads, causal=True)
    close(
        layer(x, statistics=True, backend="blockwise").statistics,
        layer(x, statistics=True, backend="reference").statistics,
    )


def test_a_learned_sink_has_its_share(x: Tensor) -> None:
    layer = make(sinks=True, causal=True)
    result = layer(x, statistics=True, weights=True)
    share = result.statistics.learned_sink_mass
    torch.testing.assert_close(share, 1 - result.weights.sum(-1))
    with pytest.raises(OptionError, match="got an attention without sinks"):
        make()(x, statistics="learned_sink_mass")


# ---- cross-attention


def test_cross_attention_has_no_statistics_of_positions(x: Tensor) -> None:
    layer = make()
    source = torch.randn(BATCH, KEYS, EMBED, dtype=DOUBLE)
    absent = {*POSITIONAL, "learned_sink_mass"}
    for key in (source, layer.remember(source)):
        for requested in (True, Statistics(), Statistics(cross=True)):
            found = layer(x, key, statistics=requested).statistics
            assert {name for name, _ in found.items()} == set(NAMES) - absent
        for requested in ("mean_distance", ("entropy", "self_mass"), Statistics("next_mass")):
            with pytest.raises(OptionError, match="a cross-attention have no common positions"):
                layer(x, key, statistics=requested)
    # The options of a request survive.
    weights = layer(x, source, weights=True).weights
    first = layer(x, source, statistics=Statistics("sink_mass", sink_keys=4)).statistics.sink_mass
    torch.testing.assert_close(first, weights[..., :4].sum(-1))


# ---- caches


CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 31}),
    "paged": (PagedCache, {"num_pages": 31, "page_size": 4}),
}
PIECES = {"a prompt, then tokens": [25, 1, 1, 1, 1], "in chunks": [5, 1, 11, 2, 10]}


@torch.no_grad()
def generated(layer: MultiHeadAttention, cache: KVCache, x: Tensor, pieces: list[int], **options: Any) -> RowStatistics:
    """The statistics of a sequence that comes in pieces, put together again."""
    found = [dict(layer(piece, cache=cache, **options).statistics.items()) for piece in x.split(pieces, 1)]
    return RowStatistics(**{name: torch.cat([part[name] for part in found], -1) for name in found[0]})


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("positions", ["none", "rotary", "ALiBi"])
def test_statistics_through_a_cache_are_those_of_one_forward(x: Tensor, kind: str, pieces: str, positions: str) -> None:
    """A cache is absolute: reach, first keys and the rest do not depend on how the tokens came."""
    encoding = {"none": None, "rotary": Rotary(HEAD_DIM), "ALiBi": ALiBi(HEADS)}[positions]
    layer = make(causal=True, positions=encoding)
    build, options = CACHES[kind]
    cache = build.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, **options)
    requested = Statistics(sink_keys=2, window=3)
    close(generated(layer, cache, x, PIECES[pieces], statistics=requested), layer(x, statistics=requested).statistics)


def test_statistics_through_a_rolling_cache_are_those_of_a_window(x: Tensor) -> None:
    window = 7
    layer = make(causal=True, window=window)
    requested = Statistics(
        "entropy", "mean_distance", "self_mass", "previous_mass", "visible_keys", "sink_mass", "window_mass"
    )
    cache = RollingCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, window=window)
    close(generated(layer, cache, x, [9] + [1] * 20, statistics=requested), layer(x, statistics=requested).statistics)


def test_statistics_through_a_quantised_cache_are_those_of_its_keys(x: Tensor) -> None:
    layer = make(causal=True).float()
    cache = QuantizedCache.for_layout(layer.layout, batch_size=BATCH, dtype=torch.float32, capacity=31)
    found = generated(layer, cache, x.float(), [25, 1, 1, 1, 1], statistics=("entropy", "mean_distance", "confidence"))
    expected = layer(x.float(), statistics=("entropy", "mean_distance", "confidence")).statistics
    close(found, expected, 0.1)  # keys of eight bits
    assert not torch.equal(found.entropy, expected.entropy)


def test_a_ragged_batch_is_told_sequence_by_sequence(x: Tensor) -> None:
    layer = make(causal=True)
    lengths = [29, 11, 0]
    together = layer(x, mask=Mask.lengths(lengths), statistics=True).statistics
    for index, length in enumerate(lengths):
        alone = layer(x[index : index + 1, :length], statistics=True).statistics if length else None
        for name, found in together.items():
            if alone is not None:
                torch.testing.assert_close(found[index, :, :length], getattr(alone, name)[0], msg=name)
            nothing = -torch.inf if name == "max_logit" else 0.0
            assert (found[index, :, length:] == nothing).all(), name


def test_a_layer_gives_what_the_function_gives(x: Tensor) -> None:
    layer = make()
    result = layer(x, statistics=True, mask=Mask.window(left=3, right=2))
    split = (BATCH, LENGTH, -1, HEAD_DIM)
    query, key, value = (p(x).view(split).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = attention(query, key, value, mask=Mask.window(left=3, right=2), statistics=True, backend="reference")
    close(result.statistics, expected.statistics)

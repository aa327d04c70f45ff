"""Routed heads in what people do with layers: compilers, copies, configs, checkpoints of memory, nothing at all."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import Mask
from polyhead.errors import OptionError, ShapeError
from polyhead.layers.config import AttentionConfig, build_attention, config_of
from polyhead.layers.kv_cache import GrowingCache
from polyhead.layers.positions import Rotary
from polyhead.layers.positions.config import ALiBiConfig, RotaryConfig
from polyhead.layers.variants import RoutedHeads
from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.layers.variants.routed.layer import collect_routings
from polyhead.layers.variants.routed.router import Routing
from tests.layers.variants.routed_formula import scramble

BATCH, LENGTH, EMBED, HEADS, DIM = 3, 7, 22, 5, 6
DOUBLE = torch.float64
# Dynamo instantiates an autograd function, which PyTorch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


EVERY_RULE: list[dict[str, Any]] = [
    {"shape": shape, name: value}
    for shape in ("shared", "full")
    for name, value in (("top_k", 2), ("top_p", 0.5), ("threshold", 0.25))
]


def make(**options: Any) -> RoutedHeads:
    return scramble(RoutedHeads(EMBED, HEADS, **{"head_dim": DIM, "causal": True, "dtype": DOUBLE, **options}))


def differentiated(call: torch.nn.Module, layer: RoutedHeads, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    result = call(leaf)
    loss = result.output.square().sum() + result.routing.balance_loss
    return [result.output, *torch.autograd.grad(loss, [leaf, *layer.parameters()])]


def test_shared_heads_compile_whole_forward_and_backward():
    layer = make(top_k=2, positions=Rotary(DIM))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    for found, expected in zip(differentiated(compiled, layer, x), differentiated(layer, layer, x), strict=True):
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_shared_heads_compile_whole_with_lengths_and_a_given_routing():
    layer, x = make(top_k=2).eval(), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    options = {"mask": Mask.lengths(torch.tensor([LENGTH, 3, 0]))}
    found, expected = compiled(x, **options), layer(x, **options)
    torch.testing.assert_close(found.output, expected.output)
    assert found.routing.real.sum(-1).tolist() == [LENGTH, 3, 0]
    heads, weights = expected.routing.heads, expected.routing.weights.detach()
    again = compiled(x, routing=Routing(heads, weights, HEADS), **options)
    torch.testing.assert_close(again.output, expected.output)


def test_an_exported_layer_takes_other_lengths_and_returns_its_routing():
    layer, length = make(top_k=2, always_on=1).eval(), torch.export.Dim("length")
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    program = torch.export.export(layer, (x,), dynamic_shapes={"query": {1: length}})
    longer = torch.randn(BATCH, 11, EMBED, dtype=DOUBLE)
    found, expected = program.module()(longer), layer(longer)
    torch.testing.assert_close(found.output, expected.output)
    torch.testing.assert_close(found.routing.balance_loss, expected.routing.balance_loss)


def test_a_batch_of_nothing_and_a_sequence_of_nothing():
    for options in EVERY_RULE:
        layer = make(**options)
        for batch, length in ((2, 0), (1, 1), (0, 3), (0, 0)):
            x = torch.randn(batch, length, EMBED, dtype=DOUBLE, requires_grad=True)
            result = layer(x, mask=Mask.lengths([length] * batch))
            assert result.output.shape == (batch, length, EMBED)
            loss = result.output.sum() + result.routing.balance_loss + result.routing.z_loss
            inputs = [x, *layer.parameters()]
            for gradient, of in zip(torch.autograd.grad(loss, inputs), inputs, strict=True):
                assert gradient.shape == of.shape
                assert bool(gradient.isfinite().all())
            told = layer(x, statistics=True, logsumexp=True)
            assert told.statistics.entropy.shape == (batch, HEADS, length)
            assert told.logsumexp.shape == (batch, HEADS, length)


def test_a_batch_of_nothing_over_a_cache_and_over_a_source():
    for options in EVERY_RULE:
        layer, cache = make(**options), GrowingCache()
        with torch.no_grad():
            for length in (3, 1):
                result = layer(torch.randn(0, length, EMBED, dtype=DOUBLE), cache=cache, statistics="entropy")
                assert result.output.shape == (0, length, EMBED)
                assert result.statistics.entropy.shape == (0, HEADS, length)
        assert cache.view().key.shape[2] == 4
        source = torch.randn(0, 5, EMBED, dtype=DOUBLE)
        assert layer(source[:, :2], source).output.shape == (0, 2, EMBED)
        routing = layer(source).routing
        assert layer(source, routing=routing).output.shape == (0, 5, EMBED)


def test_copies_and_pickles_compute_the_same():
    for options in ({"top_k": 2}, {"shape": "full", "top_p": 0.5}):
        layer, x = make(**options), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x).output, layer(x).output)


def test_a_checkpointed_layer_has_the_same_gradients():
    layer, x = make(top_k=2), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE, requires_grad=True)
    plain = torch.autograd.grad(layer(x).output.square().sum(), x)
    saved = torch.utils.checkpoint.checkpoint(lambda x: layer(x).output, x, use_reentrant=False)
    assert torch.equal(*plain, *torch.autograd.grad(saved.square().sum(), x))


def test_the_meta_device_tells_sizes():
    layer = RoutedHeads(EMBED, HEADS, top_k=2, head_dim=DIM, device="meta")
    assert layer(torch.empty(BATCH, LENGTH, EMBED, device="meta")).output.shape == (BATCH, LENGTH, EMBED)


def test_training_with_the_losses_spreads_the_load():
    layer = make(top_k=1).float()
    x = torch.randn(8, LENGTH, EMBED) + 2.0  # a common part, which draws every token to the same head
    optimiser = torch.optim.Adam(layer.router.parameters(), lr=0.02)
    first = layer(x).routing.load.max()
    for _ in range(60):
        optimiser.zero_grad()
        layer(x).routing.balance_loss.backward()
        optimiser.step()
    assert layer(x).routing.load.max() < first


def test_routings_are_collected_from_anywhere_in_a_model_and_only_within_the_block():
    model = torch.nn.ModuleList([make(top_k=2), make(shape="full", top_p=0.5)])
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    with collect_routings(torch.nn.Sequential(model)) as routings:
        results = [layer(x) for layer in model]
    model[0](x)
    assert [a is b.routing for a, b in zip(routings, results, strict=True)] == [True, True]
    assert not any(layer._forward_hooks for layer in model)


# ---- configs

CONFIGS: dict[str, dict[str, Any]] = {
    "shared": {"top_k": 2},
    "shared, all": {
        "top_k": 2, "normalise": "chosen", "noise": 0.5, "always_on": 1, "num_kv_heads": 2, "head_dim": 6,
        "value_dim": 4, "bias": False, "output_bias": True, "causal": True, "window": 5, "qk_norm": "layer",
        "softcap": 20.0, "scale": 0.25, "dropout": 0.125, "finite": True, "backend": "blockwise",
    },
    "shared, top_p": {"top_p": 0.75, "k_min": 2, "k_max": 3, "budget": 2.5},
    "full": {"shape": "full", "threshold": 0.25, "sinks": True, "qk_norm": "rms", "num_kv_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_a_config_builds_the_layer_that_its_options_make(options):
    config, expected = RoutedConfig(24, 6, **options), RoutedHeads(24, 6, **options)
    assert config_of(expected) == config
    layer = build_attention(config)
    assert config_of(layer) == config
    assert AttentionConfig.from_json(config.to_json()) == config
    assert repr(config.mask) == repr(expected.mask)
    layer.load_state_dict(expected.state_dict(), strict=True)
    x = torch.randn(2, 5, 24)
    ours, theirs = (module.eval()(x) for module in (layer, expected))
    assert torch.equal(ours.output, theirs.output)


def test_the_config_has_every_option_of_the_layer():
    arguments = set(inspect.signature(RoutedHeads.__init__).parameters) - {"self", "device", "dtype"}
    assert {field.name for field in dataclasses.fields(RoutedConfig)} == arguments


def test_positions_are_described_and_built_again():
    for shape, positions in (("shared", RotaryConfig(interleaved=True)), ("full", ALiBiConfig(learnable=True))):
        config = RoutedConfig(24, 6, shape=shape, top_k=2, positions=positions)
        assert config_of(build_attention(config)) == config
        assert AttentionConfig.from_json(config.to_json()) == config
    with pytest.raises(OptionError, match=r"shape 'shared' does not support positions .* got positions ALiBi;"):
        RoutedConfig(24, 6, top_k=2, positions=ALiBiConfig())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, OptionError, "one of top_k, top_p and threshold"),
        ({"top_k": 7}, ShapeError, "at most the number of routed heads, 6"),
        ({"top_k": 2, "sinks": True}, OptionError, "does not support sinks"),
        ({"top_k": 2, "shape": "full", "dropout": 0.1}, OptionError, "dropout requires shape"),
        ({"top_k": 2, "shape": "wide"}, OptionError, "shape must be"),
        ({"top_k": 2, "window": 3}, OptionError, "needs causal=True"),
        ({"top_k": 2, "bias": "no"}, OptionError, "bias must be True or False"),
        ({"top_k": 2, "noise": None}, OptionError, "noise must be a standard deviation of at least 0, got None"),
        ({"top_k": 2, "k_min": None}, ShapeError, "k_min must be an integer, got None"),
        ({"top_p": 0.5, "k_min": None}, ShapeError, "k_min must be an integer, got None"),
        ({"top_k": 2, "k_min": True}, ShapeError, "k_min must be an integer, got True"),
        ({"top_p": 0.5, "k_max": 2, "budget": 100}, OptionError, "at most the number of routed heads, 6, got 100"),
    ],
)
def test_options_are_checked_before_anything_is_built(options, error, words):
    with pytest.raises(error, match=words):
        RoutedConfig(24, 6, **options)


def test_device_and_dtype_reach_every_parameter():
    layer = build_attention(RoutedConfig(24, 6, top_k=2, qk_norm="rms"), device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


def test_a_routing_can_be_replayed():
    layer, x = make(top_p=0.6), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    first = layer(x)
    assert isinstance(first.routing, Routing)
    assert torch.equal(layer(x, routing=first.routing).output, first.output)

"""Configs of the layers beside multi-head attention: each builds its layer, is read off it, and goes through JSON."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from polyhead.errors import OptionError, ShapeError
from polyhead.layers.config import AttentionConfig, build_attention, config_of
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.positions import ALiBi, Learned, Rotary
from polyhead.layers.positions.config import ALiBiConfig, LearnedConfig, RotaryConfig
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig
from polyhead.layers.variants.grouped import GroupedHeads
from polyhead.layers.variants.mixing import HeadMix

EMBED, HEADS, LENGTH = 30, 6, 11
HEADS_OF_ALL = {
    "num_kv_heads": 2, "head_dim": 10, "value_dim": 4, "bias": False, "causal": True, "window": 5, "qk_norm": "rms",
    "output_gate": "head", "softcap": 20.0, "scale": 0.25, "sinks": True, "dropout": 0.125, "finite": True,
    "backend": "blockwise",
}  # fmt: skip
LATENT = {"kv_lora_rank": 8}

# The config's class, the layer's, and options that both take.
CASES: dict[str, tuple[type[AttentionConfig], type[torch.nn.Module], dict[str, Any]]] = {
    "grouped": (GroupedHeadsConfig, GroupedHeads, {"num_groups": 3}),
    "grouped, hidden_dim": (GroupedHeadsConfig, GroupedHeads, {"num_groups": 2, "hidden_dim": 7}),
    "grouped, linear": (GroupedHeadsConfig, GroupedHeads, {"num_groups": 6, "activation": "linear"}),
    "grouped, everything": (GroupedHeadsConfig, GroupedHeads, {"num_groups": 3, **HEADS_OF_ALL, "output_bias": True}),
    "mixed": (HeadMixConfig, HeadMix, {}),
    "mixed, rows": (HeadMixConfig, HeadMix, {"num_rows": 4}),
    "mixed, full": (HeadMixConfig, HeadMix, {"mix": "full", "row_attention": None}),
    "mixed, everything": (HeadMixConfig, HeadMix, {"num_rows": 4, "row_attention": "projected", **HEADS_OF_ALL}),
    "latent": (LatentConfig, LatentAttention, LATENT),
    "latent, dims": (LatentConfig, LatentAttention, {**LATENT, "qk_nope_head_dim": 7, "value_head_dim": 9}),
    "latent, queries": (LatentConfig, LatentAttention, {**LATENT, "q_lora_rank": 11, "norm_eps": 1e-5}),
    "latent, everything": (
        LatentConfig,
        LatentAttention,
        {
            **LATENT, "q_lora_rank": 11, "qk_nope_head_dim": 7, "value_head_dim": 9, "bias": False, "output_bias": True,
            "norm_eps": 1e-5, "form": "absorbed", "causal": True, "window": 5, "softcap": 20.0, "scale": 0.25,
            "sinks": True, "dropout": 0.125, "finite": True, "backend": "blockwise",
        },
    ),
}  # fmt: skip


def same_numbers(config: AttentionConfig, expected: torch.nn.Module) -> None:
    layer = build_attention(config)
    layer.load_state_dict(expected.state_dict(), strict=True)
    x = torch.randn(2, LENGTH, EMBED)
    ours, theirs = (module.eval()(x) for module in (layer, expected))
    assert torch.equal(ours.output, theirs.output)
    assert ours.backend == theirs.backend


@pytest.mark.parametrize(("kind", "layer", "options"), CASES.values(), ids=CASES)
def test_a_config_builds_the_layer_that_its_options_make(kind, layer, options):
    config, expected = kind(EMBED, HEADS, **options), layer(EMBED, HEADS, **options)
    assert config_of(expected) == config
    assert config_of(build_attention(config)) == config
    assert AttentionConfig.from_json(config.to_json()) == config
    assert repr(config.mask) == repr(expected.mask)
    same_numbers(config, expected)


@pytest.mark.parametrize(
    ("positions", "module", "options"),
    [
        (RotaryConfig(interleaved=True), lambda: Rotary(4, interleaved=True), {"qk_rope_head_dim": 4}),
        (ALiBiConfig(), lambda: ALiBi(HEADS), {}),
        (LearnedConfig(13), lambda: Learned(13, EMBED), {}),
    ],
)
def test_positions_of_latent_heads_are_described_and_built_again(positions, module, options):
    config = LatentConfig(EMBED, HEADS, **LATENT, positions=positions, **options)
    layer = LatentAttention(EMBED, HEADS, **LATENT, positions=module())
    assert config_of(layer) == config
    assert config_of(build_attention(config)) == config
    assert AttentionConfig.from_json(config.to_json()) == config
    same_numbers(config, layer)


def test_no_number_of_turning_channels_is_none_of_them():
    config = LatentConfig(EMBED, HEADS, **LATENT, qk_rope_head_dim=None)
    assert config == LatentConfig(EMBED, HEADS, **LATENT)
    assert config.qk_rope_head_dim == 0
    assert config_of(build_attention(config)) == config
    assert AttentionConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("kind", "own"), [(GroupedHeadsConfig, {"num_groups": 3, "hidden_dim": 7}), (HeadMixConfig, {})]
)
def test_positions_of_other_heads_are_those_of_multi_head_attention(kind, own):
    config = kind(EMBED, HEADS, head_dim=10, value_dim=5, positions=RotaryConfig(rotary_dim=6), **own)
    assert config_of(build_attention(config)) == config
    assert AttentionConfig.from_json(config.to_json()) == config


def test_each_config_has_every_option_of_its_layer():
    heads = {field.name for field in dataclasses.fields(HeadsConfig)}
    for kind, layer, _ in CASES.values():
        arguments = set(inspect.signature(layer.__init__).parameters) - {"self", "device", "dtype"}
        if "options" in arguments:
            arguments = (arguments - {"options"}) | heads
        assert {field.name for field in dataclasses.fields(kind)} == arguments


def test_device_and_dtype_reach_every_parameter():
    for kind, _, options in CASES.values():
        layer = build_attention(kind(EMBED, HEADS, **options), device="meta", dtype=torch.bfloat16)
        assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        (GroupedHeadsConfig, {"num_groups": 4}, ShapeError, "multiple of num_groups, got 6 and 4"),
        (GroupedHeadsConfig, {"num_groups": 4, "hidden_dim": 5}, ShapeError, "multiple of num_groups, got 6 and 4"),
        (GroupedHeadsConfig, {"num_groups": 3, "activation": "relu"}, OptionError, "activation must be"),
        (GroupedHeadsConfig, {"num_groups": 3, "dropout": 1.0}, OptionError, "dropout must be"),
        (HeadMixConfig, {"num_rows": 0}, ShapeError, "num_rows must be at least 1, got 0"),
        (HeadMixConfig, {"mix": "some"}, OptionError, "mix must be"),
        (LatentConfig, {"kv_lora_rank": 0}, ShapeError, "kv_lora_rank must be at least 1, got 0"),
        (LatentConfig, {**LATENT, "form": "short"}, OptionError, "form must be"),
        (LatentConfig, {**LATENT, "norm_eps": 0.0}, OptionError, "norm_eps must be positive"),
        (LatentConfig, {**LATENT, "bias": "no"}, OptionError, "bias must be True or False, got 'no'"),
        (LatentConfig, {**LATENT, "window": 3}, OptionError, "needs causal=True, got window 3"),
        (LatentConfig, {**LATENT, "qk_rope_head_dim": 4}, OptionError, "got qk_rope_head_dim 4 and positions None"),
        (LatentConfig, {**LATENT, "qk_rope_head_dim": {}}, ShapeError, "qk_rope_head_dim must be an integer, got {}"),
        (LatentConfig, {**LATENT, "qk_rope_head_dim": False}, ShapeError, "must be an integer, got False"),
        (LatentConfig, {"kv_lora_rank": None}, ShapeError, "kv_lora_rank must be an integer, got None"),
        (LatentConfig, {**LATENT, "positions": RotaryConfig()}, OptionError, "got qk_rope_head_dim 0 and positions"),
        (
            LatentConfig,
            {**LATENT, "qk_rope_head_dim": 3, "positions": RotaryConfig()},
            ShapeError,
            "rotary_dim must be even.*got 3",
        ),
    ],
)
def test_options_are_checked_before_anything_is_built(kind, options, error, words):
    with pytest.raises(error, match=words):
        kind(EMBED, HEADS, **options)

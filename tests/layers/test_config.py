"""A config and its layer are two forms of one thing, and JSON loses nothing of it."""

from __future__ import annotations

import dataclasses
import inspect
import json
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pytest
import torch
from torch import nn

from polyhead import Mask, MultiHeadAttention
from polyhead.errors import OptionError, ShapeError
from polyhead.layers import MultiHeadConfig
from polyhead.layers.config import (
    CONFIGS,
    AttentionConfig,
    build_attention,
    config_of,
    register_config,
)
from polyhead.layers.positions import (
    ALiBi,
    BiasesLogits,
    DynamicNTKScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    QuadraticRelative1D,
    QuadraticRelative2D,
    Rotary,
    Sinusoidal,
    T5Bias,
    YarnScaling,
)
from polyhead.layers.positions.config import (
    ALiBiConfig,
    LearnedConfig,
    QuadraticRelative1DConfig,
    QuadraticRelative2DConfig,
    RotaryConfig,
    SinusoidalConfig,
    T5BiasConfig,
    positions_config_of,
)
from polyhead.layers.registry import Registry
from polyhead.layers.variants.grouped import HeadGroups

EMBED, HEADS, HEAD_DIM, LENGTH = 30, 6, 10, 11
SIZES = {"embed_dim": EMBED, "num_heads": HEADS, "head_dim": HEAD_DIM}

# Options of a config beside those of the layer it stands for.
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "uneven groups": {"num_kv_heads": 2, "key_heads": (1, 0, 1, 1, 1, 0)},
    "value_dim": {"value_dim": 7},
    "other inputs": {"key_input_dim": 19, "value_input_dim": 17},
    "no bias": {"bias": False},
    "output bias alone": {"bias": False, "output_bias": True},
    "no output bias": {"output_bias": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "rms norm": {"qk_norm": "rms"},
    "layer norm": {"qk_norm": "layer"},
    "gate a head": {"output_gate": "head"},
    "gate a channel": {"output_gate": "channel"},
    "softcap": {"softcap": 20.0},
    "scale": {"scale": 0.25},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.125},
    "finite": {"finite": True},
    "backend": {"backend": "blockwise"},
    "init": {"init": "xavier"},
}  # fmt: skip
POSITIONS = {
    "rotary": (RotaryConfig(), lambda: Rotary(HEAD_DIM)),
    "rotary options": (
        RotaryConfig(base=500.0, rotary_dim=6, interleaved=True),
        lambda: Rotary(HEAD_DIM, base=500.0, rotary_dim=6, interleaved=True),
    ),
    **{
        type(scaling).__name__: (RotaryConfig(scaling=scaling), partial(Rotary, HEAD_DIM, scaling=scaling))
        for scaling in (
            LinearScaling(2.0),
            NTKScaling(3.0),
            DynamicNTKScaling(2.0, 7),
            YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.5, truncate=False),
            Llama3Scaling(8.0, original_length=128),
        )
    },
    "alibi": (ALiBiConfig(), lambda: ALiBi(HEADS)),
    "alibi learned": (ALiBiConfig(learnable=True), lambda: ALiBi(HEADS, learnable=True)),
    "t5": (
        T5BiasConfig(num_buckets=8, max_distance=9, bidirectional=False),
        lambda: T5Bias(HEADS, num_buckets=8, max_distance=9, bidirectional=False),
    ),
    "sinusoidal": (SinusoidalConfig(base=77.0), lambda: Sinusoidal(EMBED, base=77.0)),
    "learned": (LearnedConfig(13), lambda: Learned(13, EMBED)),
    "quadratic 1d": (
        QuadraticRelative1DConfig(alpha=0.25, center_std=1.5),
        lambda: QuadraticRelative1D(HEADS, alpha=0.25, center_std=1.5),
    ),
    "quadratic 2d": (
        QuadraticRelative2DConfig(1, LENGTH, alpha=0.25, center_std=1.5),
        lambda: QuadraticRelative2D(HEADS, 1, LENGTH, alpha=0.25, center_std=1.5),
    ),
}  # fmt: skip


def same_numbers(config: AttentionConfig, expected: MultiHeadAttention) -> None:
    """The config's layer computes what `expected` does, once it has its weights."""
    layer = build_attention(config)
    layer.load_state_dict(expected.state_dict(), strict=True)
    assert isinstance(layer, MultiHeadAttention)
    layout = expected.layout
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, EMBED)
    source = ()
    if layout.key_input_dim != EMBED:
        source = (torch.randn(2, LENGTH, layout.key_input_dim), torch.randn(2, LENGTH, layout.value_input_dim))
    results = [module.eval()(x, *source) for module in (layer, expected)]
    assert torch.equal(results[0].output, results[1].output)
    assert results[0].backend == results[1].backend


# ---- the three forms


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_config_builds_the_layer_that_its_options_make(options):
    config = MultiHeadConfig(**SIZES, **options)
    layer = MultiHeadAttention(**SIZES, **options)
    assert config_of(layer) == config
    assert config_of(build_attention(config)) == config
    same_numbers(config, layer)


@pytest.mark.parametrize(("positions", "module"), POSITIONS.values(), ids=POSITIONS)
def test_positions_are_described_and_built_again(positions, module):
    config = MultiHeadConfig(**SIZES, positions=positions)
    layer = MultiHeadAttention(**SIZES, positions=module())
    assert config_of(layer) == config
    assert config_of(build_attention(config)) == config
    same_numbers(config, layer)


@pytest.mark.parametrize(
    "options",
    [*OPTIONS.values(), *({"positions": positions} for positions, _ in POSITIONS.values())],
    ids=[*OPTIONS, *POSITIONS],
)
def test_json_gives_back_an_equal_config(options):
    config = MultiHeadConfig(**SIZES, **options)
    again = AttentionConfig.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    assert type(again) is MultiHeadConfig
    assert json.loads(config.to_json())["kind"] == "multi_head"


def test_a_config_has_every_option_of_the_layer_and_every_one_is_set_above():
    arguments = list(inspect.signature(MultiHeadAttention.__init__).parameters)[1:]
    fields = {field.name for field in dataclasses.fields(MultiHeadConfig)}
    assert fields == set(arguments) - {"device", "dtype", "combine"}
    assert fields == {name for options in OPTIONS.values() for name in options} | set(SIZES) | {"positions"}


def test_sizes_that_are_left_out_are_those_of_the_layer():
    short = MultiHeadConfig(EMBED, HEADS, key_input_dim=19, positions=RotaryConfig(rotary_dim=4))
    full = MultiHeadConfig(
        EMBED, HEADS, num_kv_heads=6, head_dim=5, value_dim=5, key_input_dim=19, value_input_dim=19,
        bias=True, output_bias=True, positions=RotaryConfig(rotary_dim=4),
    )  # fmt: skip
    assert short == full
    assert short.layout == MultiHeadAttention(EMBED, HEADS, key_input_dim=19).layout
    whole = MultiHeadConfig(**SIZES, positions=RotaryConfig())
    assert whole == MultiHeadConfig(**SIZES, positions=RotaryConfig(rotary_dim=HEAD_DIM))


def test_device_and_dtype_reach_the_positions_too():
    config = MultiHeadConfig(**SIZES, positions=LearnedConfig(13), qk_norm="rms", output_gate="head", sinks=True)
    layer = build_attention(config, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    assert config_of(layer) == config


def test_making_a_config_draws_no_random_numbers():
    before = torch.get_rng_state()
    for positions, _ in POSITIONS.values():
        MultiHeadConfig(**SIZES, positions=positions)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mask_of_a_config_is_the_layer_s_own():
    for options in ({}, {"causal": True}, {"causal": True, "window": 5}):
        config = MultiHeadConfig(**SIZES, **options)
        assert repr(config.mask) == repr(build_attention(config).mask)


# ---- what is refused


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "heads": 2, "hue": 1}, "has no field heads, hue"),
        ({"kind": "multi_head", "embed_dim": 8}, "needs num_heads"),
        ({"kind": "many_head", "embed_dim": 8}, "must be one of multi_head.*got 'many_head'"),
        ({"kind": ["multi_head"]}, r"got \['multi_head'\]"),
        ({"embed_dim": 8, "num_heads": 2}, "a dictionary with a kind"),
        ([8, 2], r"a dictionary with a kind, got \[8, 2\]"),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "causal": "false"}, "True or False, got 'false'"),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "output_bias": 1}, "True or False, got 1"),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "window": 3}, "needs causal=True, got window 3"),
        (
            {"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "causal": True, "window": 0},
            "window size must be at least 1, got 0",
        ),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "dropout": 1.5}, "less than 1, got 1.5"),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "softcap": 0}, "softcap must be positive"),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "scale": "x"}, "scale must be a finite number"),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "qk_norm": "batch"}, "qk_norm must be"),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "output_gate": "all"}, "output_gate must be"),
        ({"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "backend": "best"}, "backend must be"),
        (
            {"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "positions": {"kind": "rotary", "theta": 9}},
            "a description of positions of kind 'rotary' has no field theta",
        ),
        (
            {"kind": "multi_head", "embed_dim": 8, "num_heads": 2, "positions": {"kind": "rotary", "interleaved": 1}},
            "interleaved must be True or False",
        ),
        (
            {
                "kind": "multi_head", "embed_dim": 8, "num_heads": 2,
                "positions": {"kind": "rotary", "scaling": {"kind": "linear", "by": 2}},
            },
            "a rotary scaling of kind 'linear' has no field by; its fields are factor",
        ),
    ],
)  # fmt: skip
def test_a_description_that_fits_no_config_is_refused_by_name(description, words):
    with pytest.raises(OptionError, match=words):
        AttentionConfig.from_json(json.dumps(description))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 7, "head_dim": None}, "got 30 and 7"),
        ({"num_kv_heads": 4}, "got 6 and 4"),
        ({"value_dim": 0}, "value_dim must be at least 1, got 0"),
        ({"positions": RotaryConfig(rotary_dim=12)}, "must not exceed head_dim, got 12 and 10"),
        ({"positions": T5BiasConfig(num_buckets=0)}, "num_buckets must be at least 1, got 0"),
    ],
)
def test_sizes_are_checked_before_anything_is_built(options, words):
    with pytest.raises(ShapeError, match=words):
        MultiHeadConfig(**{**SIZES, **options})


def test_text_that_is_no_json_is_refused():
    with pytest.raises(OptionError, match="a JSON object, got 'embed_dim=8'"):
        AttentionConfig.from_json("embed_dim=8")


def test_a_module_is_no_description_of_positions():
    with pytest.raises(OptionError, match=r"got the module Rotary; use positions_config_of\(module\)"):
        MultiHeadConfig(**SIZES, positions=Rotary(HEAD_DIM))
    with pytest.raises(OptionError, match="such as RotaryConfig"):
        MultiHeadConfig(**SIZES, positions="rotary")


def test_what_a_config_cannot_hold_is_refused():
    class Bias(BiasesLogits):
        num_heads = HEADS

    with pytest.raises(OptionError, match="got Bias; register a dataclass"):
        positions_config_of(Bias())
    with pytest.raises(OptionError, match=r"describes one of MultiHeadAttention.*; got Linear"):
        config_of(nn.Linear(2, 3))
    with pytest.raises(OptionError, match="takes an AttentionConfig, got dict"):
        build_attention({"kind": "multi_head"})
    layer = MultiHeadAttention(**SIZES, qk_norm="rms")
    layer.q_norm = nn.Identity()
    with pytest.raises(OptionError, match="got Identity"):
        config_of(layer)
    grouped = HeadGroups(MultiHeadAttention(**SIZES).layout, 3, hidden_dim=5)
    with pytest.raises(OptionError, match="got a layer with HeadGroups"):
        config_of(MultiHeadAttention(**SIZES, combine=grouped))
    layer = MultiHeadAttention(**SIZES)
    layer.mask = Mask.window(left=2, right=1)
    with pytest.raises(OptionError, match="2 before, 1 after"):
        config_of(layer)


# ---- new kinds


@pytest.fixture
def registry(monkeypatch):
    """The registry as it is, put back after the test."""
    monkeypatch.setattr(CONFIGS, "_classes", dict(CONFIGS._classes))
    monkeypatch.setattr(CONFIGS, "_descriptions", dict(CONFIGS._descriptions))


class Averaging(nn.Module):
    """A layer of another kind."""

    def __init__(self, mean_distance: int) -> None:
        super().__init__()
        self.mean_distance = mean_distance


@pytest.mark.usefixtures("registry")
def test_a_new_kind_joins_with_one_dataclass():
    @register_config("averaging", Averaging)
    @dataclass(frozen=True)
    class AveragingConfig(AttentionConfig):
        mean_distance: int

        def build(self, *, device: Any = None, dtype: Any = None) -> Averaging:
            return Averaging(self.mean_distance)

        @classmethod
        def of(cls, layer: Averaging) -> Self:
            return cls(layer.mean_distance)

    config = AveragingConfig(3)
    assert config.to_dict() == {"kind": "averaging", "mean_distance": 3}
    assert AttentionConfig.from_json(config.to_json()) == config
    assert config_of(build_attention(config)) == config
    assert config.mask is None
    with pytest.raises(OptionError, match="description of a MultiHeadConfig, got that of a AveragingConfig"):
        MultiHeadConfig.from_json(config.to_json())


def test_a_name_is_taken_once_and_an_unregistered_value_has_none():
    @dataclass(frozen=True)
    class First:
        size: int = 1

    @dataclass(frozen=True)
    class Second:
        size: int = 1

    kinds: Registry[Any] = Registry("a thing")
    kinds.register("one")(First)
    kinds.register("one")(First)
    with pytest.raises(OptionError, match="already registered as First, got Second"):
        kinds.register("one")(Second)
    with pytest.raises(OptionError, match="one of First; got Second"):
        kinds.to_dict(Second())

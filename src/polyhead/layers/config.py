"""Configs of attention layers: frozen dataclasses that build a layer and round-trip through JSON.

To add an attention variant, register a frozen dataclass with `@register_config`, as the packages of
`polyhead.layers.variants` do, and add its description to `polyhead.costs.descriptions`.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.files import in_one_line, short
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.positions.base import Positions
from polyhead.layers.positions.config import POSITIONS, PositionsConfig, positions_config_of
from polyhead.layers.registry import Registry, check_flags
from polyhead.layers.steps import layer_mask
from polyhead.masks import Mask


@dataclass(frozen=True)
class AttentionConfig(ABC):
    """Base class of attention configs. Configs that build the same layer compare equal."""

    layer: ClassVar[type[Any]]  # set by `register_config`

    @abstractmethod
    def build(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the layer with freshly initialised parameters."""

    @classmethod
    @abstractmethod
    def of(cls, layer: Any) -> Self:
        """Return the config of `layer`."""

    @property
    def mask(self) -> Mask | None:
        """Mask of the layer, combined with the mask of each call."""
        return None

    def to_dict(self) -> dict[str, Any]:
        return CONFIGS.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        config = CONFIGS.from_dict(data)
        if not isinstance(config, cls):
            raise OptionError(f"expected the description of a {cls.__name__}, got that of a {type(config).__name__}")
        return config

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a config written by `to_json`; `AttentionConfig.from_json` accepts any kind."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(
                f"an attention config must be a JSON object, got {short(text)}: {in_one_line(error)}"
            ) from error
        return cls.from_dict(data)


CONFIGS: Registry[AttentionConfig] = Registry("an attention config")
_BY_LAYER: dict[type[nn.Module], type[AttentionConfig]] = {}
Config = TypeVar("Config", bound=type[AttentionConfig])


def register_config(kind: str, layer: type[nn.Module]) -> Callable[[Config], Config]:
    """Register a dataclass as the config of `layer`, with `kind` as its name in JSON."""

    def decorate(config: Config) -> Config:
        CONFIGS.register(kind)(config)
        config.layer = layer
        _BY_LAYER[layer] = config
        return config

    return decorate


def build_attention(
    config: AttentionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the layer that `config` describes, including its positions, on one device and in one dtype.

    >>> config = AttentionConfig.from_json('{"kind": "multi_head", "embed_dim": 512, "num_heads": 8, "causal": true}')
    >>> layer = build_attention(config)
    >>> config_of(layer) == config
    True
    """
    if not isinstance(config, AttentionConfig):
        raise OptionError(
            f"build_attention takes an AttentionConfig, got {type(config).__name__}; "
            "read JSON with AttentionConfig.from_json, a dictionary with AttentionConfig.from_dict"
        )
    return config.build(device=device, dtype=dtype)


def config_of(layer: nn.Module) -> AttentionConfig:
    """Return the config of a polyhead attention layer, without its weights and any `head_gate` set on it."""
    config = _BY_LAYER.get(type(layer))
    if config is None:
        known = ", ".join(kind.__name__ for kind in _BY_LAYER)
        raise OptionError(f"config_of takes one of {known}; got {type(layer).__name__}")
    return config.of(layer)


@dataclass(frozen=True)
class HeadsConfig(AttentionConfig):
    """Options of `MultiHeadAttention`, shared by the configs of all variants derived from it.

    Sizes that are left out are filled in with the layer's defaults. `positions` is a config, not a module.
    """

    embed_dim: int
    num_heads: int
    _: KW_ONLY
    num_kv_heads: int | None = None
    key_heads: tuple[int, ...] | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    key_input_dim: int | None = None
    value_input_dim: int | None = None
    bias: bool = True
    output_bias: bool | None = None
    positions: PositionsConfig | None = field(default=None, metadata={"kinds": POSITIONS})
    causal: bool = False
    window: int | None = None
    qk_norm: Literal["rms", "layer"] | None = None
    output_gate: Literal["head", "channel"] | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    finite: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_options(self)
        layout = self._given_layout()
        fill = object.__setattr__
        for x in dataclasses.fields(layout):
            fill(self, x.name, getattr(layout, x.name))
        fill(self, "output_bias", self.bias if self.output_bias is None else self.output_bias)
        checks.check_one_of("qk_norm", self.qk_norm, ("rms", "layer", None))
        checks.check_one_of("output_gate", self.output_gate, ("head", "channel", None))
        if self.positions is not None:
            fill(self, "positions", checked_positions(self.positions).fitted(self.turning))

    def _given_layout(self) -> HeadLayout:
        """Return the layout of the given sizes; a size of None takes `HeadLayout`'s default."""
        sizes = {x.name: getattr(self, x.name) for x in dataclasses.fields(HeadLayout)}
        return checks.layout_of(self.embed_dim, self.num_heads, sizes)

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(**{x.name: getattr(self, x.name) for x in dataclasses.fields(HeadLayout)})

    @property
    def turning(self) -> HeadLayout:
        """Head layout that the position module applies to."""
        return self.layout

    @property
    def mask(self) -> Mask | None:
        return layer_mask(self.causal, self.window)

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MultiHeadAttention:
        options = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        if self.positions is not None:
            options["positions"] = self.positions.build(self.turning).to(device=device, dtype=dtype)
        layer: MultiHeadAttention = self.layer(**options, device=device, dtype=dtype)
        return layer

    @classmethod
    def of(cls, layer: Any) -> Self:
        return cls(**cls._read(layer))

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        """Return the fields read from a layer; subclasses add their own."""
        gate, layout = layer.gate_proj, layer.layout
        causal, window = causal_and_window(layer.mask)
        return {
            **layout.to_dict(),
            "bias": layer.q_proj.bias is not None,
            "output_bias": layer.out_proj.bias is not None,
            "positions": None if layer.positions is None else positions_config_of(layer.positions),
            "causal": causal,
            "window": window,
            "qk_norm": _norm_name(layer.q_norm),
            # With one channel per head the two gates coincide.
            "output_gate": None if gate is None else "head" if gate.out_features == layout.num_heads else "channel",
            "softcap": layer.softcap,
            "scale": layer.scale,
            "sinks": layer.sinks is not None,
            "dropout": layer.dropout,
            "finite": layer.finite,
            "backend": layer.backend,
        }


@register_config("multi_head", MultiHeadAttention)
@dataclass(frozen=True)
class MultiHeadConfig(HeadsConfig):
    """Config of `MultiHeadAttention`.

    >>> config = MultiHeadConfig(512, 8, num_kv_heads=2, causal=True)
    >>> config.head_dim, config.output_bias
    (64, True)
    """

    _: KW_ONLY
    init: Literal["xavier", "conv"] = "xavier"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_one_of("init", self.init, ("xavier", "conv"))
        if self.init == "conv":
            with torch.device("meta"):
                self.build(device="meta")  # raises where the options do not describe a convolution

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        return {**super()._read(layer), "init": layer.init}

    @classmethod
    def of(cls, layer: Any) -> Self:
        if layer.combine is not None:
            raise OptionError(
                f"the config of MultiHeadAttention does not describe a combine module, got a layer with "
                f"{type(layer.combine).__name__}; give that variant its own layer class and config"
            )
        return super().of(layer)


def check_options(config: Any) -> None:
    """Check the options common to all layers, as the layers themselves do."""
    check_flags(config)
    checks.check_rate("dropout", config.dropout)
    checks.check_positive("softcap", config.softcap)
    checks.check_finite("scale", config.scale)
    checks.check_backend(config.backend)
    layer_mask(config.causal, config.window)


def checked_positions(positions: object) -> PositionsConfig:
    if isinstance(positions, Positions):
        raise OptionError(
            f"positions of a config must be a PositionsConfig, got the module {type(positions).__name__}; "
            "use positions_config_of(module)"
        )
    if not isinstance(positions, PositionsConfig):
        raise OptionError(f"positions must be a PositionsConfig such as RotaryConfig(), got {positions!r}")
    return positions


def causal_and_window(mask: Mask | None) -> tuple[bool, int | None]:
    """Return the `causal` and `window` options that a layer's mask corresponds to."""
    if mask is None:
        return False, None
    if not (mask.is_band and mask.right == 0 and mask.sinks == 0):
        raise OptionError(f"a config describes causal and causal window masks only, got a layer with {mask!r}")
    return True, None if mask.left is None else mask.left + 1


def _norm_name(norm: nn.Module | None) -> Literal["rms", "layer"] | None:
    if norm is None:
        return None
    if type(norm) not in (nn.RMSNorm, nn.LayerNorm):
        raise OptionError(f"qk_norm of a config must be an RMSNorm or a LayerNorm, got {type(norm).__name__}")
    return "rms" if type(norm) is nn.RMSNorm else "layer"

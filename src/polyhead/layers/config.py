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
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.files import in_one_line, short
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.positions.config import POSITIONS, PositionsConfig
from polyhead.layers.positions.position_encoding import Positions
from polyhead.layers.registry import Member, Registry, check_flags
from polyhead.layers.steps import layer_mask
from polyhead.masks import Mask


@dataclass(frozen=True)
class AttentionConfig(ABC):
    """Base class of attention configs. Configs that build the same layer compare equal."""

    layer: ClassVar[type[Any]]  # set by `register_config`

    @abstractmethod
    def build(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the layer with freshly initialised parameters.

        Args:
            device: device of the parameters.
            dtype: dtype of the parameters.

        Returns:
            The layer.
        """

    @classmethod
    @abstractmethod
    def of(cls, layer: Any) -> Self:
        """Return the config of `layer`.

        Args:
            layer: an attention layer of the config's class.
        """

    @property
    def mask(self) -> Mask | None:
        """Mask of the layer, combined with the mask of each call."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dictionary of JSON types, including its kind."""
        return CONFIGS.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the config that `to_dict` wrote; unknown fields raise.

        Args:
            data: the dictionary.
        """
        config = CONFIGS.from_dict(data)
        if not isinstance(config, cls):
            raise OptionError(f"expected the description of a {cls.__name__}, got that of a {type(config).__name__}")
        return config

    def to_json(self) -> str:
        """Return the config as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a config written by `to_json`; `AttentionConfig.from_json` accepts any kind.

        Args:
            text: JSON text.

        Returns:
            The config; of the class it was called on.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(
                f"an attention config must be a JSON object, got {short(text)}: {in_one_line(error)}"
            ) from error
        return cls.from_dict(data)


CONFIGS: Registry[AttentionConfig] = Registry("an attention config", attribute="layer")


def register_config(kind: str, layer: type[nn.Module]) -> Callable[[Member], Member]:
    """Register a dataclass as the config of `layer`, with `kind` as its name in JSON."""
    return CONFIGS.register(kind, layer)


def build_attention(
    config: AttentionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the layer that `config` describes, including its positions, on one device and in one dtype.

    Args:
        config: config of the layer.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Returns:
        The layer, with freshly initialised parameters.

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
    """Return the config of a polyhead attention layer, without its weights and any `head_gate` set on it.

    Args:
        layer: an attention layer of polyhead.
    """
    return CONFIGS.describe(layer)


@dataclass(frozen=True)
class LayerConfig(AttentionConfig):
    """Base class of the configs of polyhead's own layers, whose fields are the options of the layer.

    Sizes that are left out are filled in with the layer's defaults. `positions` is a config, not a module.

    Args:
        embed_dim, num_heads, bias, output_bias, causal, window, softcap, scale, sinks, dropout, finite, backend: as in
            `MultiHeadAttention`.
        positions: config of the position module.
    """

    embed_dim: int
    num_heads: int
    _: KW_ONLY
    bias: bool = True
    output_bias: bool | None = None
    positions: PositionsConfig | None = field(default=None, metadata={"kinds": POSITIONS})
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    finite: bool = False
    backend: str = "auto"

    _parts: ClassVar[tuple[str, ...]] = ("layout",)  # parts of the layer that have options as attributes

    def __post_init__(self) -> None:
        check_flags(self)
        checks.check_options(dropout=self.dropout, softcap=self.softcap, scale=self.scale, backend=self.backend)
        layer_mask(self.causal, self.window)
        self._fill(output_bias=self.bias if self.output_bias is None else self.output_bias)
        if self.positions is not None:
            _check_positions(self.positions)
        self._check_and_fill()
        if self.positions is not None:
            self._fill(positions=self.positions.fitted(self.position_layout))

    @abstractmethod
    def _check_and_fill(self) -> None:
        """Check the options of this kind of layer, as the layer does, and fill in those that were left out."""

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def layout(self) -> Any:
        """Head layout of the layer."""

    @property
    def position_layout(self) -> HeadLayout:
        """Head layout that the position module applies to."""
        layout: HeadLayout = self.layout
        return layout

    @property
    def mask(self) -> Mask | None:
        return layer_mask(self.causal, self.window)

    def build(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Any:
        options = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        if self.positions is not None:
            options["positions"] = self.positions.build(self.position_layout).to(device=device, dtype=dtype)
        return self.layer(**options, device=device, dtype=dtype)

    @classmethod
    def of(cls, layer: Any) -> Self:
        options = cls._read(layer)
        sources = [layer, *(getattr(layer, name) for name in cls._parts)]
        for name in (x.name for x in dataclasses.fields(cls) if x.name not in options):
            options[name] = next(getattr(source, name) for source in sources if hasattr(source, name))
        return cls(**options)

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        """Return the options that are not attributes of the same name of the layer or its `_parts`."""
        causal, window = _causal_and_window(layer.mask)
        return {
            "positions": None if layer.positions is None else POSITIONS.describe(layer.positions),
            "causal": causal,
            "window": window,
            "sinks": layer.sinks is not None,
        }


def _check_positions(positions: object) -> None:
    if isinstance(positions, Positions):
        raise OptionError(
            f"positions of a config must be a PositionsConfig, got the module {type(positions).__name__}; "
            "use positions_config_of(module)"
        )
    if not isinstance(positions, PositionsConfig):
        raise OptionError(f"positions must be a PositionsConfig such as RotaryConfig(), got {positions!r}")


def _causal_and_window(mask: Mask | None) -> tuple[bool, int | None]:
    """Return the `causal` and `window` options that a layer's mask corresponds to."""
    if mask is None:
        return False, None
    if not (mask.is_band and mask.right == 0 and mask.sinks == 0):
        raise OptionError(f"a config describes causal and causal window masks only, got a layer with {mask!r}")
    return True, None if mask.left is None else mask.left + 1


def norm_name(norm: nn.Module | None) -> Literal["rms", "layer"] | None:
    if norm is None:
        return None
    if type(norm) not in (nn.RMSNorm, nn.LayerNorm):
        raise OptionError(f"qk_norm of a config must be an RMSNorm or a LayerNorm, got {type(norm).__name__}")
    return "rms" if type(norm) is nn.RMSNorm else "layer"

"""Configs of `MultiHeadAttention` and, as a base, of the variants with the same projections."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Self

import torch

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.config import LayerConfig, checked_positions, norm_name, register_config
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.positions.config import POSITIONS, PositionsConfig


@dataclass(frozen=True)
class HeadsConfig(LayerConfig):
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
        self._check_options()
        layout = self._given_layout()
        self._fill(**{x.name: getattr(layout, x.name) for x in dataclasses.fields(layout)})
        checks.check_one_of("qk_norm", self.qk_norm, ("rms", "layer", None))
        checks.check_one_of("output_gate", self.output_gate, ("head", "channel", None))
        if self.positions is not None:
            self._fill(positions=checked_positions(self.positions).fitted(self.turning))

    def _given_layout(self) -> HeadLayout:
        """Return the layout of the given sizes; a size of None takes `HeadLayout`'s default."""
        sizes = {x.name: getattr(self, x.name) for x in dataclasses.fields(HeadLayout)}
        return checks.layout_of(self.embed_dim, self.num_heads, sizes)

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(**{x.name: getattr(self, x.name) for x in dataclasses.fields(HeadLayout)})

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        gate, layout = layer.gate_proj, layer.layout
        return {
            **super()._read(layer),
            **layout.to_dict(),
            "bias": layer.q_proj.bias is not None,
            "output_bias": layer.out_proj.bias is not None,
            "qk_norm": norm_name(layer.q_norm),
            # With one channel per head the two gates coincide.
            "output_gate": None if gate is None else "head" if gate.out_features == layout.num_heads else "channel",
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

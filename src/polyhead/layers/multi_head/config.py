"""Configs of `MultiHeadAttention` and, as a base, of the variants with the same projections."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

import torch

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.config import LayerConfig, norm_name, register_config
from polyhead.layers.multi_head.layer import MultiHeadAttention


@dataclass(frozen=True)
class HeadsConfig(LayerConfig):
    """Options of `MultiHeadAttention`, shared by the configs of all variants derived from it.

    Args:
        num_kv_heads, key_heads, head_dim, value_dim, key_input_dim, value_input_dim, qk_norm, output_gate: as in
            `MultiHeadAttention`.
    """

    _: KW_ONLY
    num_kv_heads: int | None = None
    key_heads: tuple[int, ...] | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    key_input_dim: int | None = None
    value_input_dim: int | None = None
    qk_norm: Literal["rms", "layer"] | None = None
    output_gate: Literal["head", "channel"] | None = None

    def _check_and_fill(self) -> None:
        self._fill(**{x.name: getattr(self.layout, x.name) for x in dataclasses.fields(HeadLayout)})
        checks.check_one_of("qk_norm", self.qk_norm, ("rms", "layer", None))
        checks.check_one_of("output_gate", self.output_gate, ("head", "channel", None))

    @property
    def layout(self) -> HeadLayout:
        sizes = {x.name: getattr(self, x.name) for x in dataclasses.fields(HeadLayout)}
        return checks.layout_of(self.embed_dim, self.num_heads, sizes)

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        return {
            **super()._read(layer),
            "bias": layer.q_proj.bias is not None,
            "output_bias": layer.out_proj.bias is not None,
            "qk_norm": norm_name(layer.q_norm),
        }


@register_config("multi_head", MultiHeadAttention)
@dataclass(frozen=True)
class MultiHeadConfig(HeadsConfig):
    """Config of `MultiHeadAttention`.

    Args:
        init: as in `MultiHeadAttention`.

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
    def of(cls, layer: Any) -> Self:
        if layer.combine is not None:
            raise OptionError(
                f"the config of MultiHeadAttention does not describe a combine module, got a layer with "
                f"{type(layer.combine).__name__}; give that variant its own layer class and config"
            )
        return super().of(layer)

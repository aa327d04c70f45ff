"""Config of `RoutedHeads`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, Self

import torch
from torch import nn

from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.config import AttentionConfig, causal_and_window, check_options, checked_positions, register_config
from polyhead.layers.positions import BiasesLogits
from polyhead.layers.positions.config import POSITIONS, PositionsConfig, positions_config_of
from polyhead.layers.steps import layer_mask
from polyhead.layers.variants.routed.layer import RoutedHeads
from polyhead.layers.variants.routed.router import HeadRouter
from polyhead.layers.variants.routed.validation import check_shape_options, check_shape_positions, routed_layout
from polyhead.masks import Mask

_ROUTER_FIELDS = ("top_k", "top_p", "threshold", "k_min", "k_max", "budget", "normalise", "always_on", "noise")


@register_config("routed_heads", RoutedHeads)
@dataclass(frozen=True)
class RoutedConfig(AttentionConfig):
    """Config of `RoutedHeads`.

    >>> config = RoutedConfig(512, 16, top_k=4)
    >>> config.head_dim, config.num_kv_heads, config.most_heads
    (32, 1, 4)
    """

    embed_dim: int
    num_heads: int
    _: KW_ONLY
    shape: Literal["shared", "full"] = "shared"
    top_k: int | None = None
    top_p: float | None = None
    threshold: float | None = None
    k_min: int = 1
    k_max: int | None = None
    budget: float | None = None
    normalise: Literal["all", "chosen"] = "all"
    always_on: int = 0
    noise: float = 0.0
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    bias: bool = True
    output_bias: bool | None = None
    positions: PositionsConfig | None = field(default=None, metadata={"kinds": POSITIONS})
    causal: bool = False
    window: int | None = None
    qk_norm: Literal["rms", "layer"] | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    finite: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_options(self)
        checks.check_one_of("qk_norm", self.qk_norm, ("rms", "layer", None))
        sizes = {name: getattr(self, name) for name in ("num_kv_heads", "head_dim", "value_dim")}
        layout = routed_layout(self.embed_dim, self.num_heads, self.shape, sizes)
        check_shape_options(self.shape, self.top_k, sinks=self.sinks, dropout=self.dropout)
        fill = object.__setattr__
        for name in sizes:
            fill(self, name, getattr(layout, name))
        fill(self, "output_bias", self.bias if self.output_bias is None else self.output_bias)
        fill(self, "k_max", self._router().k_max)
        if self.positions is not None:
            positions = checked_positions(self.positions)
            with torch.device("meta"):
                biases = isinstance(positions.build(layout), BiasesLogits)
            check_shape_positions(self.shape, biases, type(positions).__name__)
            fill(self, "positions", positions.fitted(layout))

    def _router(self) -> HeadRouter:
        options = {name: getattr(self, name) for name in _ROUTER_FIELDS}
        return HeadRouter(self.embed_dim, self.num_heads, **options, device="meta")

    @property
    def most_heads(self) -> int:
        """Maximum number of heads per token, including those that are always on."""
        return self._router().most_heads

    @property
    def layout(self) -> HeadLayout:
        sizes = {name: getattr(self, name) for name in ("num_kv_heads", "head_dim", "value_dim")}
        return routed_layout(self.embed_dim, self.num_heads, self.shape, sizes)

    @property
    def mask(self) -> Mask | None:
        return layer_mask(self.causal, self.window)

    def build(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RoutedHeads:
        options = {x.name: getattr(self, x.name) for x in fields(self)}
        if self.positions is not None:
            options["positions"] = self.positions.build(self.layout).to(device=device, dtype=dtype)
        return RoutedHeads(**options, device=device, dtype=dtype)

    @classmethod
    def of(cls, layer: Any) -> Self:
        causal, window = causal_and_window(layer.mask)
        layout, router = layer.layout, layer.router
        return cls(
            layout.embed_dim,
            layer.num_heads,
            shape=layer.shape,
            **{name: getattr(router, name) for name in _ROUTER_FIELDS},
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            value_dim=layout.value_dim,
            bias=layer.query_bias is not None,
            output_bias=layer.output_bias is not None,
            positions=None if layer.positions is None else positions_config_of(layer.positions),
            causal=causal,
            window=window,
            qk_norm=None if layer.q_norm is None else "rms" if type(layer.q_norm) is nn.RMSNorm else "layer",
            softcap=layer.softcap,
            scale=layer.scale,
            sinks=layer.sinks is not None,
            dropout=layer.dropout,
            finite=layer.finite,
            backend=layer.backend,
        )

"""Config of `RoutedHeads`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.config import LayerConfig, norm_name, register_config
from polyhead.layers.variants.routed.layer import RoutedHeads
from polyhead.layers.variants.routed.router import HeadRouter
from polyhead.layers.variants.routed.validation import check_shape_options, check_shape_positions, routed_layout

_ROUTER_FIELDS = ("top_k", "top_p", "threshold", "k_min", "k_max", "budget", "normalise", "always_on", "noise")
_SIZES = ("num_kv_heads", "head_dim", "value_dim")


@register_config("routed_heads", RoutedHeads)
@dataclass(frozen=True)
class RoutedConfig(LayerConfig):
    """Config of `RoutedHeads`.

    Args:
        shape, top_k, top_p, threshold, k_min, k_max, budget, normalise, always_on, noise: as in `RoutedHeads`.
        num_kv_heads, head_dim, value_dim, qk_norm: as in `RoutedHeads`.

    >>> config = RoutedConfig(512, 16, top_k=4)
    >>> config.head_dim, config.num_kv_heads, config.max_heads
    (32, 1, 4)
    """

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
    qk_norm: Literal["rms", "layer"] | None = None

    _parts = ("layout", "router")

    def _check_and_fill(self) -> None:
        checks.check_one_of("qk_norm", self.qk_norm, ("rms", "layer", None))
        layout = self.layout
        check_shape_options(self.shape, self.top_k, sinks=self.sinks, dropout=self.dropout)
        self._fill(k_max=self._router().k_max, **{name: getattr(layout, name) for name in _SIZES})
        if self.positions is not None:
            check_shape_positions(self.shape, self.positions.module)

    def _router(self) -> HeadRouter:
        options = {name: getattr(self, name) for name in _ROUTER_FIELDS}
        return HeadRouter(self.embed_dim, self.num_heads, **options, device="meta")

    @property
    def max_heads(self) -> int:
        """Maximum number of heads per token, including those that are always on."""
        return self._router().max_heads

    @property
    def layout(self) -> HeadLayout:
        sizes = {name: getattr(self, name) for name in _SIZES}
        return routed_layout(self.embed_dim, self.num_heads, self.shape, sizes)

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        return {
            **super()._read(layer),
            "bias": layer.query_bias is not None,
            "output_bias": layer.output_bias is not None,
            "qk_norm": norm_name(layer.q_norm),
        }

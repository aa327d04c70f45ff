"""Config of `LatentAttention`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.config import LayerConfig, register_config
from polyhead.layers.latent.forms import FORMS, LatentLayout, resolve_nope_head_dim
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.positions.config import RotaryConfig


@register_config("latent", LatentAttention)
@dataclass(frozen=True)
class LatentConfig(LayerConfig):
    """Config of `LatentAttention`; `qk_rope_head_dim` is required with rotary positions, else 0 or None.

    Args:
        kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, value_head_dim, norm_eps, form: as in
            `LatentAttention`.

    >>> config = LatentConfig(512, 8, kv_lora_rank=128, qk_rope_head_dim=32, positions=RotaryConfig(interleaved=True))
    >>> config.qk_nope_head_dim, config.layout.cache_width
    (64, 160)
    """

    _: KW_ONLY
    kv_lora_rank: int
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = 0
    value_head_dim: int | None = None
    norm_eps: float = 1e-6
    form: Literal["auto", "expanded", "absorbed"] = "auto"

    def _check_and_fill(self) -> None:
        checks.check_positive("norm_eps", self.norm_eps)
        checks.check_one_of("form", self.form, ("auto", *FORMS))
        for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "value_head_dim"):
            checks.check_size(name, getattr(self, name))
        nope = resolve_nope_head_dim(self.embed_dim, self.num_heads, self.qk_nope_head_dim)
        self._fill(
            qk_nope_head_dim=nope,
            qk_rope_head_dim=0 if self.qk_rope_head_dim is None else self.qk_rope_head_dim,
            value_head_dim=self.value_head_dim or nope,
        )
        rotary_channels = self.layout.qk_rope_head_dim
        if isinstance(self.positions, RotaryConfig) != (rotary_channels > 0):
            raise OptionError(
                "qk_rope_head_dim is the number of channels with rotary positions, so each requires the other; "
                f"got qk_rope_head_dim {rotary_channels} and positions {self.positions}"
            )

    @property
    def layout(self) -> LatentLayout:
        sizes = {x.name: getattr(self, x.name) for x in fields(LatentLayout)}
        return LatentLayout(**{**sizes, "q_lora_rank": self.q_lora_rank or 0})

    @property
    def position_layout(self) -> HeadLayout:
        """Head layout that the position module applies to: the rotary channels only, if there are any."""
        layout = self.layout
        if not layout.qk_rope_head_dim:
            return layout.expanded
        return HeadLayout(layout.embed_dim, layout.num_heads, head_dim=layout.qk_rope_head_dim)

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        return {
            **super()._read(layer),
            "q_lora_rank": layer.layout.q_lora_rank or None,
            "bias": layer.kv_a_proj.bias is not None,
            "output_bias": layer.out_proj.bias is not None,
            "norm_eps": layer.kv_a_norm.eps,
        }

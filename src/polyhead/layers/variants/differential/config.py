"""Config of `DifferentialAttention`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from polyhead.geometry import HeadLayout
from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.variants.differential.layer import DifferentialAttention, check_differential


@register_config("differential", DifferentialAttention)
@dataclass(frozen=True)
class DifferentialConfig(HeadsConfig):
    """Config of `DifferentialAttention`.

    Args:
        layer_index, norm_eps: as in `DifferentialAttention`.

    >>> config = DifferentialConfig(512, 4, layer_index=3)
    >>> config.head_dim, config.position_layout.head_dim
    (128, 64)
    """

    _: KW_ONLY
    layer_index: int = 0
    norm_eps: float = 1e-5

    def _check_and_fill(self) -> None:
        super()._check_and_fill()
        check_differential(self.layout, self.layer_index, self.norm_eps, self.qk_norm)

    @property
    def position_layout(self) -> HeadLayout:
        return replace(self.layout, head_dim=self.layout.head_dim // 2)

"""Config of `CollaborativeAttention`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from polyhead.geometry import HeadLayout
from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeAttention, check_collaborative


@register_config("collaborative", CollaborativeAttention)
@dataclass(frozen=True)
class CollaborativeConfig(HeadsConfig):
    """Config of `CollaborativeAttention`.

    Args:
        shared_dim: as in `CollaborativeAttention`.

    >>> CollaborativeConfig(512, 8).shared_dim
    512
    """

    _: KW_ONLY
    shared_dim: int | None = None

    def _check_and_fill(self) -> None:
        super()._check_and_fill()
        check_collaborative(self.layout, self.shared_dim, self.qk_norm)
        self._fill(shared_dim=self.shared_dim or self.layout.num_heads * self.layout.head_dim)

    @property
    def position_layout(self) -> HeadLayout:
        """Head layout that the position module applies to: queries and keys of a head have all shared channels."""
        assert self.shared_dim is not None
        return replace(self.layout, head_dim=self.shared_dim)

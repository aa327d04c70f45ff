"""Config of `CollaborativeAttention`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from polyhead.geometry import HeadLayout
from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeAttention, check_collaborative


@register_config("collaborative", CollaborativeAttention)
@dataclass(frozen=True)
class CollaborativeConfig(HeadsConfig):
    """Config of `CollaborativeAttention`.

    >>> CollaborativeConfig(512, 8).shared_dim
    512
    """

    _: KW_ONLY
    shared_dim: int | None = None

    def __post_init__(self) -> None:
        layout = self._given_layout()
        check_collaborative(layout, self.shared_dim, self.qk_norm)
        self._fill(shared_dim=self.shared_dim or layout.num_heads * layout.head_dim)
        super().__post_init__()

    @property
    def turning(self) -> HeadLayout:
        assert self.shared_dim is not None
        return replace(self.layout, head_dim=self.shared_dim)

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        return {**super()._read(layer), "shared_dim": layer.shared_dim}

"""Config of `GroupedHeads`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.variants.grouped.layer import GroupedHeads, HeadGroups


@register_config("grouped_heads", GroupedHeads)
@dataclass(frozen=True)
class GroupedHeadsConfig(HeadsConfig):
    """Config of `GroupedHeads`.

    >>> GroupedHeadsConfig(512, 8, num_groups=4).hidden_dim
    192
    """

    _: KW_ONLY
    num_groups: int
    hidden_dim: int | None = None
    activation: Literal["gelu", "linear"] = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = HeadGroups(self.layout, self.num_groups, self.hidden_dim, activation=self.activation, device="meta")
        self._fill(hidden_dim=groups.width)

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        groups = layer.combine
        fields = {"num_groups": groups.num_groups, "hidden_dim": groups.width, "activation": groups.activation}
        return {**super()._read(layer), **fields}

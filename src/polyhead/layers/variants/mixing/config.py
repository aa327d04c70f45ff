"""Config of `HeadMix`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.variants.mixing.layer import HeadMix, HeadMixing


@register_config("head_mix", HeadMix)
@dataclass(frozen=True)
class HeadMixConfig(HeadsConfig):
    """Config of `HeadMix`.

    >>> HeadMixConfig(512, 8).num_rows
    8
    """

    _: KW_ONLY
    num_rows: int | None = None
    mix: Literal["heads", "full"] = "heads"
    row_attention: Literal["plain", "projected"] | None = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        mixing = HeadMixing(self.layout, self.num_rows, mix=self.mix, row_attention=self.row_attention, device="meta")
        self._fill(num_rows=mixing.num_rows)

    @classmethod
    def _read(cls, layer: Any) -> dict[str, Any]:
        mixing = layer.combine
        fields = {"num_rows": mixing.num_rows, "mix": mixing.mix, "row_attention": mixing.row_attention}
        return {**super()._read(layer), **fields}

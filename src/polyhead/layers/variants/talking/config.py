"""Config of `TalkingHeads`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.positions import BiasesLogits
from polyhead.layers.variants.talking.layer import TalkingHeads, check_talking, refuse_biases


@register_config("talking_heads", TalkingHeads)
@dataclass(frozen=True)
class TalkingHeadsConfig(HeadsConfig):
    """Config of `TalkingHeads`; unsupported options must keep their defaults.

    >>> TalkingHeadsConfig(512, 8, causal=True).head_dim
    64
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_talking(
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=self.dropout,
            key_heads=self.key_heads,
            backend=self.backend,
        )
        if self.positions is not None:
            with torch.device("meta"):
                module = self.positions.build(self.turning)
            if isinstance(module, BiasesLogits):
                refuse_biases(type(self.positions).__name__)

"""Descriptions of all kinds of layers, from which FLOPs, bytes and memory derive.

A new attention variant derives a class from `LayerDescription`, or from `PlainHeads` if its projections are those of
multi-head attention, and adds it to `DESCRIPTIONS`.
"""

from __future__ import annotations

from typing import Any

from polyhead.costs.descriptions.head_variants import (
    CollaborativeHeads,
    DifferentialHeads,
    GroupedHeads,
    HeadMix,
    TalkingHeads,
)
from polyhead.costs.descriptions.latent_heads import LatentHeads
from polyhead.costs.descriptions.layer_description import LayerDescription
from polyhead.costs.descriptions.plain_heads import PlainHeads
from polyhead.costs.descriptions.routed_heads import RoutedHeads
from polyhead.errors import OptionError
from polyhead.layers.config import AttentionConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.multi_head.config import MultiHeadConfig
from polyhead.layers.variants import (
    CollaborativeConfig,
    DifferentialConfig,
    GroupedHeadsConfig,
    HeadMixConfig,
    RoutedConfig,
    TalkingHeadsConfig,
)

DESCRIPTIONS: dict[type[AttentionConfig], type[LayerDescription[Any]]] = {
    MultiHeadConfig: PlainHeads,
    GroupedHeadsConfig: GroupedHeads,
    HeadMixConfig: HeadMix,
    TalkingHeadsConfig: TalkingHeads,
    DifferentialConfig: DifferentialHeads,
    CollaborativeConfig: CollaborativeHeads,
    LatentConfig: LatentHeads,
    RoutedConfig: RoutedHeads,
}


def describe(config: AttentionConfig) -> LayerDescription[Any]:
    """Return the description of a layer with this config.

    Args:
        config: config of a layer of polyhead.

    >>> describe(MultiHeadConfig(512, 8, num_kv_heads=2)).projections
    (262144, 65536, 65536, 262144)
    """
    for kind in type(config).__mro__:
        if kind in DESCRIPTIONS:
            return DESCRIPTIONS[kind](config)
    raise OptionError(f"no description of {type(config).__name__}; add one to polyhead.costs.descriptions.DESCRIPTIONS")

"""Attention variants beyond multi-head, grouped-query and latent attention, one folder each."""

from polyhead.layers.multi_head.conv_init import set_convolution
from polyhead.layers.variants.collaborative import (
    CollaborativeAttention,
    CollaborativeConfig,
    SharedFactors,
    shared_factors,
)
from polyhead.layers.variants.convolutional import convolutional_heads
from polyhead.layers.variants.differential import DifferentialAttention, DifferentialConfig
from polyhead.layers.variants.grouped import GroupedHeads, GroupedHeadsConfig
from polyhead.layers.variants.mixing import HeadMix, HeadMixConfig
from polyhead.layers.variants.routed import (
    HeadRouter,
    RoutedConfig,
    RoutedHeads,
    RoutedOutput,
    Routing,
    collect_routings,
)
from polyhead.layers.variants.talking import TalkingHeads, TalkingHeadsConfig

__all__ = [
    "CollaborativeAttention",
    "CollaborativeConfig",
    "DifferentialAttention",
    "DifferentialConfig",
    "GroupedHeads",
    "GroupedHeadsConfig",
    "HeadMix",
    "HeadMixConfig",
    "HeadRouter",
    "RoutedConfig",
    "RoutedHeads",
    "RoutedOutput",
    "Routing",
    "SharedFactors",
    "TalkingHeads",
    "TalkingHeadsConfig",
    "collect_routings",
    "convolutional_heads",
    "set_convolution",
    "shared_factors",
]

"""How heads are arranged: attention layers, their configs, their positions and their caches."""

from polyhead.layers.arrangements import GroupedHeadsConfig, HeadMixConfig, LatentConfig
from polyhead.layers.collaborative import CollaborativeAttention
from polyhead.layers.collaborative_config import CollaborativeConfig
from polyhead.layers.collaborative_factors import SharedFactors, shared_factors
from polyhead.layers.config import AttentionConfig, MultiHeadConfig, build_attention, config_of
from polyhead.layers.convolutional import convolutional_heads, set_convolution
from polyhead.layers.differential import DifferentialAttention
from polyhead.layers.differential_config import DifferentialConfig
from polyhead.layers.grouped_heads import GroupedHeads
from polyhead.layers.head_mixing import HeadMix
from polyhead.layers.heads import HeadMatrices, Heads
from polyhead.layers.kv_cache import (
    CacheView,
    GrowingCache,
    KVCache,
    LatentCache,
    PagedCache,
    PagePool,
    PreallocatedCache,
    PreallocatedLatentCache,
    QuantizedCache,
    RollingCache,
)
from polyhead.layers.latent import LatentAttention
from polyhead.layers.multi_head import Memory, MultiHeadAttention
from polyhead.layers.routed_config import RoutedConfig
from polyhead.layers.routed_heads import RoutedHeads, RoutedOutput, collect_routings
from polyhead.layers.routing import HeadRouter, Routing
from polyhead.layers.talking_heads import TalkingHeads
from polyhead.layers.talking_heads_config import TalkingHeadsConfig

__all__ = [
    "AttentionConfig",
    "CacheView",
    "CollaborativeAttention",
    "CollaborativeConfig",
    "DifferentialAttention",
    "DifferentialConfig",
    "GroupedHeads",
    "GroupedHeadsConfig",
    "GrowingCache",
    "HeadMatrices",
    "HeadMix",
    "HeadMixConfig",
    "HeadRouter",
    "Heads",
    "KVCache",
    "LatentAttention",
    "LatentCache",
    "LatentConfig",
    "Memory",
    "MultiHeadAttention",
    "MultiHeadConfig",
    "PagePool",
    "PagedCache",
    "PreallocatedCache",
    "PreallocatedLatentCache",
    "QuantizedCache",
    "RollingCache",
    "RoutedConfig",
    "RoutedHeads",
    "RoutedOutput",
    "Routing",
    "SharedFactors",
    "TalkingHeads",
    "TalkingHeadsConfig",
    "build_attention",
    "collect_routings",
    "config_of",
    "convolutional_heads",
    "set_convolution",
    "shared_factors",
]

"""How heads are arranged: attention layers, their configs, their positions and their caches."""

from polyhead.layers.arrangements import GroupedHeadsConfig, HeadMixConfig, LatentConfig
from polyhead.layers.config import AttentionConfig, MultiHeadConfig, build_attention, config_of
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

__all__ = [
    "AttentionConfig",
    "CacheView",
    "GroupedHeads",
    "GroupedHeadsConfig",
    "GrowingCache",
    "HeadMatrices",
    "HeadMix",
    "HeadMixConfig",
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
    "build_attention",
    "config_of",
]

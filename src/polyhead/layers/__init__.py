"""Attention layers, their configs, position modules and KV caches."""

from polyhead.layers.multi_head.config import MultiHeadConfig  # first, as in the registry of configs

# isort: split
from polyhead.layers.base_attention import Memory
from polyhead.layers.config import AttentionConfig, build_attention, config_of
from polyhead.layers.head_matrices import HeadMatrices, Heads
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
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.multi_head.layer import MultiHeadAttention

__all__ = [
    "AttentionConfig",
    "CacheView",
    "GrowingCache",
    "HeadMatrices",
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

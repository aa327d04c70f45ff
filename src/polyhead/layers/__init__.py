"""How heads are arranged: attention layers, their positions and their caches."""

from polyhead.layers.heads import HeadMatrices, Heads
from polyhead.layers.kv_cache import (
    CacheView,
    GrowingCache,
    KVCache,
    PagedCache,
    PagePool,
    PreallocatedCache,
    QuantizedCache,
    RollingCache,
)
from polyhead.layers.multi_head import Memory, MultiHeadAttention

__all__ = [
    "CacheView",
    "GrowingCache",
    "HeadMatrices",
    "Heads",
    "KVCache",
    "Memory",
    "MultiHeadAttention",
    "PagePool",
    "PagedCache",
    "PreallocatedCache",
    "QuantizedCache",
    "RollingCache",
]

"""KV caches for generation: growing, preallocated, rolling, paged, quantised and latent."""

from __future__ import annotations

from polyhead.layers.kv_cache.base import CacheView, KVCache
from polyhead.layers.kv_cache.latent import LatentCache, PreallocatedLatentCache
from polyhead.layers.kv_cache.paged import PagedCache, PagePool
from polyhead.layers.kv_cache.quantized import QuantizedCache
from polyhead.layers.kv_cache.rolling import RollingCache
from polyhead.layers.kv_cache.slots import GrowingCache, PreallocatedCache

__all__ = [
    "CacheView",
    "GrowingCache",
    "KVCache",
    "LatentCache",
    "PagePool",
    "PagedCache",
    "PreallocatedCache",
    "PreallocatedLatentCache",
    "QuantizedCache",
    "RollingCache",
]

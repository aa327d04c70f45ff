"""KV caches of latent attention, whose values are the first channels of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.layers.kv_cache.base import CacheView
from polyhead.layers.kv_cache.slots import GrowingCache, PreallocatedCache, SlotCache
from polyhead.layers.kv_cache.tokens import TokenLayout
from polyhead.ops.decode.fused import CacheArguments


class LatentStorage(SlotCache):
    """Base of latent caches: one buffer [batch, kv_heads, slots, head_dim], of which values are a slice.

    `append` takes keys without values and raises on separate values, which would be lost. `options` of the constructor
    are those of the growing or preallocated cache that the subclass also derives from.

    Args:
        value_dim: channels of a latent that are values; the layer sets it.
        num_kv_heads: 1; the latent is shared by all heads.
        head_dim: channels of a latent with its rotary key.
        options: capacity, batch_size, dtype and device, as of other caches.
    """

    def __init__(
        self, *, value_dim: int | None = None, num_kv_heads: int | None = 1, head_dim: int | None = None, **options: Any
    ) -> None:
        options |= {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        super().__init__(**options)  # that of the growing or preallocated cache
        if head_dim is not None and value_dim is not None and value_dim > head_dim:
            raise CacheError(
                f"value_dim must be at most head_dim, whose first channels it is, got {value_dim} and {head_dim}"
            )
        self._value_dim = value_dim

    def reset(self) -> None:
        super().reset()
        self._value_dim = self._sizes["value_dim"]

    def take_value_dim(self, value_dim: int) -> None:
        """Set the number of channels that are values, as the layer does before `append`; raise if it is another.

        Args:
            value_dim: number of channels.
        """
        if self._value_dim not in (None, value_dim):
            raise CacheError(f"this cache has value_dim {self._value_dim}, got value_dim {value_dim}")
        self._value_dim = value_dim

    def append(
        self, key: Tensor, value: Tensor | None = None, *, lengths: Sequence[int] | Tensor | None = None
    ) -> CacheView:
        """Append new tokens [batch, kv_heads, tokens, head_dim] and return the view to attend to.

        Args:
            key: latents [batch, 1, tokens, head_dim].
            value: None; values are channels of the latents.
            lengths: number of non-padding tokens of each sequence.

        Returns:
            Latents and the mask of everything stored so far.
        """
        if value is not None:
            raise CacheError(
                "a latent cache reads values from the first channels of its keys and stores no others, "
                f"got separate values of shape {list(value.shape)}; it is for LatentAttention, for other "
                "layers use a GrowingCache or PreallocatedCache"
            )
        if self._value_dim is None:
            raise CacheError(
                "a latent cache takes value_dim from the LatentAttention that it is passed to, got an append without "
                "one; build it with value_dim"
            )
        return super().append(key, key[..., : self._value_dim], lengths=lengths)

    def _built_layout(self) -> TokenLayout | None:
        return None if self._sizes["value_dim"] is None else super()._built_layout()

    def _buffer_formats(self, layout: TokenLayout) -> tuple[tuple[int, torch.dtype], ...]:
        return ((layout.head_dim, layout.dtype),)

    def _encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return (key,)

    def _describe(self, stored: tuple[Tensor, ...]) -> CacheArguments:
        return CacheArguments(*self._read(stored, 0), shared=True)

    def _read(self, stored: tuple[Tensor, ...], num_keys: int) -> tuple[Tensor, Tensor]:
        (key,) = stored
        return key, key[..., : self._value_dim]


class LatentCache(LatentStorage, GrowingCache):
    """Growing latent cache; sizes, dtype and device come from the first block.

    The capacity doubles when full. A token takes head_dim numbers, shared by all heads: kv_lora_rank + qk_rope_head_dim
    of a `LatentAttention`.
    `value_dim` is kv_lora_rank, which the layer passes itself.

    >>> cache = LatentCache(value_dim=5)
    >>> view = cache.append(torch.ones(2, 1, 3, 7))
    >>> view.key.shape, view.value.shape, cache.nbytes == 2 * 3 * 7 * 4
    (torch.Size([2, 1, 3, 7]), torch.Size([2, 1, 3, 5]), True)
    """


class PreallocatedLatentCache(LatentStorage, PreallocatedCache):
    """Latent cache with memory for `capacity` tokens per sequence, allocated once.

    >>> cache = PreallocatedLatentCache(capacity=11, batch_size=2, head_dim=7, value_dim=5, dtype=torch.bfloat16)
    >>> cache.nbytes == 2 * 11 * 7 * 2
    True
    """

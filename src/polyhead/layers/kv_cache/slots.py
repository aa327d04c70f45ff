"""KV caches that store each sequence in a row of token slots, in order from slot 0."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.layers.kv_cache.base import CacheView, KVCache
from polyhead.layers.kv_cache.tokens import CacheSizes, TokenLayout, all_equal, count, longest, new_tokens


class SlotCache(KVCache):
    """Base of caches whose storage is tensors of shape [batch, kv_heads, slots, channels].

    Subclasses may override the storage format of a token (`_buffer_formats`, `_encode`, and `_describe` and `_read` of
    `KVCache`) and what happens when the capacity is exceeded (`_reserve`).
    """

    def __init__(self, capacity: int, **sizes: Unpack[CacheSizes]) -> None:
        super().__init__(**sizes)
        self._capacity = capacity
        self._buffers: tuple[Tensor, ...] = ()
        if self._layout is not None:
            self._buffers = self._allocate(self.batch_size, capacity, self._layout)

    @property
    def capacity(self) -> int:
        """Token slots of each sequence."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def fork(self) -> Self:
        forked = copy.copy(self)  # everything but the buffers is immutable
        with torch.inference_mode(False):
            forked._buffers = tuple(buffer.clone() for buffer in self._buffers)
        return forked

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def reset(self) -> None:
        batch_size = self.batch_size
        super().reset()
        if self._layout is None:
            self._buffers = ()
        elif batch_size != self.batch_size:
            self._buffers = self._allocate(self.batch_size, self._capacity, self._layout)

    # ---- storage format, overridden by subclasses

    def _buffer_formats(self, layout: TokenLayout) -> tuple[tuple[int, torch.dtype], ...]:
        """Return the channels and dtype of each buffer."""
        return (layout.head_dim, layout.dtype), (layout.value_dim, layout.dtype)

    def _encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return key, value

    def _reserve(self, needed: int) -> None:
        """Ensure capacity for `needed` tokens per sequence, or raise."""
        if needed > self._capacity:
            raise CacheError(
                f"this cache has a capacity of {self._capacity} tokens per sequence, got {needed}: "
                f"{needed - self._capacity} too many; build it with a larger capacity, crop it, or use a growing or "
                "rolling cache"
            )

    # ---- implementation of KVCache

    def _start(self, layout: TokenLayout, batch_size: int) -> None:
        super()._start(layout, batch_size)
        self._buffers = self._allocate(batch_size, self._capacity, layout)

    def _append(self, key: Tensor, value: Tensor, new_lengths: tuple[int, ...], layout: TokenLayout) -> CacheView:
        num_tokens = key.shape[2]
        starts = self._lengths
        ends = [old + new for old, new in zip(starts, new_lengths, strict=True)]
        self._reserve(longest(ends, otherwise=self._max_length + num_tokens))
        write = TokenWriter.build(starts, new_lengths, self._max_length, num_tokens, layout.device)
        self._write(write, key, value)
        self._advance(new_lengths, num_tokens)
        return self._view(self._stored(), self._lengths_mask(new_lengths, num_tokens), new_lengths)

    def _stored(self) -> tuple[Tensor, ...]:
        self._require_layout()
        return tuple(buffer.narrow(2, 0, self._max_length) for buffer in self._buffers)

    def _write(self, write: TokenWriter, key: Tensor, value: Tensor) -> None:
        for buffer, block in zip(self._buffers, self._encode(key, value), strict=True):
            write(buffer, block)

    def _reorder(self, rows: Sequence[int] | None, where: Tensor) -> None:
        layout = self._require_layout()
        num_slots = min(self._max_length, self._capacity)
        targets = self._buffers
        if where.shape[0] != self.batch_size:
            targets = self._allocate(where.shape[0], self._capacity, layout)
        for target, buffer in zip(targets, self._buffers, strict=True):
            target.narrow(2, 0, num_slots).copy_(buffer.narrow(2, 0, num_slots).index_select(0, where))
        self._buffers = targets

    def _crop(self, new_lengths: tuple[int, ...]) -> None:
        """Do nothing: slots after a sequence's length are never read."""

    def _allocate(self, batch_size: int, capacity: int, layout: TokenLayout) -> tuple[Tensor, ...]:
        # Zeros, because a kernel may multiply unwritten slots by weights of 0, and 0 * NaN is NaN. Outside inference
        # mode, so that a cache first filled in inference mode can be written to afterwards.
        with torch.inference_mode(False):
            return tuple(
                torch.zeros(batch_size, layout.num_kv_heads, capacity, channels, dtype=dtype, device=layout.device)
                for channels, dtype in self._buffer_formats(layout)
            )


class TokenWriter(NamedTuple):
    """Appends the non-padding tokens of a block to the sequences of a buffer; built once for all buffers."""

    start: int
    num_tokens: int
    places: Tensor | None  # [3, tokens]: row, slot, index in the block; None: one slice from `start` for all rows

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        new_lengths: Sequence[int],
        longest_start: int,
        num_tokens: int,
        device: torch.device,
    ) -> TokenWriter:
        if all_equal(starts):
            # Padding written after a shorter row is masked until it is overwritten.
            return cls(longest_start, longest(new_lengths, otherwise=num_tokens), None)
        row, in_block, position = new_tokens(starts, new_lengths, num_tokens)
        return cls(0, 0, torch.stack([row, position, in_block]).to(device, non_blocking=True))

    def __call__(self, buffer: Tensor, block: Tensor) -> None:
        if self.places is None:
            block = block if block.shape[2] == self.num_tokens else block.narrow(2, 0, self.num_tokens)
            buffer.narrow(2, self.start, self.num_tokens).copy_(block)
        else:
            row, slot, in_block = self.places
            buffer[row, :, slot] = block[row, :, in_block]


class PreallocatedCache(SlotCache):
    """Cache with memory for `capacity` tokens per sequence, allocated once; views copy nothing.

    The memory is allocated by the first append, or by the constructor if all sizes are passed.

    Args:
        capacity: tokens per sequence.
        sizes: batch_size, num_kv_heads, head_dim, value_dim, dtype and device, as of `KVCache`.

    >>> cache = PreallocatedCache(capacity=5)
    >>> key = value = torch.ones(1, 2, 4, 3)
    >>> cache.append(key, value).key.shape
    torch.Size([1, 2, 4, 3])
    >>> cache.append(key, value)
    Traceback (most recent call last):
    polyhead.errors.CacheError: this cache has a capacity of 5 tokens per sequence, got 8: 3 too many; build it with a \
larger capacity, crop it, or use a growing or rolling cache
    """

    def __init__(self, *, capacity: int, **sizes: Unpack[CacheSizes]) -> None:
        super().__init__(count("capacity", capacity), **sizes)


class GrowingCache(SlotCache):
    """Growing cache; layout, dtype and device come from the first block, capacity doubles when full.

    Growing costs less than two copies per token in total, for any sequence length. `reset` frees the memory, and
    the next block determines the layout again. Arguments of the constructor are checked against the first block.

    Args:
        sizes: batch_size, num_kv_heads, head_dim, value_dim, dtype and device, as of `KVCache`.

    >>> cache = GrowingCache()
    >>> for _ in range(3):
    ...     view = cache.append(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8))
    >>> view.key.shape, cache.lengths
    (torch.Size([1, 2, 12, 8]), (12,))
    """

    def __init__(self, **sizes: Unpack[CacheSizes]) -> None:
        super().__init__(0, **sizes)

    def reset(self) -> None:
        super().reset()
        self._capacity = 0

    def _built_layout(self) -> TokenLayout | None:
        return None

    def _reserve(self, needed: int) -> None:
        if needed <= self._capacity:
            return
        capacity = max(needed, 2 * self._capacity)
        grown = self._allocate(self.batch_size, capacity, self._require_layout())
        for buffer, filled in zip(grown, self._buffers, strict=True):
            buffer.narrow(2, 0, self._max_length).copy_(filled.narrow(2, 0, self._max_length))
        self._buffers, self._capacity = grown, capacity

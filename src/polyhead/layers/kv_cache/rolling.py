"""Rolling KV cache: a sliding window and attention sinks, for sequences of unbounded length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.layers.kv_cache.base import CacheView
from polyhead.layers.kv_cache.slots import SlotCache, TokenWriter
from polyhead.layers.kv_cache.tokens import (
    CacheSizes,
    TokenLayout,
    all_equal,
    count,
    integers,
    longest,
    new_tokens,
    positive,
)
from polyhead.masks import Mask


class RollingCache(SlotCache):
    """Cache of the first `sinks` and last `window` tokens (StreamingLLM, Xiao et al. 2023).

    Generation equals the full forward with `Mask.window(window, sinks=sinks)` for any chunking of the tokens: views
    include that mask, and a chunk sees the old tokens that its first query needs before they are dropped. Memory is
    `sinks + window + rollback` tokens, plus the chunk while it is appended. Unlike StreamingLLM, positions are those of
    the full sequence.

    `rollback` keeps that many older tokens, so that `crop` can remove up to `rollback + 1` tokens, or crop to `sinks`.

    Token p is in slot p if p < sinks, otherwise in a ring buffer after the sinks. Slots are out of order once the ring
    has wrapped around; the view's mask accounts for it. Weights that a layer returns are in the order of the tokens.

    Args:
        window: last tokens to keep.
        sinks: first tokens to keep.
        rollback: further tokens to keep, so that `crop` can drop that many.
        sizes: batch_size, num_kv_heads, head_dim, value_dim, dtype and device, as of `KVCache`.

    >>> cache = RollingCache(window=4)
    >>> for _ in range(9):
    ...     view = cache.append(torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1, 3))
    >>> cache.lengths, view.key.shape
    ((9,), torch.Size([1, 2, 4, 3]))
    """

    def __init__(self, *, window: int, sinks: int = 0, rollback: int = 0, **sizes: Unpack[CacheSizes]) -> None:
        self.window: int = positive("window", window)
        self.sinks = count("sinks", sinks)
        self.rollback = count("rollback", rollback)
        self._ring = self.window + self.rollback
        super().__init__(self.sinks + self._ring, **sizes)
        # Position of the first token after the sinks that is still stored; 0 while nothing was dropped. Not a function
        # of the length, because a crop does not restore dropped tokens.
        self._floors: tuple[int, ...] = (0,) * self.batch_size
        self._has_lost_tokens = False

    def reset(self) -> None:
        super().reset()
        self._has_lost_tokens = False
        self._floors = (0,) * self.batch_size

    # ---- implementation of KVCache

    def _start(self, layout: TokenLayout, batch_size: int) -> None:
        super()._start(layout, batch_size)
        self._floors = (0,) * batch_size

    def _append(self, key: Tensor, value: Tensor, new_lengths: tuple[int, ...], layout: TokenLayout) -> CacheView:
        self._check_complete()
        num_tokens = key.shape[2]
        starts, start = self._lengths, self._max_length
        ends = tuple(old + new for old, new in zip(starts, new_lengths, strict=True))
        all_real = all(new == num_tokens for new in new_lengths)
        in_order = not any(self._floors)
        if in_order and longest(ends, otherwise=start + num_tokens) <= self._capacity:
            view = super()._append(key, value, new_lengths, layout)
            view.mask = self._windowed(view.mask, num_tokens, all_real)
            return view

        floors = tuple(
            max(floor, end - self._ring) if end > self._capacity else floor
            for floor, end in zip(self._floors, ends, strict=True)
        )
        write = self._writer(starts, new_lengths, num_tokens, layout.device)
        if num_tokens <= self.rollback + 1:
            # No token that the first of these queries sees is dropped.
            self._write(write, key, value)
            self._advance(new_lengths, num_tokens)
            self._floors = floors
            stored = self._stored()
            key_positions = self._slot_positions()
            mask: Mask | None = Mask.positions(self._positions(starts, start, new_lengths, num_tokens), key_positions)
        else:
            stored = key, value
            if start:
                stored = tuple(torch.cat(pair, dim=2) for pair in zip(self._stored(), stored, strict=True))
            old_positions = self._slot_positions()
            self._write(write, key, value)
            self._advance(new_lengths, num_tokens)
            self._floors = floors
            if in_order and all_equal(starts):
                mask = self._lengths_mask(new_lengths, num_tokens)
            else:
                positions = self._positions(starts, start, new_lengths, num_tokens)
                rows = max(old_positions.shape[0], positions.shape[0])
                key_positions = torch.cat([old_positions.expand(rows, -1), positions.expand(rows, -1)], dim=1)
                mask = Mask.positions(positions, key_positions)
        return self._view(stored, self._windowed(mask, num_tokens, all_real), new_lengths)

    def view(self) -> CacheView:
        self._check_complete()
        return super().view()

    def _undo_append(self, lengths: tuple[int, ...]) -> None:
        try:
            self._crop(lengths)
        except CacheError:  # the block overwrote tokens that the next one sees
            self._has_lost_tokens = True

    def _check_complete(self) -> None:
        if self._has_lost_tokens:
            raise CacheError(
                "a call failed after its block had overwritten tokens that the window still needs; "
                "reset the cache and prefill again, or build it with a rollback as long as a block"
            )

    def _stored(self) -> tuple[Tensor, ...]:
        self._require_layout()
        used = min(self._max_length, self._capacity)
        return tuple(buffer.narrow(2, 0, used) for buffer in self._buffers)

    def _reorder(self, rows: Sequence[int] | None, where: Tensor) -> None:
        super()._reorder(rows, where)
        if rows is None:
            self._floors = self._floors[:1] * where.shape[0]
        else:
            self._floors = tuple(self._floors[row] for row in rows)

    def _needs_rows_on_host(self) -> bool:
        return not all_equal(self._floors)

    def _crop(self, new_lengths: tuple[int, ...]) -> None:
        floors = []
        for row, (length, floor) in enumerate(zip(new_lengths, self._floors, strict=True)):
            if length <= self.sinks:
                floor = 0
            elif floor > length - self.window + 1 and floor > 0:
                raise CacheError(
                    "a rolling cache can be cropped as long as the window before the next token is still stored: "
                    f"sequence {row} can be cropped to {floor + self.window - 1} tokens or its first {self.sinks}, "
                    f"got {length}; build it with rollback at least {self._lengths[row] - length - 1}"
                )
            floors.append(floor)
        self._floors = tuple(floors)

    def _occupied_mask(self) -> Mask | None:
        full = all(floor <= max(end - self._ring, 0) for floor, end in zip(self._floors, self._lengths, strict=True))
        if full and not self.is_ragged:
            return None
        return Mask.dense((self._slot_positions() >= 0)[:, None, None])

    # ---- the ring

    def _windowed(self, mask: Mask | None, num_tokens: int, all_real: bool) -> Mask | None:
        """Return `mask` & window; omits the window if the slots contain exactly that of a single query."""
        if num_tokens <= 1 and self.rollback == 0 and all_real:
            return mask
        window = Mask.window(self.window, sinks=self.sinks)
        return window if mask is None else window & mask

    def _writer(
        self, starts: Sequence[int], new_lengths: Sequence[int], num_tokens: int, device: torch.device
    ) -> TokenWriter:
        if num_tokens == 1 and starts and all_equal(starts) and all_equal(new_lengths):
            first_slot = starts[0] if starts[0] < self.sinks else self.sinks + (starts[0] - self.sinks) % self._ring
            return TokenWriter(first_slot, new_lengths[0], None)
        row, in_block, position = new_tokens(starts, new_lengths, num_tokens)
        sink = position < self.sinks
        retained = sink | (position >= (integers(starts, "cpu") + integers(new_lengths, "cpu"))[row] - self._ring)
        slot = torch.where(sink, position, self.sinks + (position - self.sinks) % self._ring)
        index = torch.stack([row, slot, in_block])[:, retained]
        return TokenWriter(0, 0, index.to(device, non_blocking=True))

    def _positions(self, starts: Sequence[int], start: int, new_lengths: Sequence[int], num_tokens: int) -> Tensor:
        """Return the positions of the block's tokens, [batch or 1, tokens]; -1 for padding, which is masked."""
        device = self._require_layout().device
        place = torch.arange(num_tokens, device=device)
        if all_equal(starts) and all(new == num_tokens for new in new_lengths):
            return (start + place)[None]
        real = place < integers(new_lengths, device)[:, None]
        return torch.where(real, integers(starts, device)[:, None] + place, -1)

    def _slot_positions(self) -> Tensor:
        """Return the position of the token in each slot in use, [batch or 1, slots]; -1 for empty slots."""
        device = self._require_layout().device
        slot = torch.arange(min(self._max_length, self._capacity), device=device)
        end: int | Tensor
        first: int | Tensor
        if all_equal(self._lengths) and all_equal(self._floors):
            end, first = self._max_length, max(self.sinks, *self._floors[:1], 0)
        else:
            end = integers(self._lengths, device)[:, None]
            first = integers([max(self.sinks, floor) for floor in self._floors], device)[:, None]
        newest = end - 1
        in_ring = newest - (newest - slot) % self._ring  # the latest position before `end` stored in this ring slot
        positions = torch.where(slot < self.sinks, slot, torch.where(in_ring >= first, in_ring, -1))
        positions = torch.where(positions < end, positions, -1)
        return positions if positions.ndim == 2 else positions[None]

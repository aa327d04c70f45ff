"""What every key/value cache promises, so that a layer can generate with any of them without knowing which it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.geometry import HeadLayout
from polyhead.layers.kv_cache.tokens import TokenLayout, all_equal, count, host_integers, integers, longest
from polyhead.masks import Mask
from polyhead.ops.decode.fused import CacheArguments


class CacheView:
    """The keys and values to attend to, and what a mask must add so that they line up with the queries.

    `key` is [batch, kv_heads, num_keys, head_dim], `value` [batch, kv_heads, num_keys, value_dim]. `storage` says where
    they lie in the cache's memory, for kernels that read them there; a cache that holds them in another form (pages,
    int8) puts `key` and `value` together when one of them is first asked for. All of this may be windows into the
    cache's own memory: read it before the next call that changes the cache, and never write to it.
    `mask` is None where attention lines up by itself (the last query stands beside the last key).
    `new_lengths` counts the real tokens of the block just appended, sequence by sequence; a plain `view()` has none.
    """

    __slots__ = ("_cache", "_stored", "_tensors", "lengths", "mask", "new_lengths", "num_keys")

    def __init__(
        self,
        cache: KVCache,
        stored: tuple[Tensor, ...],
        num_keys: int,
        mask: Mask | None,
        new_lengths: tuple[int, ...] | None,
    ) -> None:
        self._cache = cache
        self._stored = stored
        self._tensors: tuple[Tensor, Tensor] | None = None
        self.num_keys = num_keys
        self.mask = mask
        self.lengths = cache.lengths
        self.new_lengths = new_lengths

    @property
    def storage(self) -> CacheArguments:
        return self._cache._describe(self._stored)

    @property
    def key(self) -> Tensor:
        return self._together()[0]

    @property
    def value(self) -> Tensor:
        return self._together()[1]

    def _together(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            self._tensors = self._cache._read(self._stored, self.num_keys)
        return self._tensors

    def masked(self, mask: Mask | None) -> Mask | None:
        """`mask` with what this view adds to it."""
        if mask is None or self.mask is None:
            return self.mask if mask is None else mask
        return mask & self.mask


class KVCache(ABC):
    """The keys and values of the tokens one attention layer has seen.

    Keys and values are [batch, kv_heads, tokens, dim], as attention takes them (after rotary positions). All
    bookkeeping is in Python integers, so no call waits for a device. Where a call raises, the cache is unchanged.
    Caches are for inference: tensors that require a gradient are refused while gradients are recorded.
    """

    def __init__(self, batch_size: int | None, layout: TokenLayout | None) -> None:
        self._layout = layout
        self._built_batch = None if batch_size is None else count("batch_size", batch_size)
        self._lengths: tuple[int, ...] = (0,) * (self._built_batch or 0)
        self._width = 0  # the longest sequence; kept apart from the lengths, because an empty batch has none

    @classmethod
    def for_layout(
        cls,
        layout: HeadLayout,
        *,
        batch_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """A cache for a layer of this head layout; `options` are the cache's own (capacity, window, num_pages, ...)."""
        build: Any = cls  # each kind has its own constructor
        cache: Self = build(
            batch_size=batch_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            value_dim=layout.value_dim,
            dtype=dtype,
            device=device,
            **options,
        )
        return cache

    # ---- what is in it

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen so far, sequence by sequence, the ones a rolling cache has dropped included."""
        return self._lengths

    @property
    def batch_size(self) -> int:
        return len(self._lengths)

    @property
    def is_ragged(self) -> bool:
        """Whether the sequences differ in length."""
        return not all_equal(self._lengths)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory this cache holds."""

    def next_positions(self, num_tokens: int, *, device: torch.device | str | None = None) -> Tensor:
        """The absolute positions that the next `num_tokens` tokens will take, [batch, num_tokens], or [1, num_tokens]
        where all sequences agree: what rotary and learned positions need before `append`."""
        if device is None and self._layout is not None:
            device = self._layout.device
        if not self.is_ragged:
            return torch.arange(self._width, self._width + num_tokens, device=device)[None]
        return integers(self._lengths, device)[:, None] + torch.arange(num_tokens, device=device)

    # ---- what one does with it

    def append(self, key: Tensor, value: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> CacheView:
        """Add a block of new tokens and return what their queries attend to.

        `lengths` says how many tokens of the block are real in each sequence, where it is padded on the right; the
        padding takes no room. Give Python integers (or a CPU tensor), so that nothing waits for a device.
        """
        layout = self._checked_layout(key, value)
        new_lengths = self._checked_lengths(lengths, key.shape[0], key.shape[2])
        return self._append(key, value, new_lengths, layout)

    def view(self) -> CacheView:
        """Everything in the cache, for queries that are no part of the sequences (cross-attention over cached keys).

        The mask hides empty slots and knows no queries, so it aligns no causal mask; `append` returns one that does.
        """
        return self._view(self._stored(), self._occupied_mask())

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Row b becomes what row `index[b]` was (beam search). The batch size becomes the length of the index.

        A tensor on a device is used there unless the rows must be known to Python (sequences of different lengths, a
        paged cache); then it is read back, the one place where a cache waits. Indices on a device are not checked.
        """
        if self._layout is None:
            raise CacheError("a cache can be reordered once it holds a batch, got reorder before the first append")
        rows, where = self._checked_index(index)
        self._reorder(rows, where)
        size = where.shape[0] if rows is None else len(rows)
        self._lengths = (self._width,) * size if rows is None else tuple(self._lengths[row] for row in rows)
        self._width = longest(self._lengths, otherwise=self._width)

    def crop(self, length: int | Sequence[int]) -> None:
        """Forget the tokens after the first `length` of each sequence (speculative decoding rolling back).

        A single number is a maximum: shorter sequences stay as they are. A list has one number a sequence, none
        above what that sequence holds.
        """
        if isinstance(length, int):
            width = min(count("crop length", length), self._width)
            kept = tuple(min(length, old) for old in self._lengths)
        else:
            kept = self._checked_crop(length)
            width = self._width
        self._crop(kept)
        self._lengths = kept
        self._width = longest(kept, otherwise=width)

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Take back what was appended inside the block if the block raises, as where an attention after it fails."""
        lengths, width, was_built = self._lengths, self._width, self._layout is not None
        try:
            yield
        except BaseException:
            if not was_built:
                self.reset()
            elif (self._lengths, self._width) != (lengths, width):
                self._take_back(lengths)
                self._lengths, self._width = lengths, width
            raise

    @abstractmethod
    def fork(self) -> Self:
        """An independent copy: what happens to one never shows in the other."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every token; the cache is as it was built."""

    # ---- what a kind of cache provides

    @abstractmethod
    def _append(self, key: Tensor, value: Tensor, new_lengths: tuple[int, ...], layout: TokenLayout) -> CacheView: ...

    @abstractmethod
    def _stored(self) -> tuple[Tensor, ...]:
        """The memory that holds the keys and values up to the longest sequence."""

    def _describe(self, stored: tuple[Tensor, ...]) -> CacheArguments:
        """That memory in a kernel's words; whose the tokens in it are is for a mask to say."""
        key, value = stored
        return CacheArguments(key, value)

    def _read(self, stored: tuple[Tensor, ...], num_keys: int) -> tuple[Tensor, Tensor]:
        """That memory as plain keys and values, padded on the right to the longest sequence."""
        key, value = stored
        return key, value

    @abstractmethod
    def _reorder(self, rows: Sequence[int] | None, where: Tensor) -> None:
        """Move the rows' storage; `rows` is None where the index lives on a device and all lengths agree."""

    @abstractmethod
    def _crop(self, kept: tuple[int, ...]) -> None: ...

    def _take_back(self, lengths: tuple[int, ...]) -> None:
        """Drop the tokens after the first `lengths`, the last that were appended."""
        self._crop(lengths)

    def _needs_rows_on_host(self) -> bool:
        """Whether a reorder must know its rows in Python although all sequences are equally long."""
        return False

    def _view(
        self, stored: tuple[Tensor, ...], mask: Mask | None, new_lengths: tuple[int, ...] | None = None
    ) -> CacheView:
        return CacheView(self, stored, stored[0].shape[2], mask, new_lengths)

    def _occupied_mask(self) -> Mask | None:
        if not self.is_ragged:
            return None
        device = self._require_layout().device
        slots = torch.arange(self._width, device=device)
        return Mask.dense((slots < integers(self._lengths, device)[:, None])[:, None, None])

    def _lengths_mask(self, new_lengths: tuple[int, ...], num_tokens: int) -> Mask | None:
        """The mask for queries just appended, where each row holds its tokens in order from slot 0."""
        if not self.is_ragged and all(new == num_tokens for new in new_lengths):
            return None
        return Mask.lengths(integers(self._lengths, "cpu"), queries=integers(new_lengths, "cpu"))

    def _advance(self, new_lengths: tuple[int, ...], num_tokens: int) -> None:
        self._lengths = tuple(old + new for old, new in zip(self._lengths, new_lengths, strict=True))
        self._width = longest(self._lengths, otherwise=self._width + num_tokens)

    def _require_layout(self) -> TokenLayout:
        if self._layout is None:
            raise CacheError("this cache takes its layout from the first append, got a question before; append first")
        return self._layout

    # ---- checks

    def _checked_layout(self, key: Tensor, value: Tensor) -> TokenLayout:
        for name, tensor in (("key", key), ("value", value)):
            if tensor.ndim != 4:
                raise CacheError(f"{name} must be [batch, kv_heads, tokens, dim], got shape {list(tensor.shape)}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise CacheError(
                    f"a cache keeps no gradients, got a {name} that requires one; generate under torch.no_grad() "
                    "or torch.inference_mode(), or detach it"
                )
        if key.shape[:3] != value.shape[:3]:
            raise CacheError(
                "key and value must agree in batch, heads and tokens, "
                f"got {list(key.shape[:3])} and {list(value.shape[:3])}"
            )
        if key.dtype is not value.dtype or key.device != value.device:
            raise CacheError(
                f"key and value must agree in dtype and device, got {key.dtype} on {key.device} and "
                f"{value.dtype} on {value.device}"
            )
        arrived = TokenLayout.of(key, value)
        batch_size = self._built_batch if self._layout is None else self.batch_size
        if batch_size is not None and key.shape[0] != batch_size:
            raise CacheError(f"this cache holds a batch of {batch_size}, got a block of batch {key.shape[0]}")
        held = self._layout
        if held is None or held == arrived:
            return arrived
        for name in TokenLayout.__slots__:
            if getattr(held, name) != getattr(arrived, name):
                raise CacheError(f"this cache holds {name} {getattr(held, name)}, got {name} {getattr(arrived, name)}")
        raise AssertionError("unequal layouts differ in a field")

    @staticmethod
    def _checked_lengths(lengths: Sequence[int] | Tensor | None, batch: int, num_tokens: int) -> tuple[int, ...]:
        if lengths is None:
            return (num_tokens,) * batch
        checked = host_integers("lengths", lengths)
        if len(checked) != batch:
            raise CacheError(f"lengths must have one number a sequence, got {len(checked)} for a batch of {batch}")
        for row, new in enumerate(checked):
            if not 0 <= new <= num_tokens:
                raise CacheError(
                    f"lengths must be between 0 and the block's {num_tokens} tokens, got {new} for sequence {row}"
                )
        return checked

    def _checked_crop(self, lengths: Sequence[int]) -> tuple[int, ...]:
        kept = host_integers("crop lengths", lengths)
        if len(kept) != self.batch_size:
            raise CacheError(
                f"crop takes one length or one a sequence, got {len(kept)} for a batch of {self.batch_size}"
            )
        for row, (new, old) in enumerate(zip(kept, self._lengths, strict=True)):
            if not 0 <= new <= old:
                raise CacheError(f"sequence {row} can be cropped to between 0 and its {old} tokens, got {new}")
        return kept

    def _checked_index(self, index: Sequence[int] | Tensor) -> tuple[tuple[int, ...] | None, Tensor]:
        device = self._require_layout().device
        if isinstance(index, Tensor):
            if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
                raise CacheError(
                    f"a reorder index is 1-D and of int32 or int64, got {index.dtype} of shape {list(index.shape)}"
                )
            on_device = index.device.type != "cpu"
            if on_device and not self.is_ragged and not self._needs_rows_on_host():
                return None, index.to(device)
            rows = tuple(index.tolist())
        else:
            rows = host_integers("a reorder index", index)
        for row in rows:
            if not 0 <= row < self.batch_size:
                raise CacheError(f"a reorder index must name rows 0 to {self.batch_size - 1}, got {row}")
        return rows, integers(rows, device)

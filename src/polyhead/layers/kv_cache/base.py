"""Interface of KV caches, common to all kinds."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.geometry import HeadLayout
from polyhead.layers.kv_cache.tokens import (
    TokenLayout,
    all_equal,
    checked_sizes,
    count,
    host_integers,
    integers,
    longest,
)
from polyhead.masks import Mask
from polyhead.ops.decode.fused import CacheArguments

# Layer that filled each cache, and the edits of its heads until then. Not an attribute, so that a fork, copy or pickle
# may be continued by another layer.
_layers: weakref.WeakKeyDictionary[KVCache, tuple[weakref.ref[Any], int]] = weakref.WeakKeyDictionary()


@dataclass(slots=True, eq=False, repr=False)
class CacheView:
    """Keys and values to attend to, and the mask that aligns them with the queries.

    `key` is [batch, kv_heads, num_keys, head_dim], `value` [batch, kv_heads, num_keys, value_dim]. `storage` describes
    the cache's memory for kernels that read it directly; a cache with another storage format (pages, int8) materialises
    `key` and `value` on first access. All of them may be views of the cache's memory: read them before the next call
    that changes the cache, and never write to them.
    `mask` is None where the default alignment is correct (the last query is aligned with the last key).
    `new_lengths` is the number of non-padding tokens of each sequence in the block just appended; None for `view()`.
    """

    _cache: KVCache
    _stored: tuple[Tensor, ...]
    num_keys: int
    mask: Mask | None
    lengths: tuple[int, ...]
    new_lengths: tuple[int, ...] | None
    _tensors: tuple[Tensor, Tensor] | None = None

    @property
    def storage(self) -> CacheArguments:
        return self._cache._describe(self._stored)

    @property
    def key(self) -> Tensor:
        return self._materialise()[0]

    @property
    def value(self) -> Tensor:
        return self._materialise()[1]

    def _materialise(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            self._tensors = self._cache._read(self._stored, self.num_keys)
        return self._tensors

    def masked(self, mask: Mask | None) -> Mask | None:
        """Return the conjunction of `mask` and the view's mask.

        Args:
            mask: mask of the call; None for none.
        """
        if mask is None or self.mask is None:
            return self.mask if mask is None else mask
        if self.mask.placed is not None and mask.names_keys:
            raise CacheError(
                "the keys of a rolling cache that has dropped tokens, or whose sequences differ in length, are not in "
                f"order, so a mask can only be causal or a window, got {mask!r}; pad on the right and pass lengths=, "
                "or use a cache that keeps all tokens"
            )
        return mask & self.mask

    def in_order(self, weights: Tensor) -> Tensor:
        """Return weights [batch, heads, queries, keys] with the keys in order of position, empty slots first.

        Args:
            weights: weights over the keys of the view.
        """
        if self.mask is None or self.mask.placed is None:
            return weights
        order = self.mask.placed[1].argsort(dim=-1, stable=True)  # [batch or 1, keys]
        return weights.gather(-1, order[:, None, None].expand_as(weights))


class KVCache(ABC):
    """Keys and values of the past tokens of one attention layer.

    Keys and values are [batch, kv_heads, tokens, dim], as attention takes them (after rotary positions). All
    bookkeeping is in Python integers, so no call synchronises with a device. If a call raises, the cache is unchanged.
    Caches are for inference: tensors that require a gradient raise while gradients are enabled.

    A cache that is built without batch_size, num_kv_heads or head_dim takes them, dtype and device from the first
    block, and allocates its memory then; `reset` frees it, and the next block determines them again.

    Args:
        batch_size: number of sequences; that of the first block by default.
        num_kv_heads, head_dim, value_dim: sizes of a token; those of the first block by default.
        dtype: dtype of keys and values; that of the first block by default.
        device: device of the storage; that of the first block by default.

    >>> import torch, polyhead
    >>> from polyhead.layers import GrowingCache
    >>> layer, cache = polyhead.MultiHeadAttention(16, 2, causal=True).eval(), GrowingCache()
    >>> x = torch.randn(1, 6, 16)
    >>> with torch.no_grad():
    ...     prompt, step = layer(x[:, :5], cache=cache), layer(x[:, 5:], cache=cache)
    ...     full = layer(x)
    >>> torch.allclose(step.output, full.output[:, 5:], atol=1e-6), cache.lengths
    (True, (6,))
    """

    window: int | None = None  # last tokens that are kept; None for all
    sinks: int = 0  # first tokens that are kept besides

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._sizes = checked_sizes(num_kv_heads, head_dim, value_dim, dtype, device)
        self._built_batch = None if batch_size is None else count("batch_size", batch_size)
        self._layout = self._initial_layout = self._built_layout()
        if self._layout is not None:
            self._sizes = self._layout.sizes()  # defaults may change
        self._lengths: tuple[int, ...] = (0,) * (self._built_batch or 0)
        self._max_length = 0  # the longest sequence; stored separately, because an empty batch has no lengths
        self.holds_masked_keys = False  # whether an earlier call stored keys that its mask hid from every query

    @classmethod
    def for_layout(
        cls,
        layout: HeadLayout,
        *,
        batch_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Build a cache for a head layout; `options` are those of the class (capacity, window, ...).

        Args:
            layout: head layout of the attention layer.
            batch_size: number of sequences; that of the first block by default.
            dtype: dtype of keys and values; that of the first block by default.
            device: device of the storage; that of the first block by default.
            options: other options of the class.

        Returns:
            The cache, empty.
        """
        return cls(
            batch_size=batch_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            value_dim=layout.value_dim,
            dtype=dtype,
            device=device,
            **options,
        )

    # ---- contents

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens appended to each sequence, including those that a rolling cache has dropped."""
        return self._lengths

    @property
    def batch_size(self) -> int:
        return len(self._lengths)

    @property
    def is_ragged(self) -> bool:
        """True if the sequences differ in length."""
        return not all_equal(self._lengths)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory used by this cache."""

    def next_positions(self, num_tokens: int, *, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of the next tokens, [batch, num_tokens], or [1, num_tokens] if not ragged.

        Rotary and learned positions need them before `append`.

        Args:
            num_tokens: number of new tokens.
            device: device of the result.
        """
        if device is None and self._layout is not None:
            device = self._layout.device
        if not self.is_ragged:
            return torch.arange(self._max_length, self._max_length + num_tokens, device=device)[None]
        return integers(self._lengths, device)[:, None] + torch.arange(num_tokens, device=device)

    # ---- operations

    def append(self, key: Tensor, value: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> CacheView:
        """Append a block of new tokens and return the view that their queries attend to.

        `lengths` is the number of non-padding tokens of each sequence in a block padded on the right; padding is not
        stored. It must be Python integers or a CPU tensor, to avoid a device synchronisation.

        Args:
            key: keys [batch, kv_heads, tokens, head_dim].
            value: values [batch, kv_heads, tokens, value_dim].
            lengths: number of non-padding tokens of each sequence.

        Returns:
            Keys, values and the mask of everything stored so far.

        Raises:
            CacheError: the cache is full, has another layout, or gradients are enabled.
        """
        layout = self._checked_layout(key, value)
        new_lengths = self._checked_lengths(lengths, key.shape[0], key.shape[2])
        if self._layout is not None:
            return self._append(key, value, new_lengths, layout)
        self._start(layout, key.shape[0])
        try:
            return self._append(key, value, new_lengths, layout)
        except BaseException:
            self.reset()
            raise

    def view(self) -> CacheView:
        """Return a view of the whole cache, for queries outside the sequences (cross-attention).

        Its mask covers empty slots only and does not align a causal mask; the one returned by `append` does.
        """
        return self._view(self._stored(), self._occupied_mask())

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Replace row b by row `index[b]` (beam search). The batch size becomes the length of the index.

        A device tensor is used without a synchronisation unless the rows are needed on the host (ragged sequences, a
        paged cache); this is the only synchronisation of a cache. Indices on a device are not checked.

        Args:
            index: rows of the present batch, [new batch].
        """
        if self._layout is None:
            raise CacheError("reorder requires a batch in the cache, got reorder before the first append")
        rows, where = self._checked_index(index)
        self._reorder(rows, where)
        size = where.shape[0] if rows is None else len(rows)
        self._lengths = (self._max_length,) * size if rows is None else tuple(self._lengths[row] for row in rows)
        self._max_length = longest(self._lengths, otherwise=self._max_length)

    def crop(self, length: int | Sequence[int]) -> None:
        """Drop the tokens after the first `length` of each sequence (rollback in speculative decoding).

        A single integer is a maximum: shorter sequences are unchanged. A list has one integer per sequence, at most
        that sequence's length.

        Args:
            length: tokens to keep, of all sequences or of each.
        """
        if isinstance(length, int):
            width = min(count("crop length", length), self._max_length)
            new_lengths = tuple(min(length, old) for old in self._lengths)
        else:
            new_lengths = self._checked_crop(length)
            width = self._max_length
        self._crop(new_lengths)
        self._lengths = new_lengths
        self._max_length = longest(new_lengths, otherwise=width)
        self.holds_masked_keys &= self._max_length > 0

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Undo appends made inside the `with` block if it raises, e.g. when the following attention fails.

        Returns:
            A context manager.
        """
        lengths, width, was_built = self._lengths, self._max_length, self._layout is not None
        holds_masked_keys = self.holds_masked_keys
        try:
            yield
        except BaseException:
            if not was_built:
                self.reset()
            elif (self._lengths, self._max_length) != (lengths, width):
                self._undo_append(lengths)
                self._lengths, self._max_length = lengths, width
            self.holds_masked_keys = holds_masked_keys
            raise

    def check_layer(self, layer: Any) -> None:
        """Raise `CacheError` if the cache holds tokens of another layer, or of one whose heads were edited since.

        A layer calls it before `append`.

        Args:
            layer: the layer that the cache is passed to.
        """
        if torch.compiler.is_compiling():
            return
        reference, edits = _layers.get(self, (None, 0))
        filled_by: Any = None if reference is None else reference()
        if filled_by is not None and filled_by is not layer and self._max_length:
            raise CacheError(
                f"a cache holds the tokens of one layer, got a {type(layer).__name__} with a cache that another "
                f"{type(filled_by).__name__} has filled; build a cache for each layer, or pass cache.fork() to "
                "continue with another layer"
            )
        if filled_by is layer and edits != layer.kv_edits and self._max_length:
            raise CacheError(
                f"a cache must hold keys and values of a layer's current heads, got one that {type(layer).__name__} "
                "filled before its heads were edited; start with an empty cache and pass all tokens again"
            )
        if filled_by is not layer or edits != layer.kv_edits:
            _layers[self] = weakref.ref(layer), layer.kv_edits

    def check_window(self, size: int, sinks: int = 0) -> None:
        """Raise `CacheError` if the cache does not keep the keys that a mask with this window needs.

        Args:
            size: keys up to the query that the mask shows, the query's own among them.
            sinks: first keys that the mask shows at any distance.
        """
        if self.window is not None and size > self.window:
            raise CacheError(
                f"a rolling cache keeps the keys of its own window, {self.window}, got a mask with a window of {size}, "
                f"which needs more; build the cache with window={size}, or use the smaller window in the mask"
            )
        if self.window is not None and sinks > self.sinks:
            raise CacheError(
                f"a rolling cache keeps as many first keys as its sinks, {self.sinks}, got a mask with {sinks}; build "
                f"the cache with sinks={sinks}"
            )

    @abstractmethod
    def fork(self) -> Self:
        """Return an independent copy."""

    def reset(self) -> None:
        """Drop all tokens and return to the state after construction."""
        self._layout = self._initial_layout
        self._lengths = (0,) * (self._built_batch or 0)
        self._max_length = 0
        self.holds_masked_keys = False

    # ---- implemented by subclasses

    def _built_layout(self) -> TokenLayout | None:
        """Return the layout if the constructor's arguments determine it; None if the first block does."""
        required = (self._built_batch, self._sizes["num_kv_heads"], self._sizes["head_dim"])
        return None if None in required else TokenLayout.build(self._sizes)

    def _start(self, layout: TokenLayout, batch_size: int) -> None:
        """Take layout and batch size from the first block, and allocate memory."""
        self._layout = layout
        self._lengths = (0,) * batch_size

    @abstractmethod
    def _append(self, key: Tensor, value: Tensor, new_lengths: tuple[int, ...], layout: TokenLayout) -> CacheView: ...

    @abstractmethod
    def _stored(self) -> tuple[Tensor, ...]:
        """Return the storage tensors of keys and values, up to the longest sequence."""

    def _describe(self, stored: tuple[Tensor, ...]) -> CacheArguments:
        """Return kernel arguments for the storage; a mask describes which tokens are valid."""
        key, value = stored
        return CacheArguments(key, value)

    def _read(self, stored: tuple[Tensor, ...], num_keys: int) -> tuple[Tensor, Tensor]:
        """Return the storage as dense keys and values, padded on the right to the longest sequence."""
        key, value = stored
        return key, value

    @abstractmethod
    def _reorder(self, rows: Sequence[int] | None, where: Tensor) -> None:
        """Move the rows' storage; `rows` is None if the index is on a device and all lengths are equal."""

    @abstractmethod
    def _crop(self, new_lengths: tuple[int, ...]) -> None: ...

    def _undo_append(self, lengths: tuple[int, ...]) -> None:
        """Undo the last append, leaving the first `lengths` tokens."""
        self._crop(lengths)

    def _needs_rows_on_host(self) -> bool:
        """Return True if a reorder needs its rows on the host even though all sequences are equally long."""
        return False

    def _view(
        self, stored: tuple[Tensor, ...], mask: Mask | None, new_lengths: tuple[int, ...] | None = None
    ) -> CacheView:
        return CacheView(self, stored, stored[0].shape[2], mask, self._lengths, new_lengths)

    def _occupied_mask(self) -> Mask | None:
        if not self.is_ragged:
            return None
        device = self._require_layout().device
        slots = torch.arange(self._max_length, device=device)
        return Mask.dense((slots < integers(self._lengths, device)[:, None])[:, None, None])

    def _lengths_mask(self, new_lengths: tuple[int, ...], num_tokens: int) -> Mask | None:
        """Return the mask of queries just appended, for rows that store their tokens in order from slot 0."""
        if not self.is_ragged and all(new == num_tokens for new in new_lengths):
            return None
        return Mask.lengths(integers(self._lengths, "cpu"), queries=integers(new_lengths, "cpu"))

    def _advance(self, new_lengths: tuple[int, ...], num_tokens: int) -> None:
        self._lengths = tuple(old + new for old, new in zip(self._lengths, new_lengths, strict=True))
        self._max_length = longest(self._lengths, otherwise=self._max_length + num_tokens)

    def _require_layout(self) -> TokenLayout:
        if self._layout is None:
            raise CacheError("this cache takes its layout from the first append, got a read before it; append first")
        return self._layout

    # ---- checks

    def _checked_layout(self, key: Tensor, value: Tensor) -> TokenLayout:
        for name, tensor in (("key", key), ("value", value)):
            if tensor.ndim != 4:
                raise CacheError(f"{name} must be [batch, kv_heads, tokens, dim], got shape {list(tensor.shape)}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise CacheError(
                    f"a cache does not support gradients, got a {name} that requires one; generate under "
                    "torch.no_grad() or torch.inference_mode(), or detach it"
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
        layout = TokenLayout.of(key, value)
        batch_size = self._built_batch if self._layout is None else self.batch_size
        if batch_size is not None and key.shape[0] != batch_size:
            raise CacheError(f"this cache has a batch size of {batch_size}, got a block of batch {key.shape[0]}")
        if self._layout != layout:
            layout.check(self._sizes if self._layout is None else self._layout.sizes())
        return layout

    @staticmethod
    def _checked_lengths(lengths: Sequence[int] | Tensor | None, batch: int, num_tokens: int) -> tuple[int, ...]:
        if lengths is None:
            return (num_tokens,) * batch
        checked = host_integers("lengths", lengths)
        if len(checked) != batch:
            raise CacheError(f"lengths must have one integer per sequence, got {len(checked)} for a batch of {batch}")
        for row, new in enumerate(checked):
            if not 0 <= new <= num_tokens:
                raise CacheError(
                    f"lengths must be between 0 and the block's {num_tokens} tokens, got {new} for sequence {row}"
                )
        return checked

    def _checked_crop(self, lengths: Sequence[int]) -> tuple[int, ...]:
        new_lengths = host_integers("crop lengths", lengths)
        if len(new_lengths) != self.batch_size:
            raise CacheError(
                f"crop takes one length or one per sequence, got {len(new_lengths)} for a batch of {self.batch_size}"
            )
        for row, (new, old) in enumerate(zip(new_lengths, self._lengths, strict=True)):
            if not 0 <= new <= old:
                raise CacheError(f"sequence {row} can be cropped to between 0 and its {old} tokens, got {new}")
        return new_lengths

    def _checked_index(self, index: Sequence[int] | Tensor) -> tuple[tuple[int, ...] | None, Tensor]:
        device = self._require_layout().device
        if isinstance(index, Tensor):
            if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
                raise CacheError(
                    f"a reorder index must be 1-D, int32 or int64, got {index.dtype} of shape {list(index.shape)}"
                )
            on_device = index.device.type != "cpu"
            if on_device and not self.is_ragged and not self._needs_rows_on_host():
                return None, index.to(device)
            rows = tuple(index.tolist())
        else:
            rows = host_integers("a reorder index", index)
        for row in rows:
            if not 0 <= row < self.batch_size:
                raise CacheError(f"a reorder index must contain rows 0 to {self.batch_size - 1}, got {row}")
        return rows, integers(rows, device)

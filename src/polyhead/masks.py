"""Attention masks as conjunctions of terms; True always means that a query may attend to a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from polyhead.errors import DtypeError, MaskError, OptionError
from polyhead.geometry import checked_integer

Side = Literal["left", "right"]
_checked_int = partial(checked_integer, error=OptionError)


@dataclass(frozen=True, slots=True, eq=False)
class Padding:
    """Number of non-padding tokens of each sequence, and the side of the padding."""

    keys: Tensor  # [batch]
    queries: Tensor | None  # [batch]; None: same as keys in self-attention, otherwise no query is padding
    side: Side


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Document id of each token of a packed row; a negative id marks padding."""

    queries: Tensor  # [batch or 1, queries]
    keys: Tensor | None  # [batch or 1, keys]; None: the same tokens as the queries


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias:
    """Bias by relative distance: `table[head, key - query + zero]` is added to the logit, the column clamped."""

    table: Tensor  # [heads or 1, distances]
    zero: int  # column of distance 0


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Keys that each query may attend to, and biases added to their logits.

    A mask is a description; no [queries, keys] tensor is built. True means *may attend*; masks are combined with `&`.
    Build one with the constructors below, never from the fields.

    >>> Mask.causal() & Mask.window(4)
    Mask(window: 3 before, 0 after)
    >>> Mask.causal() & Mask.lengths([5, 3])
    Mask(causal & lengths of 2 sequences, padding on the right)

    Positions are counted within each sequence. Without lengths, documents or explicit positions the last query is
    aligned with the last key, so that a causal mask over a cache of earlier tokens needs no further arguments.
    """

    left: int | None = None  # keys before the query's position that are visible; None: all
    right: int | None = None  # keys after it; 0 is causal, None: all
    sinks: int = 0  # first keys of a sequence that are visible regardless of `left`
    padding: tuple[Padding, ...] = ()
    packed: tuple[Documents, ...] = ()
    placed: tuple[Tensor, Tensor] | None = None  # explicit positions of queries and keys, [batch or 1, sequence]
    allowed: tuple[Tensor, ...] = ()  # boolean, 4-D as in `Mask.dense`
    biases: tuple[Tensor, ...] = ()  # floating point, 4-D as in `Mask.bias`
    relative_biases: tuple[RelativeBias, ...] = ()

    # ---- constructors

    @classmethod
    def causal(cls) -> Mask:
        """Causal mask: a query sees its own position and earlier ones.

        Returns:
            The mask; the last query is aligned with the last key.
        """
        return cls(right=0)

    @classmethod
    def window(
        cls, size: int | None = None, *, left: int | None = None, right: int | None = None, sinks: int = 0
    ) -> Mask:
        """Sliding window of `size` keys ending at the query, or of `left` before and `right` after it.

        `sinks` keeps the first keys of each sequence (attention sinks) visible at any distance.

        Args:
            size: keys up to and including the query's own position.
            left: keys before the query; None is unbounded.
            right: keys after the query; None is unbounded.
            sinks: first keys of each sequence that stay visible.

        Returns:
            The mask.

        >>> Mask.window(left=2, right=1)
        Mask(window: 2 before, 1 after)
        """
        if size is not None:
            if left is not None or right is not None:
                raise OptionError(
                    f"a window takes either a size or left/right, got size {size}, left {left}, right {right}"
                )
            left, right = _checked_int("window size", size, at_least=1) - 1, 0
        elif left is None and right is None:
            raise OptionError("a window needs a size, or left and/or right; got none of them")
        else:
            left = None if left is None else _checked_int("window left", left)
            right = None if right is None else _checked_int("window right", right)
        sinks = _checked_int("sinks", sinks)
        if sinks and left is None:
            raise OptionError(
                f"sinks keep keys visible that a window's left edge hides, got sinks {sinks} and no left edge"
            )
        return cls(left=left, right=right, sinks=sinks)

    @classmethod
    def lengths(
        cls, keys: Sequence[int] | Tensor, *, queries: Sequence[int] | Tensor | None = None, side: Side = "right"
    ) -> Mask:
        """Padding mask: sequence b has `keys[b]` non-padding keys, the rest is padding on `side`.

        Without `queries`, the queries of a self-attention (as many queries as keys) are padded like its keys;
        otherwise no query is padding. A padding query attends to nothing.

        Args:
            keys: non-padding keys of each sequence.
            queries: non-padding queries of each sequence.
            side: side of the padding, "right" or "left".

        Returns:
            The mask.
        """
        if side not in ("left", "right"):
            raise OptionError(f"side must be 'left' or 'right', got {side!r}")
        real_keys = _lengths("keys", keys)
        real_queries = None if queries is None else _lengths("queries", queries)
        if real_queries is not None and real_queries.shape != real_keys.shape:
            raise MaskError(
                "key and query lengths must have the same number of sequences, "
                f"got {real_keys.shape[0]} and {real_queries.shape[0]}"
            )
        return cls(padding=(Padding(real_keys, real_queries, side),))

    @classmethod
    def documents(cls, queries: Tensor | Sequence[int], keys: Tensor | Sequence[int] | None = None) -> Mask:
        """Mask of packed documents: a query sees the keys of its document; a negative id is padding.

        Ids are [sequence] or [batch, sequence]. Without `keys`, queries and keys are the same tokens. Combined
        with `Mask.causal()`, queries and keys are aligned at the end of each document.

        Args:
            queries: document of each query.
            keys: document of each key.

        Returns:
            The mask.
        """
        query_ids = _as_rows("document ids", queries)
        return cls(packed=(Documents(query_ids, None if keys is None else _as_rows("document ids", keys)),))

    @classmethod
    def positions(cls, queries: Tensor, keys: Tensor) -> Mask:
        """Explicit positions, [sequence] or [batch, sequence]; a key at a negative position is masked.

        Causal masks, windows and relative biases compare these positions. Caches that reorder tokens use it.

        Args:
            queries: position of each query.
            keys: position of each key.

        Returns:
            The mask, which alone hides only keys at negative positions.
        """
        return cls(placed=(_as_rows("query positions", queries), _as_rows("key positions", keys)))

    @classmethod
    def dense(cls, allowed: Tensor) -> Mask:
        """Boolean mask tensor, True = may attend.

        Its shape is [queries, keys] or [batch or 1, heads or 1, queries or 1, keys].

        Args:
            allowed: boolean tensor.

        Returns:
            The mask.

        Raises:
            DtypeError: the tensor is not boolean.
        """
        if not isinstance(allowed, Tensor):
            raise MaskError(f"Mask.dense takes a boolean tensor, got {type(allowed).__name__}")
        if allowed.dtype is not torch.bool:
            raise DtypeError(
                f"Mask.dense takes a boolean tensor (True = may attend), got {allowed.dtype}; "
                "for a 0/1 mask pass mask.bool(), for values to be added to the logits use Mask.bias"
            )
        return cls(allowed=(_as_4d("Mask.dense", allowed),))

    @classmethod
    def bias(cls, bias: Tensor, *, zero_one: bool = False) -> Mask:
        """Bias added to the scaled logits, -inf to mask a key, in the shapes that `Mask.dense` takes.

        A tensor of only zeros and ones is almost always a boolean mask in the wrong dtype, and raises where its
        values can be read without a device synchronisation; `zero_one=True` accepts it.

        Args:
            bias: the numbers to add.
            zero_one: accept a bias of only zeros and ones.

        Returns:
            The mask, which gradients of `bias` pass through.

        Raises:
            MaskError: a tensor of zeros and ones, without `zero_one`.
        """
        if not isinstance(bias, Tensor):
            raise MaskError(f"Mask.bias takes a floating-point tensor, got {type(bias).__name__}")
        if not bias.is_floating_point():
            raise DtypeError(
                f"Mask.bias takes a floating-point tensor, got {bias.dtype}; "
                "for a boolean mask (True = may attend) use Mask.dense"
            )
        if not zero_one and is_readable(bias) and bias.numel() and _is_zero_one(bias):
            raise MaskError(
                "Mask.bias adds its values to the logits, got a tensor of zeros and ones, which masks nothing; for a "
                "0/1 mask use Mask.dense(mask.bool()); if adding 0 and 1 is intended, Mask.bias(..., zero_one=True)"
            )
        return cls(biases=(_as_4d("Mask.bias", bias),))

    @classmethod
    def relative(cls, table: Tensor, zero: int) -> Mask:
        """Relative position bias: `table[head, key - query + zero]`, index clamped, is added to the logit.

        `table` is [heads or 1, distances], and `zero` its column for distance 0. Covers ALiBi, T5 and other
        relative encodings in O(n) memory.

        Args:
            table: bias by head and distance.
            zero: column of distance 0.

        Returns:
            The mask, which gradients of `table` pass through.
        """
        if not isinstance(table, Tensor) or table.ndim != 2 or not table.is_floating_point():
            got = f"{table.dtype} of shape {list(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
            raise MaskError(f"Mask.relative takes a floating-point table [heads, distances], got {got}")
        if isinstance(zero, bool) or not isinstance(zero, int | torch.SymInt) or not 0 <= zero < table.shape[1]:
            raise MaskError(f"zero must be a column of the table, 0 to {table.shape[1] - 1}, got {zero!r}")
        return cls(relative_biases=(RelativeBias(table, zero),))

    @classmethod
    def from_torch(
        cls, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, num_heads: int | None = None
    ) -> Mask:
        """Convert masks of `torch.nn.MultiheadAttention`, where True means *masked* and floats are added.

        `attn_mask` is [queries, keys] or [batch * num_heads, queries, keys], which requires `num_heads`;
        `key_padding_mask` is [batch, keys] or [keys].

        Args:
            attn_mask: boolean or float mask of PyTorch.
            key_padding_mask: boolean or float padding mask of PyTorch.
            num_heads: heads of the layer.

        Returns:
            The mask, in polyhead's polarity.
        """
        mask = cls()
        if num_heads is not None:
            _checked_int("num_heads", num_heads, at_least=1)
        for name, term in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if term is not None and not isinstance(term, Tensor):
                raise MaskError(f"{name} must be a tensor, got {type(term).__name__}")
        if attn_mask is not None:
            if attn_mask.ndim == 3:
                if num_heads is None:
                    raise MaskError(
                        "a 3-D attn_mask is [batch * num_heads, queries, keys] and requires num_heads, "
                        f"got shape {list(attn_mask.shape)} without it"
                    )
                if attn_mask.shape[0] % num_heads:
                    raise MaskError(
                        "a 3-D attn_mask must have batch * num_heads rows, "
                        f"got {attn_mask.shape[0]} rows and num_heads {num_heads}"
                    )
                attn_mask = attn_mask.unflatten(0, (-1, num_heads))
            elif attn_mask.ndim != 2:
                raise MaskError(
                    "attn_mask must be [queries, keys] or [batch * num_heads, queries, keys], "
                    f"got shape {list(attn_mask.shape)}"
                )
            mask = mask & cls._torch_term("attn_mask", attn_mask)
        if key_padding_mask is not None:
            if key_padding_mask.ndim not in (1, 2):
                raise MaskError(
                    f"key_padding_mask must be [batch, keys] or [keys], got shape {list(key_padding_mask.shape)}"
                )
            rows = key_padding_mask if key_padding_mask.ndim == 2 else key_padding_mask[None]
            mask = mask & cls._torch_term("key_padding_mask", rows[:, None, None])
        return mask

    @classmethod
    def _torch_term(cls, name: str, term: Tensor) -> Mask:
        if term.dtype is torch.bool:
            return cls(allowed=(_as_4d(name, ~term),))
        if term.is_floating_point():
            return cls(biases=(_as_4d(name, term),))
        raise DtypeError(f"{name} must be boolean (True = masked) or floating point (added), got {term.dtype}")

    # ---- combining and moving

    def __and__(self, other: Mask) -> Mask:
        """Return the conjunction: a key is visible where both masks allow it; biases add up."""
        if isinstance(other, Tensor):
            raise MaskError(
                "a mask is combined with another mask, got a tensor; use Mask.dense(tensor) for booleans "
                "(True = may attend), Mask.bias(tensor) for values to add"
            )
        if not isinstance(other, Mask):
            return NotImplemented
        left, sinks = _intersect_windows(self, other)
        if self.placed is not None and other.placed is not None:
            raise MaskError("two masks with explicit positions cannot be combined; keep one Mask.positions")
        return Mask(
            left=left,
            right=_min_or_none(self.right, other.right),
            sinks=sinks,
            padding=self.padding + other.padding,
            packed=self.packed + other.packed,
            placed=self.placed or other.placed,
            allowed=self.allowed + other.allowed,
            biases=self.biases + other.biases,
            relative_biases=self.relative_biases + other.relative_biases,
        )

    @property
    def is_everything(self) -> bool:
        """True if the mask masks no key and adds no bias."""
        return self.left is None and self.right is None and len(self.tensors) == 0

    @property
    def is_just_causal(self) -> bool:
        """True if the mask is exactly `Mask.causal()`."""
        return self.right == 0 and self.left is None and self.is_band

    @property
    def is_band(self) -> bool:
        """True if the mask is only a causal mask or a window, the same for every sequence."""
        is_dense = len(self.allowed) or len(self.biases) or len(self.relative_biases)
        return not (is_dense or len(self.padding) or len(self.packed)) and self.placed is None

    @property
    def names_keys(self) -> bool:
        """True if the mask has a term by key index: padding, documents, or a tensor with a column for each key."""
        by_key = any(term.shape[3] != 1 for term in (*self.allowed, *self.biases))
        return by_key or len(self.padding) > 0 or len(self.packed) > 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the mask's terms."""
        padding = [x for term in self.padding for x in (term.keys, term.queries) if x is not None]
        packed = [x for term in self.packed for x in (term.queries, term.keys) if x is not None]
        tables = [term.table for term in self.relative_biases]
        return (*padding, *packed, *(self.placed or ()), *self.allowed, *self.biases, *tables)

    def to(self, device: torch.device | str) -> Mask:
        """Return the mask with its tensors on `device`.

        Call it once for a mask built from lists and used by many layers, to avoid a copy per layer.

        Args:
            device: device of the tensors.
        """

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        def move_if(x: Tensor | None) -> Tensor | None:
            return None if x is None else move(x)

        return dataclasses.replace(
            self,
            padding=tuple(Padding(move(term.keys), move_if(term.queries), term.side) for term in self.padding),
            packed=tuple(Documents(move(term.queries), move_if(term.keys)) for term in self.packed),
            placed=None if self.placed is None else (move(self.placed[0]), move(self.placed[1])),
            allowed=tuple(move(x) for x in self.allowed),
            biases=tuple(move(x) for x in self.biases),
            relative_biases=tuple(RelativeBias(move(term.table), term.zero) for term in self.relative_biases),
        )

    def with_head_terms(self, change: Callable[[Tensor, int], Tensor]) -> Mask:
        """Return the mask with other tensors in its terms that may differ by head.

        Args:
            change: returns the new tensor, given that of a term and the axis of its heads: 1 of a dense mask and of a
                bias, 0 of the table of a relative bias.
        """
        return dataclasses.replace(
            self,
            allowed=tuple(change(x, 1) for x in self.allowed),
            biases=tuple(change(x, 1) for x in self.biases),
            relative_biases=tuple(RelativeBias(change(x.table, 0), x.zero) for x in self.relative_biases),
        )

    def __repr__(self) -> str:
        terms = []
        if self.right == 0 and self.left is None:
            terms.append("causal")
        elif self.left is not None or self.right is not None:
            before, after = ("all" if side is None else side for side in (self.left, self.right))
            terms.append(
                f"window: {before} before, {after} after" + (f", first {self.sinks} kept" if self.sinks else "")
            )
        terms += [f"lengths of {term.keys.shape[0]} sequences, padding on the {term.side}" for term in self.padding]
        terms += [f"documents {list(term.queries.shape)}" for term in self.packed]
        terms += ["explicit positions"] if self.placed else []
        terms += [f"dense {list(x.shape)}" for x in self.allowed]
        terms += [f"bias {list(x.shape)}" for x in self.biases]
        terms += [f"relative bias {list(term.table.shape)}" for term in self.relative_biases]
        return f"Mask({' & '.join(terms) or 'everything'})"


def _min_or_none(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _intersect_windows(a: Mask, b: Mask) -> tuple[int | None, int]:
    """Return `left` and `sinks` of the intersection of two windows."""
    if a.left is None or b.left is None:
        return _min_or_none(a.left, b.left), a.sinks or b.sinks
    (left, sinks), (other_left, other_sinks) = sorted([(a.left, a.sinks), (b.left, b.sinks)])
    if left < other_left and sinks > other_sinks:
        raise MaskError(
            "two windows combine into one only if the narrower has no more sinks than the wider, "
            f"got left {left} with sinks {sinks} and left {other_left} with sinks {other_sinks}"
        )
    return left, min(sinks, other_sinks)


def is_readable(tensor: Tensor) -> bool:
    """Return True if values can be read without a device synchronisation or a graph break."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def _is_zero_one(tensor: Tensor) -> bool:
    tensor = tensor.detach()
    ones = tensor == 1
    return bool(ones.any()) and bool((ones | (tensor == 0)).all())


def _integer_tensor(name: str, values: Sequence[int] | Tensor) -> Tensor:
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MaskError(f"{name} must be a list of integers or an integer tensor, got {values!r}") from error
    if tensor.numel() == 0 and not isinstance(values, Tensor):
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise DtypeError(f"{name} must be integers, got {tensor.dtype}")
    # Differences of narrow or unsigned integers would wrap around.
    return tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.long()


def _lengths(name: str, values: Sequence[int] | Tensor) -> Tensor:
    tensor = _integer_tensor(f"{name} lengths", values)
    if tensor.ndim != 1:
        raise MaskError(f"{name} lengths must be one integer per sequence, [batch], got shape {list(tensor.shape)}")
    if is_readable(tensor) and tensor.numel() and int(tensor.min()) < 0:
        raise MaskError(f"{name} lengths must not be negative, got {int(tensor.min())}")
    return tensor


def _as_rows(name: str, values: Tensor | Sequence[int]) -> Tensor:
    tensor = _integer_tensor(name, values)
    if tensor.ndim not in (1, 2):
        raise MaskError(f"{name} must be [sequence] or [batch, sequence], got shape {list(tensor.shape)}")
    return tensor if tensor.ndim == 2 else tensor[None]


def _as_4d(name: str, tensor: Tensor) -> Tensor:
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 4:
        return tensor
    hint = (
        "; a 3-D mask is ambiguous: insert the missing axis, mask[:, None] for [batch, queries, keys]"
        if tensor.ndim == 3
        else ""
    )
    raise MaskError(
        f"{name} takes [queries, keys] or [batch or 1, heads or 1, queries or 1, keys], "
        f"got shape {list(tensor.shape)}{hint}"
    )

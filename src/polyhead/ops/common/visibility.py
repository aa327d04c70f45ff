"""A mask resolved against the sizes of one attention call, evaluated tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.errors import DeviceError, MaskError
from polyhead.masks import Mask, Padding, RelativeBias, is_readable
from polyhead.ops.common.tracing import is_exporting

Span = tuple[int, int]  # from, to (exclusive)


def select_heads(x: Tensor, batch: slice, heads: slice) -> Tensor:
    """Return the view of some sequences and heads of [batch or 1, heads or 1, ...]; broadcast axes stay."""
    x = x if x.shape[0] == 1 else x[batch]
    return x if x.shape[1] == 1 else x[:, heads]


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """Visible keys and additive bias of `num_queries` queries over `num_keys` keys.

    Query i has position `i + offset` and key j has position j, unless the position tensors are set. A "real" token is
    one that is not padding.
    """

    num_queries: int
    num_keys: int
    device: torch.device
    left: int | None = None  # keys up to this many positions before the query are visible; None: any number
    right: int | None = None  # and up to this many after it
    sinks: int = 0  # keys with a smaller ordinal are visible regardless of `left`
    offset: int = 0
    query_positions: Tensor | None = None  # [batch or 1, queries]
    key_positions: Tensor | None = None  # [batch or 1, keys]
    pads_right_only: bool = True  # then a causal row of a real token sees no padded key
    key_ordinals: Tensor | None = None  # [batch or 1, keys]: index among the real keys of its sequence; None: j
    query_real: Tensor | None = None  # [batch or 1, queries], False for padding
    key_real: Tensor | None = None  # [batch or 1, keys], False for padding
    documents: tuple[tuple[Tensor, Tensor], ...] = ()  # ids [batch or 1, queries] and [batch or 1, keys]
    allowed: Tensor | None = None  # [batch or 1, heads or 1, queries or 1, keys]
    biases: tuple[Tensor, ...] = ()  # each [batch or 1, heads or 1, queries or 1, keys]
    relative_biases: tuple[RelativeBias, ...] = ()

    @property
    def bias_tensors(self) -> list[Tensor]:
        return [*self.biases, *(term.table for term in self.relative_biases)]

    @property
    def has_bias(self) -> bool:
        return len(self.biases) > 0 or len(self.relative_biases) > 0

    def with_bias_tensors(self, tensors: Sequence[Tensor]) -> Visibility:
        """Return a copy with `tensors` in place of `bias_tensors`."""
        count = len(self.biases)
        tables = [replace(term, table=x) for term, x in zip(self.relative_biases, tensors[count:], strict=True)]
        return replace(self, biases=tuple(tensors[:count]), relative_biases=tuple(tables))

    @property
    def is_band(self) -> bool:
        """True if the mask is only a causal or sliding-window band, the same for all sequences and heads.

        It may have attention sinks, unlike a `MaskArguments.is_band`.
        """
        # Lengths are compared with 0, here and elsewhere, because Dynamo cannot evaluate a tuple of tensors as a bool.
        has_token_tensors = self.query_positions is not None or self.query_real is not None or self.key_real is not None
        return not has_token_tensors and self.allowed is None and len(self.documents) == 0 and not self.has_bias

    @property
    def is_window(self) -> bool:
        """True if the mask is a sliding window without attention sinks, and nothing else."""
        return self.left is not None and self.sinks == 0 and self.is_band

    @property
    def may_leave_rows_empty(self) -> bool:
        """True if a row may see no key; False only where the sizes alone rule it out."""
        sees_own_position = self.offset >= 0 and self.num_keys > 0
        return not (self.is_band and sees_own_position and (self.right is None or self.num_queries <= self.num_keys))

    def select(
        self, batch: slice, heads: slice, queries: Tensor | None = None, keys: slice | None = None
    ) -> Visibility:
        """Return the mask of some sequences and heads, optionally of some queries (by index) and keys only.

        Positions do not change: those of selected queries and keys become explicit.
        """

        def of_pairs(x: Tensor) -> Tensor:
            x = select_heads(x, batch, heads)
            x = x if queries is None or x.shape[2] == 1 else x[:, :, queries]
            return x if keys is None else x[..., keys]

        def of_queries(x: Tensor) -> Tensor:
            x = x if x.shape[0] == 1 else x[batch]
            return x if queries is None else x[:, queries]

        def of_keys(x: Tensor) -> Tensor:
            x = x if x.shape[0] == 1 else x[batch]
            return x if keys is None else x[:, keys]

        query_positions, key_positions, key_ordinals = self.query_positions, self.key_positions, self.key_ordinals
        num_queries, num_keys = self.num_queries, self.num_keys
        if queries is not None or keys is not None:
            # Write out positions that follow from the index: selected tokens keep theirs.
            indices = torch.arange(max(num_queries, num_keys), device=self.device)[None]
            query_positions = indices[:, :num_queries] + self.offset if query_positions is None else query_positions
            key_positions = indices[:, :num_keys] if key_positions is None else key_positions
            key_ordinals = indices[:, :num_keys] if key_ordinals is None else key_ordinals
        return replace(
            self,
            num_queries=num_queries if queries is None else queries.shape[0],
            num_keys=num_keys if keys is None else len(range(num_keys)[keys]),
            query_positions=None if query_positions is None else of_queries(query_positions),
            key_positions=None if key_positions is None else of_keys(key_positions),
            key_ordinals=None if key_ordinals is None else of_keys(key_ordinals),
            query_real=None if self.query_real is None else of_queries(self.query_real),
            key_real=None if self.key_real is None else of_keys(self.key_real),
            documents=tuple([(of_queries(query_ids), of_keys(key_ids)) for query_ids, key_ids in self.documents]),
            allowed=None if self.allowed is None else of_pairs(self.allowed),
            biases=tuple([of_pairs(bias) for bias in self.biases]),
            relative_biases=tuple(
                [x if x.table.shape[0] == 1 else replace(x, table=x.table[heads]) for x in self.relative_biases]
            ),
        )

    def without_query_padding(self) -> Visibility:
        """Return a copy that treats padded queries as real, for a backend that clears their rows itself."""
        return self if self.query_real is None else replace(self, query_real=None)

    def spans(self, rows: Span) -> list[Span]:
        """Return the column spans that some query of `rows` may see; other columns can be skipped."""
        if self.query_positions is not None:
            return [(0, self.num_keys)]
        first, last = rows[0] + self.offset, rows[1] - 1 + self.offset
        start = 0 if self.left is None else min(max(0, first - self.left), self.num_keys)
        stop = self.num_keys if self.right is None else min(self.num_keys, last + self.right + 1)
        if self.sinks and start:
            # The sinks may end before the window starts: then they are a span of their own.
            sink_stop = self.num_keys if self.key_ordinals is not None else self.sinks
            if sink_stop < start:
                return (
                    [(0, min(sink_stop, max(stop, 0))), (start, stop)]
                    if stop > start
                    else [(0, min(sink_stop, max(stop, 0)))]
                )
            start = 0
        return [(start, stop)] if stop > start else []

    def allowed_tile(self, rows: Span, columns: Span) -> Tensor | None:
        """Return the mask (True: visible) [batch or 1, heads or 1, rows, columns]; None if all is visible."""
        terms: list[Tensor] = []
        band = self._band_tile(rows, columns)
        if band is not None:
            terms.append(band)
        if self.query_real is not None:
            terms.append(self.query_real[:, None, rows[0] : rows[1], None])
        if self.key_real is not None:
            terms.append(self.key_real[:, None, None, columns[0] : columns[1]])
        for query_ids, key_ids in self.documents:
            same = query_ids[:, rows[0] : rows[1], None] == key_ids[:, None, columns[0] : columns[1]]
            terms.append(same[:, None])
        if self.allowed is not None:
            terms.append(_slice_tile(self.allowed, rows, columns))
        terms += [_slice_tile(bias.detach(), rows, columns) != -torch.inf for bias in self.biases]
        if not terms:
            return None
        result = terms[0]
        for term in terms[1:]:
            result = result & term
        return result

    def bias_tile(self, rows: Span, columns: Span, dtype: torch.dtype) -> Tensor | None:
        """Return the additive bias [batch or 1, heads or 1, rows, columns], finite where visible."""
        result: Tensor | None = None
        for bias in self.biases:
            tile = _cast_finite(_slice_tile(bias, rows, columns), dtype)
            result = tile if result is None else _add_finite(result, tile)
        for term in self.relative_biases:
            table = _cast_finite(term.table, dtype)
            # The gradient of a table column is a sum over all pairs at its distance: autograd computes it in float64
            # if the tile is float32. In half precision the rounding of the weights dominates, and a float64 tile would
            # take four times the memory.
            if (
                torch.is_grad_enabled()
                and table.requires_grad
                and dtype is torch.float32
                and table.device.type != "mps"
            ):
                table = table.double()
            tile = table[:, self.relative_index(term, rows, columns)].to(dtype)  # [heads, (batch,) rows, columns]
            tile = tile[None] if tile.ndim == 3 else tile.transpose(0, 1)
            result = tile if result is None else _add_finite(result, tile)
        return result

    def relative_index(self, term: RelativeBias, rows: Span, columns: Span) -> Tensor:
        """Return the table column of each query-key pair, [rows, columns] or [batch, rows, columns]."""
        return (self.distance_tile(rows, columns) + term.zero).clamp(0, term.table.shape[1] - 1)

    def distance_tile(self, rows: Span, columns: Span) -> Tensor:
        """Return key position minus query position, [rows, columns] or [batch or 1, rows, columns]."""
        if self.query_positions is not None and self.key_positions is not None:
            return (
                self.key_positions[:, None, columns[0] : columns[1]] - self.query_positions[:, rows[0] : rows[1], None]
            )
        query = torch.arange(rows[0] + self.offset, rows[1] + self.offset, device=self.device)
        key = torch.arange(columns[0], columns[1], device=self.device)
        return key - query[:, None]

    def _band_tile(self, rows: Span, columns: Span) -> Tensor | None:
        left, right = self.left, self.right
        if self.query_positions is None and not is_exporting():
            min_distance = columns[0] - (rows[1] - 1) - self.offset
            max_distance = columns[1] - 1 - rows[0] - self.offset
            left = None if left is None or min_distance >= -left else left
            right = None if right is None or max_distance <= right else right
        if left is None and right is None:
            return None
        distance = self.distance_tile(rows, columns)
        visible: Tensor | None = None
        if left is not None:
            visible = distance >= -left
            if self.sinks:
                visible = visible | self.first_tile(columns, self.sinks)
        if right is not None:
            before = distance <= right
            visible = before if visible is None else visible & before
        assert visible is not None
        return visible[None, None] if visible.ndim == 2 else visible[:, None]

    def first_tile(self, columns: Span, count: int) -> Tensor:
        """Return True for the first `count` keys of each sequence, [columns] or [batch or 1, 1, columns]."""
        if self.key_ordinals is not None:
            return self.key_ordinals[:, None, columns[0] : columns[1]] < count
        return torch.arange(columns[0], columns[1], device=self.device) < count


def resolve(
    mask: Mask, *, batch: int, heads: int, queries: int, keys: int, device: torch.device, ordinals: bool = False
) -> Visibility | None:
    """Resolve a mask against the sizes of an attention call; None if it masks nothing and adds nothing.

    `ordinals` requests `key_ordinals` even if the mask itself does not need them.
    """
    left, right, sinks, offset = mask.left, mask.right, mask.sinks, keys - queries
    if mask.is_band:
        is_unbounded = left is None and right is None
        # A single query, at the last position, sees every key that no left edge hides.
        if is_unbounded or (queries == 1 and keys > 0 and (left is None or left >= keys - 1)):
            return None
        return Visibility(queries, keys, device, left, right, sinks, offset)
    ordinals = ordinals or sinks > 0
    for tensor in (*mask.allowed, *mask.biases):
        _check_dense(tensor, batch, heads, queries, keys)
    for tensor in (*mask.allowed, *mask.biases, *(term.table for term in mask.relative_biases)):
        if tensor.device != device:
            raise DeviceError(
                f"the mask must be on the device of the query, got {tensor.device} and {device}; "
                f"use mask.to({str(device)!r})"
            )
    for term in mask.relative_biases:
        if term.table.shape[0] not in (1, heads):
            raise MaskError(f"a relative bias needs one row per head, got {term.table.shape[0]} rows for {heads} heads")

    query_real, key_real = None, None
    query_positions, key_positions, key_ordinals = None, None, None
    left_padded_lengths: Tensor | None = None  # [batch]: real keys of left-padded sequences
    # [batch]: start of the right padding; `is_aligned`: it is that of the same tokens for queries and keys.
    key_ends, query_ends, is_aligned = None, None, True
    for padding in mask.padding:
        real_keys, real_queries = _check_lengths(padding, batch, queries, keys, device)
        key_real = _logical_and(key_real, _real_tokens(real_keys, keys, padding.side))
        if real_queries is not None:
            query_real = _logical_and(query_real, _real_tokens(real_queries, queries, padding.side))
        if padding.side == "left":
            left_padded_lengths = _minimum(left_padded_lengths, real_keys)
        else:
            key_ends = _minimum(key_ends, real_keys)
            query_ends = query_ends if real_queries is None else _minimum(query_ends, real_queries)
            is_aligned = is_aligned and queries == keys and padding.queries is None
    if left_padded_lengths is not None:
        key_ordinals = torch.arange(keys, device=device)[None] - (keys - left_padded_lengths)[:, None]
    if key_ends is not None and not is_aligned:
        # The last real query is at the last real key.
        position_shift = key_ends - (queries if query_ends is None else query_ends)
        query_positions = torch.arange(queries, device=device) + position_shift[:, None]
        key_positions = torch.arange(keys, device=device)[None]
    documents = []
    for packed in mask.packed:
        query_ids, key_ids = _check_rows("document ids", packed.queries, packed.keys, batch, queries, keys, device)
        documents.append((query_ids, key_ids))
        query_real, key_real = _logical_and(query_real, query_ids >= 0), _logical_and(key_real, key_ids >= 0)
    aligns_documents = any(packed.keys is not None for packed in mask.packed)
    if len(documents) and (ordinals or aligns_documents):
        assert query_real is not None and key_real is not None
        query_ids, key_ids = documents[0]
        for next_ids in documents[1:]:
            query_ids, key_ids = _combined_ids(_ranks(query_ids, key_ids), _ranks(*next_ids))
        # Padding tokens belong to no document, whatever their id.
        query_ids, key_ids = torch.where(query_real, query_ids, -1), torch.where(key_real, key_ids, -1)
        key_ordinals = _ordinals(key_ids) if ordinals else None
        if aligns_documents:
            # Positions are counted back from the end of each document, so that its last query is at its last key.
            query_positions = -_ordinals(query_ids.flip(-1)).flip(-1)
            key_positions = -_ordinals(key_ids.flip(-1)).flip(-1)
    if mask.placed is not None:
        query_positions, key_positions = _check_rows("positions", *mask.placed, batch, queries, keys, device)
        key_ordinals = key_positions
        key_real = _logical_and(key_real, key_positions >= 0)
    allowed = None
    for tensor in mask.allowed:
        allowed = _logical_and(allowed, tensor)
    return Visibility(
        num_queries=queries,
        num_keys=keys,
        device=device,
        left=left,
        right=right,
        sinks=sinks,
        offset=offset,
        query_positions=query_positions,
        key_positions=key_positions,
        pads_right_only=len(mask.packed) == 0
        and mask.placed is None
        and all(term.side == "right" for term in mask.padding),
        key_ordinals=key_ordinals if ordinals else None,
        query_real=query_real,
        key_real=key_real,
        documents=tuple(documents),
        allowed=allowed,
        biases=mask.biases,
        relative_biases=mask.relative_biases,
    )


def _logical_and(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def _minimum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else torch.minimum(a, b)


def _cast_finite(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a bias, clamping finite values to the range of `dtype`: only an explicit -inf may mask a key."""
    largest = torch.finfo(dtype).max
    if torch.finfo(bias.dtype).max <= largest:
        return bias.to(dtype)
    return torch.where(bias.isinf(), bias, bias.clamp(-largest, largest)).to(dtype)


def _add_finite(a: Tensor, b: Tensor) -> Tensor:
    """Add two biases, finite where both are.

    A bias often contains its dtype's most negative number, so a plain sum may overflow.
    """
    total, largest = a + b, torch.finfo(a.dtype).max
    return torch.where(a.isinf() | b.isinf(), total, total.clamp(-largest, largest))


def _slice_tile(tensor: Tensor, rows: Span, columns: Span) -> Tensor:
    """Return one tile of a mask tensor whose query axis may be broadcast."""
    tensor = tensor[..., columns[0] : columns[1]]
    return tensor if tensor.shape[-2] == 1 else tensor[..., rows[0] : rows[1], :]


def _real_tokens(lengths: Tensor, size: int, side: str) -> Tensor:
    """Return False for padding, boolean [batch, size]; `side` is that of the padding."""
    index = torch.arange(size, device=lengths.device)
    return index < lengths[:, None] if side == "right" else index >= size - lengths[:, None]


def _ordinals(ids: Tensor) -> Tensor:
    """Return for each token the number of earlier tokens of its row with the same id."""
    ordered, order = ids.sort(dim=-1, stable=True)
    index = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    run_start = torch.where(starts, index, torch.zeros_like(index)).cummax(-1).values
    return torch.zeros_like(index).scatter(-1, order, index - run_start)


def _ranks(query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each id among the distinct ids of its row, queries and keys together."""
    rows = max(query_ids.shape[0], key_ids.shape[0])
    ids = torch.cat([query_ids.expand(rows, -1), key_ids.expand(rows, -1)], -1)
    ordered, order = ids.sort(dim=-1)
    steps = torch.zeros_like(order)
    steps[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ranks = torch.zeros_like(order).scatter(-1, order, steps.cumsum(-1))
    queries, keys = ranks.split([query_ids.shape[1], key_ids.shape[1]], -1)
    return queries, keys


def _combined_ids(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids that are equal where the ranks of both document masks are equal."""
    base = a[0].shape[1] + a[1].shape[1]
    return a[0] * base + b[0], a[1] * base + b[1]


def _check_dense(tensor: Tensor, batch: int, heads: int, queries: int, keys: int) -> None:
    b, h, q, k = tensor.shape
    if b not in (1, batch) or h not in (1, heads) or q not in (1, queries) or k != keys:
        hint = (
            "; pass a key padding mask [batch, keys] as mask[:, None, None]"
            if (b, h, q, k) == (1, 1, batch, keys)
            else ""
        )
        raise MaskError(
            f"the mask must be [{batch} or 1, {heads} or 1, {queries} or 1, {keys}] "
            f"(batch, heads, queries, keys), got {list(tensor.shape)}{hint}"
        )


def _check_lengths(
    padding: Padding, batch: int, queries: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return the checked numbers of real keys and of real queries, [batch] each; None: all queries are real."""
    real_queries = padding.queries if padding.queries is not None else (padding.keys if queries == keys else None)
    for name, lengths, size in (("key", padding.keys, keys), ("query", real_queries, queries)):
        if lengths is None:
            continue
        if lengths.shape[0] != batch:
            raise MaskError(
                f"lengths must have one entry per sequence, got {lengths.shape[0]} lengths for {batch} sequences"
            )
        if batch and is_readable(lengths) and int(lengths.max()) > size:
            raise MaskError(f"{name} lengths must not exceed the sequence, got {int(lengths.max())} for {size} tokens")
    return (
        _to_device("lengths", padding.keys, device),
        None if real_queries is None else _to_device("lengths", real_queries, device),
    )


def _check_rows(
    name: str, query_rows: Tensor, key_rows: Tensor | None, batch: int, queries: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the checked per-token tensors of queries and keys; the keys' are the queries' by default."""
    if key_rows is None:
        if queries != keys:
            raise MaskError(
                f"{name} of the keys are required where queries and keys are not the same tokens, "
                f"got {queries} queries and {keys} keys"
            )
        key_rows = query_rows
    for kind, rows, size in (("queries", query_rows, queries), ("keys", key_rows, keys)):
        if rows.shape[0] not in (1, batch) or rows.shape[1] != size:
            raise MaskError(f"{name} of the {kind} must be [{batch} or 1, {size}], got {list(rows.shape)}")
    return _to_device(name, query_rows, device), _to_device(name, key_rows, device)


def _to_device(name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a mask's lengths, ids or positions to the device of the attention, without synchronising."""
    if tensor.device.type == "meta" and device.type != "meta":
        raise DeviceError(f"{name} must have values to be used on {device}, got a tensor on the meta device")
    return tensor.to(device, non_blocking=True)

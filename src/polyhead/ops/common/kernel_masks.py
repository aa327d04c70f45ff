"""Pack a resolved mask into the numbers and tensors that kernels read, without synchronising."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.ops.common.kernels.mask_arguments import GAPS, MaskArguments
from polyhead.ops.common.nonfinite import can_launch
from polyhead.ops.common.visibility import Visibility

# With fewer pairs of a query and a key, searching a dense mask for tiles to skip takes longer than it saves.
_SEARCHED_PAIRS = 1 << 21
_COMPARED_PAIRS = 1 << 28  # with more pairs, sorting document ids is faster than comparing all of them


def mask_reasons(visibility: Visibility | None) -> list[str]:
    """Return the reasons why kernels cannot read this mask; empty if they can."""
    if visibility is None:
        return []
    reasons = []
    if len(visibility.documents) > 1:
        reasons.append(f"our kernels read one document mask, got {len(visibility.documents)}")
    if len(visibility.biases) > 1:
        reasons.append(f"our kernels read one bias tensor, got {len(visibility.biases)}")
    if len(visibility.relative_biases) > 1:
        reasons.append(f"our kernels read one relative bias, got {len(visibility.relative_biases)}")
    return reasons


def pack(visibility: Visibility, *, poison: Tensor | None = None, for_columns: bool = False) -> MaskArguments:
    """Return the kernel arguments of a mask.

    The mask must have no `mask_reasons`; `for_columns` adds what a loop over the queries of a key block needs.
    """
    if visibility.is_band:
        left, right, sinks = visibility.left, visibility.right, visibility.sinks or None
        return MaskArguments(left, right, sinks, visibility.offset, poison=poison)
    queries, keys = visibility.num_queries, visibility.num_keys
    query_document, key_document, of_documents = _documents(visibility, for_columns=for_columns)
    per_token = {
        "query_position": visibility.query_positions,
        "key_position": visibility.key_positions,
        "key_ordinal": visibility.key_ordinals,
        "query_document": query_document,
        "key_document": key_document,
    }
    of_queries, of_keys = _dense_intervals(visibility, for_columns=for_columns)
    dense_terms = len(visibility.biases) + (visibility.allowed is not None)
    # With explicit token positions, kernels cannot tell from a tile's indices whether it lies inside a band.
    is_band_regular = visibility.query_positions is None or (visibility.left is None and visibility.right is None)
    has_full_tiles = not len(visibility.biases) and len(of_queries) == dense_terms and is_band_regular
    of_queries += of_documents[:1]
    of_keys += of_documents[1:]
    for intervals, token in ((of_queries, "key"), (of_keys, "query")):
        if len(intervals):
            first, last, full = _intersection(intervals)
            per_token |= {f"first_{token}": first, f"last_{token}": last}
            per_token[f"full_{token}"] = full if has_full_tiles else None
    tensors = {name: x for name, x in per_token.items() if x is not None}
    batch = 1
    for x in tensors.values():
        batch = max(batch, x.shape[0])
    present: dict[str, Any] = {name: x.to(torch.int32).expand(batch, -1).contiguous() for name, x in tensors.items()}
    bias = visibility.biases[0] if len(visibility.biases) else None
    relative = visibility.relative_biases[0] if len(visibility.relative_biases) else None
    arguments = MaskArguments(
        left=visibility.left,
        right=visibility.right,
        sinks=visibility.sinks or None,
        offset=visibility.offset,
        stride_query=queries if batch > 1 else 0,
        stride_key=keys if batch > 1 else 0,
        allowed=visibility.allowed,
        table_zero=0 if relative is None else relative.zero,
        poison=poison,
        **present,
    )
    return arguments.with_dense(bias=bias, table=None if relative is None else relative.table)


# (first, last, full), each [batch or 1, tokens]: first and last visible index, last < first if there is none; full is
# `first` if every index in between is visible, else `GAPS`.
_Interval = tuple[Tensor, Tensor, Tensor]


def _dense_intervals(visibility: Visibility, *, for_columns: bool) -> tuple[list[_Interval], list[_Interval]]:
    """Return the keys that each query sees in each dense mask, and for the columns the queries that see each key.

    Kernels skip the tiles outside. Masks that differ between heads are left out: they have one interval per head.
    """
    queries, keys = visibility.num_queries, visibility.num_keys
    of_queries: list[_Interval] = []
    of_keys: list[_Interval] = []
    if not torch.compiler.is_compiling() and not queries * keys >= _SEARCHED_PAIRS:
        return of_queries, of_keys
    terms = [*([] if visibility.allowed is None else [visibility.allowed]), *visibility.biases]
    for term in terms:
        if term.shape[1] != 1:
            continue
        pairs = term.detach()[:, 0]  # [batch or 1, queries or 1, keys]
        first, last, full = (x.expand(-1, queries) for x in _ends(pairs))
        of_queries.append((first, last, full))
        if not for_columns:
            continue
        first, last, full = _ends(pairs.transpose(1, 2))
        if pairs.shape[1] == 1:
            first, last = torch.where(first > 0, queries, 0), torch.where(last < 0, -1, queries - 1)
        of_keys.append((first, last, full))
    return of_queries, of_keys


def _ends(pairs: Tensor) -> _Interval:
    """Return the first and the last visible column of each row of a mask or a bias, [batch or 1, rows]."""
    if can_launch(pairs):
        from polyhead.ops.common.kernels.row_ends import mask_ends

        return mask_ends(pairs)
    columns = pairs.shape[-1]
    if not columns:
        nothing = torch.zeros(pairs.shape[:-1], dtype=torch.int64, device=pairs.device)
        return nothing, nothing - 1, nothing + GAPS
    is_shown = (pairs if pairs.dtype is torch.bool else pairs != -torch.inf).to(torch.uint8)
    first = is_shown.argmax(-1)  # of equal values the first
    last = columns - 1 - is_shown.flip(-1).argmax(-1)
    return _interval_of(first, last, is_shown.sum(-1), columns)


def _interval_of(first: Tensor, last: Tensor, count: Tensor, size: int) -> _Interval:
    """Return an interval from its ends and the number of visible indices; an empty one if that is 0."""
    is_full = (count > 0) & (count == last - first + 1)
    occurs = count > 0
    return torch.where(occurs, first, size), torch.where(occurs, last, -1), torch.where(is_full, first, GAPS)


def _intersection(intervals: list[_Interval]) -> _Interval:
    first, last, full = intervals[0]
    for other_first, other_last, other_full in intervals[1:]:
        first, last = torch.maximum(first, other_first), torch.minimum(last, other_last)
        full = torch.maximum(full, other_full)
    return first, last, full


def _documents(visibility: Visibility, *, for_columns: bool) -> tuple[Tensor | None, Tensor | None, list[_Interval]]:
    """Encode documents and padding as one pair of small ids, equal where a query may see a key.

    Also returns the keys that each query sees, and for the columns the queries that see each key.
    """
    if not len(visibility.documents) and visibility.query_real is None and visibility.key_real is None:
        return None, None, []
    shared = torch.zeros((1, 1), dtype=torch.int64, device=visibility.device)
    query_ids, key_ids = shared.expand(1, visibility.num_queries), shared.expand(1, visibility.num_keys)
    if len(visibility.documents):
        query_ids, key_ids = visibility.documents[0]
    if visibility.query_real is not None:
        query_ids = torch.where(visibility.query_real, query_ids, -1)
    if visibility.key_real is not None:
        key_ids = torch.where(visibility.key_real, key_ids, -2)
    if can_launch(query_ids) and can_launch(key_ids) and query_ids.shape[1] * key_ids.shape[1] <= _COMPARED_PAIRS:
        from polyhead.ops.common.kernels.row_ends import document_ends

        query_document, of_queries = document_ends(query_ids, key_ids, none=-1)
        key_document, _ = document_ends(key_ids, key_ids, none=-2)
        columns = [document_ends(key_ids, query_ids, none=-2)[1]] if for_columns else []
        return query_document, key_document, [of_queries, *columns]
    interval = _interval_of_real
    if len(visibility.documents) and visibility.num_keys:
        query_ids, key_ids = _compact_ids(query_ids, key_ids)
        interval = _interval
    intervals = [interval(query_ids, key_ids)]
    if for_columns:
        intervals.append(interval(key_ids, query_ids))
    return query_ids, key_ids, intervals


def _compact_ids(query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Replace each id by its rank among the sorted key ids of its row, which fits into 32 bits.

    Queries without a matching key become -1, and keys with a negative id -2.
    """
    batch = max(query_ids.shape[0], key_ids.shape[0])
    query_ids, key_ids = (ids.expand(batch, -1).contiguous() for ids in (query_ids, key_ids))
    ordered = key_ids.sort(dim=-1).values
    start, stop = (torch.searchsorted(ordered, query_ids, right=right) for right in (False, True))
    key_ranks = torch.searchsorted(ordered, key_ids)
    return torch.where((stop > start) & (query_ids >= 0), start, -1), torch.where(key_ids >= 0, key_ranks, -2)


def _interval(ids: Tensor, others: Tensor) -> _Interval:
    """Return for each id where it is in `others`; an empty interval if it does not occur."""
    count = others.shape[1]
    batch = max(ids.shape[0], others.shape[0])
    ids, others = ids.expand(batch, -1).contiguous(), others.expand(batch, -1)
    if not count:
        return torch.zeros_like(ids), torch.full_like(ids, -1), torch.full_like(ids, GAPS)
    ordered, order = others.sort(dim=-1, stable=True)
    ordered = ordered.contiguous()
    start = torch.searchsorted(ordered, ids)
    stop = torch.searchsorted(ordered, ids, right=True)
    first = order.gather(-1, start.clamp_max(count - 1))
    last = order.gather(-1, (stop - 1).clamp_min(0))
    return _interval_of(first, last, stop - start, count)


def _interval_of_real(ids: Tensor, others: Tensor) -> _Interval:
    """`_interval` of ids that are 0, or negative for padding.

    Inductor cannot compile a search for ids that are all the same constant, and Triton warns of its code for `any`.
    """
    count = others.shape[1]
    batch = max(ids.shape[0], others.shape[0])
    ids, others = ids.expand(batch, -1), others.expand(batch, -1)
    if not count:
        return torch.zeros_like(ids), torch.full_like(ids, -1), torch.full_like(ids, GAPS)
    is_real = (others == 0).to(torch.int32)
    first = is_real.argmax(-1, keepdim=True)  # of equal values the first
    last = count - 1 - is_real.flip(-1).argmax(-1, keepdim=True)
    return _interval_of(first, last, torch.where(ids == 0, is_real.sum(-1, keepdim=True), 0), count)

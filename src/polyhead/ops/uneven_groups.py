"""Grouped-query attention with groups of different sizes.

Query heads are sorted by the KV head they read, and the results are returned in the caller's order. With many queries,
KV heads are repeated until all groups have the same size and `attention` is called once: several calls with few heads
each would leave much of a device idle, and the backward of their slices costs more than the copies. With few queries
over many keys the copies would cost more than the attention itself: then there is one call per group size, and no KV
head is repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.errors import MaskError, ShapeError
from polyhead.geometry import checked_key_heads
from polyhead.masks import Mask
from polyhead.ops.attention.api import attention
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import NAMES, RowStatistics, Statistics
from polyhead.ops.decode.api import cached_attention, cached_reasons
from polyhead.ops.decode.fused import CacheArguments

if TYPE_CHECKING:
    from jaxtyping import Float

# Fields of a cache that have an axis of KV heads.
_PER_KV_HEAD = ("key", "value", "key_scale", "value_scale")
# KV heads are repeated for a single call if there are at least MANY_QUERIES queries and at most KEYS_A_QUERY keys per
# query: the cost of a copy grows with the keys, its benefit with the queries.
MANY_QUERIES, KEYS_A_QUERY = 128, 4
# Groups must not drop the same weights, so each has its own dropout seed, derived with this step.
_SEED_STEP = 0x9E3779B97F4A7C15 >> 1


@dataclass(frozen=True, slots=True)
class Group:
    """KV heads with equally many query heads each, and those query heads in the same order."""

    heads: tuple[int, ...]
    key_heads: tuple[int, ...]


def groups_of(key_heads: Sequence[int]) -> tuple[Group, ...]:
    """Return the groups of a map from query heads to KV heads, smallest group size first.

    >>> groups_of((0, 2, 0, 1, 0))
    (Group(heads=(3, 1), key_heads=(1, 2)), Group(heads=(0, 2, 4), key_heads=(0,)))
    """
    readers: dict[int, list[int]] = {key_head: [] for key_head in sorted(set(key_heads))}
    for head, key_head in enumerate(key_heads):
        readers[key_head].append(head)
    groups = []
    for size in sorted({len(heads) for heads in readers.values()}):
        shared = tuple(key_head for key_head, heads in readers.items() if len(heads) == size)
        groups.append(Group(tuple(head for key_head in shared for head in readers[key_head]), shared))
    return tuple(groups)


def one_group_of(key_heads: Sequence[int]) -> Group:
    """Return all heads of a map from query heads to KV heads as one group; KV heads of larger groups are repeated.

    >>> one_group_of((0, 1, 1, 1, 1, 0))
    Group(heads=(0, 5, 1, 2, 3, 4), key_heads=(0, 1, 1))
    """
    heads = sorted(range(len(key_heads)), key=key_heads.__getitem__)
    group_size = math.gcd(*Counter(key_heads).values())
    return Group(tuple(heads), tuple(key_heads[head] for head in heads[::group_size]))


def calls_of(key_heads: Sequence[int], queries: int, keys: int) -> tuple[Group, ...]:
    """Return the groups that get one `attention` call each, given the numbers of queries and keys."""
    if queries >= MANY_QUERIES and keys <= KEYS_A_QUERY * queries:
        return (one_group_of(key_heads),)
    return groups_of(key_heads)


def uneven_attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    key_heads: Sequence[int],
    *,
    mask: Mask | None = None,
    scale: float | Float[Tensor, " heads"] | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    seed: int | Tensor | None = None,
    **options: Any,
) -> AttentionOutput:
    """`attention` in which query head i reads KV head `key_heads[i]`, so that groups may have any sizes.

    Output, log-sum-exp, weights and statistics are in the order of the query heads. The options are those of
    `attention`. Dropout is a function of the seed here too, but heads are numbered in the order of their KV heads, and
    within their group where there is one call per group size. `backend` of the result names all backends that were
    used.

    >>> query, key = torch.randn(2, 5, 7, 16), torch.randn(2, 2, 7, 16)
    >>> uneven_attention(query, key, key, (0, 0, 1, 0, 0)).output.shape
    torch.Size([2, 5, 7, 16])
    """
    if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (query, key, value)):
        return attention(query, key, value, mask=mask, scale=scale, sinks=sinks, seed=seed, **options)  # raises
    num_heads = query.shape[1]
    groups = calls_of(checked_key_heads(key_heads, num_heads, key.shape[1]), query.shape[2], key.shape[2])
    if value.shape[1] != key.shape[1]:
        raise ShapeError(f"key and value must have the same heads, got {key.shape[1]} and {value.shape[1]}")
    results = []
    for number, group in enumerate(groups):
        results.append(
            attention(
                select_heads(query, group.heads),
                select_heads(key, group.key_heads),
                select_heads(value, group.key_heads),
                mask=None if mask is None else _mask_for_heads(mask, group.heads, num_heads),
                scale=_select_per_head("scale", scale, group.heads, num_heads) if isinstance(scale, Tensor) else scale,
                sinks=None if sinks is None else _select_per_head("sinks", sinks, group.heads, num_heads),
                seed=seed if seed is None or number == 0 else _group_seed(seed, number),
                **options,
            )
        )
    return _combine_results(results, groups)


def uneven_cached_attention(
    query: Tensor,
    cache: CacheArguments,
    num_keys: int,
    key_heads: Sequence[int],
    *,
    mask: Mask | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    statistics: Statistics | None = None,
    **options: Any,
) -> AttentionOutput | None:
    """`cached_attention` with query head i reading KV head `key_heads[i]`; None if unsupported.

    A cache is read in place, so KV heads of one group size that are not evenly spaced need several calls.
    """
    num_heads, axis = query.shape[1], 1 if cache.block_table is None else 2
    groups = [part for group in groups_of(key_heads) for part in _split_at_uneven_strides(group)]
    calls = []
    for group in groups:
        tensors = {name: x for name in _PER_KV_HEAD if (x := getattr(cache, name)) is not None}
        selected: dict[str, Any] = {name: select_heads(x, group.key_heads, axis) for name, x in tensors.items()}
        group_cache = cache._replace(**selected)
        requested: dict[str, Any] = {
            "mask": None if mask is None else _mask_for_heads(mask, group.heads, num_heads),
            "scale": scale,
            "sinks": None if sinks is None else _select_per_head("sinks", sinks, group.heads, num_heads),
            "statistics": statistics,
        }
        rows = select_heads(query, group.heads)
        if len(cached_reasons(rows, group_cache, num_keys, **requested)):
            return None
        calls.append((rows, group_cache, requested))
    results = [
        cached_attention(rows, group_cache, num_keys, **requested, **options) for rows, group_cache, requested in calls
    ]
    return _combine_results(results, groups)


def _split_at_uneven_strides(group: Group) -> list[Group]:
    """Split a group into several in which the KV heads are evenly spaced."""
    parts, size, start = [], len(group.heads) // len(group.key_heads), 0
    for run in _arithmetic_runs(group.key_heads):
        parts.append(Group(group.heads[start * size : (start + len(run)) * size], tuple(run)))
        start += len(run)
    return parts


def _combine_results(results: Sequence[AttentionOutput], groups: Sequence[Group]) -> AttentionOutput:
    """Combine the results of groups into one, in the order of the query heads."""
    order = [head for group in groups for head in group.heads]
    inverse = [order.index(head) for head in range(len(order))]

    def combine(parts: Sequence[Tensor | None]) -> Tensor | None:
        tensors = [x for x in parts if x is not None]
        if len(tensors) < len(parts):
            return None
        return select_heads(tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1), inverse)

    group_stats = [result.statistics for result in results]
    statistics = None
    if all(rows is not None for rows in group_stats):
        statistics = RowStatistics(**{name: combine([getattr(rows, name) for rows in group_stats]) for name in NAMES})
    output = combine([result.output for result in results])
    assert output is not None
    return AttentionOutput(
        output,
        combine([result.logsumexp for result in results]),
        combine([result.weights for result in results]),
        statistics,
        "+".join(dict.fromkeys(result.backend for result in results)),
    )


def select_heads(x: Tensor, heads: Sequence[int], axis: int = 1) -> Tensor:
    """Select heads of a tensor in the given order: a view if they are evenly spaced, else one copy.

    The copy concatenates views, so no index tensor is sent to the device. It has the memory order of `x`, and its
    backward is one copy as well, plus a sum for every repeated head.
    """
    runs = _arithmetic_runs(heads)
    if len(runs) == 1:
        return _sliced(x, runs[0], axis)
    if axis + 1 < x.ndim and x.stride(axis) < x.stride(axis + 1):  # the heads of a token are adjacent in memory
        return select_heads(x.transpose(axis, axis + 1), heads, axis + 1).transpose(axis, axis + 1)
    # The backward of a slice fills all of `x` with zeros; that of a split is one `cat`, that of an expansion one sum.
    parts, trailing = x.split(1, axis), [-1] * (x.ndim - axis - 1)
    repeats = [(head, len(list(same))) for head, same in groupby(heads)]
    return torch.cat([parts[head].expand(*[-1] * axis, count, *trailing) for head, count in repeats], axis)


def is_view_of(heads: Sequence[int]) -> bool:
    """Return True if `select_heads` returns a view for these heads."""
    return len(_arithmetic_runs(heads)) == 1


def _sliced(x: Tensor, run: range, axis: int) -> Tensor:
    if run == range(x.shape[axis]):
        return x
    return x[(slice(None),) * axis + (slice(run.start, run.stop, run.step),)]


def _arithmetic_runs(heads: Sequence[int]) -> list[range]:
    """Split a list of heads greedily into ascending arithmetic progressions, in order."""
    runs: list[range] = []
    for head in heads:
        last = runs[-1] if runs else None
        if last is not None and len(last) == 1 and head > last.start:
            runs[-1] = range(last.start, head + 1, head - last.start)
        elif last is not None and len(last) > 1 and head == last[-1] + last.step:
            runs[-1] = range(last.start, head + 1, last.step)
        else:
            runs.append(range(head, head + 1))
    return runs


def _mask_for_heads(mask: Mask, heads: Sequence[int], num_heads: int) -> Mask:
    """Return the mask of some heads: every tensor with an axis of heads is reduced to them."""
    if not isinstance(mask, Mask):
        return mask  # `attention` raises

    def select(x: Tensor, axis: int) -> Tensor:
        if x.shape[axis] == 1:
            return x
        if x.shape[axis] != num_heads:
            raise MaskError(f"a mask must have {num_heads} heads or 1, got shape {list(x.shape)}")
        return select_heads(x, heads, axis)

    return mask.with_head_terms(select)


def _select_per_head(name: str, x: Tensor, heads: Sequence[int], num_heads: int) -> Tensor:
    if not isinstance(x, Tensor) or x.shape != (num_heads,):
        got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"{name} must have one number per head, got {got} for {num_heads} heads")
    return select_heads(x, heads, 0)


def _group_seed(seed: int | Tensor, number: int) -> int | Tensor:
    return seed ^ (number * _SEED_STEP % (1 << 62))

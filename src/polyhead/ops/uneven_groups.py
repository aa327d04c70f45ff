"""Attention in which KV heads have different numbers of query heads: one call of `attention` where queries are many.

Query heads are taken in the order of the KV heads they read, and what comes back is put into the caller's order. For
one call, KV heads are repeated until each has as many readers as the next: several calls of few heads each would leave
much of a machine idle, and what they are slices of costs more in a backward than the copies. Where few queries meet
many keys, the copies would cost more than the attention: then there is one call for each group size, and none is
repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.errors import MaskError, ShapeError
from polyhead.geometry import checked_key_heads
from polyhead.masks import Mask, RelativeBias
from polyhead.ops.attention.api import attention
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import NAMES, RowStatistics
from polyhead.ops.decode.api import cached_attention, cached_reasons
from polyhead.ops.decode.fused import CacheArguments

if TYPE_CHECKING:
    from jaxtyping import Float

# What of a cache has an axis of KV heads.
_OF_HEADS = ("key", "value", "key_scale", "value_scale")
# KV heads are repeated for one call from so many queries on, and for so many keys a query at most: a copy costs by the
# key, what it spares by the query.
MANY_QUERIES, KEYS_A_QUERY = 128, 4
# Groups must not drop the same weights: each has a seed of its own, this far from the one before.
_SEED_STEP = 0x9E3779B97F4A7C15 >> 1


@dataclass(frozen=True, slots=True)
class Group:
    """KV heads that as many query heads read each, and those query heads in the same order."""

    heads: tuple[int, ...]
    key_heads: tuple[int, ...]


def groups_of(key_heads: Sequence[int]) -> tuple[Group, ...]:
    """The groups of a map from query heads to KV heads, those of few readers first.

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
    """All heads of such a map as one group, in which KV heads of many readers stand more than once.

    >>> one_group_of((0, 1, 1, 1, 1, 0))
    Group(heads=(0, 5, 1, 2, 3, 4), key_heads=(0, 1, 1))
    """
    heads = sorted(range(len(key_heads)), key=key_heads.__getitem__)
    share = math.gcd(*Counter(key_heads).values())
    return Group(tuple(heads), tuple(key_heads[head] for head in heads[::share]))


def calls_of(key_heads: Sequence[int], queries: int, keys: int) -> tuple[Group, ...]:
    """The groups that are a call of `attention` each, with so many queries and keys."""
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
    """`attention` in which query head i reads KV head `key_heads[i]`, so that groups may be of any sizes.

    Output, log-sum-exp, weights and statistics are in the order of the query heads. The options are those of
    `attention`. Dropout with a seed is a function of it here too, but heads are numbered as they are taken: in the
    order of their KV heads, and where there is a call for each group size, within their group. `backend` of the result
    names all that served, where groups were served by several.

    >>> query, key = torch.randn(2, 5, 7, 16), torch.randn(2, 2, 7, 16)
    >>> uneven_attention(query, key, key, (0, 0, 1, 0, 0)).output.shape
    torch.Size([2, 5, 7, 16])
    """
    if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (query, key, value)):
        return attention(query, key, value, mask=mask, scale=scale, sinks=sinks, seed=seed, **options)  # says why not
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
                mask=None if mask is None else _mask_of(mask, group.heads, num_heads),
                scale=_each("scale", scale, group.heads, num_heads) if isinstance(scale, Tensor) else scale,
                sinks=None if sinks is None else _each("sinks", sinks, group.heads, num_heads),
                seed=seed if seed is None or number == 0 else _another(seed, number),
                **options,
            )
        )
    return _in_order(results, groups)


def uneven_cached_attention(
    query: Tensor,
    cache: CacheArguments,
    num_keys: int,
    key_heads: Sequence[int],
    *,
    mask: Mask | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> AttentionOutput | None:
    """`cached_attention` in which query head i reads KV head `key_heads[i]`; None where the kernels cannot serve it.

    A cache is read where it lies, so KV heads of one size that do not stand at equal distances are several calls.
    """
    num_heads, axis = query.shape[1], 1 if cache.block_table is None else 2
    groups = [part for group in groups_of(key_heads) for part in _parts(group)]
    calls = []
    for group in groups:
        held = {name: x for name in _OF_HEADS if (x := getattr(cache, name)) is not None}
        parts: dict[str, Any] = {name: select_heads(x, group.key_heads, axis) for name, x in held.items()}
        own = cache._replace(**parts)
        requested: dict[str, Any] = {
            "mask": None if mask is None else _mask_of(mask, group.heads, num_heads),
            "scale": scale,
            "sinks": None if sinks is None else _each("sinks", sinks, group.heads, num_heads),
        }
        rows = select_heads(query, group.heads)
        if len(cached_reasons(rows, own, num_keys, **requested)):
            return None
        calls.append((rows, own, requested))
    results = [cached_attention(rows, own, num_keys, **requested, **options) for rows, own, requested in calls]
    return _in_order(results, groups)


def _parts(group: Group) -> list[Group]:
    """A group as several, the KV heads of each at equal distances."""
    parts, size, start = [], len(group.heads) // len(group.key_heads), 0
    for run in _runs(group.key_heads):
        parts.append(Group(group.heads[start * size : (start + len(run)) * size], tuple(run)))
        start += len(run)
    return parts


def _in_order(results: Sequence[AttentionOutput], groups: Sequence[Group]) -> AttentionOutput:
    """What groups gave, as one result in the order of the query heads."""
    order = [head for group in groups for head in group.heads]
    places = [order.index(head) for head in range(len(order))]

    def together(parts: Sequence[Tensor | None]) -> Tensor | None:
        there = [x for x in parts if x is not None]
        if len(there) < len(parts):
            return None
        return select_heads(there[0] if len(there) == 1 else torch.cat(there, 1), places)

    told = [result.statistics for result in results]
    statistics = None
    if all(rows is not None for rows in told):
        statistics = RowStatistics(**{name: together([getattr(rows, name) for rows in told]) for name in NAMES})
    output = together([result.output for result in results])
    assert output is not None
    return AttentionOutput(
        output,
        together([result.logsumexp for result in results]),
        together([result.weights for result in results]),
        statistics,
        "+".join(dict.fromkeys(result.backend for result in results)),
    )


def select_heads(x: Tensor, heads: Sequence[int], axis: int = 1) -> Tensor:
    """Some heads of a tensor in the order given: a view where they stand at equal distances, else one copy.

    Views alone are put together, so that no index has to reach a device. The copy lies as `x` does, and its backward is
    one copy too, beside a sum for every head that is repeated.
    """
    runs = _runs(heads)
    if len(runs) == 1:
        return _sliced(x, runs[0], axis)
    if axis + 1 < x.ndim and x.stride(axis) < x.stride(axis + 1):  # the heads of a token lie side by side
        return select_heads(x.transpose(axis, axis + 1), heads, axis + 1).transpose(axis, axis + 1)
    # The backward of a slice fills all of `x` with zeros; that of a split is one `cat`, that of an expansion one sum.
    parts, others = x.split(1, axis), [-1] * (x.ndim - axis - 1)
    times = [(head, len(list(same))) for head, same in groupby(heads)]
    return torch.cat([parts[head].expand(*[-1] * axis, count, *others) for head, count in times], axis)


def is_view_of(heads: Sequence[int]) -> bool:
    """Whether `select_heads` gives such heads without a copy."""
    return len(_runs(heads)) == 1


def _sliced(x: Tensor, run: range, axis: int) -> Tensor:
    if run == range(x.shape[axis]):
        return x
    return x[(slice(None),) * axis + (slice(run.start, run.stop, run.step),)]


def _runs(heads: Sequence[int]) -> list[range]:
    """A list of heads as few ascending progressions, in order."""
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


def _mask_of(mask: Mask, heads: Sequence[int], num_heads: int) -> Mask:
    """The mask of some heads: of every tensor that tells heads apart, theirs."""
    if not isinstance(mask, Mask):
        return mask  # `attention` says what a mask is

    def own(x: Tensor, axis: int) -> Tensor:
        if x.shape[axis] == 1:
            return x
        if x.shape[axis] != num_heads:
            raise MaskError(f"a mask must have {num_heads} heads or 1, got shape {list(x.shape)}")
        return select_heads(x, heads, axis)

    return replace(
        mask,
        allowed=tuple(own(x, 1) for x in mask.allowed),
        biases=tuple(own(x, 1) for x in mask.biases),
        relative_biases=tuple(RelativeBias(own(term.table, 0), term.zero) for term in mask.relative_biases),
    )


def _each(name: str, x: Tensor, heads: Sequence[int], num_heads: int) -> Tensor:
    if not isinstance(x, Tensor) or x.shape != (num_heads,):
        got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"{name} must have one number a head, got {got} for {num_heads} heads")
    return select_heads(x, heads, 0)


def _another(seed: int | Tensor, number: int) -> int | Tensor:
    return seed ^ (number * _SEED_STEP % (1 << 62))

"""Reduce rows to count, mean, squared deviations and maximum, for each statistic and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.ops.common.kernels.availability import device_reasons
from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.common.tracing import is_traced, is_transformed

# The column for entropy as a share of its maximum, the logarithm of the number of visible keys (plus one with a learned
# sink). It is the one column that is not a row statistic.
SHARE = "normalized_entropy"


class RowTotals(NamedTuple):
    """Moments and maximum of the rows so far, each [columns, heads]; never written in place.

    They are float64 where the device supports it.
    """

    total: Tensor  # number of rows that count
    mean: Tensor  # 0 without rows
    squares: Tensor  # sum of squared deviations from the mean
    largest: Tensor  # -inf without rows


def reduce_rows(
    rows: RowStatistics,
    real: Tensor | None,
    columns: Sequence[str],
    heads: Sequence[int],
    state: RowTotals,
    *,
    learned_sinks: bool = False,
) -> RowTotals:
    """Merge the rows of one more call into `state`, without synchronising with the device.

    Args:
        rows: the statistics named by `columns`, and `visible_keys`; rows without visible keys do not count.
        real: [batch or 1, queries], False for rows that do not count, such as padding; their values are ignored.
        columns: names of statistics, or `normalized_entropy`, for which rows with a single key do not count.
        heads: heads to reduce, in the order of the state's last axis.
        state: totals so far, on the device of the rows.
        learned_sinks: True if a learned sink adds one term to a row's maximal entropy.
    """
    keys = rows.visible_keys
    assert keys is not None
    if not keys.numel() or not len(columns) or not len(heads):
        return state
    values = [getattr(rows, "entropy" if name == SHARE else name) for name in columns]
    share = columns.index(SHARE) if SHARE in columns else None
    if has_kernel(keys):
        from polyhead.ops.common.kernels import row_reduction as kernels

        packed = kernels.reduce_rows(values, keys, real, state, heads=heads, share=share, learned_sinks=learned_sinks)
        return RowTotals(*packed.unbind(0))
    totals = _reduce_in_torch(values, keys, real, share, learned_sinks, state.total.dtype)
    if tuple(heads) != tuple(range(keys.shape[1])):
        # Selected after the reduction, so that a head's result is bit-identical whichever other heads are selected.
        # One view per head: copying an index tensor to the device would synchronise.
        totals = RowTotals(*(torch.stack([x[:, head] for head in heads], 1) for x in totals))
    return _merge(state, totals)


def has_kernel(x: Tensor) -> bool:
    """Return True if kernels can read the values of a tensor."""
    return not device_reasons(x.device) and not is_traced(x) and not is_transformed()


def _reduce_in_torch(
    values: list[Tensor],
    keys: Tensor,
    real: Tensor | None,
    share: int | None,
    learned_sinks: bool,
    sum_dtype: torch.dtype,
) -> RowTotals:
    """Reduce rows of all heads in plain PyTorch.

    `share` is the index of the column `normalized_entropy`; `sum_dtype` is float64 where the device supports it.
    """
    stacked = torch.stack(values).detach()  # [columns, batch, heads, queries]
    min_keys, max_keys = 0.0, math.inf
    if keys.is_cpu and not is_traced(keys):
        # On the CPU values can be read without a synchronisation. Most calls mask no row, and masking takes longer than
        # the sums themselves.
        min_keys, max_keys = (float(x) for x in torch.aminmax(keys))
        real = None if real is not None and real.all() else real
    counted = keys > 0 if min_keys <= 0 else None
    if real is not None:
        counted = real[:, None].expand_as(keys) if counted is None else counted & real[:, None]
    masks: list[tuple[slice | int, Tensor]] = [] if counted is None else [(slice(None), counted)]
    if share is not None:
        extra_terms = int(learned_sinks)
        if min_keys == max_keys:
            stacked[share].div_(math.log(max(max_keys + extra_terms, 2.0)))
        else:
            stacked[share].div_((keys + extra_terms).clamp_min(2.0).log())
        if min_keys + extra_terms <= 1:
            has_several_terms = keys + extra_terms > 1
            masks.append((share, has_several_terms if counted is None else has_several_terms & counted))

    count = torch.full(stacked.shape[::2], keys.shape[0] * keys.shape[2], dtype=sum_dtype, device=keys.device)
    for column, mask in masks:
        stacked[column].masked_fill_(~mask, 0.0)
        count[column] = mask.sum((0, 2))
    deviations = stacked.to(sum_dtype, copy=True)
    for column, mask in masks:
        stacked[column].add_(torch.where(mask, 0.0, -torch.inf))
    mean = _over_rows(torch.sum, deviations) / count.clamp_min(1.0)
    deviations.sub_(mean[:, None, :, None])
    for column, mask in masks:
        deviations[column].mul_(mask.to(sum_dtype))
    squares = torch.linalg.vector_norm(deviations, dim=-1).square_().sum(1)
    return RowTotals(count, mean, squares, _over_rows(torch.amax, stacked).to(sum_dtype))


def _over_rows(reduction: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Reduce [columns, batch, heads, queries] to [columns, heads], first over queries, which is twice as fast."""
    reduced = reduction(x, -1)
    return reduced[:, 0] if x.shape[1] == 1 else reduction(reduced, 1)


def _merge(a: RowTotals, b: RowTotals) -> RowTotals:
    """Merge by the pairwise update of Chan, Golub and LeVeque (1979).

    If one of the two has no rows, the result is bit-identical to the other.
    """
    total = a.total + b.total
    share = b.total / total.clamp_min(1.0)  # of the rows, those of `b`
    delta = b.mean - a.mean
    squares = torch.addcmul(a.squares + b.squares, delta.square(), a.total * share)
    return RowTotals(total, torch.addcmul(a.mean, delta, share), squares, torch.maximum(a.largest, b.largest))

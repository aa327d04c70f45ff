"""What becomes of the rows of a call: count, mean, squared distances and the largest, for each statistic and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.ops.common.kernels.availability import HAS_TRITON, IS_INTERPRETED, capability
from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.common.tracing import is_traced, is_transformed

# The entropy over its maximum, the logarithm of how many keys the row sees (plus one where there is a learned sink).
SHARE = "normalized_entropy"


class RowTotals(NamedTuple):
    """What is known of the rows that were seen, each float64 [statistics, heads] and never written to again."""

    total: Tensor  # how many rows counted
    mean: Tensor  # 0 where nothing was counted
    squares: Tensor  # the sum of squared distances from the mean
    largest: Tensor  # -inf where nothing was counted


def reduce_rows(
    rows: RowStatistics,
    real: Tensor | None,
    columns: Sequence[str],
    heads: Sequence[int],
    state: RowTotals,
    *,
    learned_sinks: bool = False,
) -> RowTotals:
    """`state` and the rows of one more call. Waits for no device.

    Args:
        rows: the statistics that `columns` names, and `visible_keys`; a row that sees no key does not count.
        real: [batch or 1, queries], False for rows that do not count either. What stands there is never read.
        columns: names of statistics, or `normalized_entropy`, for which a row with a single key does not count.
        heads: which ones, in the order of the state's last axis.
        state: on the device of the rows.
        learned_sinks: whether a row's maximal entropy has one more term than it sees keys.
    """
    keys = rows.visible_keys
    assert keys is not None
    if not keys.numel() or not len(columns) or not len(heads):
        return state
    values = [getattr(rows, "entropy" if name == SHARE else name) for name in columns]
    share = columns.index(SHARE) if SHARE in columns else None
    if _has_kernel(keys):
        from polyhead.ops.common.kernels import row_reduction as kernels

        totals = kernels.reduce_rows(values, keys, real, state, heads=heads, share=share, learned_sinks=learned_sinks)
        return RowTotals(*totals.unbind(0))
    found = _reduced(values, keys, real, share, learned_sinks, state.total.dtype)
    if tuple(heads) != tuple(range(keys.shape[1])):
        # Chosen afterwards, so that a head has the same bits whichever others are chosen beside it. One view a head: an
        # index tensor would be copied to the device, and that is waited for.
        found = RowTotals(*(torch.stack([x[:, head] for head in heads], 1) for x in found))
    return _joined(state, found)


def _has_kernel(keys: Tensor) -> bool:
    if keys.is_cuda:
        runs = HAS_TRITON and torch.version.cuda is not None and capability(keys.device.index) >= (8, 0)
    else:
        runs = IS_INTERPRETED and keys.is_cpu
    return runs and not is_traced(keys) and not is_transformed()


def _reduced(
    values: list[Tensor],
    keys: Tensor,
    real: Tensor | None,
    share: int | None,
    learned_sinks: bool,
    wide: torch.dtype,
) -> RowTotals:
    """The same of these rows alone and of every head, in plain PyTorch: `wide` is float64 where the device has it."""
    stacked = torch.stack(values).detach()  # [columns, batch, heads, queries]
    fewest, most = 0.0, math.inf
    if keys.is_cpu and not is_traced(keys):
        # Here it can be looked at. Most calls hide no row, and a mask takes longer than the sums themselves.
        fewest, most = (float(x) for x in torch.aminmax(keys))
        real = None if real is not None and real.all() else real
    counted = keys > 0 if fewest <= 0 else None
    if real is not None:
        counted = real[:, None].expand_as(keys) if counted is None else counted & real[:, None]
    masks: list[tuple[slice | int, Tensor]] = [] if counted is None else [(slice(None), counted)]
    if share is not None:
        terms = int(learned_sinks)
        if fewest == most:
            stacked[share].div_(math.log(max(most + terms, 2.0)))
        else:
            stacked[share].div_((keys + terms).clamp_min(2.0).log())
        if fewest + terms <= 1:
            several = keys + terms > 1
            masks.append((share, several if counted is None else several & counted))

    count = torch.full(stacked.shape[::2], keys.shape[0] * keys.shape[2], dtype=wide, device=keys.device)
    for where, mask in masks:
        stacked[where].masked_fill_(~mask, 0.0)
        count[where] = mask.sum((0, 2))
    distances = stacked.to(wide, copy=True)
    for where, mask in masks:
        stacked[where].add_(torch.where(mask, 0.0, -torch.inf))
    mean = _over_rows(torch.sum, distances) / count.clamp_min(1.0)
    distances.sub_(mean[:, None, :, None])
    for where, mask in masks:
        distances[where].mul_(mask.to(wide))
    squares = torch.linalg.vector_norm(distances, dim=-1).square_().sum(1)
    return RowTotals(count, mean, squares, _over_rows(torch.amax, stacked).to(wide))


def _over_rows(reduction: Callable[..., Tensor], x: Tensor) -> Tensor:
    """[columns, batch, heads, queries] reduced to [columns, heads]; along memory first, which is twice as fast."""
    reduced = reduction(x, -1)
    return reduced[:, 0] if x.shape[1] == 1 else reduction(reduced, 1)


def _joined(one: RowTotals, other: RowTotals) -> RowTotals:
    """Chan, Golub and LeVeque's rule; one without rows changes no bit of the other."""
    total = one.total + other.total
    share = other.total / total.clamp_min(1.0)
    apart = other.mean - one.mean
    squares = torch.addcmul(one.squares + other.squares, apart.square(), one.total * share)
    return RowTotals(total, torch.addcmul(one.mean, apart, share), squares, torch.maximum(one.largest, other.largest))

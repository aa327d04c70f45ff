"""The one bound on rounding errors: no worse than twice what the plain formula loses when it rounds at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

DRAWS = 8  # of one problem, where the errors of a single one would be left to chance


@dataclass(frozen=True)
class Formula:
    """What the formula gives: [batch, heads, queries, value_dim], [batch, heads, queries] and [..., queries, keys].

    `gradients` is keyed by the names of the inputs.
    """

    output: Tensor
    logsumexp: Tensor
    weights: Tensor
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


def plain_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    rate: float = 0.0,
) -> Formula:
    """Attention as the textbook has it, every intermediate in (and so rounded to) the dtype of the query.

    With float64 tensors this is what the others call exact. `visible` is boolean and `bias` floating point, both
    [batch, heads, queries, keys]; `keep` says which weights a dropout of `rate` leaves.
    """
    dtype = query.dtype
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    logits = _product(query, key.transpose(-1, -2))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    logits = logits * (factor.to(dtype)[:, None, None] if isinstance(factor, Tensor) else factor)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(dtype)
    seen = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible.expand_as(logits)
    logits = torch.where(seen, logits, 0.0)
    columns = torch.where(seen, logits.detach(), -torch.inf)
    if sinks is not None:
        columns = torch.cat([columns, sinks.detach().to(dtype)[:, None, None].expand(*logits.shape[:3], 1)], -1)
    largest = columns.amax(-1, keepdim=True) if columns.shape[-1] else columns.new_full((*logits.shape[:3], 1), 0.0)
    empty = largest == -torch.inf if columns.shape[-1] else torch.ones_like(largest, dtype=torch.bool)
    largest = torch.where(empty, 0.0, largest)
    exponentials = torch.where(seen, torch.exp(logits - largest), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(dtype)[:, None, None] - largest)
    total = torch.where(empty, 1.0, total)
    weights = exponentials / total
    kept = weights if keep is None else torch.where(keep, weights / (1 - rate), 0.0)
    logsumexp = torch.where(empty, -torch.inf, largest + torch.log(total)).squeeze(-1)
    return Formula(_product(kept, value), logsumexp, weights)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product rounded once; its own sums are wide, as they are in every matrix unit."""
    if left.dtype in (torch.bfloat16, torch.float16):
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def assert_within_error_budget(
    actual: Tensor, *, exact: Tensor, plain: Tensor, factor: float = 2, name: str = "result"
) -> None:
    """error <= factor * (error of the plain formula) + 2 * eps * max|exact|, errors being the largest of any element.

    `plain` carries the dtype of the inputs. Infinities must stand where the exact ones do.
    """
    share, bound, error = budget_used(actual, exact=exact, plain=plain, factor=factor, name=name)
    assert share <= 1, f"{name}: error {error:.3e} exceeds {bound:.3e}, the budget at factor {factor}"


class Compared(NamedTuple):
    """One result: ours, what is exact, and what the plain formula gives."""

    actual: Tensor
    exact: Tensor
    plain: Tensor


def assert_draws_within_error_budget(draws: Sequence[Mapping[str, Compared]], *, name: str = "") -> None:
    """One budget for all draws of a problem, for each of its results by name.

    Both errors of a budget are maxima. Over a few numbers, or where a single row loses far more than the others, each
    is left to chance, and so is their ratio; over all draws they are maxima of as many more numbers. Draws differ in
    nothing but their numbers: beside a problem that loses more, the errors of another would not be seen.
    """
    for what in draws[0]:
        actual, exact, plain = (torch.stack(same) for same in zip(*(draw[what] for draw in draws), strict=True))
        assert_within_error_budget(actual, exact=exact, plain=plain, name=f"{name}: {what}" if name else what)


def budget_used(
    actual: Tensor, *, exact: Tensor, plain: Tensor, factor: float = 2, name: str = "result"
) -> tuple[float, float, float]:
    """The share of the budget that was used, the budget and the error."""
    assert exact.dtype is torch.float64, f"{name}: what is exact is float64, got {exact.dtype}"
    assert actual.shape == exact.shape == plain.shape, (
        f"{name}: shapes {list(actual.shape)}, {list(exact.shape)} and {list(plain.shape)} differ"
    )
    actual, exact, plain = actual.detach(), exact.detach(), plain.detach()
    infinite = exact.isinf()
    assert torch.equal(actual.double()[infinite], exact[infinite]), f"{name}: infinities stand elsewhere"
    actual, exact, loose = (x.double()[~infinite] for x in (actual, exact, plain))
    assert actual.isfinite().all(), f"{name}: {int((~actual.isfinite()).sum())} elements are not finite"
    assert loose.isfinite().all(), f"{name}: the plain formula overflows in {plain.dtype}, so it sets no budget"
    if not exact.numel():
        return 0.0, 0.0, 0.0
    error, plain_error = (float((x - exact).abs().max()) for x in (actual, loose))
    bound = factor * plain_error + 2 * torch.finfo(plain.dtype).eps * float(exact.abs().max())
    return (error / bound if bound else float(error > 0)), bound, error

"""The one bound on rounding errors: no worse than twice what the plain formula loses when it rounds at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.budget_report import record

DRAWS = 8  # of one problem, where the errors of a single one would be left to chance
ORDERS = 32  # of the keys, queries and channels of one problem: the orders of summation of as many machines


@dataclass(frozen=True)
class Formula:
    """What the formula gives: [batch, heads, queries, value_dim], [batch, heads, queries] and [..., queries, keys].

    `gradients` is keyed by the names of the inputs. `logits` are those of the softmax, 0 at masked keys.
    """

    output: Tensor
    logsumexp: Tensor
    weights: Tensor
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


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
    if key.requires_grad or value.requires_grad:  # the gradient is rounded for each head that shares them
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    logits = _product_of_heads(query, key.transpose(-1, -2))
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
    return Formula(_product_of_heads(kept, value), logsumexp, weights, logits=logits)


def key_orders(keys: int, orders: int = ORDERS) -> Tensor:
    """Random permutations of keys, [orders, keys]."""
    return torch.rand(orders, keys, generator=torch.Generator().manual_seed(orders)).argsort(-1)


def token_orders(x: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, tokens, channels] in several orders of the tokens, one sequence after the other, and who then sees whom.

    `visible` is [tokens, tokens]; of each sequence in each order it becomes [batch * orders, tokens, tokens].
    """
    orders = key_orders(x.shape[1]).to(x.device)
    return x[:, orders].flatten(0, 1), visible[orders[:, :, None], orders[:, None]].repeat(len(x), 1, 1)


def output_in_orders(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exact: Tensor,
    *,
    visible: Tensor | None,
    bias: Tensor | None,
    **options: Any,
) -> Compared:
    """The output of the plain formula in several orders of keys and channels, and the exact one; without ours."""
    orders, channels = (key_orders(x).to(key.device) for x in key.shape[2:])

    def ordered(x: Tensor | None, axis: int) -> Tensor | None:
        """Every order of one sequence after the other."""
        if x is None:
            return None
        x = x.expand(len(query), *x.shape[1:])
        return torch.cat([x.index_select(axis, order) for order in orders])

    keys = torch.cat([key[:, :, order][..., channel] for order, channel in zip(orders, channels, strict=True)])
    plain = plain_formula(
        torch.cat([query[..., channel] for channel in channels]),
        keys,
        ordered(value, 2),
        visible=ordered(visible, 3),
        bias=ordered(bias, 3),
        **options,
    )
    return Compared(None, exact.repeat(len(orders), 1, 1, 1), plain.output)


def product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product rounded once; its own sums are wide, as they are in every matrix unit."""
    if left.dtype in (torch.bfloat16, torch.float16):
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def _product_of_heads(left: Tensor, right: Tensor) -> Tensor:
    """The product of [batch, heads, ...]; heads of the left that share one of the right are multiplied together."""
    (heads, rows), shared = left.shape[1:3], right.shape[1]
    if heads == shared:
        return product(left, right)
    together = left.unflatten(1, (shared, heads // shared)).flatten(2, 3)
    return product(together, right).unflatten(2, (heads // shared, rows)).flatten(1, 2)


class Compared(NamedTuple):
    """One result: ours, what is exact, and what the plain formula gives.

    Without ours it adds to the estimate of what the plain formula loses, and to nothing else.
    """

    actual: Tensor | None
    exact: Tensor
    plain: Tensor


class Used(NamedTuple):
    """The share of the budget that was used, the budget and the error."""

    share: float
    bound: float
    error: float


def assert_within_error_budget(
    actual: Tensor, *, exact: Tensor, plain: Tensor, factor: float = 2, name: str = "result"
) -> None:
    """error <= factor * (error of the plain formula) + 2 * eps * max|exact|, errors being the largest of any element.

    `plain` carries the dtype of the inputs. Infinities must stand where the exact ones do.
    """
    assert_draws_within_error_budget([{name: Compared(actual, exact, plain)}], factor=factor)


def assert_draws_within_error_budget(
    draws: Sequence[Mapping[str, Compared]], *, factor: float = 2, name: str = ""
) -> None:
    """One budget for all draws and all orders of a problem, for each of its results by name.

    Both errors of a budget are maxima. Over a few numbers, or where a single row loses far more than the others, each
    is left to chance, and so is their ratio: another CPU adds in another order. Over all draws and orders they are
    maxima of as many more numbers. Draws differ in nothing but their numbers, and orders (of keys, queries and
    channels) in nothing at all: beside a problem that loses more, the errors of another would not be seen.
    """
    for what in dict.fromkeys(what for draw in draws for what in draw):
        where = f"{name}: {what}" if name else what
        samples = [draw[what] for draw in draws if what in draw]
        share, bound, error = budget_used(*samples, factor=factor, name=where)
        numbers = sum(x.actual.numel() for x in samples if x.actual is not None)
        kind = str(samples[0].plain.dtype).removeprefix("torch.")
        record(name=where, dtype=kind, numbers=numbers, factor=factor, error=error, bound=bound, share=share)
        assert share <= 1, f"{where}: error {error:.3e} exceeds {bound:.3e}, the budget at factor {factor}"


def budget_used(*samples: Compared, factor: float = 2, name: str = "result") -> Used:
    """How much of one budget some samples use."""
    errors, plain_errors, sizes = [0.0], [0.0], [0.0]
    for actual, exact, plain in samples:
        assert exact.dtype is torch.float64, f"{name}: what is exact is float64, got {exact.dtype}"
        finite = exact.isfinite()
        assert not exact[~finite].isnan().any(), f"{name}: what is exact has NaN, to which no error is measured"
        errors.append(0.0 if actual is None else _largest_error(actual, exact, finite, name))
        assert plain.shape == exact.shape, f"{name}: shapes {list(exact.shape)} and {list(plain.shape)} differ"
        right, loose = _chosen(finite, exact.detach(), plain.detach().double())
        if right.numel():
            plain_errors.append(float((loose - right).abs().max()))
            sizes.append(float(right.abs().max()))
        assert math.isfinite(plain_errors[-1]), f"{name}: the plain formula overflows in {plain.dtype}: no budget"
    error = max(errors)
    bound = factor * max(plain_errors) + 2 * torch.finfo(samples[0].plain.dtype).eps * max(sizes)
    return Used(error / bound if bound else math.inf if error else 0.0, bound, error)


def _largest_error(actual: Tensor, exact: Tensor, finite: Tensor, name: str) -> float:
    assert actual.shape == exact.shape, f"{name}: shapes {list(actual.shape)} and {list(exact.shape)} differ"
    actual, exact = actual.detach().double(), exact.detach()
    if not finite.all():
        assert torch.equal(actual[~finite], exact[~finite]), f"{name}: infinities stand elsewhere"
    actual, exact = _chosen(finite, actual, exact)
    error = float((actual - exact).abs().max()) if exact.numel() else 0.0
    assert math.isfinite(error), f"{name}: {int((~actual.isfinite()).sum())} elements are not finite"
    return error


def _chosen(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The elements of each tensor where the mask is true; the tensors themselves where it is true everywhere."""
    return tensors if mask.all() else tuple(x[mask] for x in tensors)

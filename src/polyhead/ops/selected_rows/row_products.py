"""Products of rows with the matrix that each row has chosen, so that the work is that of the chosen rows alone.

A token has `slots` rows, side by side: row r belongs to token r // slots and meets matrix i of a stack [matrices, in,
out]. `spread_product` goes from tokens to rows and `summed_product` from rows back to tokens; each is the transpose of
the other, so that gradients of any order are made of the same three operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.errors import ShapeError
from polyhead.ops.common.kernels.availability import HAS_TRITON, IS_INTERPRETED, capability
from polyhead.ops.common.tracing import is_transformed, is_watched


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Which matrix each row meets: the rows sorted by matrix, those that meet none last. Nothing waits for a device."""

    order: Tensor  # int64 [rows]: within a group the rows stand as they did
    ends: Tensor  # int32 [matrices]: the rows order[ends[i - 1] : ends[i]] meet matrix i
    slots: int  # rows of each token
    complete: bool = False  # whether every row is known to meet a matrix

    @classmethod
    def of(cls, chosen: Tensor, matrices: int, used: Tensor | None = None) -> Self:
        """From the matrix of every row, [tokens, slots]; a row that is not `used` meets none.

        >>> RowGroups.of(torch.tensor([[2, 0], [0, 1]]), matrices=3)
        RowGroups(order=tensor([1, 2, 3, 0]), ends=tensor([2, 3, 4], dtype=torch.int32), slots=2, complete=True)
        """
        if chosen.ndim != 2 or not chosen.shape[1] or (used is not None and used.shape != chosen.shape):
            given = "" if used is None else f" and {list(used.shape)}"
            raise ShapeError(f"chosen and used must be [tokens, slots], got {list(chosen.shape)}{given}")
        keys = chosen if used is None else torch.where(used, chosen, matrices)
        order, ends = sorted_groups(keys.reshape(-1), matrices)
        return cls(order, ends, chosen.shape[1], complete=used is None)

    @property
    def places(self) -> Tensor:
        """Where each row stands in the order: int64 [rows]."""
        return torch.empty_like(self.order).scatter_(
            0, self.order, torch.arange(self.order.shape[0], device=self.order.device)
        )


def sorted_groups(keys: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The order that sorts keys 0 to groups, and where each group ends in it, int32 [groups]; equal keys keep theirs.

    The key `groups` is of no group and comes last.
    """
    # A radix sort takes a pass for each byte. A number that a compiler leaves open is not asked.
    narrow = torch.int16 if isinstance(groups, int) and groups < 2**15 else torch.int32
    ordered, order = torch.sort(keys.to(narrow), stable=True)
    names = torch.arange(groups, dtype=narrow, device=keys.device)
    return order, torch.searchsorted(ordered, names, right=True, out_int32=True)


def spread_product(x: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
    """Row r is x[r // slots] @ matrices[i]: [tokens, in] to [rows, out]; zero for a row that meets no matrix."""
    _check(x, matrices, x.shape[0] * groups.slots, groups)
    return _spread(x, matrices, groups.order, groups.ends, groups.slots, groups.complete)


def summed_product(rows: Tensor, matrices: Tensor, groups: RowGroups, factors: Tensor | None = None) -> Tensor:
    """Each token's sum of rows[r] @ matrices[i] over its rows, each times factors[r]: [rows, in] to [tokens, out]."""
    _check(rows, matrices, rows.shape[0], groups)
    of_groups = (groups.order, groups.ends, groups.slots, groups.complete)
    if factors is None:
        return _summed(rows, matrices, *of_groups)
    if not weighs_rows(rows, matrices, factors):
        return _summed(rows * factors[:, None], matrices, *of_groups)
    from polyhead.ops.selected_rows.kernels import grouped_product

    return grouped_product.summed(rows, matrices, *of_groups, factors)


def weighs_rows(rows: Tensor, matrices: Tensor, factors: Tensor) -> bool:
    """Whether `summed_product` weighs rows as it multiplies them, and so needs no tensor of weighed rows.

    A backward reads that tensor, and compilers and those who count know no kernel that does both.
    """
    given = (rows, matrices, factors)
    if torch.compiler.is_compiling() or is_transformed() or is_watched() or type(rows) is not Tensor or rows.is_meta:
        return False
    if rows.dtype is not matrices.dtype or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return False
    return _kernels_take(rows)


def _check(given: Tensor, matrices: Tensor, rows: int, groups: RowGroups) -> None:
    if given.ndim != 2 or matrices.ndim != 3 or given.shape[1] != matrices.shape[1]:
        raise ShapeError(
            "rows [rows, in] meet matrices [matrices, in, out], "
            f"got shapes {list(given.shape)} and {list(matrices.shape)}"
        )
    if groups.order.shape[0] != rows or groups.ends.shape[0] != matrices.shape[0]:
        raise ShapeError(
            f"the groups must be of these rows and matrices, got groups of {groups.order.shape[0]} rows in "
            f"{groups.ends.shape[0]} matrices for {rows} rows and {matrices.shape[0]} matrices"
        )


# ---- what is computed; all three take (left, right, order, ends, slots, complete), one a word on its layout besides


def _spread_rows(x: Tensor, matrices: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool) -> Tensor:
    if _kernels_take(x):
        from polyhead.ops.selected_rows.kernels import grouped_product

        return grouped_product.spread(x, matrices, order, ends, slots, complete)
    if _grouped_mm_takes(x, matrices):
        products = _without_tail(F.grouped_mm(x[order // slots], matrices, offs=ends), ends)
        return torch.empty_like(products).index_copy_(0, order, products)
    result = x.new_zeros(order.shape[0], matrices.shape[2])
    for index, matrix in _parts(order, ends, matrices):
        result[index] = x[index // slots] @ matrix
    return result


def _sum_rows(rows: Tensor, matrices: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool) -> Tensor:
    if _kernels_take(rows):
        from polyhead.ops.selected_rows.kernels import grouped_product

        return grouped_product.summed(rows, matrices, order, ends, slots, complete)
    tokens = order.shape[0] // slots
    if _grouped_mm_takes(rows, matrices):
        products = _without_tail(F.grouped_mm(rows[order], matrices, offs=ends), ends)
        return products[RowGroups(order, ends, slots).places].view(tokens, slots, -1).sum(1)
    wide = rows.dtype if rows.dtype is torch.float64 else torch.float32
    result = rows.new_zeros(tokens, matrices.shape[2], dtype=wide)
    for index, matrix in _parts(order, ends, matrices):
        result.index_add_(0, index // slots, (rows[index] @ matrix).to(wide))
    return result.to(rows.dtype)


def _outer_rows(
    x: Tensor, rows: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool, turned: bool
) -> Tensor:
    """The sum of x[r // slots]^T rows[r] over the rows of each group: [groups, x's width, rows' width].

    `turned`, it lies in memory as its transpose: a gradient in another layout than its weight's would be copied.
    """
    if not _kernels_take(x) and _grouped_mm_takes(x, rows):
        left, right = x[order // slots], rows[order]
        return F.grouped_mm(right.T, left, offs=ends).mT if turned else F.grouped_mm(left.T, right, offs=ends)
    result = _outer_result(x, rows, order, ends, slots, complete, turned)
    if _kernels_take(x):
        from polyhead.ops.selected_rows.kernels import grouped_product

        return grouped_product.outer(x, rows, order, ends, slots, result)
    result.zero_()
    for index, matrix in _parts(order, ends, result):
        matrix.copy_(x[index // slots].T @ rows[index])
    return result


def _outer_result(
    x: Tensor, rows: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool, turned: bool
) -> Tensor:
    if turned:
        return x.new_empty(ends.shape[0], rows.shape[1], x.shape[1]).mT
    return x.new_empty(ends.shape[0], x.shape[1], rows.shape[1])


def _parts(order: Tensor, ends: Tensor, matrices: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The rows of each matrix that has any, as indices, beside it. Waits for the device the ends are on."""
    bounds = pairwise([0, *ends.tolist()])
    return [(order[a:b], matrix) for (a, b), matrix in zip(bounds, matrices, strict=True) if b > a]


def _kernels_take(x: Tensor) -> bool:
    """Whether our kernels multiply, which gather rows as they go."""
    if not HAS_TRITON or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    if x.is_cuda:
        return torch.version.cuda is not None and capability(x.device.index) >= (8, 0)
    return x.is_cpu and IS_INTERPRETED


def _grouped_mm_takes(left: Tensor, right: Tensor) -> bool:
    """Whether PyTorch multiplies all groups in one kernel; it does so for bfloat16 whose rows are 16 bytes apart."""
    if not left.is_cuda or left.dtype is not torch.bfloat16 or torch.version.cuda is None:
        return False
    return left.shape[1] % 8 == 0 and right.shape[-1] % 8 == 0 and capability(left.device.index) >= (8, 0)


def _without_tail(products: Tensor, ends: Tensor) -> Tensor:
    """Rows that met no matrix, which PyTorch leaves as they were in memory, are zero."""
    is_met = torch.arange(products.shape[0], device=products.device) < ends[-1]
    return torch.where(is_met[:, None], products, 0)


# ---- their gradients


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left, right, order, ends, slots, complete, *_ = inputs
    ctx.sizes = (slots, complete)
    ctx.save_for_backward(left, right, order, ends)


def _spread_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, matrices, *groups = ctx.saved_tensors
    of_x = _summed(gradient, matrices.mT, *groups, *ctx.sizes) if ctx.needs_input_grad[0] else None
    of_matrices = _outer(x, gradient, *groups, *ctx.sizes, False) if ctx.needs_input_grad[1] else None
    return of_x, of_matrices, None, None, None, None


def _summed_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    rows, matrices, *groups = ctx.saved_tensors
    of_rows = _spread(gradient, matrices.mT, *groups, *ctx.sizes) if ctx.needs_input_grad[0] else None
    of_matrices = _outer(gradient, rows, *groups, *ctx.sizes, True).mT if ctx.needs_input_grad[1] else None
    return of_rows, of_matrices, None, None, None, None


def _outer_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, rows, *groups = ctx.saved_tensors
    of_x = _summed(rows, gradient.mT, *groups, *ctx.sizes) if ctx.needs_input_grad[0] else None
    of_rows = _spread(x, gradient, *groups, *ctx.sizes) if ctx.needs_input_grad[1] else None
    return of_x, of_rows, None, None, None, None, None


def _entered(name: str, compute: Callable[..., Tensor], fake: Callable[..., Tensor], backward: Any) -> Any:
    """A function that compilers meet as an operator, and everybody else on the tape of plain PyTorch.

    The tape costs less than an operator, and a counter of FLOPs sees the products behind it; but none of a kernel's,
    so that dispatch modes, of which a counter is one, meet an operator there as well.
    """
    operator = torch.library.custom_op(f"polyhead::{name}", compute, mutates_args=())
    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=_remember)

    def forward(ctx: Any, *arguments: Any) -> Tensor:
        output = compute(*arguments)
        _remember(ctx, arguments, output)
        return output

    def on_tape(**methods: Any) -> Any:
        return type(name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in methods.items()})

    # With a `setup_context`, which transforms need, PyTorch reads the signature in every call.
    recorded = on_tape(forward=forward, backward=backward)
    transformed = on_tape(forward=compute, setup_context=_remember, backward=backward)

    def call(left: Tensor, right: Tensor, *groups: Any) -> Tensor:
        is_real = type(left) in (Tensor, torch.nn.Parameter) and not left.is_meta
        if torch.compiler.is_compiling() or not is_real or (is_watched() and _kernels_take(left)):
            return operator(left, right, *groups)
        result: Tensor
        if is_transformed():
            result = transformed.apply(left, right, *groups)
        elif torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
            result = recorded.apply(left, right, *groups)
        else:
            result = compute(left, right, *groups)
        return result

    return call


_spread = _entered(
    "spread_product",
    _spread_rows,
    lambda x, matrices, order, ends, slots, complete: x.new_empty(order.shape[0], matrices.shape[2]),
    _spread_backward,
)
_summed = _entered(
    "summed_product",
    _sum_rows,
    lambda rows, matrices, order, ends, slots, complete: rows.new_empty(order.shape[0] // slots, matrices.shape[2]),
    _summed_backward,
)
_outer = _entered("row_outer_product", _outer_rows, _outer_result, _outer_backward)

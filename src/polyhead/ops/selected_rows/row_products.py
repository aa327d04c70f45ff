"""Grouped matrix products: each row is multiplied with one matrix of a stack.

A token has `slots` consecutive rows: row r belongs to token r // slots and is multiplied with its matrix of a stack
[matrices, in, out]. `spread_product` maps tokens to rows and `summed_product` maps rows back to tokens; each is the
transpose of the other, so gradients of any order use the same three operators.
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
from polyhead.ops.common.kernels.availability import capability, device_reasons
from polyhead.ops.common.tracing import is_transformed, is_watched


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Rows sorted by their matrix, those without a matrix last.

    Building it does not synchronise with the device.
    """

    order: Tensor  # int64 [rows]: stable, rows of a group keep their order
    ends: Tensor  # int32 [matrices]: the rows order[ends[i - 1] : ends[i]] are multiplied with matrix i
    slots: int  # rows per token
    complete: bool = False  # True if every row is known to have a matrix

    @classmethod
    def of(cls, chosen: Tensor, matrices: int, used: Tensor | None = None) -> Self:
        """Build the groups from the matrix of every row, [tokens, slots]; rows that are not `used` have none.

        >>> RowGroups.of(torch.tensor([[2, 0], [0, 1]]), matrices=3)
        RowGroups(order=tensor([1, 2, 3, 0]), ends=tensor([2, 3, 4], dtype=torch.int32), slots=2, complete=True)
        """
        if chosen.ndim != 2 or not chosen.shape[1] or (used is not None and used.shape != chosen.shape):
            used_shape = "" if used is None else f" and {list(used.shape)}"
            raise ShapeError(f"chosen and used must be [tokens, slots], got {list(chosen.shape)}{used_shape}")
        keys = chosen if used is None else torch.where(used, chosen, matrices)
        order, ends = sorted_groups(keys.reshape(-1), matrices)
        return cls(order, ends, chosen.shape[1], complete=used is None)

    @property
    def places(self) -> Tensor:
        """Inverse of `order`: the sorted index of each row, int64 [rows]."""
        return torch.empty_like(self.order).scatter_(
            0, self.order, torch.arange(self.order.shape[0], device=self.order.device)
        )


def sorted_groups(keys: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the stable order that sorts keys, and the end of each group in it, int32 [groups].

    The key `groups` belongs to no group and is sorted last.
    """
    # A radix sort needs one pass per byte. A symbolic size is not compared, which would add a guard.
    key_dtype = torch.int16 if isinstance(groups, int) and groups < 2**15 else torch.int32
    ordered, order = torch.sort(keys.to(key_dtype), stable=True)
    group_ids = torch.arange(groups, dtype=key_dtype, device=keys.device)
    return order, torch.searchsorted(ordered, group_ids, right=True, out_int32=True)


def spread_product(x: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
    """Return x[r // slots] @ matrices[i] for each row r, [tokens, in] to [rows, out].

    Rows without a matrix are zero.
    """
    _check(x, matrices, x.shape[0] * groups.slots, groups)
    return _spread(x, matrices, groups.order, groups.ends, groups.slots, groups.complete)


def summed_product(rows: Tensor, matrices: Tensor, groups: RowGroups, factors: Tensor | None = None) -> Tensor:
    """Sum factors[r] * rows[r] @ matrices[i] over the rows of each token: [rows, in] to [tokens, out]."""
    _check(rows, matrices, rows.shape[0], groups)
    group_arguments = (groups.order, groups.ends, groups.slots, groups.complete)
    if factors is None:
        return _summed(rows, matrices, *group_arguments)
    if not weighs_rows(rows, matrices, factors):
        return _summed(rows * factors[:, None], matrices, *group_arguments)
    from polyhead.ops.selected_rows.kernels import grouped_product

    return grouped_product.summed(rows, matrices, *group_arguments, factors)


def weighs_rows(rows: Tensor, matrices: Tensor, factors: Tensor) -> bool:
    """Return True if `summed_product` fuses the multiplication by `factors`.

    It then needs no tensor of scaled rows.

    It does not if a backward needs that tensor, or under compilers and dispatch modes, which do not know the kernel.
    """
    tensors = (rows, matrices, factors)
    if torch.compiler.is_compiling() or is_transformed() or is_watched() or type(rows) is not Tensor or rows.is_meta:
        return False
    if rows.dtype is not matrices.dtype or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    return _kernels_support(rows)


def _check(x: Tensor, matrices: Tensor, rows: int, groups: RowGroups) -> None:
    if x.ndim != 2 or matrices.ndim != 3 or x.shape[1] != matrices.shape[1]:
        raise ShapeError(
            f"rows must be [rows, in] and matrices [matrices, in, out], got shapes {list(x.shape)} and "
            f"{list(matrices.shape)}"
        )
    if groups.order.shape[0] != rows or groups.ends.shape[0] != matrices.shape[0]:
        raise ShapeError(
            f"groups must match the rows and matrices, got groups of {groups.order.shape[0]} rows in "
            f"{groups.ends.shape[0]} matrices for {rows} rows and {matrices.shape[0]} matrices"
        )


# ---- forward; all three take (left, right, order, ends, slots, complete), and the outer product also its layout


def _spread_rows(x: Tensor, matrices: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool) -> Tensor:
    if _kernels_support(x):
        from polyhead.ops.selected_rows.kernels import grouped_product

        return grouped_product.spread(x, matrices, order, ends, slots, complete)
    if _grouped_mm_takes(x, matrices):
        products = _zero_unassigned(F.grouped_mm(x[order // slots], matrices, offs=ends), ends)
        return torch.empty_like(products).index_copy_(0, order, products)
    result = x.new_zeros(order.shape[0], matrices.shape[2])
    for index, matrix in _parts(order, ends, matrices):
        result[index] = x[index // slots] @ matrix
    return result


def _sum_rows(rows: Tensor, matrices: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool) -> Tensor:
    if _kernels_support(rows):
        from polyhead.ops.selected_rows.kernels import grouped_product

        return grouped_product.summed(rows, matrices, order, ends, slots, complete)
    tokens = order.shape[0] // slots
    if _grouped_mm_takes(rows, matrices):
        products = _zero_unassigned(F.grouped_mm(rows[order], matrices, offs=ends), ends)
        return products[RowGroups(order, ends, slots).places].view(tokens, slots, -1).sum(1)
    accumulation_dtype = rows.dtype if rows.dtype is torch.float64 else torch.float32
    result = rows.new_zeros(tokens, matrices.shape[2], dtype=accumulation_dtype)
    for index, matrix in _parts(order, ends, matrices):
        result.index_add_(0, index // slots, (rows[index] @ matrix).to(accumulation_dtype))
    return result.to(rows.dtype)


def _outer_rows(
    x: Tensor, rows: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool, transposed: bool
) -> Tensor:
    """Sum x[r // slots]^T rows[r] over the rows of each group: [groups, x's width, rows' width].

    If `transposed`, its memory layout is that of its transpose: autograd would copy a gradient whose layout is not that
    of its weight.
    """
    if not _kernels_support(x) and _grouped_mm_takes(x, rows):
        left, right = x[order // slots], rows[order]
        return F.grouped_mm(right.T, left, offs=ends).mT if transposed else F.grouped_mm(left.T, right, offs=ends)
    result = _outer_result(x, rows, order, ends, slots, complete, transposed)
    if _kernels_support(x):
        from polyhead.ops.selected_rows.kernels import grouped_product

        return grouped_product.outer(x, rows, order, ends, slots, result)
    result.zero_()
    for index, matrix in _parts(order, ends, result):
        matrix.copy_(x[index // slots].T @ rows[index])
    return result


def _outer_result(
    x: Tensor, rows: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool, transposed: bool
) -> Tensor:
    if transposed:
        return x.new_empty(ends.shape[0], rows.shape[1], x.shape[1]).mT
    return x.new_empty(ends.shape[0], x.shape[1], rows.shape[1])


def _parts(order: Tensor, ends: Tensor, matrices: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (row indices, matrix) for each matrix with rows; synchronises with the device of `ends`."""
    bounds = pairwise([0, *ends.tolist()])
    return [(order[a:b], matrix) for (a, b), matrix in zip(bounds, matrices, strict=True) if b > a]


def _kernels_support(x: Tensor) -> bool:
    """Return True if the Triton kernels support `x`; they gather rows while multiplying."""
    return x.dtype in (torch.float16, torch.bfloat16, torch.float32) and not device_reasons(x.device)


def _grouped_mm_takes(left: Tensor, right: Tensor) -> bool:
    """Return True if `F.grouped_mm` supports the operands: bfloat16 with rows aligned to 16 bytes."""
    if not left.is_cuda or left.dtype is not torch.bfloat16 or torch.version.cuda is None:
        return False
    return left.shape[1] % 8 == 0 and right.shape[-1] % 8 == 0 and capability(left.device.index) >= (8, 0)


def _zero_unassigned(products: Tensor, ends: Tensor) -> Tensor:
    """Zero the rows without a matrix, which PyTorch leaves uninitialised."""
    is_assigned = torch.arange(products.shape[0], device=products.device) < ends[-1]
    return torch.where(is_assigned[:, None], products, 0)


# ---- gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left, right, order, ends, slots, complete, *_ = inputs
    ctx.sizes = (slots, complete)
    ctx.save_for_backward(left, right, order, ends)


def _spread_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, matrices, *groups = ctx.saved_tensors
    grad_x = _summed(gradient, matrices.mT, *groups, *ctx.sizes) if ctx.needs_input_grad[0] else None
    grad_matrices = _outer(x, gradient, *groups, *ctx.sizes, False) if ctx.needs_input_grad[1] else None
    return grad_x, grad_matrices, None, None, None, None


def _summed_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    rows, matrices, *groups = ctx.saved_tensors
    grad_rows = _spread(gradient, matrices.mT, *groups, *ctx.sizes) if ctx.needs_input_grad[0] else None
    grad_matrices = _outer(gradient, rows, *groups, *ctx.sizes, True).mT if ctx.needs_input_grad[1] else None
    return grad_rows, grad_matrices, None, None, None, None


def _outer_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, rows, *groups = ctx.saved_tensors
    grad_x = _summed(rows, gradient.mT, *groups, *ctx.sizes) if ctx.needs_input_grad[0] else None
    grad_rows = _spread(x, gradient, *groups, *ctx.sizes) if ctx.needs_input_grad[1] else None
    return grad_x, grad_rows, None, None, None, None, None


def _register(name: str, compute: Callable[..., Tensor], fake: Callable[..., Tensor], backward: Any) -> Any:
    """Return a function that is a custom operator for compilers and an autograd function otherwise.

    An autograd function costs less than an operator, and a FLOP counter sees the products inside it. It does not see
    those of a Triton kernel, so under dispatch modes, such as a FLOP counter, kernels are called as an operator too.
    """
    operator = torch.library.custom_op(f"polyhead::{name}", compute, mutates_args=())
    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=_setup_context)

    def forward(ctx: Any, *arguments: Any) -> Tensor:
        output = compute(*arguments)
        _setup_context(ctx, arguments, output)
        return output

    def autograd_function(**methods: Any) -> Any:
        return type(name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in methods.items()})

    # Transforms need `setup_context`, with which PyTorch inspects the signature in every call.
    eager = autograd_function(forward=forward, backward=backward)
    transformed = autograd_function(forward=compute, setup_context=_setup_context, backward=backward)

    def call(left: Tensor, right: Tensor, *groups: Any) -> Tensor:
        is_plain_tensor = type(left) in (Tensor, torch.nn.Parameter) and not left.is_meta
        if torch.compiler.is_compiling() or not is_plain_tensor or (is_watched() and _kernels_support(left)):
            return operator(left, right, *groups)
        result: Tensor
        if is_transformed():
            result = transformed.apply(left, right, *groups)
        elif torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
            result = eager.apply(left, right, *groups)
        else:
            result = compute(left, right, *groups)
        return result

    return call


_spread = _register(
    "spread_product",
    _spread_rows,
    lambda x, matrices, order, ends, slots, complete: x.new_empty(order.shape[0], matrices.shape[2]),
    _spread_backward,
)
_summed = _register(
    "summed_product",
    _sum_rows,
    lambda rows, matrices, order, ends, slots, complete: rows.new_empty(order.shape[0] // slots, matrices.shape[2]),
    _summed_backward,
)
_outer = _register("row_outer_product", _outer_rows, _outer_result, _outer_backward)

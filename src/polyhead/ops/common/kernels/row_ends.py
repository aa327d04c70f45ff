"""Find where queries see keys in a dense mask, a bias or documents: the first, the last, and whether all in between.

Memory-bound for a mask, which is read once; documents compare each pair of tokens, 268 million at 16,384 tokens. Plain
PyTorch needs four passes over a mask, and has to sort documents.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.launching import launch, wide
from polyhead.ops.common.kernels.mask_arguments import GAPS
from polyhead.ops.common.kernels.sizes import blocks_of

_BLOCK_M, _BLOCK_N = 32, 128
_GAPS = tl.constexpr(GAPS)

# First and last visible index of each row, [batch, rows], the number of columns and -1 if there is none; and again the
# first if all in between are visible, else `GAPS`. All are int32.
Ends = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _store_ends(first, last, count, ptr_first, ptr_last, ptr_full, offs, is_row, columns):
    """Reduce what was collected for each column of a tile, and store it."""
    first, last, count = tl.min(first, 1), tl.max(last, 1), tl.sum(count, 1)
    tl.store(ptr_first + offs, tl.minimum(first, columns), mask=is_row)
    tl.store(ptr_last + offs, last, mask=is_row)
    is_full = (count > 0) & (count == last - first + 1)
    tl.store(ptr_full + offs, tl.where(is_full, first, _GAPS), mask=is_row)
    return first, last


@triton.jit(do_not_specialize=("stride_batch", "stride_row", "stride_column", "rows", "columns"))
def mask_ends_kernel(
    ptr_mask, ptr_first, ptr_last, ptr_full, stride_batch, stride_row, stride_column, rows, columns,
    DENSE_AXIS: tl.constexpr, IS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Search a block of rows; DENSE_AXIS is the one whose stride is 1: 0 for rows, 1 for columns, 2 for none."""
    blocks = tl.cdiv(rows, BLOCK_M)
    i_batch = (tl.program_id(0) // blocks).to(tl.int64)
    offs_m = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < rows
    if DENSE_AXIS == 0:
        offs_row = offs_m.to(tl.int64)
    else:
        offs_row = offs_m.to(tl.int64) * stride_row
    ptr_rows = ptr_mask + i_batch * stride_batch + offs_row[:, None]
    first = tl.full([BLOCK_M, BLOCK_N], _GAPS, tl.int32)
    last = tl.full([BLOCK_M, BLOCK_N], -1, tl.int32)
    count = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for column in range(0, columns, BLOCK_N):
        offs_n = column + tl.arange(0, BLOCK_N)
        if DENSE_AXIS == 1:
            offs_column = offs_n.to(tl.int64)
        else:
            offs_column = offs_n.to(tl.int64) * stride_column
        inside = is_row[:, None] & (offs_n < columns)[None, :]
        # [BLOCK_M, BLOCK_N]
        if IS_BIAS:
            shown = tl.load(ptr_rows + offs_column[None, :], mask=inside, other=-float("inf")) != -float("inf")
        else:
            shown = tl.load(ptr_rows + offs_column[None, :], mask=inside, other=0) != 0
        first = tl.where(shown, tl.minimum(first, offs_n[None, :]), first)
        last = tl.where(shown, offs_n[None, :], last)
        count += shown.to(tl.int32)
    _store_ends(first, last, count, ptr_first, ptr_last, ptr_full, i_batch * rows + offs_m, is_row, columns)


@triton.jit(do_not_specialize=("stride_ids", "stride_others", "rows", "columns"))
def document_ends_kernel(
    ptr_ids, ptr_others, ptr_first, ptr_last, ptr_full, ptr_document, stride_ids, stride_others, rows, columns,
    NONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Search the ids of a block of rows among others; `ptr_document` is the first index, or NONE if there is none."""
    blocks = tl.cdiv(rows, BLOCK_M)
    i_batch = (tl.program_id(0) // blocks).to(tl.int64)
    offs_m = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < rows
    ids = tl.load(ptr_ids + i_batch * stride_ids + offs_m, mask=is_row, other=-1)
    first = tl.full([BLOCK_M, BLOCK_N], _GAPS, tl.int32)
    last = tl.full([BLOCK_M, BLOCK_N], -1, tl.int32)
    count = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for column in range(0, columns, BLOCK_N):
        offs_n = column + tl.arange(0, BLOCK_N)
        others = tl.load(ptr_others + i_batch * stride_others + offs_n, mask=offs_n < columns, other=-1)
        shown = (ids[:, None] == others[None, :]) & (ids >= 0)[:, None]
        first = tl.where(shown, tl.minimum(first, offs_n[None, :]), first)
        last = tl.where(shown, offs_n[None, :], last)
        count += shown.to(tl.int32)
    offs = i_batch * rows + offs_m
    first, last = _store_ends(first, last, count, ptr_first, ptr_last, ptr_full, offs, is_row, columns)
    tl.store(ptr_document + offs, tl.where(last >= 0, first, NONE), mask=is_row)


def mask_ends(mask: Tensor) -> Ends:
    """Return where the rows of a mask see columns.

    Args:
        mask: boolean, True for visible, or a bias, -inf for invisible; [batch, rows, columns] with any strides.
    """
    batch, rows, columns = mask.shape
    first, last, full = _empty(3, batch, rows, mask)
    if first.numel():
        dense_axis = 1 if mask.stride(2) == 1 else 0 if mask.stride(1) == 1 else 2
        constants = dense_axis, mask.dtype is not torch.bool, _BLOCK_M, _BLOCK_N
        variant = mask.get_device(), mask.dtype, mask.data_ptr() % 16, wide(*mask.stride())
        with torch.cuda.device_of(mask):
            arguments = (mask, first, last, full, *mask.stride(), rows, columns)
            launch(mask_ends_kernel, batch * blocks_of(rows, _BLOCK_M), arguments, constants, variant=variant)
    return first, last, full


def document_ends(ids: Tensor, others: Tensor, *, none: int) -> tuple[Tensor, Ends]:
    """Return ids that fit into 32 bits, and where tokens see others of the same document.

    Args:
        ids: of the tokens, [batch or 1, rows]; a negative one sees nothing.
        others: ids to match, [batch or 1, columns].
        none: new id of tokens that see nothing; every other token gets the index of the first one that it sees.
    """
    batch, rows, columns = max(ids.shape[0], others.shape[0]), ids.shape[1], others.shape[1]
    ids, others = (x if x.stride(1) == 1 else x.contiguous() for x in (ids, others))
    first, last, full, document = _empty(4, batch, rows, ids)
    if first.numel():
        strides = [x.stride(0) if x.shape[0] > 1 else 0 for x in (ids, others)]
        constants = none, _BLOCK_M, _BLOCK_N
        alignment = ids.data_ptr() % 16, others.data_ptr() % 16
        variant = ids.get_device(), ids.dtype, others.dtype, alignment, wide(*strides)
        with torch.cuda.device_of(ids):
            arguments = (ids, others, first, last, full, document, *strides, rows, columns)
            launch(document_ends_kernel, batch * blocks_of(rows, _BLOCK_M), arguments, constants, variant=variant)
    return document, (first, last, full)


def _empty(count: int, batch: int, rows: int, like: Tensor) -> list[Tensor]:
    return [torch.empty((batch, rows), dtype=torch.int32, device=like.device) for _ in range(count)]

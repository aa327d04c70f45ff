"""Find the first and the last visible column of each row of a dense mask or bias, and whether all between are visible.

Memory-bound: the mask is read once. PyTorch's `argmax` takes a multiple of the time of attention at 16,384 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.launching import launch
from polyhead.ops.common.kernels.sizes import blocks_of

_BLOCK_M, _BLOCK_N = 32, 128


@triton.jit(do_not_specialize=("stride_batch", "stride_row", "stride_column", "rows", "columns"))
def ends_kernel(
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
    first = tl.full([BLOCK_M], 2147483647, tl.int32)
    last = tl.full([BLOCK_M], -1, tl.int32)
    count = tl.zeros([BLOCK_M], tl.int32)
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
        first = tl.minimum(first, tl.min(tl.where(shown, offs_n[None, :], 2147483647), 1))
        last = tl.maximum(last, tl.max(tl.where(shown, offs_n[None, :], -1), 1))
        count += tl.sum(shown.to(tl.int32), 1)
    offs = i_batch * rows + offs_m
    tl.store(ptr_first + offs, tl.minimum(first, columns), mask=is_row)
    tl.store(ptr_last + offs, last, mask=is_row)
    is_full = (count > 0) & (count == last - first + 1)
    tl.store(ptr_full + offs, tl.where(is_full, first, 2147483647), mask=is_row)


def row_ends(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and the last visible column of each row, and again the first if all in between are visible.

    They are int32 [batch, rows]. A row without any has the number of columns and -1, and the third of a row with gaps
    is the largest int32.

    Args:
        mask: boolean, True for visible, or a bias, -inf for invisible; [batch, rows, columns] with any strides.
    """
    batch, rows, columns = mask.shape
    first, last, full = (torch.empty((batch, rows), dtype=torch.int32, device=mask.device) for _ in range(3))
    if not first.numel():
        return first, last, full
    dense_axis = 1 if mask.stride(2) == 1 else 0 if mask.stride(1) == 1 else 2
    is_bias = mask.dtype is not torch.bool
    wide = sum(1 << i for i, stride in enumerate(mask.stride()) if stride >> 31)
    variant = mask.get_device(), mask.dtype, mask.data_ptr() % 16, wide
    with torch.cuda.device_of(mask):
        arguments = (mask, first, last, full, *mask.stride(), rows, columns)
        programs = batch * blocks_of(rows, _BLOCK_M)
        launch(ends_kernel, programs, arguments, (dense_axis, is_bias, _BLOCK_M, _BLOCK_N), variant=variant)
    return first, last, full

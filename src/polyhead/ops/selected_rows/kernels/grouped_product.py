"""Grouped matrix product kernels, which gather rows on the fly.

Rows are sorted by matrix; `order` is the sorted order, and `ends` the end of the rows of each matrix. The number of
programs depends on sizes alone and each program searches its own rows, so nothing synchronises with the device.
Neighbouring programs process blocks of the same rank in different groups: rows of a group keep the order of their
tokens, so these programs gather from the same tokens, which are then in the L2 cache.

Compute-bound if the inner axis is long, bound by writing the rows if it is short.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernel_call import with_dense_rows
from polyhead.ops.common.kernels.availability import multiprocessors
from polyhead.ops.common.kernels.resources import launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim, power_of_two
from polyhead.ops.common.kernels.softmax_tiles import add_product

# Up to this many channels the inner axis is one block, and a program loops over the outer axis instead.
_SHORT_INNER = 256
_WAVES = 4  # programs per multiprocessor, if there are enough: fewer and longer programs load rows less often


class Groups(NamedTuple):
    """Assignment of rows to matrices, as kernels read it."""

    order: Any  # int64 [rows]
    ends: Any  # int32 [matrices]
    matrices: Any
    slots: Any  # rows per token


class Matrix(NamedTuple):
    """Pointer and strides of a stack of matrices, or of rows, whose first stride is 0."""

    pointer: Any
    stride: Any
    stride_row: Any
    stride_column: Any


class Tile(NamedTuple):
    """Rows, columns and inner channels of a tile, warps, and pipeline stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    def smaller(self) -> Tile | None:
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        if self.columns > 32:
            return self._replace(columns=self.columns // 2)
        return self._replace(rows=self.rows // 2) if self.rows > 16 else None


@triton.jit
def _find_rows(groups, i_program, BLOCK_M: tl.constexpr, BLOCK_GROUPS: tl.constexpr, STEPS: tl.constexpr):
    """Return the group of a program and its rows.

    Programs take block 0 of every group, then block 1, and so on.
    """
    # [BLOCK_GROUPS]
    offs_group = tl.arange(0, BLOCK_GROUPS)
    mask_group = offs_group < groups.matrices
    stops = tl.load(groups.ends + offs_group, mask=mask_group, other=0)
    starts = tl.load(groups.ends + offs_group - 1, mask=mask_group & (offs_group > 0), other=0)
    blocks = (stops - starts + BLOCK_M - 1) // BLOCK_M
    # Binary search for the last rank with no more than i_program blocks before it.
    rank, upper = 0, 1 << STEPS
    for _ in range(STEPS):
        middle = (rank + upper) // 2
        before = tl.sum(tl.minimum(blocks, middle), 0)
        rank = tl.where(before <= i_program, middle, rank)
        upper = tl.where(before <= i_program, upper, middle)
    index = i_program - tl.sum(tl.minimum(blocks, rank), 0)
    has_rank = (blocks > rank).to(tl.int32)
    is_group = (has_rank > 0) & (tl.cumsum(has_rank, 0) == index + 1)
    i_group = tl.sum(tl.where(is_group, offs_group, 0), 0)
    first = tl.sum(tl.where(is_group, starts, 0), 0) + rank * BLOCK_M
    stop = tl.sum(tl.where(is_group, stops, 0), 0)
    # Without such a group there are fewer blocks than programs, and this program has nothing to do.
    has_block = tl.sum(is_group.to(tl.int32), 0) > 0
    return i_group, tl.where(has_block, first, 0), tl.where(has_block, stop, 0)


@triton.jit
def _long_kernel(
    left,
    stack,
    result,
    groups,
    inner,
    columns,
    BY_TOKEN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Multiply a block of rows with a block of columns, with a loop over a long inner axis."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    i_program = tl.program_id(0)
    i_group, first, stop = _find_rows(groups, i_program // tiles_n, BLOCK_M, BLOCK_GROUPS, STEPS)
    if first >= stop:
        return
    # [BLOCK_M]
    offs_m = first + tl.arange(0, BLOCK_M)
    mask_m = offs_m < stop
    rows = tl.load(groups.order + offs_m, mask=mask_m, other=0).to(tl.int32)  # 64-bit division is slow
    source_rows = rows // groups.slots if BY_TOKEN else rows
    offs_n = (i_program % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < columns
    offs_k = tl.arange(0, BLOCK_K)
    # [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_N]
    ptr_left = left.pointer + (source_rows.to(tl.int64) * left.stride_row)[:, None] + offs_k[None, :]
    ptr_matrix = stack.pointer + i_group.to(tl.int64) * stack.stride
    ptr_matrix += offs_k.to(tl.int64)[:, None] * stack.stride_row + offs_n.to(tl.int64)[None, :] * stack.stride_column
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        if EVEN:
            tile_left = tl.load(ptr_left, mask=mask_m[:, None], other=0.0)
            tile_matrix = tl.load(ptr_matrix)
        else:
            mask_k = start + offs_k < inner
            tile_left = tl.load(ptr_left, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            tile_matrix = tl.load(ptr_matrix, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = add_product(acc, tile_left, tile_matrix)
        ptr_left += BLOCK_K
        ptr_matrix += BLOCK_K * stack.stride_row
    ptr_result = result.pointer + (rows.to(tl.int64) * result.stride_row)[:, None] + offs_n[None, :]
    mask_result = mask_m[:, None] if EVEN else mask_m[:, None] & mask_n[None, :]
    tl.store(ptr_result, acc.to(result.pointer.dtype.element_ty), mask=mask_result)


@triton.jit
def _short_kernel(
    left,
    stack,
    result,
    groups,
    ptr_factors,
    inner,
    columns,
    columns_per_program,
    BY_TOKEN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Multiply a block of rows over a short inner axis, with a loop over columns.

    Each row is multiplied by its factor, if any.
    """
    programs_per_block = tl.cdiv(columns, columns_per_program)
    i_program = tl.program_id(0)
    i_group, first, stop = _find_rows(groups, i_program // programs_per_block, BLOCK_M, BLOCK_GROUPS, STEPS)
    if first >= stop:
        return
    # [BLOCK_M]
    offs_m = first + tl.arange(0, BLOCK_M)
    mask_m = offs_m < stop
    rows = tl.load(groups.order + offs_m, mask=mask_m, other=0).to(tl.int32)  # 64-bit division is slow
    source_rows = rows // groups.slots if BY_TOKEN else rows
    offs_k = tl.arange(0, BLOCK_K)
    # [BLOCK_M, BLOCK_K]
    ptr_left = left.pointer + (source_rows.to(tl.int64) * left.stride_row)[:, None] + offs_k[None, :]
    tile_left = tl.load(ptr_left, mask=mask_m[:, None] & (offs_k < inner)[None, :], other=0.0)
    if ptr_factors is not None:
        factors = tl.load(ptr_factors + rows, mask=mask_m, other=0.0).to(tl.float32)
        tile_left = (tile_left.to(tl.float32) * factors[:, None]).to(tile_left.dtype)
    start = (i_program % programs_per_block) * columns_per_program
    ptr_matrix = stack.pointer + i_group.to(tl.int64) * stack.stride + offs_k.to(tl.int64)[:, None] * stack.stride_row
    ptr_result = result.pointer + (rows.to(tl.int64) * result.stride_row)[:, None]
    for first_column in range(start, tl.minimum(start + columns_per_program, columns), BLOCK_N):
        offs_n = first_column + tl.arange(0, BLOCK_N)
        # [BLOCK_K, BLOCK_N]
        ptr_tile = ptr_matrix + offs_n.to(tl.int64)[None, :] * stack.stride_column
        if EVEN:
            tile_matrix = tl.load(ptr_tile)
            mask_result = mask_m[:, None]
        else:
            mask_n = offs_n < columns
            tile_matrix = tl.load(ptr_tile, mask=(offs_k < inner)[:, None] & mask_n[None, :], other=0.0)
            mask_result = mask_m[:, None] & mask_n[None, :]
        acc = tl.dot(tile_left, tile_matrix)
        tl.store(ptr_result + offs_n[None, :], acc.to(result.pointer.dtype.element_ty), mask=mask_result)


@triton.jit
def _sum_kernel(ptr_products, ptr_used, ptr_result, slots, columns, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum the rows of each token that have a matrix."""
    blocks = tl.cdiv(columns, BLOCK_N)
    i_token = (tl.program_id(0) // blocks).to(tl.int64)
    offs_n = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < columns
    acc = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, slots, BLOCK_S):
        # [BLOCK_S]
        offs_s = start + tl.arange(0, BLOCK_S)
        mask_s = offs_s < slots
        rows = i_token * slots + offs_s
        if ptr_used is not None:
            mask_s = tl.load(ptr_used + rows, mask=mask_s, other=0) != 0
        # [BLOCK_S, BLOCK_N]; a thread has all rows of its columns, and so many loads in flight
        ptr_tile = ptr_products + (rows * columns)[:, None] + offs_n[None, :]
        tile = tl.load(ptr_tile, mask=mask_s[:, None] & mask_n[None, :], other=0.0)
        acc += tl.sum(tile.to(tl.float32), 0)
    tl.store(ptr_result + i_token * columns + offs_n, acc.to(ptr_result.dtype.element_ty), mask=mask_n)


@triton.jit
def _outer_kernel(
    left,
    right,
    result,
    groups,
    left_columns,
    right_columns,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a block of left^T right over the rows of one group, with a loop over the rows."""
    tiles_n = tl.cdiv(right_columns, BLOCK_N)
    tiles = tl.cdiv(left_columns, BLOCK_M) * tiles_n
    i_group = tl.program_id(0) // tiles
    i_tile = tl.program_id(0) % tiles
    first = tl.load(groups.ends + i_group - 1, mask=i_group > 0, other=0)
    stop = tl.load(groups.ends + i_group)
    offs_m = (i_tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (i_tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, stop, BLOCK_K):
        # [BLOCK_K]
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < stop)[:, None]
        rows = tl.load(groups.order + offs_k, mask=offs_k < stop, other=0).to(tl.int32)
        ptr_left = left.pointer + ((rows // groups.slots).to(tl.int64) * left.stride_row)[:, None] + offs_m[None, :]
        ptr_right = right.pointer + (rows.to(tl.int64) * right.stride_row)[:, None] + offs_n[None, :]
        # [BLOCK_K, BLOCK_M] and [BLOCK_K, BLOCK_N]
        if EVEN:
            tile_left = tl.load(ptr_left, mask=mask_k, other=0.0)
            tile_right = tl.load(ptr_right, mask=mask_k, other=0.0)
        else:
            tile_left = tl.load(ptr_left, mask=mask_k & (offs_m < left_columns)[None, :], other=0.0)
            tile_right = tl.load(ptr_right, mask=mask_k & (offs_n < right_columns)[None, :], other=0.0)
        acc = add_product(acc, tl.trans(tile_left), tile_right)
    ptr_result = result.pointer + i_group.to(tl.int64) * result.stride
    ptr_result += (offs_m.to(tl.int64) * result.stride_row)[:, None]
    ptr_result += (offs_n.to(tl.int64) * result.stride_column)[None, :]
    mask_result = (offs_m < left_columns)[:, None] & (offs_n < right_columns)[None, :]
    tl.store(ptr_result, acc.to(result.pointer.dtype.element_ty), mask=mask_result)


def spread(x: Tensor, matrices: Tensor, order: Tensor, ends: Tensor, slots: int, complete: bool) -> Tensor:
    """Return x[r // slots] @ matrices[i] for each row r.

    Rows without a matrix are zero; `complete` means that there are none.
    """
    allocate = x.new_empty if complete else x.new_zeros
    result = allocate(order.shape[0], matrices.shape[2])
    _multiply(x, matrices, order, ends, slots, result, by_token=True)
    return result


def summed(
    rows: Tensor,
    matrices: Tensor,
    order: Tensor,
    ends: Tensor,
    slots: int,
    complete: bool,
    factors: Tensor | None = None,
) -> Tensor:
    """Return each token's sum of rows[r] @ matrices[i], accumulated in float32.

    Row r is multiplied by factors[r], if any.
    """
    tokens, columns = order.shape[0] // slots, matrices.shape[2]
    products = rows.new_empty(order.shape[0], columns)
    _multiply(rows, matrices, order, ends, slots, products, by_token=False, factors=factors)
    result = rows.new_empty(tokens, columns)
    if not result.numel():
        return result
    used = None
    if not complete:
        is_assigned = (torch.arange(order.shape[0], device=order.device) < ends[-1]).to(torch.uint8)
        used = torch.empty_like(is_assigned).scatter_(0, order, is_assigned)
    block = min(power_of_two(columns), 2048)
    _sum_kernel[(tokens * blocks_of(columns, block),)](
        products, used, result, slots, columns, BLOCK_S=min(power_of_two(slots), 8), BLOCK_N=block
    )
    return result


def outer(x: Tensor, rows: Tensor, order: Tensor, ends: Tensor, slots: int, result: Tensor) -> Tensor:
    """Write the sum of x[r // slots]^T rows[r] over each group: [groups, x's width, rows' width]."""
    if not result.numel():
        return result
    x, rows = with_dense_rows(x), with_dense_rows(rows)
    left_columns, right_columns = x.shape[1], rows.shape[1]
    groups = Groups(order, ends, ends.shape[0], slots)
    largest_tile = Tile(32, 32, 32, 4, 2) if x.dtype is torch.float32 else Tile(128, 128, 64, 8, 6)
    largest_tile = _fit_tile(largest_tile, rows=left_columns, columns=right_columns)

    def launch(tile: Tile) -> None:
        tiles = blocks_of(left_columns, tile.rows) * blocks_of(right_columns, tile.columns)
        _outer_kernel[(ends.shape[0] * tiles,)](
            _as_matrix(x),
            _as_matrix(rows),
            Matrix(result, *result.stride()),
            groups,
            left_columns,
            right_columns,
            EVEN=left_columns % tile.rows == 0 and right_columns % tile.columns == 0,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.inner,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    launch_fitting(launch, largest_tile, Tile.smaller, lambda: ("outer", x.device.index, x.dtype, largest_tile))
    return result


def _multiply(
    left: Tensor,
    matrices: Tensor,
    order: Tensor,
    ends: Tensor,
    slots: int,
    result: Tensor,
    *,
    by_token: bool,
    factors: Tensor | None = None,
) -> None:
    """Write left[r // slots] @ matrices[i] to the rows that have a matrix.

    It is left[r] @ matrices[i] if not `by_token`.
    """
    rows, inner, columns = order.shape[0], matrices.shape[1], matrices.shape[2]
    if not (rows and columns):
        return
    left = with_dense_rows(left)
    stack = Matrix(matrices, *matrices.stride())
    groups = Groups(order, ends, ends.shape[0], slots)
    # In float32 a tile over the full inner axis would need too many registers.
    is_short = inner <= _SHORT_INNER and left.dtype is not torch.float32
    if factors is not None:
        left, factors = (left, factors.contiguous()) if is_short else (left * factors[:, None], None)
    largest_tile = _choose_tile(left.dtype, is_short, inner, columns)

    def launch(tile: Tile) -> None:
        blocks = rows // tile.rows + min(ends.shape[0], rows)
        # No group has more blocks than all rows together would fill.
        steps = blocks_of(rows, tile.rows).bit_length()
        constants: dict[str, Any] = {
            "BY_TOKEN": by_token,
            "EVEN": inner % tile.inner == 0 and columns % tile.columns == 0,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.inner,
            "BLOCK_GROUPS": power_of_two(ends.shape[0]),
            "STEPS": steps,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        operands = (_as_matrix(left), stack, Matrix(result, 0, result.stride(0), 1), groups)
        if is_short:
            columns_per_program = _columns_per_program(
                columns, tile.columns, blocks, _WAVES * multiprocessors(left.get_device())
            )
            _short_kernel[(blocks * blocks_of(columns, columns_per_program),)](
                *operands, factors, inner, columns, columns_per_program, **constants
            )
        else:
            _long_kernel[(blocks * blocks_of(columns, tile.columns),)](*operands, inner, columns, **constants)

    launch_fitting(
        launch, largest_tile, Tile.smaller, lambda: ("grouped", left.device.index, left.dtype, is_short, largest_tile)
    )


def _choose_tile(dtype: torch.dtype, is_short: bool, inner: int, columns: int) -> Tile:
    if dtype is torch.float32:
        tile = Tile(64, 64, 32, 4, 2)
    elif is_short:
        tile = Tile(128, 64, padded_dim(inner), 8, 3)
    else:
        tile = Tile(128, 128, 64, 8, 3) if columns >= 128 else Tile(128, 64, 64, 4, 4)
    return _fit_tile(tile, columns=columns)


def _columns_per_program(columns: int, tile_columns: int, blocks: int, min_programs: int) -> int:
    """Return the columns per program: all, or fewer if there would be too few programs.

    >>> _columns_per_program(4096, 128, 544, 528), _columns_per_program(4096, 128, 48, 528)
    (4096, 256)
    """
    columns_per_program = blocks_of(columns, tile_columns) * tile_columns
    while columns_per_program > tile_columns and blocks * blocks_of(columns, columns_per_program) < min_programs:
        columns_per_program = blocks_of(columns_per_program // 2, tile_columns) * tile_columns
    return columns_per_program


def _fit_tile(tile: Tile, *, columns: int, rows: int | None = None) -> Tile:
    """Limit a tile to the size of the problem, but not below the minimum of the tensor cores."""
    tile = tile._replace(columns=min(tile.columns, padded_dim(columns)))
    return tile if rows is None else tile._replace(rows=min(tile.rows, padded_dim(rows)))


def _as_matrix(rows: Tensor) -> Matrix:
    return Matrix(rows, 0, rows.stride(0), 1)

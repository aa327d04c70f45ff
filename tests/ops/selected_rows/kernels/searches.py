"""A kernel that runs the row searches of the selected-rows kernels alone, for their tests."""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.selected_rows.kernels.tiles import find_rows, first_from


@triton.jit
def search_kernel(rows, ptr_result, BLOCK_M: tl.constexpr):
    """Store for each program its pair, first row and end, and the first row of pair 0 from query 7 * program on."""
    i_pair, first_row, stop_row = find_rows(rows, tl.program_id(0), BLOCK_M)
    ptr = ptr_result + tl.program_id(0) * 4
    tl.store(ptr, i_pair)
    tl.store(ptr + 1, first_row)
    tl.store(ptr + 2, stop_row)
    tl.store(ptr + 3, first_from(rows, tl.load(rows.offsets), tl.load(rows.offsets + 1), tl.program_id(0) * 7))

"""A kernel that computes the bins of offsets; Triton compiles only functions at the top level of a module."""

import triton
import triton.language as tl

from polyhead.ops.profile.kernels.offsets import bin_end, offset_bin


@triton.jit
def bins_kernel(ptr_offset, ptr_bin, ptr_end, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(ptr_offset + offs, mask=offs < count, other=0)
    tl.store(ptr_bin + offs, offset_bin(offset), mask=offs < count)
    tl.store(ptr_end + offs, bin_end(offset), mask=offs < count)

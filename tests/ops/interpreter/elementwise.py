"""Kernels that apply arithmetic functions of `softmax_tiles` to a tensor; imported only if Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.softmax_tiles import add_product, exp2, log2, tanh, tanh_slope

BLOCK = 2048


@triton.jit
def _kernel(ptr_x, ptr_result, size, NAME: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(ptr_x + offs, mask=offs < size, other=1.0)
    if NAME == "exp2":
        result = exp2(x, True)
    elif NAME == "log2":
        result = log2(x, True)
    elif NAME == "tanh_slope":
        result = tanh_slope(x, tanh(x, True), True)
    else:
        result = tanh(x, NAME == "exact_tanh")
    tl.store(ptr_result + offs, result, mask=offs < size)


def apply(name: str, x: Tensor) -> Tensor:
    """Return the function `name` of x: exp2, log2, tanh, exact_tanh (tanh with EXACT) or tanh_slope."""
    result = torch.full_like(x, torch.nan)
    _kernel[(triton.cdiv(x.numel(), BLOCK),)](x, result, x.numel(), NAME=name, BLOCK=BLOCK)
    return result


@triton.jit
def _add_kernel(ptr_total, ptr_a, ptr_b, SIDE: tl.constexpr):
    offs = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    total = add_product(tl.load(ptr_total + offs), tl.load(ptr_a + offs), tl.load(ptr_b + offs))
    tl.store(ptr_total + offs, total)


def added(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a @ b of square tensors."""
    result = total.clone()
    _add_kernel[(1,)](result, a, b, SIDE=total.shape[0])
    return result

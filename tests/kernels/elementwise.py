"""Kernels that apply one function of the kernels' arithmetic to every element; imported where Triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.kernels.softmax_tiles import exp2, log2, tanh

BLOCK = 256


@triton.jit
def _kernel(ptr_x, ptr_result, size, NAME: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(ptr_x + offs, mask=offs < size, other=1.0)
    if NAME == "exp2":
        result = exp2(x, True)
    elif NAME == "log2":
        result = log2(x, True)
    else:
        result = tanh(x)
    tl.store(ptr_result + offs, result, mask=offs < size)


def apply(name: str, x: Tensor) -> Tensor:
    result = torch.full_like(x, torch.nan)
    _kernel[(triton.cdiv(x.numel(), BLOCK),)](x, result, x.numel(), NAME=name, BLOCK=BLOCK)
    return result

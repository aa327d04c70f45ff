"""Tensors at addresses that PyTorch's attention kernels for GPUs can read.

They load 16 bytes at a time, and PyTorch does not check that rows start at multiples of 16 bytes. Where they do not,
cuDNN returns wrong numbers without an error, and the other kernels raise, in part errors after which the process cannot
use the device any more (docs/attention.md has a reproduction).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from polyhead.ops.common.tracing import is_traced, is_transformed

_BYTES = 16


def aligned(x: Tensor) -> Tensor:
    """Return a tensor whose rows start at multiples of 16 bytes: itself, or a contiguous copy.

    Rows whose length is no multiple of 16 bytes need less: PyTorch pads them, or takes a kernel with shorter loads.
    Traced and transformed tensors have no address, and are returned as they are.
    """
    if is_traced(x) or is_transformed():
        return x
    if x.data_ptr() % _BYTES == 0 and _has_aligned_strides(x.shape, x.stride(), x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def _has_aligned_strides(shape: torch.Size, strides: tuple[int, ...], element_size: int) -> bool:
    unit = math.gcd(_BYTES, shape[-1] * element_size)
    steps = (stride * element_size for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1)
    return all(step % unit == 0 for step in steps)

"""Tensors at addresses that PyTorch's attention kernels for GPUs can read.

They load 16 bytes at a time, and PyTorch does not check that rows start at multiples of 16 bytes. Where they do not,
cuDNN returns wrong numbers without an error, and the other kernels raise; after some of these errors the process cannot
use the device any more. docs/attention.md has a reproduction.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from polyhead.ops.common.tracing import is_transformed

_BYTES = 16


def aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose rows start at multiples of 16 bytes: each as it is, or a contiguous copy.

    Rows whose length is no multiple of 16 bytes need less: PyTorch pads them, or takes a kernel with shorter loads.
    Traced and transformed tensors have no address, and are returned as they are.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return tensors
    return tuple(x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors)


def _is_aligned(x: Tensor) -> bool:
    """Return True if the kernels can read the tensor, or if it has no address that could be read here."""
    if x.is_meta or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # such as fake tensors and DTensor
        return True
    if x.data_ptr() % _BYTES:
        return False
    return x.is_contiguous() or _has_aligned_strides(x.shape, x.stride(), x.element_size())


@functools.lru_cache(maxsize=4096)
def _has_aligned_strides(shape: torch.Size, strides: tuple[int, ...], element_size: int) -> bool:
    unit = math.gcd(_BYTES, shape[-1] * element_size)
    steps = (stride * element_size for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1)
    return all(step % unit == 0 for step in steps)

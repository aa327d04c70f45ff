"""Descriptors of the tensor memory accelerator (TMA) and row sums, shared by the Hopper kernels."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from polyhead.ops.common.kernels.availability import capability

if TYPE_CHECKING:
    from polyhead.ops.common.kernel_call import KernelCall

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_DESCRIBED = {**DTYPES, torch.float32: gl.float32}  # sums in memory


@gluon.jit
def row_sums(x, BLOCK_N: gl.constexpr):
    """Return partial row sums [64, 4], one for each of the four threads that share a row."""
    by_thread = gl.permute(gl.reshape(x, [64, BLOCK_N // 8, 4, 2]), (0, 2, 1, 3))
    return gl.sum(gl.reshape(by_thread, [64, 4, BLOCK_N // 4]), axis=2)


def is_readable(x: Tensor) -> bool:
    """Return True if TMA can address the tensor: strides and data pointer are multiples of 16 bytes."""
    batch, head, token, channel = x.stride()
    is_dense = channel == 1 and min(batch, head, token) > 0 and x.numel() > 0
    return is_dense and x.data_ptr() % 16 == 0 and (batch | head | token) * x.element_size() % 16 == 0


def supports_band(call: KernelCall, query: Tensor, num_queries: int) -> bool:
    """Return True if the kernels for a band of keys support the tensors and the mask of a call.

    `query` is [batch, heads, rows, head_dim], where the rows are all or some of the `num_queries` queries.
    """
    keys, mask = call.key.shape[2], call.mask
    return (
        query.dtype in DTYPES
        and capability(query.device.index)[0] == 9
        and all(32 < x.shape[3] <= 128 and is_readable(x) for x in (query, call.key, call.value))
        and 0 < num_queries <= keys
        and mask.offset == keys - num_queries
        and mask.is_band
    )


_MOST_KNOWN = 4096
_descriptors: dict[Hashable, dict[str, Any]] = {}  # validated fields of descriptors, without the tensor


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a TMA descriptor of [batch, heads, tokens, dim] for blocks of `rows` tokens and `columns` channels.

    Sizes and strides are validated once, which takes longer than the rest.
    """
    properties = x.shape, x.stride(), x.dtype, rows, columns, x.data_ptr() % 16
    known = _descriptors.get(properties)
    if known is None:
        layout = _layout(rows, columns, x.dtype)
        result = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns], layout)
        if len(_descriptors) >= _MOST_KNOWN:
            _descriptors.clear()
        _descriptors[properties] = {name: field for name, field in vars(result).items() if name != "base"}
        return result
    result = object.__new__(TensorDescriptor)
    vars(result).update(known, base=x)
    return result


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _DESCRIBED[dtype])

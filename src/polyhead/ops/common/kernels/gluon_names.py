"""Operations of Gluon under one name, where their names differ between Triton 3.6 and 3.9."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _async_add(descriptor: Any, coordinates: Any, smem: Any, _semantic: Any = None) -> None:
    handles = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, handles, smem.handle)


barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# (descriptor, coordinates, mbarrier, shared memory, pred)
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# (descriptor, coordinates, shared memory); `async_add` adds to global memory atomically, in no defined order
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
async_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _async_add

"""Gradients of attention for Hopper, in Gluon: a faster `backward` for bands of keys.

A warp-specialised pipeline like FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608). One program keeps 128 keys and
their values in shared memory and their gradients in registers, and loops over the rows that see them, of all query
heads that share them. A producer warpgroup copies queries, output gradients and row terms into shared memory; two
warpgroups compute five products per tile, transposed, so that weights and gradients of logits are operands from
registers. The tensor memory accelerator adds gradients of queries to a float32 tensor in global memory, which a second
kernel rounds. These sums are in any order: gradients of keys and values are deterministic, those of queries are not.

Bound by tensor cores. The terms are those of `kernels.backward`: the gradient of a statistic is a part of C and at most
a logarithm and two multiply-adds per weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from polyhead.ops.attention.kernels.backward_tiles import fresh_like
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.gluon_names import async_add, async_load, async_store, barrier
from polyhead.ops.common.kernels.hopper import descriptor, is_readable, supports_band
from polyhead.ops.common.kernels.launching import FAR, bounded, launch
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E

_DISTANCES = "mean_distance", "mean_offset"
_TERMS = frozenset(("logsumexp", "confidence", "entropy", *_DISTANCES))
_BLOCK_M, _BLOCK_N = 64, 128
_TINY = gl.constexpr(1.0e-37)
_EMPTY = gl.constexpr(1.0e30)  # log-sum-exp of a row without keys: finite, so that 0 times a shifted logit is 0


@gluon.jit
def _log2(x):
    """Return the logarithm of numbers that are not denormal; `gl.log2` is not an instruction but a polynomial."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _tile_range(i_block, num_queries, num_keys, offset, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the tiles of rows that see a block of keys: first, first full one, end of the full ones, end."""
    first_key = i_block * BLOCK_N
    last_key = gl.minimum(first_key + BLOCK_N, num_keys) - 1
    tiles = (num_queries + BLOCK_M - 1) // BLOCK_M
    start = gl.maximum(first_key - right - offset, 0) // BLOCK_M
    stop = gl.minimum(gl.maximum(last_key + left - offset, 0) // BLOCK_M + 1, tiles)
    # A row i sees key j if i + offset - left <= j <= i + offset + right.
    full_start = (gl.maximum(last_key - right - offset, 0) + BLOCK_M - 1) // BLOCK_M
    full_stop = gl.maximum(first_key + left - offset + 1, 0) // BLOCK_M
    full_start = gl.where(first_key + BLOCK_N > num_keys, stop, full_start)
    full_start = gl.minimum(gl.maximum(full_start, start), stop)
    full_stop = gl.minimum(gl.maximum(full_stop, full_start), stop)
    # The last rows may end inside a tile: their log-sum-exp is +inf.
    full_stop = gl.where(first_key + left - offset >= num_queries - 1, stop, full_stop)
    return start, full_start, full_stop, stop


@gluon.jit
def _producer(
    desc_q, desc_do, desc_k, desc_v, q_smem, do_smem, k_smem, v_smem, rows_smem, loaded, ready, free,
    ptr_lse, ptr_constant, ptr_entropy, ptr_distance, ptr_offset,
    kv_heads, group, num_queries, num_keys, offset, left, right, blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of the program, then the queries, output gradients and row terms of each tile.

    Row terms that the consumers loaded themselves took 40% of their time.
    """
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i_block = gl.program_id(0) % blocks
    i_pair = gl.program_id(0) // blocks
    i_batch = i_pair // kv_heads
    i_kv_head = i_pair % kv_heads
    mbarrier.expect(loaded.index(0), desc_k.block_type.nbytes + desc_v.block_type.nbytes)
    async_load(desc_k, [i_batch, i_kv_head, i_block * BLOCK_N, 0], loaded.index(0), k_smem)
    async_load(desc_v, [i_batch, i_kv_head, i_block * BLOCK_N, 0], loaded.index(0), v_smem)
    start, _, _, stop = _tile_range(i_block, num_queries, num_keys, offset, left, right, BLOCK_M, BLOCK_N)
    step = 0
    for i_member in range(group):
        i_head = i_kv_head * group + i_member
        i_row = (i_batch * kv_heads * group + i_head).to(gl.int64) * num_queries
        for tile in range(start, stop):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, desc_q.block_type.nbytes + desc_do.block_type.nbytes)
            async_load(desc_q, [i_batch, i_head, tile * BLOCK_M, 0], bar, q_smem.index(stage))
            async_load(desc_do, [i_batch, i_head, tile * BLOCK_M, 0], bar, do_smem.index(stage))
            offs = tile * BLOCK_M + gl.arange(0, BLOCK_M, ROWS)
            is_row = offs < num_queries
            offs += i_row
            lse = gl.load(ptr_lse + offs, mask=is_row, other=_EMPTY)
            lse = gl.where(lse == float("-inf"), _EMPTY, lse * LOG2E)
            rows_smem.index(stage * 8 + 0).store(lse)
            rows_smem.index(stage * 8 + 1).store(gl.load(ptr_constant + offs, mask=is_row, other=0.0))
            if ptr_entropy is not None:
                rows_smem.index(stage * 8 + 2).store(gl.load(ptr_entropy + offs, mask=is_row, other=0.0) * LN2)
            if ptr_distance is not None:
                rows_smem.index(stage * 8 + 3).store(gl.load(ptr_distance + offs, mask=is_row, other=0.0))
            if ptr_offset is not None:
                rows_smem.index(stage * 8 + 4).store(gl.load(ptr_offset + offs, mask=is_row, other=0.0))
            mbarrier.arrive(bar, count=1)
            step += 1


@gluon.jit
def _add_tiles(
    dk, dv, step, from_tile, to_tile,
    desc_dq, q_smem, do_smem, k_smem, v_smem, rows_smem, ds_smem, dq_smem, ready, free,
    i_batch, i_head, first_key, num_keys, offset, left, right, scale2,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, OFFSET: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contributions of some tiles of rows of one head to the gradients of a block of keys and values."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    ROWS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DTYPE: gl.constexpr = q_smem.dtype
    zero_s = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, S_LAYOUT)
    zero_dq = gl.full([BLOCK_M, D], 0.0, gl.float32, DQ_LAYOUT)
    k = k_smem.reshape([BLOCK_N, D])
    v = v_smem.reshape([BLOCK_N, DV])
    for tile in range(from_tile, to_tile):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        q = q_smem.index(stage).reshape([BLOCK_M, D])
        do = do_smem.index(stage).reshape([BLOCK_M, DV])
        # [BLOCK_N, BLOCK_M]
        s = warpgroup_mma(k, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * scale2 - gl.expand_dims(rows_smem.index(stage * 8 + 0).load(ROWS), 0))
        offs_key = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, S_LAYOUT))
        position = offset + tile * BLOCK_M + gl.arange(0, BLOCK_M, ROWS)
        if MASKED:
            distance = gl.expand_dims(offs_key, 1) - gl.expand_dims(position, 0)
            visible = (distance <= right) & (distance >= -left) & gl.expand_dims(offs_key < num_keys, 1)
            p = gl.where(visible, p, 0.0)
        p_operand = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2), assert_trivial=True)
        dv_next = warpgroup_mma(p_operand, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = dp + gl.expand_dims(rows_smem.index(stage * 8 + 1).load(ROWS), 0)
        if ENTROPY:
            # The logarithm of the weight again, which takes less than the registers to keep the logit.
            ds -= _log2(gl.maximum(p, _TINY)) * gl.expand_dims(rows_smem.index(stage * 8 + 2).load(ROWS), 0)
        if DISTANCE or OFFSET:
            delta = gl.expand_dims(offs_key.to(gl.float32), 1) - gl.expand_dims(position.to(gl.float32), 0)
        if DISTANCE:
            ds += gl.abs(delta) * gl.expand_dims(rows_smem.index(stage * 8 + 3).load(ROWS), 0)
        if OFFSET:
            ds += delta * gl.expand_dims(rows_smem.index(stage * 8 + 4).load(ROWS), 0)
        ds = p * ds
        if MASKED:
            ds = gl.where(visible, ds, 0.0)  # a masked value may be NaN or Inf
        ds = ds.to(DTYPE)
        ds_smem.store(ds)
        fence_async_shared()
        dq = warpgroup_mma(ds_smem.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
        ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2), assert_trivial=True)
        dk_next = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dq, dv = warpgroup_mma_wait(1, deps=(dq, dv_next))
        tma.store_wait(0)
        dq_smem.reshape([BLOCK_M, D]).store(dq)
        fence_async_shared()
        async_add(desc_dq, [i_batch, i_head, tile * BLOCK_M, 0], dq_smem)
        dk = warpgroup_mma_wait(0, deps=(dk_next,))
        mbarrier.arrive(free.index(stage), count=1)
        step += 1
    return dk, dv, step


@gluon.jit
def _consumer(
    desc_dq, desc_dk, desc_dv, q_smem, do_smem, k_smem, v_smem, rows_smem, ds_smem, dq_smem, loaded, ready, free,
    kv_heads, group, num_queries, num_keys, offset, left, right, scale, blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values."""
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DV, 16])
    i_block = gl.program_id(0) % blocks
    i_pair = gl.program_id(0) // blocks
    i_batch = i_pair // kv_heads
    i_kv_head = i_pair % kv_heads
    first_key = i_block * BLOCK_N
    scale2 = scale * LOG2E
    dk = gl.full([BLOCK_N, D], 0.0, gl.float32, DK_LAYOUT)
    dv = gl.full([BLOCK_N, DV], 0.0, gl.float32, DV_LAYOUT)
    start, full_start, full_stop, stop = _tile_range(
        i_block, num_queries, num_keys, offset, left, right, BLOCK_M, BLOCK_N
    )
    mbarrier.wait(loaded.index(0), 0)
    step = 0
    for i_member in range(group):
        i_head = i_kv_head * group + i_member
        dk, dv, step = _add_tiles(
            dk, dv, step, start, full_start,
            desc_dq, q_smem, do_smem, k_smem, v_smem, rows_smem, ds_smem, dq_smem, ready, free,
            i_batch, i_head, first_key, num_keys, offset, left, right, scale2,
            BLOCK_M, BLOCK_N, D, DV, STAGES, ENTROPY, DISTANCE, OFFSET, True,
        )  # fmt: skip
        dk, dv, step = _add_tiles(
            dk, dv, step, full_start, full_stop,
            desc_dq, q_smem, do_smem, k_smem, v_smem, rows_smem, ds_smem, dq_smem, ready, free,
            i_batch, i_head, first_key, num_keys, offset, left, right, scale2,
            BLOCK_M, BLOCK_N, D, DV, STAGES, ENTROPY, DISTANCE, OFFSET, False,
        )  # fmt: skip
        if WINDOW:
            dk, dv, step = _add_tiles(
                dk, dv, step, full_stop, stop,
                desc_dq, q_smem, do_smem, k_smem, v_smem, rows_smem, ds_smem, dq_smem, ready, free,
                i_batch, i_head, first_key, num_keys, offset, left, right, scale2,
                BLOCK_M, BLOCK_N, D, DV, STAGES, ENTROPY, DISTANCE, OFFSET, True,
            )  # fmt: skip
    tma.store_wait(0)
    k_smem.reshape([BLOCK_N, D]).store((dk * scale).to(k_smem.dtype))
    v_smem.reshape([BLOCK_N, DV]).store(dv.to(v_smem.dtype))
    fence_async_shared()
    async_store(desc_dk, [i_batch, i_kv_head, first_key, 0], k_smem)
    async_store(desc_dv, [i_batch, i_kv_head, first_key, 0], v_smem)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=(
        "kv_heads", "group", "num_queries", "num_keys", "offset", "left", "right", "scale", "blocks",
    )
)  # fmt: skip
def backward_kernel(
    desc_q, desc_k, desc_v, desc_do, desc_dq, desc_dk, desc_dv,
    ptr_lse, ptr_constant, ptr_entropy, ptr_distance, ptr_offset,
    kv_heads, group, num_queries, num_keys, offset, left, right, scale, blocks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = desc_q.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], desc_q.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, DV], desc_do.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_N, D], desc_k.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_N, DV], desc_v.layout)
    rows_smem = gl.allocate_shared_memory(gl.float32, [STAGES * 8, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ds_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [1, 1, BLOCK_M, D], desc_dq.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=2)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    desc_dq, desc_dk, desc_dv,
                    q_smem, do_smem, k_smem, v_smem, rows_smem, ds_smem, dq_smem, loaded, ready, free,
                    kv_heads, group, num_queries, num_keys, offset, left, right, scale, blocks,
                    BLOCK_M, BLOCK_N, D, DV, STAGES, WINDOW,
                    ptr_entropy is not None, ptr_distance is not None, ptr_offset is not None,
                ),
            ),
            (
                _producer,
                (
                    desc_q, desc_do, desc_k, desc_v, q_smem, do_smem, k_smem, v_smem, rows_smem, loaded, ready, free,
                    ptr_lse, ptr_constant, ptr_entropy, ptr_distance, ptr_offset,
                    kv_heads, group, num_queries, num_keys, offset, left, right, blocks, BLOCK_M, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4],
        [24],
    )  # fmt: skip


@triton.jit
def _subtract_term(constant, ptr_gradient, ptr_value, offs, is_row):
    """Subtract gradient * value from C; 0 where the value is 0, even if the gradient is not finite."""
    if ptr_gradient is not None:
        value = tl.load(ptr_value + offs, mask=is_row, other=0.0)
        gradient = tl.load(ptr_gradient + offs, mask=is_row, other=0.0)
        constant -= tl.where(value == 0.0, 0.0, gradient * value)
    return constant


@triton.jit(
    do_not_specialize=(
        "heads", "num_queries", "o_batch", "o_head", "o_token", "do_batch", "do_head", "do_token",
    )
)  # fmt: skip
def prepare_kernel(
    ptr_o, ptr_do, ptr_lse, ptr_constant, ptr_total,
    ptr_grad_lse, ptr_grad_entropy, ptr_entropy, ptr_grad_confidence, ptr_confidence,
    ptr_grad_distance, ptr_distance, ptr_grad_offset, ptr_offset,
    heads, num_queries, o_batch, o_head, o_token, do_batch, do_head, do_token,
    DIM: tl.constexpr, DIM_VALUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write C of each row and zeros for the gradient of its query; strides are in units of 8 elements."""
    blocks = tl.cdiv(num_queries, BLOCK_M)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)
    i_batch, i_head = i_pair // heads, i_pair % heads
    offs_m = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < num_queries
    offs_value = tl.arange(0, BLOCK_VALUE)
    mask_value = is_row[:, None] & (offs_value < DIM_VALUE)[None, :]
    offs_token = offs_m.to(tl.int64)[:, None]
    # [BLOCK_M, BLOCK_VALUE]
    base_o = ptr_o + (i_batch * o_batch + i_head * o_head) * 8
    base_do = ptr_do + (i_batch * do_batch + i_head * do_head) * 8
    tile_o = tl.load(base_o + offs_token * o_token * 8 + offs_value[None, :], mask=mask_value, other=0.0).to(tl.float32)
    tile_do = tl.load(base_do + offs_token * do_token * 8 + offs_value[None, :], mask=mask_value, other=0.0)
    # A row whose output is 0 has no gradient there, even if that of the output is not finite.
    constant = -tl.sum(tl.where(tile_o == 0.0, 0.0, tile_o * tile_do.to(tl.float32)), 1)
    offs = i_pair * num_queries + offs_m
    if ptr_grad_lse is not None:
        constant += tl.load(ptr_grad_lse + offs, mask=is_row, other=0.0)
    constant = _subtract_term(constant, ptr_grad_entropy, ptr_entropy, offs, is_row)
    constant = _subtract_term(constant, ptr_grad_confidence, ptr_confidence, offs, is_row)
    constant = _subtract_term(constant, ptr_grad_distance, ptr_distance, offs, is_row)
    constant = _subtract_term(constant, ptr_grad_offset, ptr_offset, offs, is_row)
    constant = tl.where(tl.load(ptr_lse + offs, mask=is_row, other=0.0) == float("-inf"), 0.0, constant)
    tl.store(ptr_constant + offs, constant, mask=is_row)
    offs_dim = tl.arange(0, BLOCK)
    mask_dim = is_row[:, None] & (offs_dim < DIM)[None, :]
    tile_zero = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    tl.store(ptr_total + offs[:, None] * DIM + offs_dim[None, :], tile_zero, mask=mask_dim)


@triton.jit(do_not_specialize=("heads", "num_queries", "grad_batch", "grad_head", "grad_token", "scale"))
def round_kernel(
    ptr_total, ptr_grad, heads, num_queries, grad_batch, grad_head, grad_token, scale,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write `total` [batch, heads, queries, DIM] times the scale to `grad`; strides are in units of 8 elements."""
    blocks = tl.cdiv(num_queries, BLOCK_M)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)
    offs_m = (tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_dim = tl.arange(0, BLOCK)[None, :]
    mask_tile = (offs_m < num_queries)[:, None] & (offs_dim < DIM)
    tile = tl.load(ptr_total + (i_pair * num_queries + offs_m)[:, None] * DIM + offs_dim, mask=mask_tile, other=0.0)
    base = ptr_grad + ((i_pair // heads) * grad_batch + (i_pair % heads) * grad_head) * 8
    pointers = base + offs_m[:, None] * grad_token * 8 + offs_dim
    tl.store(pointers, (tile * scale).to(ptr_grad.dtype.element_ty), mask=mask_tile)


def can_serve(call: KernelCall, grad_output: Tensor, row_gradients: Collection[str]) -> bool:
    """Return True if this kernel computes the gradients of a call, given those of its output and of row statistics."""
    mask = call.mask
    return (
        call.is_plain
        and supports_band(call, call.query, call.query.shape[2])
        and min(FAR if edge is None else edge for edge in (mask.left, mask.right)) >= 0
        and call.query.shape[3] % 8 == 0
        and call.value.shape[3] % 8 == 0
        and grad_output.dtype is call.query.dtype
        and _TERMS.issuperset(row_gradients)
        and not torch.are_deterministic_algorithms_enabled()
    )


def backward(
    call: KernelCall,
    grad_output: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    row_gradients: Mapping[str, Tensor],
    row_values: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; the arguments are those of `kernels.backward.backward`."""
    query, key, value, left, right = call.query, call.key, call.value, call.mask.left, call.mask.right
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    output, grad_output = (_readable(x) for x in (output, grad_output))
    dim, padded_value_dim = padded_dim(head_dim, 64), padded_dim(value_dim, 64)
    grad_query, grad_key, grad_value = (fresh_like(x) for x in (query, key, value))
    constant = torch.empty_like(logsumexp)
    total = torch.empty((batch, heads, queries, head_dim), dtype=torch.float32, device=query.device)
    gradients = {name: x.contiguous() for name, x in row_gradients.items()}
    values = {name: row_values[name].contiguous() for name in gradients if name != "logsumexp"}
    pairs = [terms.get(name) for name in ("entropy", "confidence", *_DISTANCES) for terms in (gradients, values)]
    blocks, row_blocks = blocks_of(keys, _BLOCK_N), batch * heads * blocks_of(queries, _BLOCK_M)
    rows = (logsumexp, *gradients.values(), *values.values())
    alignment = tuple(x.data_ptr() % 16 for x in rows)
    variant = query.get_device(), query.dtype, tuple(gradients), alignment
    with torch.cuda.device_of(query):
        launch(
            prepare_kernel,
            row_blocks,
            (
                *(output, grad_output, logsumexp, constant, total, gradients.get("logsumexp"), *pairs),
                *(heads, queries, *_strides(output), *_strides(grad_output)),
            ),
            (head_dim, value_dim, padded_dim(head_dim), padded_dim(value_dim), _BLOCK_M),
            variant=variant,
        )
        launch(
            backward_kernel,
            batch * kv_heads * blocks,
            (
                descriptor(query, _BLOCK_M, dim),
                descriptor(key, _BLOCK_N, dim),
                descriptor(value, _BLOCK_N, padded_value_dim),
                descriptor(grad_output, _BLOCK_M, padded_value_dim),
                descriptor(total, _BLOCK_M, dim),
                descriptor(grad_key, _BLOCK_N, dim),
                descriptor(grad_value, _BLOCK_N, padded_value_dim),
                *(logsumexp, constant, *map(gradients.get, ("entropy", *_DISTANCES))),
                *(kv_heads, heads // kv_heads, queries, keys, keys - queries),
                *(bounded(left), bounded(right), float(call.scale), blocks),
            ),
            (_BLOCK_M, _BLOCK_N, dim, padded_value_dim, 2, left is not None),
            variant=variant,
            num_warps=8,
        )
        launch(
            round_kernel,
            row_blocks,
            (total, grad_query, heads, queries, *_strides(grad_query), float(call.scale)),
            (head_dim, padded_dim(head_dim), _BLOCK_M),
            variant=variant[:2],
        )
    return grad_query, grad_key, grad_value


def _readable(x: Tensor) -> Tensor:
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _strides(x: Tensor) -> tuple[int, ...]:
    return tuple(stride // 8 for stride in x.stride()[:3])

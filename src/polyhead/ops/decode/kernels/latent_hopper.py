"""MLA decoding of one new token on Hopper, in Gluon: a faster kernel than `latent` for many heads.

A program processes 64 heads with two warpgroups. Each multiplies the queries with half of a tile's keys, both compute
the softmax over all keys, and each accumulates half of the value channels, because one warpgroup has not enough
registers for all. Tiles of 64 keys are loaded by the tensor memory accelerator (TMA) in two stages; c is read from the
same shared memory for the logits and for the values. The product with the values of one tile and the logits of the next
are issued back to back, while the tile after them is loaded.

Compute-bound: with 128 heads there are 242 FLOPs per byte of the latents.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from polyhead.ops.common.kernels.gluon_names import async_load, barrier
from polyhead.ops.common.kernels.hopper import DTYPES, descriptor, is_readable
from polyhead.ops.common.kernels.launching import bounded
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E
from polyhead.ops.decode.kernels.latent_tiles import LatentBlocks, Latents, SoftmaxOptions

_SUPPORTED_STATISTICS = frozenset(
    ("max_logit", "entropy", "confidence", "mean_distance", "mean_offset", "visible_keys", "learned_sink_mass")
)

_MASKED_LOGIT = gl.constexpr(-1.0e30)  # finite, so that 0 times it is 0
_MIN_ROW_MAX = gl.constexpr(-1.0e20)  # lower bound of the row max, so that the weight of a masked logit is 0


@gluon.jit
def _thread_sums(x):
    """Return the sums over columns of a tile of logits, one per thread that shares a row: [64, 8]."""
    by_thread = gl.permute(gl.reshape(x, [64, 2, 4, 4, 2]), (0, 1, 3, 2, 4))
    return gl.sum(gl.reshape(by_thread, [64, 8, 8]), axis=2)


@gluon.jit
def _load_tile(desc_latent, desc_rope, latent_smem, rope_smem, ready, i_batch, i_kv_head, tile, step, pred):
    """Start the TMA load of a tile of 64 keys into stage `step % 2`, if `pred`."""
    stage = step % 2
    bar = ready.index(stage)
    if desc_rope is not None:
        mbarrier.expect(bar, desc_latent.block_type.nbytes + desc_rope.block_type.nbytes, pred=pred)
        async_load(desc_rope, [i_batch, i_kv_head, tile * 64, 0], bar, rope_smem.index(stage), pred=pred)
    else:
        mbarrier.expect(bar, desc_latent.block_type.nbytes, pred=pred)
    async_load(desc_latent, [i_batch, i_kv_head, tile * 64, 0], bar, latent_smem.index(stage), pred=pred)


@gluon.jit
def _query_tile(ptr_rows, mask_m, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Load query channels [64, BLOCK] into shared memory, with zeros past COLUMNS."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    offs = gl.arange(0, BLOCK, gl.SliceLayout(0, BLOCKED))
    ptr = gl.convert_layout(ptr_rows, gl.SliceLayout(1, BLOCKED))
    mask = gl.expand_dims(gl.convert_layout(mask_m, gl.SliceLayout(1, BLOCKED)), 1)
    mask = mask & gl.expand_dims(offs < COLUMNS, 0)
    tile = gl.load(gl.expand_dims(ptr, 1) + gl.expand_dims(offs, 0), mask=mask, other=0.0)
    return gl.allocate_shared_memory(tile.dtype, [64, BLOCK], LAYOUT, tile)


@gluon.jit
def _clear_outside(latent, from_row, to_row, BLOCK_RANK: gl.constexpr):
    """Zero the latents of a tile outside [from_row, to_row): a weight of zero times NaN would be NaN."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, BLOCKED))
    inside = gl.expand_dims((rows >= from_row) & (rows < to_row), 1)
    for column in gl.static_range(0, BLOCK_RANK, 64):
        part = latent.slice(column, 64, dim=1)
        tile = part.load(BLOCKED)
        part.store(gl.where(inside, tile, gl.zeros_like(tile)))


@gluon.jit(do_not_specialize=("left", "num_slots", "splits", "num_rows", "stride_query_batch", "stride_query_head"))
def latent_hopper_kernel(
    desc_latent, desc_rope, ptr_query, ptr_sums, ptr_parts, ptr_lengths, ptr_new_lengths,
    stride_query_batch, stride_query_head, sm_scale, left, num_slots, splits, num_rows, stat_slots,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr, ROPE_DIM: gl.constexpr,
    BLOCK_RANK: gl.constexpr, BLOCK_ROPE: gl.constexpr,
):  # fmt: skip
    """Store partial results in the format of `latent.latent_kernel`, for one query per head."""
    ENTROPY: gl.constexpr = stat_slots.entropy is not None
    DISTANCE: gl.constexpr = (stat_slots.mean_distance is not None) or (stat_slots.mean_offset is not None)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_RANK // 2, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DTYPE: gl.constexpr = desc_latent.dtype
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ROW_BLOCKS: gl.constexpr = (GROUP + 63) // 64

    latent_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, BLOCK_RANK], desc_latent.layout)
    rope_smem = latent_smem
    if ROPE_DIM > 0:
        rope_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, BLOCK_ROPE], desc_rope.layout)
    weight_smem = gl.allocate_shared_memory(DTYPE, [64, 64], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    barrier()

    i_pair = gl.program_id(0) // ROW_BLOCKS
    i_batch = i_pair // KV_HEADS
    i_kv_head = i_pair % KV_HEADS
    i_split = gl.program_id(1)
    length = num_slots
    if ptr_lengths is not None:
        length = gl.minimum(gl.load(ptr_lengths + i_batch).to(gl.int32), num_slots)
    if ptr_new_lengths is not None:
        length = gl.where(gl.load(ptr_new_lengths + i_batch) > 0, length, 0)  # a padding query sees no key
    # The query is the last token, so it sees the keys from `first_key` up to `length`.
    first_key = gl.maximum(length - 1 - left, 0)
    first_tile = first_key // 64
    tiles_each = (gl.maximum((length + 63) // 64 - first_tile, 0) + splits - 1) // splits
    tile_from = gl.minimum(first_tile + i_split * tiles_each, (length + 63) // 64)
    tile_to = gl.minimum(tile_from + tiles_each, (length + 63) // 64)
    count = tile_to - tile_from
    for ahead in gl.static_range(2):
        _load_tile(
            desc_latent, desc_rope, latent_smem, rope_smem, ready,
            i_batch, i_kv_head, tile_from + ahead, ahead, ahead < count,
        )  # fmt: skip

    # [64]: heads
    offs_m = (gl.program_id(0) % ROW_BLOCKS) * 64 + gl.arange(0, 64, ROWS)
    mask_m = offs_m < GROUP
    ptr_rows = ptr_query + i_batch.to(gl.int64) * stride_query_batch
    ptr_rows += (i_kv_head * GROUP + offs_m).to(gl.int64) * stride_query_head
    q_latent = _query_tile(ptr_rows, mask_m, RANK, BLOCK_RANK, FLAT)
    q_rope = q_latent
    if ROPE_DIM > 0:
        q_rope = _query_tile(ptr_rows + RANK, mask_m, ROPE_DIM, BLOCK_ROPE, FLAT)
    fence_async_shared()
    barrier()

    zero = gl.full([64, 64], 0.0, gl.float32, S_LAYOUT)
    m = gl.full([64], _MIN_ROW_MAX, gl.float32, ROWS)
    sums = _thread_sums(zero)
    PARTS: gl.constexpr = sums.type.layout
    acc_entropy = sums
    acc_offset = sums
    o = gl.full([64, BLOCK_RANK], 0.0, gl.float32, O_LAYOUT)
    sm_scale_log2 = sm_scale * LOG2E

    mbarrier.wait(ready.index(0), 0, pred=count > 0)
    s = zero
    if ROPE_DIM > 0:
        rope = rope_smem.index(0).reshape([64, BLOCK_ROPE])
        s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(
        q_latent, latent_smem.index(0).reshape([64, BLOCK_RANK]).permute((1, 0)), s, use_acc=ROPE_DIM > 0, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=(s,))
    for step in range(count):
        column = (tile_from + step) * 64
        latent = latent_smem.index(step % 2).reshape([64, BLOCK_RANK])
        if (column < first_key) | (column + 64 > length):
            _clear_outside(latent, first_key - column, length - column, BLOCK_RANK)
        offs_n = column + gl.arange(0, 64, COLUMNS)
        s = gl.where(gl.expand_dims((offs_n >= first_key) & (offs_n < length), 0), s * sm_scale_log2, _MASKED_LOGIT)
        m_new = gl.maximum(m, gl.max(s, axis=1))
        t = s - gl.expand_dims(m_new, 1)
        p = gl.exp2(t)
        weight_smem.store(p.to(DTYPE))
        m_diff = m - m_new
        alpha = gl.exp2(m_diff)
        alpha_parts = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, PARTS)), 1)
        if ENTROPY:
            m_diff_parts = gl.expand_dims(gl.convert_layout(m_diff, gl.SliceLayout(1, PARTS)), 1)
            acc_entropy = alpha_parts * (acc_entropy + m_diff_parts * sums) + _thread_sums(p * t)
        sums = sums * alpha_parts + _thread_sums(p)
        if DISTANCE:
            distance = (offs_n - (length - 1)).to(gl.float32)
            acc_offset = acc_offset * alpha_parts + _thread_sums(p * gl.expand_dims(distance, 0))
        m = m_new
        o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT)), 1)
        fence_async_shared()
        barrier()
        o_next = warpgroup_mma(weight_smem, latent, o, is_async=True)

        # The logits of the next tile; after the last one they are computed from stale memory and not used.
        next_step = step + 1
        mbarrier.wait(ready.index(next_step % 2), (next_step // 2) & 1, pred=next_step < count)
        s_next = zero
        if ROPE_DIM > 0:
            rope = rope_smem.index(next_step % 2).reshape([64, BLOCK_ROPE])
            s_next = warpgroup_mma(q_rope, rope.permute((1, 0)), s_next, use_acc=False, is_async=True)
        next_latent = latent_smem.index(next_step % 2).reshape([64, BLOCK_RANK])
        s_next = warpgroup_mma(q_latent, next_latent.permute((1, 0)), s_next, use_acc=ROPE_DIM > 0, is_async=True)
        o = warpgroup_mma_wait(2 if ROPE_DIM > 0 else 1, deps=(o_next,))
        barrier()
        _load_tile(
            desc_latent, desc_rope, latent_smem, rope_smem, ready,
            i_batch, i_kv_head, tile_from + step + 2, step, step + 2 < count,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=(s_next,))

    l_i = gl.convert_layout(gl.sum(sums, axis=1), ROWS)
    m_i = gl.where(count > 0, m * LN2, gl.full([64], -float("inf"), gl.float32, ROWS))
    num_rows = num_rows.to(gl.int64)
    stride_slot = splits * num_rows
    offs_part = i_split * num_rows + i_pair.to(gl.int64) * GROUP + offs_m
    ptr = ptr_sums + offs_part
    gl.store(ptr, m_i, mask=mask_m)
    gl.store(ptr + stride_slot, l_i, mask=mask_m)
    ptr += 2 * stride_slot
    mask_filled = mask_m & (count > 0)
    if ENTROPY:
        entropy_sum = gl.convert_layout(gl.sum(acc_entropy, axis=1), ROWS) * LN2
        gl.store(ptr + stat_slots.entropy * stride_slot, entropy_sum, mask=mask_filled)
    if DISTANCE:
        offset_sum = gl.convert_layout(gl.sum(acc_offset, axis=1), ROWS)
        if stat_slots.mean_distance is not None:
            gl.store(
                ptr + stat_slots.mean_distance * stride_slot, -offset_sum, mask=mask_filled
            )  # no key is after the query
        if stat_slots.mean_offset is not None:
            gl.store(ptr + stat_slots.mean_offset * stride_slot, offset_sum, mask=mask_filled)
    if stat_slots.visible_keys is not None:
        num_visible = gl.minimum(tile_to * 64, length) - gl.maximum(tile_from * 64, first_key)
        gl.store(ptr + stat_slots.visible_keys * stride_slot, l_i * 0.0 + num_visible.to(gl.float32), mask=mask_filled)
    # [64, BLOCK_RANK]
    rows = gl.convert_layout(offs_part, gl.SliceLayout(1, O_LAYOUT))
    mask_rows = gl.convert_layout(mask_filled, gl.SliceLayout(1, O_LAYOUT))
    offs_rank = gl.arange(0, BLOCK_RANK, gl.SliceLayout(0, O_LAYOUT))
    ptr = ptr_parts + gl.expand_dims(rows * RANK, 1) + gl.expand_dims(offs_rank, 0)
    gl.store(ptr, o, mask=gl.expand_dims(mask_rows, 1) & gl.expand_dims(offs_rank < RANK, 0))


def plan(rank: int) -> LatentBlocks:
    """Return the tile sizes of this kernel."""
    return LatentBlocks(64, 64, padded_dim(rank, 128), 64, stages=2, warps=8, resident=1, on_hopper=True)


def can_serve(
    query: Tensor,
    latents: Latents,
    rank: int,
    mask: MaskArguments,
    stat_slots: Any,
    head_scale: Tensor | None,
    options: SoftmaxOptions,
) -> bool:
    """Return True if this kernel supports the latents, the mask, the statistics and the options."""
    requested = {name for name, slot in stat_slots._asdict().items() if slot is not None}
    return (
        query.dtype in DTYPES
        and query.shape[2] == 1
        and query.shape[1] // latents.data.shape[1] > 16
        and rank > 64
        and query.shape[3] - rank <= 64
        and mask.is_band
        and head_scale is None
        and options.softcap is None
        and is_readable(latents.data)
        and _SUPPORTED_STATISTICS.issuperset(requested)
    )


def leave_parts(
    query: Tensor,
    latents: Latents,
    rank: int,
    sums: Tensor,
    parts: Tensor,
    mask: MaskArguments,
    stat_slots: Any,
    options: SoftmaxOptions,
    blocks: LatentBlocks,
) -> None:
    """`latent.leave_parts` with this kernel, for calls that `can_serve` accepts."""
    data = latents.data
    heads, width = query.shape[1], query.shape[3]
    group = heads // data.shape[1]
    _, splits, rows = sums.shape
    latent_hopper_kernel[(rows // group * blocks_of(group, blocks.rows), splits)](
        descriptor(data[..., :rank], blocks.keys, blocks.rank),
        descriptor(data[..., rank:], blocks.keys, blocks.rope_dim) if width > rank else None,
        query,
        sums,
        parts,
        latents.lengths,
        latents.new_lengths,
        query.stride(0),
        query.stride(1),
        options.sm_scale,
        bounded(mask.left),
        data.shape[2],
        splits,
        rows,
        stat_slots,
        KV_HEADS=data.shape[1],
        GROUP=group,
        RANK=rank,
        ROPE_DIM=width - rank,
        BLOCK_RANK=blocks.rank,
        BLOCK_ROPE=blocks.rope_dim,
        num_warps=blocks.warps,
    )

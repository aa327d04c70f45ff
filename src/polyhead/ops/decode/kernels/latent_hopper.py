"""One new token over latents on Hopper's own units, in Gluon: the faster twin of `decode_latent` for many heads.

A program holds 64 heads. Two warpgroups share them: each multiplies the queries with half of a tile's keys, both take
the softmax of all, and each sums half of the channels of the values, for which one would not have the registers. Tiles
of 64 keys come by the tensor memory accelerator, two at a time; c is read for the logits and for the values from where
it came to lie. The product with the values of one tile and the logits of the next follow each other without a gap, and
the tile after them is on its way meanwhile.

Bound by the matrix units: with 128 heads each byte of a latent is multiplied 242 times.
"""

from __future__ import annotations

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

from polyhead.ops.common.kernels.hopper import DTYPES, FAR, LN2, LOG2E, descriptor, is_readable
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two
from polyhead.ops.decode.kernels.latent_tiles import LatentBlocks, Latents, Numbers
from polyhead.ops.decode.kernels.parts import Places

_GIVEN = frozenset(
    ("max_logit", "entropy", "confidence", "mean_distance", "mean_offset", "visible_keys", "learned_sink_mass")
)

_HIDDEN = gl.constexpr(-1.0e30)  # a hidden logit: finite, so that 0 * hidden is 0
_LOWEST = gl.constexpr(-1.0e20)  # no running maximum is below it, so that the weight of a hidden logit is 0


@gluon.jit
def _own_sums(x):
    """Sums over the columns of a tile of logits, [64, 8]: each of the eight threads that share a row keeps its own."""
    apart = gl.permute(gl.reshape(x, [64, 2, 4, 4, 2]), (0, 1, 3, 2, 4))
    return gl.sum(gl.reshape(apart, [64, 8, 8]), axis=2)


@gluon.jit
def _load_tile(desc_latent, desc_turning, latent_smem, turning_smem, ready, i_batch, i_kv_head, tile, step, is_there):
    """Send for a tile of 64 keys, into the place of the step before the last."""
    stage = step % 2
    bar = ready.index(stage)
    if desc_turning is not None:
        mbarrier.expect(bar, desc_latent.block_type.nbytes + desc_turning.block_type.nbytes, pred=is_there)
        tma.async_copy_global_to_shared(
            desc_turning, [i_batch, i_kv_head, tile * 64, 0], bar, turning_smem.index(stage), pred=is_there
        )
    else:
        mbarrier.expect(bar, desc_latent.block_type.nbytes, pred=is_there)
    tma.async_copy_global_to_shared(
        desc_latent, [i_batch, i_kv_head, tile * 64, 0], bar, latent_smem.index(stage), pred=is_there
    )


@gluon.jit
def _query_tile(ptr_rows, mask_m, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """The queries' channels from a pointer on, [64, BLOCK], with zeros past COLUMNS; put where products read them."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    offs = gl.arange(0, BLOCK, gl.SliceLayout(0, BLOCKED))
    ptr = gl.convert_layout(ptr_rows, gl.SliceLayout(1, BLOCKED))
    mask = gl.expand_dims(gl.convert_layout(mask_m, gl.SliceLayout(1, BLOCKED)), 1)
    mask = mask & gl.expand_dims(offs < COLUMNS, 0)
    tile = gl.load(gl.expand_dims(ptr, 1) + gl.expand_dims(offs, 0), mask=mask, other=0.0)
    return gl.allocate_shared_memory(tile.dtype, [64, BLOCK], LAYOUT, tile)


@gluon.jit
def _clear_outside(latent, from_row, to_row, BLOCK_RANK: gl.constexpr):
    """Set the latents outside two rows of a tile to zero: a weight of zero times NaN would be NaN."""
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, BLOCKED))
    inside = gl.expand_dims((rows >= from_row) & (rows < to_row), 1)
    for column in gl.static_range(0, BLOCK_RANK, 64):
        part = latent.slice(column, 64, dim=1)
        tile = part.load(BLOCKED)
        part.store(gl.where(inside, tile, gl.zeros_like(tile)))


@gluon.jit(do_not_specialize=("left", "num_slots", "splits", "num_rows", "stride_query_batch", "stride_query_head"))
def latent_hopper_kernel(
    desc_latent, desc_turning, ptr_query, ptr_sums, ptr_parts, ptr_lengths, ptr_new_lengths,
    stride_query_batch, stride_query_head, scale, left, num_slots, splits, num_rows, places,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr, TURNING: gl.constexpr,
    BLOCK_RANK: gl.constexpr, BLOCK_TURNING: gl.constexpr,
):  # fmt: skip
    """Sums and parts as `decode_latent.latent_kernel` leaves them, of one query a head."""
    ENTROPY: gl.constexpr = places.entropy is not None
    DISTANCE: gl.constexpr = (places.mean_distance is not None) or (places.mean_offset is not None)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_RANK // 2, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DTYPE: gl.constexpr = desc_latent.dtype
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ROW_BLOCKS: gl.constexpr = (GROUP + 63) // 64

    latent_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, BLOCK_RANK], desc_latent.layout)
    turning_smem = latent_smem
    if TURNING > 0:
        turning_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, BLOCK_TURNING], desc_turning.layout)
    weight_smem = gl.allocate_shared_memory(DTYPE, [64, 64], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()

    i_pair = gl.program_id(0) // ROW_BLOCKS
    i_batch = i_pair // KV_HEADS
    i_kv_head = i_pair % KV_HEADS
    i_split = gl.program_id(1)
    length = num_slots
    if ptr_lengths is not None:
        length = gl.minimum(gl.load(ptr_lengths + i_batch).to(gl.int32), num_slots)
    if ptr_new_lengths is not None:
        length = gl.where(gl.load(ptr_new_lengths + i_batch) > 0, length, 0)  # a query that is none sees nothing
    # The query is the last token, so that it sees the keys from `first` up to `length`.
    first = gl.maximum(length - 1 - left, 0)
    first_tile = first // 64
    tiles_each = (gl.maximum((length + 63) // 64 - first_tile, 0) + splits - 1) // splits
    tile_from = gl.minimum(first_tile + i_split * tiles_each, (length + 63) // 64)
    tile_to = gl.minimum(tile_from + tiles_each, (length + 63) // 64)
    count = tile_to - tile_from
    for ahead in gl.static_range(2):
        _load_tile(
            desc_latent, desc_turning, latent_smem, turning_smem, ready,
            i_batch, i_kv_head, tile_from + ahead, ahead, ahead < count,
        )  # fmt: skip

    # [64]: heads
    offs_m = (gl.program_id(0) % ROW_BLOCKS) * 64 + gl.arange(0, 64, ROWS)
    mask_m = offs_m < GROUP
    ptr_rows = ptr_query + i_batch.to(gl.int64) * stride_query_batch
    ptr_rows += (i_kv_head * GROUP + offs_m).to(gl.int64) * stride_query_head
    q_latent = _query_tile(ptr_rows, mask_m, RANK, BLOCK_RANK, FLAT)
    q_turned = q_latent
    if TURNING > 0:
        q_turned = _query_tile(ptr_rows + RANK, mask_m, TURNING, BLOCK_TURNING, FLAT)
    fence_async_shared()
    gl.thread_barrier()

    zero = gl.full([64, 64], 0.0, gl.float32, S_LAYOUT)
    m = gl.full([64], _LOWEST, gl.float32, ROWS)
    sums = _own_sums(zero)
    PARTS: gl.constexpr = sums.type.layout
    mixed = sums
    signed = sums
    o = gl.full([64, BLOCK_RANK], 0.0, gl.float32, O_LAYOUT)
    scale2 = scale * LOG2E

    mbarrier.wait(ready.index(0), 0, pred=count > 0)
    s = zero
    if TURNING > 0:
        turning = turning_smem.index(0).reshape([64, BLOCK_TURNING])
        s = warpgroup_mma(q_turned, turning.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(
        q_latent, latent_smem.index(0).reshape([64, BLOCK_RANK]).permute((1, 0)), s, use_acc=TURNING > 0, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=(s,))
    for step in range(count):
        column = (tile_from + step) * 64
        latent = latent_smem.index(step % 2).reshape([64, BLOCK_RANK])
        if (column < first) | (column + 64 > length):
            _clear_outside(latent, first - column, length - column, BLOCK_RANK)
        offs_n = column + gl.arange(0, 64, COLUMNS)
        s = gl.where(gl.expand_dims((offs_n >= first) & (offs_n < length), 0), s * scale2, _HIDDEN)
        m_new = gl.maximum(m, gl.max(s, axis=1))
        t = s - gl.expand_dims(m_new, 1)
        p = gl.exp2(t)
        weight_smem.store(p.to(DTYPE))
        fall = m - m_new
        alpha = gl.exp2(fall)
        decay = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, PARTS)), 1)
        if ENTROPY:
            moved = gl.expand_dims(gl.convert_layout(fall, gl.SliceLayout(1, PARTS)), 1)
            mixed = decay * (mixed + moved * sums) + _own_sums(p * t)
        sums = sums * decay + _own_sums(p)
        if DISTANCE:
            distance = (offs_n - (length - 1)).to(gl.float32)
            signed = signed * decay + _own_sums(p * gl.expand_dims(distance, 0))
        m = m_new
        o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT)), 1)
        fence_async_shared()
        gl.thread_barrier()
        o_next = warpgroup_mma(weight_smem, latent, o, is_async=True)

        # The logits of the next tile; behind the last one they are of what lies there, and nobody asks for them.
        following = step + 1
        mbarrier.wait(ready.index(following % 2), (following // 2) & 1, pred=following < count)
        s_next = zero
        if TURNING > 0:
            turning = turning_smem.index(following % 2).reshape([64, BLOCK_TURNING])
            s_next = warpgroup_mma(q_turned, turning.permute((1, 0)), s_next, use_acc=False, is_async=True)
        next_latent = latent_smem.index(following % 2).reshape([64, BLOCK_RANK])
        s_next = warpgroup_mma(q_latent, next_latent.permute((1, 0)), s_next, use_acc=TURNING > 0, is_async=True)
        o = warpgroup_mma_wait(2 if TURNING > 0 else 1, deps=(o_next,))
        gl.thread_barrier()
        _load_tile(
            desc_latent, desc_turning, latent_smem, turning_smem, ready,
            i_batch, i_kv_head, tile_from + step + 2, step, step + 2 < count,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=(s_next,))

    total = gl.convert_layout(gl.sum(sums, axis=1), ROWS)
    largest = gl.where(count > 0, m * LN2, gl.full([64], -float("inf"), gl.float32, ROWS))
    num_rows = num_rows.to(gl.int64)
    plane = splits * num_rows
    offs_part = i_split * num_rows + i_pair.to(gl.int64) * GROUP + offs_m
    ptr = ptr_sums + offs_part
    gl.store(ptr, largest, mask=mask_m)
    gl.store(ptr + plane, total, mask=mask_m)
    ptr += 2 * plane
    mask_filled = mask_m & (count > 0)
    if ENTROPY:
        spread = gl.convert_layout(gl.sum(mixed, axis=1), ROWS) * LN2
        gl.store(ptr + places.entropy * plane, spread, mask=mask_filled)
    if DISTANCE:
        far = gl.convert_layout(gl.sum(signed, axis=1), ROWS)
        if places.mean_distance is not None:
            gl.store(ptr + places.mean_distance * plane, -far, mask=mask_filled)  # nothing stands behind the query
        if places.mean_offset is not None:
            gl.store(ptr + places.mean_offset * plane, far, mask=mask_filled)
    if places.visible_keys is not None:
        seen = gl.minimum(tile_to * 64, length) - gl.maximum(tile_from * 64, first)
        gl.store(ptr + places.visible_keys * plane, total * 0.0 + seen.to(gl.float32), mask=mask_filled)
    # [64, BLOCK_RANK]
    rows = gl.convert_layout(offs_part, gl.SliceLayout(1, O_LAYOUT))
    mask_rows = gl.convert_layout(mask_filled, gl.SliceLayout(1, O_LAYOUT))
    offs_rank = gl.arange(0, BLOCK_RANK, gl.SliceLayout(0, O_LAYOUT))
    ptr = ptr_parts + gl.expand_dims(rows * RANK, 1) + gl.expand_dims(offs_rank, 0)
    gl.store(ptr, o, mask=gl.expand_dims(mask_rows, 1) & gl.expand_dims(offs_rank < RANK, 0))


def plan(rank: int) -> LatentBlocks:
    return LatentBlocks(64, 64, max(128, power_of_two(rank)), 64, stages=2, warps=8, resident=1, on_hopper=True)


def can_serve(
    query: Tensor,
    latents: Latents,
    rank: int,
    mask: MaskArguments,
    places: Places,
    head_scale: Tensor | None,
    numbers: Numbers,
) -> bool:
    """Whether this kernel takes such latents and this mask; what it does not ask about, it does not have."""
    requested = {name for name, place in places._asdict().items() if place is not None}
    return (
        query.dtype in DTYPES
        and query.shape[2] == 1
        and query.shape[1] // latents.held.shape[1] > 16
        and rank > 64
        and query.shape[3] - rank <= 64
        and mask.is_band
        and head_scale is None
        and numbers.softcap is None
        and is_readable(latents.held)
        and _GIVEN.issuperset(requested)
    )


def leave_parts(
    query: Tensor,
    latents: Latents,
    rank: int,
    sums: Tensor,
    parts: Tensor,
    mask: MaskArguments,
    places: Places,
    numbers: Numbers,
    blocks: LatentBlocks,
) -> None:
    """`decode_latent.leave_parts` where this kernel can serve."""
    held = latents.held
    heads, width = query.shape[1], query.shape[3]
    group = heads // held.shape[1]
    _, splits, rows = sums.shape
    latent_hopper_kernel[(rows // group * blocks_of(group, blocks.rows), splits)](
        descriptor(held[..., :rank], blocks.keys, blocks.rank),
        descriptor(held[..., rank:], blocks.keys, blocks.turning) if width > rank else None,
        query,
        sums,
        parts,
        latents.lengths,
        latents.new_lengths,
        query.stride(0),
        query.stride(1),
        numbers.scale,
        FAR if mask.left is None else min(mask.left, FAR),
        held.shape[2],
        splits,
        rows,
        places,
        KV_HEADS=held.shape[1],
        GROUP=group,
        RANK=rank,
        TURNING=width - rank,
        BLOCK_RANK=blocks.rank,
        BLOCK_TURNING=blocks.turning,
        num_warps=blocks.warps,
    )

"""Attention with row statistics for Hopper, in Gluon: a faster `forward` for bands of keys.

A warp-specialised pipeline like FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608). One program processes 128
query rows. A producer warp copies keys and values into shared memory with the tensor memory accelerator; two
warpgroups process 64 rows each and multiply with wgmma. Within a warpgroup the product with V of one tile runs while
the softmax of the next is computed, and the two warpgroups overlap as well.

Bound by tensor cores at head_dim 128 and by exponentials at head_dim 64. The statistics cost one multiply-add per
weight each (entropy, mean distance), done while the tensor cores are busy. Row sums are kept per thread, four for each
row, and reduced once at the end.
"""

from __future__ import annotations

import torch
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

from polyhead.ops.attention.kernels.nonfinite_rows import recompute_nonfinite_rows
from polyhead.ops.attention.kernels.outputs import output_like
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.availability import multiprocessors
from polyhead.ops.common.kernels.gluon_names import async_load, async_store, barrier
from polyhead.ops.common.kernels.hopper import descriptor, row_sums, supports_band
from polyhead.ops.common.kernels.launching import bounded, launch
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E

# In the order of the kernel's pointers.
STATISTICS = ("max_logit", "entropy", "confidence", "mean_distance", "mean_offset", "visible_keys")

_SUPPORTED = frozenset(STATISTICS)
_MASKED = gl.constexpr(-1.0e30)  # a masked logit: finite, so that 0 * masked is 0
LOWEST = gl.constexpr(-1.0e20)  # lower bound of the running max, so that the weight of a masked logit is 0


@gluon.jit
def packed(x, DTYPE: gl.constexpr):
    """Round weights to the dtype of the values and pack two per 32-bit register, [64, columns / 2]."""
    low, high = gl.split(gl.reshape(x, [64, x.type.shape[1] // 2, 2]))
    NAME: gl.constexpr = "bf16x2" if gl.bfloat16 == DTYPE else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpacked(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Unpack the weights of `packed` as an operand of a matrix product."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    weights = gl.reshape(gl.join(low, high), [64, x.type.shape[1] * 2]).to(DTYPE, bitcast=True)
    return gl.convert_layout(weights, LAYOUT, assert_trivial=True)


@gluon.jit
def _locate_block(index, blocks, num_heads, num_queries, num_keys, offset, left, right, BLOCK_N: gl.constexpr):
    """Return the (batch, head) pair, the first row and the first and last visible tile of a block index."""
    i_pair = index // blocks
    # Rows with the most keys first, so that no long block starts last.
    first_row = (blocks - 1 - index % blocks) * 128
    last_row = gl.minimum(first_row + 127, num_queries - 1)
    first_tile = gl.maximum(first_row + offset - left, 0) // BLOCK_N
    last_tile = gl.minimum(last_row + offset + right, num_keys - 1) // BLOCK_N
    return i_pair, first_row, first_tile, last_tile


@gluon.jit
def _producer(
    desc_q, desc_k, desc_v, q_smem, k_smem, v_smem, q_ready, q_free, ready, free,
    num_heads, group, num_queries, num_keys, offset, left, right, blocks, total_blocks,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy queries, and with each tile of keys the values of the tile before it: one step needs both."""
    step = 0
    phase = 1
    for index in range(gl.program_id(0), total_blocks, gl.num_programs(0)):
        i_pair, first_row, first_tile, last_tile = _locate_block(
            index, blocks, num_heads, num_queries, num_keys, offset, left, right, BLOCK_N
        )
        i_batch = i_pair // num_heads
        i_head = i_pair % num_heads
        for i_warpgroup in gl.static_range(2):
            mbarrier.wait(q_free.index(i_warpgroup), phase)
            mbarrier.expect(q_ready.index(i_warpgroup), desc_q.block_type.nbytes)
            async_load(
                desc_q,
                [i_batch, i_head, first_row + i_warpgroup * 64, 0],
                q_ready.index(i_warpgroup),
                q_smem.index(i_warpgroup),
            )
        phase ^= 1
        count = last_tile - first_tile + 1
        for i in range(count + 1):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            bar = ready.index(stage)
            column = (last_tile - i) * BLOCK_N
            has_key = i < count
            has_value = i > 0
            mbarrier.expect(bar, desc_k.block_type.nbytes + desc_v.block_type.nbytes, pred=has_key & has_value)
            mbarrier.expect(bar, desc_k.block_type.nbytes, pred=i == 0)
            mbarrier.expect(bar, desc_v.block_type.nbytes, pred=i == count)
            async_load(desc_k, [i_batch, i_head // group, column, 0], bar, k_smem.index(stage), pred=has_key)
            async_load(
                desc_v, [i_batch, i_head // group, column + BLOCK_N, 0], bar, v_smem.index(stage), pred=has_value
            )
            step += 1


@gluon.jit
def _distance(row, column, offset, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return key minus query position of every pair of a tile."""
    rows = row + offset + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(columns, 0) - gl.expand_dims(rows, 1)


@gluon.jit
def weigh(
    s, m_i, l_i, entropy_sum, distance_sum, offset_sum, row, column, num_keys, offset, left, right, scale2,
    BLOCK_N: gl.constexpr, MASKED: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """Return the weights of a tile, relative to the running max, and the updated running sums.

    The sums are `l_i` of weights, `entropy_sum` of weight times shifted logit (base 2), `distance_sum` of weight times
    |distance| and `offset_sum` of weight times distance. A tile that is not MASKED is entirely inside the band, on one
    side of the diagonal.
    """
    LAYOUT: gl.constexpr = s.type.layout
    PARTS: gl.constexpr = l_i.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, PARTS)
    if MASKED:
        distance = _distance(row, column, offset, BLOCK_N, LAYOUT)
        is_valid = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)) < num_keys
        s = gl.where((distance <= right) & (distance >= -left) & gl.expand_dims(is_valid, 0), s, _MASKED)
    m_new = gl.maximum(m_i, gl.max(s, axis=1) * scale2)
    exponent = s * scale2 - gl.expand_dims(m_new, 1)
    p = gl.exp2(exponent)
    log_alpha = m_i - m_new
    alpha = gl.exp2(log_alpha)
    decay = gl.expand_dims(gl.convert_layout(alpha, ROWS, assert_trivial=True), 1)
    if ENTROPY:
        step = gl.expand_dims(gl.convert_layout(log_alpha, ROWS, assert_trivial=True), 1)
        entropy_sum = decay * (entropy_sum + step * l_i) + row_sums(p * exponent, BLOCK_N)
    tile_sum = row_sums(p, BLOCK_N)
    l_i = l_i * decay + tile_sum
    if DISTANCE or SIGNED:
        # Columns of a tile are 8 g + 2 c + b, where c depends on the thread and 8 g + b is a constant of each register.
        constant = (gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)) & ~6).to(gl.float32)
        weighted = row_sums(p * gl.expand_dims(constant, 0), BLOCK_N)
        thread_distance = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, PARTS)) * 2, 0) - gl.expand_dims(
            gl.arange(0, 64, ROWS) + (row + offset), 1
        )
        tile_offset_sum = weighted + tile_sum * (thread_distance + column).to(gl.float32)
        if SIGNED:
            offset_sum = offset_sum * decay + tile_offset_sum
        if DISTANCE:
            if MASKED:
                tile_distance_sum = row_sums(p * gl.abs(distance).to(gl.float32), BLOCK_N)
            else:
                tile_distance_sum = gl.where(column > row + offset, tile_offset_sum, -tile_offset_sum)
            distance_sum = distance_sum * decay + tile_distance_sum
    return p, alpha, m_new, l_i, entropy_sum, distance_sum, offset_sum


@gluon.jit
def band_tiles(
    acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum, step, from_tile, to_tile, q, k_smem, v_smem, ready, free,
    row, num_keys, offset, left, right, scale2,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """Process the tiles from `from_tile` down to `to_tile`, both included.

    `p` are the weights of the previous tile. The logits of a tile are computed first; then the product of `p` with V
    runs while the softmax is computed.
    """
    O_LAYOUT: gl.constexpr = acc.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    DTYPE: gl.constexpr = k_smem.dtype
    zero = gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    for tile in range(from_tile, to_tile - 1, -1):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        k = k_smem.index(stage).reshape([BLOCK_N, q.shape[1]])
        v = v_smem.index(stage).reshape([BLOCK_N, v_smem.shape[4]])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        acc_next = warpgroup_mma(unpacked(p, DTYPE, OPERAND), v, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        weights, alpha, m_i, l_i, entropy_sum, distance_sum, offset_sum = weigh(
            s, m_i, l_i, entropy_sum, distance_sum, offset_sum,
            row, tile * BLOCK_N, num_keys, offset, left, right, scale2,
            BLOCK_N, MASKED, ENTROPY, DISTANCE, SIGNED,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=(acc_next,))
        mbarrier.arrive(free.index(stage), count=1)
        decay = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        acc = acc * gl.expand_dims(decay, 1)
        p = packed(weights, DTYPE)
        step += 1
    return acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum, step


@gluon.jit
def _consumer(
    i_warpgroup: gl.constexpr, desc_o, q_smem, k_smem, v_smem, o_smem, q_ready, q_free, ready, free,
    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_signed, ptr_visible, ptr_poison,
    num_heads, group, num_queries, num_keys, offset, left, right, scale2, blocks, total_blocks,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, FULL: gl.constexpr, WINDOW: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SIGNED: gl.constexpr, MARK: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of each block, tile by tile, from the right end of the band to the left."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    DTYPE: gl.constexpr = q_smem.dtype
    q = q_smem.index(i_warpgroup).reshape([64, D])
    smem_out = o_smem.index(i_warpgroup)
    zero = gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    step = 0
    phase = 0
    for index in range(gl.program_id(0), total_blocks, gl.num_programs(0)):
        i_pair, first_row, first_tile, last_tile = _locate_block(
            index, blocks, num_heads, num_queries, num_keys, offset, left, right, BLOCK_N
        )
        row = first_row + i_warpgroup * 64
        mbarrier.wait(q_ready.index(i_warpgroup), phase)
        m_i = gl.full([64], LOWEST, gl.float32, ROWS)
        l_i = row_sums(zero, BLOCK_N)
        entropy_sum = l_i
        distance_sum = l_i
        offset_sum = l_i

        # The last tile is always masked: the keys may end inside it.
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        k = k_smem.index(stage).reshape([BLOCK_N, D])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(free.index(stage), count=1)
        step += 1
        acc = gl.full([64, DV], 0.0, gl.float32, O_LAYOUT)
        weights, _, m_i, l_i, entropy_sum, distance_sum, offset_sum = weigh(
            s, m_i, l_i, entropy_sum, distance_sum, offset_sum,
            row, last_tile * BLOCK_N, num_keys, offset, left, right, scale2,
            BLOCK_N, True, ENTROPY, DISTANCE, SIGNED,
        )  # fmt: skip
        p = packed(weights, DTYPE)
        tile = last_tile - 1

        # Tiles that an edge of the band or the diagonal crosses are masked; those in between are not. From right to
        # left, each range with its leftmost tile: masked to `edge` (right edge of the band), full to `above`, masked to
        # `below` (diagonal), full to `clear`, masked to `first_tile` (left edge of a window).
        position = row + offset
        below = gl.maximum(position // BLOCK_N, first_tile)
        if FULL and not (DISTANCE or SIGNED):
            # Only the end of the keys is masked, and the diagonal does not matter.
            below = gl.maximum(gl.minimum(num_keys // BLOCK_N, tile + 1), first_tile)
        if not CAUSAL and (DISTANCE or not FULL):
            # Right of the diagonal.
            above = gl.maximum((position + 63) // BLOCK_N + 1, first_tile)
            edge = gl.minimum(gl.maximum((gl.minimum(position + right, num_keys - 1) + 1) // BLOCK_N, above), tile + 1)
            acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum, step = band_tiles(
                acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum,
                step, tile, edge, q, k_smem, v_smem, ready, free,
                row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, True, ENTROPY, DISTANCE, SIGNED,
            )  # fmt: skip
            above = gl.minimum(above, edge)
            acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum, step = band_tiles(
                acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum,
                step, edge - 1, above, q, k_smem, v_smem, ready, free,
                row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, False, ENTROPY, DISTANCE, SIGNED,
            )  # fmt: skip
            tile = above - 1
        below = gl.minimum(below, tile + 1)
        acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum, step = band_tiles(
            acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum, step, tile, below, q, k_smem, v_smem, ready, free,
            row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, True, ENTROPY, DISTANCE, SIGNED,
        )  # fmt: skip
        clear = first_tile
        if WINDOW:
            clear = gl.minimum(
                gl.maximum((gl.maximum(position + 63 - left, 0) + BLOCK_N - 1) // BLOCK_N, first_tile), below
            )
        acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum, step = band_tiles(
            acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum,
            step, below - 1, clear, q, k_smem, v_smem, ready, free,
            row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, False, ENTROPY, DISTANCE, SIGNED,
        )  # fmt: skip
        if WINDOW:
            acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum, step = band_tiles(
                acc, p, m_i, l_i, entropy_sum, distance_sum, offset_sum,
                step, clear - 1, first_tile, q, k_smem, v_smem, ready, free,
                row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, True, ENTROPY, DISTANCE, SIGNED,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(i_warpgroup), count=1)
        phase ^= 1

        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        v = v_smem.index(stage).reshape([BLOCK_N, DV])
        acc = warpgroup_mma(unpacked(p, DTYPE, OPERAND), v, acc, is_async=True)

        row_sum = gl.convert_layout(gl.sum(l_i, axis=1), ROWS)
        offs = row + gl.arange(0, 64, ROWS)
        is_valid = offs < num_queries
        address = i_pair.to(gl.int64) * num_queries + offs
        if ptr_poison is not None:
            # NaN for rows that see a non-finite key, 0 for others.
            i_kv = (i_pair // num_heads) * (num_heads // group) + (i_pair % num_heads) // group
            poison = gl.load(ptr_poison + i_kv.to(gl.int64) * num_queries + offs, mask=is_valid, other=0.0)
            row_sum += poison
            m_i += poison
        log2_sum = gl.log2(row_sum)
        logsumexp = (m_i + log2_sum) * LN2
        if not MARK:
            gl.store(ptr_lse + address, logsumexp, mask=is_valid)
        if ptr_max is not None:
            gl.store(ptr_max + address, m_i * LN2, mask=is_valid)
        if ptr_confidence is not None:
            gl.store(ptr_confidence + address, 1.0 / row_sum, mask=is_valid)  # the max weight is exp(m - m) / sum
        if ptr_visible is not None:
            from_key = gl.maximum(offs + (offset - left), 0)
            to_key = gl.minimum(offs + (offset + right), num_keys - 1)
            gl.store(ptr_visible + address, (to_key - from_key + 1).to(gl.float32), mask=is_valid)
        if ENTROPY:
            mean = gl.convert_layout(gl.sum(entropy_sum, axis=1), ROWS) / row_sum
            gl.store(ptr_entropy + address, (log2_sum - mean) * LN2, mask=is_valid)
        if DISTANCE:
            gl.store(
                ptr_distance + address, gl.convert_layout(gl.sum(distance_sum, axis=1), ROWS) / row_sum, mask=is_valid
            )
        if SIGNED:
            gl.store(ptr_signed + address, gl.convert_layout(gl.sum(offset_sum, axis=1), ROWS) / row_sum, mask=is_valid)
        inverse_sum = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
        step += 1
        acc = acc * gl.expand_dims(inverse_sum, 1)
        if MARK:
            # 0 * acc is NaN for NaN and Inf.
            logsumexp += gl.convert_layout(gl.sum(acc * 0.0, axis=1), ROWS)
            gl.store(ptr_lse + address, logsumexp, mask=is_valid)
        tma.store_wait(0)
        smem_out.reshape([64, DV]).store(acc.to(DTYPE))
        fence_async_shared()
        async_store(desc_o, [i_pair // num_heads, i_pair % num_heads, row, 0], smem_out)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=(
        "num_heads", "group", "num_queries", "num_keys", "offset", "left", "right", "scale", "blocks", "total_blocks",
    )
)  # fmt: skip
def forward_kernel(
    desc_q, desc_k, desc_v, desc_o,
    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_signed, ptr_visible, ptr_poison,
    num_heads, group, num_queries, num_keys, offset, left, right, scale, blocks, total_blocks,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, FULL: gl.constexpr, WINDOW: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SIGNED: gl.constexpr, MARK: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = desc_q.dtype
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], desc_q.layout)
    o_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, DV], desc_o.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], desc_k.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, DV], desc_v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_warpgroup in gl.static_range(2):
        mbarrier.init(q_ready.index(i_warpgroup), count=1)
        mbarrier.init(q_free.index(i_warpgroup), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    barrier()

    scale2 = scale * LOG2E
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, desc_o, q_smem, k_smem, v_smem, o_smem, q_ready, q_free, ready, free,
                    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_signed, ptr_visible, ptr_poison,
                    num_heads, group, num_queries, num_keys, offset, left, right, scale2, blocks, total_blocks,
                    D, DV, BLOCK_N, STAGES, CAUSAL, FULL, WINDOW, ENTROPY, DISTANCE, SIGNED, MARK,
                ),
            ),
            (
                _consumer,
                (
                    1, desc_o, q_smem, k_smem, v_smem, o_smem, q_ready, q_free, ready, free,
                    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_signed, ptr_visible, ptr_poison,
                    num_heads, group, num_queries, num_keys, offset, left, right, scale2, blocks, total_blocks,
                    D, DV, BLOCK_N, STAGES, CAUSAL, FULL, WINDOW, ENTROPY, DISTANCE, SIGNED, MARK,
                ),
            ),
            (
                _producer,
                (
                    desc_q, desc_k, desc_v, q_smem, k_smem, v_smem, q_ready, q_free, ready, free,
                    num_heads, group, num_queries, num_keys, offset, left, right, blocks, total_blocks, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


def can_serve(call: KernelCall, names: tuple[str, ...]) -> bool:
    """Return True if this kernel supports the tensors, the mask and the statistics."""
    return supports_band(call, call.query, call.query.shape[2]) and _SUPPORTED.issuperset(names)


def forward(
    call: KernelCall, *, row_poison: Tensor | None = None, names: tuple[str, ...], finite: bool = True
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return output, log-sum-exp and the named statistics for a band of keys; the scale must be positive.

    `row_poison` [batch, kv_heads, queries] is added to the results of a row: NaN if it sees a non-finite key. Without
    it, keys and values that may not be finite are given with `finite=False`; see `recompute_nonfinite_rows`.
    """
    query, key, value, left, right = call.query, call.key, call.value, call.mask.left, call.mask.right
    batch, heads, queries, dim = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    offset = keys - queries
    output = output_like(query, value_dim)
    logsumexp = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    statistics = {name: torch.empty_like(logsumexp) for name in names}
    dim, value_dim = padded_dim(dim, 64), padded_dim(value_dim, 64)
    block = 128
    blocks = blocks_of(queries, 128)
    total_blocks = blocks * batch * heads
    is_full = left is None and right is None
    # Without a mask every block takes the same time: persistent programs, one per multiprocessor, load the next block
    # while they finish the last.
    programs = min(total_blocks, multiprocessors(query.get_device())) if is_full else total_blocks
    constants = (
        *(dim, value_dim, block, 3 if max(dim, value_dim) == 64 else 2, right == 0, is_full, left is not None),
        *("entropy" in names, "mean_distance" in names, "mean_offset" in names, not finite),
    )
    with torch.cuda.device_of(query):
        arguments = (
            descriptor(query, 64, dim),
            descriptor(key, block, dim),
            descriptor(value, block, value_dim),
            descriptor(output, 64, value_dim),
            logsumexp,
            *map(statistics.get, STATISTICS),
            row_poison,
            heads,
            heads // kv_heads,
            queries,
            keys,
            offset,
            bounded(left),
            bounded(right),
            float(call.scale),
            blocks,
            total_blocks,
        )
        poison = None if row_poison is None else (row_poison.dtype, row_poison.data_ptr() % 16)
        variant = query.get_device(), query.dtype, names, poison
        launch(forward_kernel, programs, arguments, constants, variant=variant)
    if not finite:
        recompute_nonfinite_rows(
            *(query, key, value, output),
            scale=call.scale,
            left=left,
            right=right,
            logsumexp=logsumexp,
            statistics=statistics,
        )
    return output, logsumexp, statistics

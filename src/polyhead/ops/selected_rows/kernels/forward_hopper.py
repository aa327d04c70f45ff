"""Forward kernel for selected rows on Hopper, in Gluon: faster than `forward` for causal and window masks.

A program processes 128 selected rows where that of `attention.kernels.forward_hopper` processes 128 consecutive ones,
with the same pipeline and the same bottlenecks, which are described there. The selected rows are adjacent in memory, so
each warpgroup's 64 are loaded by one copy. Their queries ascend, so the first and the last bound the visible tiles. The
mask of a row follows from the position of its query.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from polyhead.ops.attention.kernels.forward_hopper import LOWEST, band_tiles, packed, unpacked, weigh
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.gluon_names import async_load, barrier
from polyhead.ops.common.kernels.hopper import descriptor, row_sums, supports_band
from polyhead.ops.common.kernels.launching import bounded
from polyhead.ops.common.kernels.sizes import padded_dim
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E
from polyhead.ops.selected_rows.rows import SelectedRows

# In the order of the kernel's pointers.
STATISTICS = ("max_logit", "entropy", "confidence", "visible_keys")

_SUPPORTED_STATISTICS = frozenset(STATISTICS)


@gluon.jit
def _find_rows(ptr_offsets, pairs, total, index):
    """Return the (batch, head) pair of block `index`, the block's first row, and one past the last row of the pair.

    The index `pairs` stands for the padding after the last pair. Does what `tiles.find_rows` does, by binary search.
    """
    low = index * 0
    high = low + pairs
    while low < high:
        middle = (low + high + 1) // 2
        is_before = gl.load(ptr_offsets + middle) // 128 + middle <= index
        low = gl.where(is_before, middle, low)
        high = gl.where(is_before, high, middle - 1)
    start = gl.load(ptr_offsets + low)
    stop = gl.load(ptr_offsets + gl.minimum(low + 1, pairs))
    stop = gl.where(low == pairs, total, stop)
    return low, start + (index - (start // 128 + low)) * 128, stop


@gluon.jit
def _producer(
    desc_q, desc_k, desc_v, q_smem, k_smem, v_smem, q_ready, ready, free,
    i_batch, i_kv_head, first_row, first_tile, last_tile,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load queries, and with each tile of keys the values of the previous tile: one step of `_consumer` needs both."""
    count = last_tile - first_tile + 1
    if count > 0:
        for i_warpgroup in gl.static_range(2):
            mbarrier.expect(q_ready.index(i_warpgroup), desc_q.block_type.nbytes)
            async_load(
                desc_q, [0, 0, first_row + i_warpgroup * 64, 0], q_ready.index(i_warpgroup), q_smem.index(i_warpgroup)
            )
        for i in range(count + 1):
            stage = i % STAGES
            mbarrier.wait(free.index(stage), (i // STAGES + 1) & 1)
            bar = ready.index(stage)
            column = (last_tile - i) * BLOCK_N
            has_key = i < count
            has_value = i > 0
            mbarrier.expect(bar, desc_k.block_type.nbytes + desc_v.block_type.nbytes, pred=has_key & has_value)
            mbarrier.expect(bar, desc_k.block_type.nbytes, pred=i == 0)
            mbarrier.expect(bar, desc_v.block_type.nbytes, pred=i == count)
            async_load(desc_k, [i_batch, i_kv_head, column, 0], bar, k_smem.index(stage), pred=has_key)
            async_load(desc_v, [i_batch, i_kv_head, column + BLOCK_N, 0], bar, v_smem.index(stage), pred=has_value)


@gluon.jit
def _store_output(ptr_output, o, row, stop_row, DIM_VALUE: gl.constexpr):
    """Store rows of the output that belong to the pair."""
    LAYOUT: gl.constexpr = o.type.layout
    offs_row = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    offs_dim = gl.arange(0, o.type.shape[1], gl.SliceLayout(0, LAYOUT))
    ptr_rows = ptr_output + gl.expand_dims(offs_row.to(gl.int64) * DIM_VALUE, 1) + gl.expand_dims(offs_dim, 0)
    mask_row = gl.expand_dims(offs_row < stop_row, 1) & gl.expand_dims(offs_dim < DIM_VALUE, 0)
    gl.store(ptr_rows, o.to(ptr_output.dtype.element_ty), mask=mask_row)


@gluon.jit
def _consumer(
    i_warpgroup: gl.constexpr, ptr_output, q_smem, k_smem, v_smem, q_ready, ready, free,
    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_visible, ptr_poison, ptr_positions,
    i_kv_pair, first_row, stop_row, first_tile, last_tile,
    num_queries, num_keys, offset, left, right, sm_scale_log2,
    D: gl.constexpr, DV: gl.constexpr, DIM_VALUE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, ENTROPY: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows, tile by tile from the last visible key to the first."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    DTYPE: gl.constexpr = q_smem.dtype
    row = first_row + i_warpgroup * 64
    offs = row + gl.arange(0, 64, ROWS)
    mask_row = offs < stop_row
    if first_tile > last_tile:
        # Padding, or a surplus block without rows.
        minus_inf = gl.full([64], -float("inf"), gl.float32, ROWS)
        zeros = gl.full([64], 0.0, gl.float32, ROWS)
        gl.store(ptr_lse + offs, minus_inf, mask=mask_row)
        if ptr_max is not None:
            gl.store(ptr_max + offs, minus_inf, mask=mask_row)
        if ptr_entropy is not None:
            gl.store(ptr_entropy + offs, zeros, mask=mask_row)
        if ptr_confidence is not None:
            gl.store(ptr_confidence + offs, zeros, mask=mask_row)
        if ptr_visible is not None:
            gl.store(ptr_visible + offs, zeros, mask=mask_row)
        _store_output(ptr_output, gl.full([64, DV], 0.0, gl.float32, O_LAYOUT), row, stop_row, DIM_VALUE)
    else:
        q = q_smem.index(i_warpgroup).reshape([64, D])
        # Rows past the end repeat the last one and are not stored.
        query = gl.load(ptr_positions + gl.minimum(offs, stop_row - 1))
        first_position = gl.load(ptr_positions + gl.minimum(row, stop_row - 1)) + offset
        last_position = gl.load(ptr_positions + gl.minimum(row + 63, stop_row - 1)) + offset
        # `weigh` adds the index of a row to the query of the first. Here each row has a "first query" of its own, to
        # which its index is added to give `query`.
        first_query = query - gl.arange(0, 64, ROWS)

        mbarrier.wait(q_ready.index(i_warpgroup), 0)
        zero = gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
        m = gl.full([64], LOWEST, gl.float32, ROWS)
        sums = row_sums(zero, BLOCK_N)
        acc_entropy = sums
        acc_distance = sums
        acc_offset = sums

        # The last tile is always masked, because the end of the keys may be inside it.
        mbarrier.wait(ready.index(0), 0)
        k = k_smem.index(0).reshape([BLOCK_N, D])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(free.index(0), count=1)
        step = first_row * 0 + 1
        o = gl.full([64, DV], 0.0, gl.float32, O_LAYOUT)
        weights, _, m, sums, acc_entropy, acc_distance, acc_offset = weigh(
            s, m, sums, acc_entropy, acc_distance, acc_offset, first_query, last_tile * BLOCK_N, num_keys, offset,
            left, right, sm_scale_log2, BLOCK_N, True, ENTROPY, False, False,
        )  # fmt: skip
        p = packed(weights, DTYPE)

        # From the last key to the first: tiles that the right edge of the band crosses for some row, full tiles, and,
        # with WINDOW, tiles that the left edge crosses.
        full_to = gl.minimum(gl.maximum(first_position + right + 1, 0), num_keys) // BLOCK_N
        full_to = gl.minimum(gl.maximum(full_to, first_tile), last_tile)
        full_from = first_tile
        if WINDOW:
            full_from = (gl.maximum(last_position - left, 0) + BLOCK_N - 1) // BLOCK_N
            full_from = gl.minimum(gl.maximum(full_from, first_tile), full_to)
        o, p, m, sums, acc_entropy, acc_distance, acc_offset, step = band_tiles(
            o, p, m, sums, acc_entropy, acc_distance, acc_offset, step, last_tile - 1, full_to, q, k_smem, v_smem,
            ready, free, first_query, num_keys, offset, left, right, sm_scale_log2,
            BLOCK_N, STAGES, True, ENTROPY, False, False,
        )  # fmt: skip
        o, p, m, sums, acc_entropy, acc_distance, acc_offset, step = band_tiles(
            o, p, m, sums, acc_entropy, acc_distance, acc_offset, step, full_to - 1, full_from, q, k_smem, v_smem,
            ready, free, first_query, num_keys, offset, left, right, sm_scale_log2,
            BLOCK_N, STAGES, False, ENTROPY, False, False,
        )  # fmt: skip
        if WINDOW:
            o, p, m, sums, acc_entropy, acc_distance, acc_offset, step = band_tiles(
                o, p, m, sums, acc_entropy, acc_distance, acc_offset, step, full_from - 1, first_tile, q, k_smem,
                v_smem, ready, free, first_query, num_keys, offset, left, right, sm_scale_log2,
                BLOCK_N, STAGES, True, ENTROPY, False, False,
            )  # fmt: skip

        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        v = v_smem.index(stage).reshape([BLOCK_N, DV])
        o = warpgroup_mma(unpacked(p, DTYPE, OPERAND), v, o, is_async=True)

        l_i = gl.convert_layout(gl.sum(sums, axis=1), ROWS)
        if ptr_poison is not None:
            # NaN for a row that sees a key with a removed NaN or Inf, 0 for any other.
            poison = gl.load(ptr_poison + i_kv_pair.to(gl.int64) * num_queries + query)
            l_i += poison
            m += poison
        log_l = gl.log2(l_i)
        gl.store(ptr_lse + offs, (m + log_l) * LN2, mask=mask_row)
        if ptr_max is not None:
            gl.store(ptr_max + offs, m * LN2, mask=mask_row)
        if ptr_confidence is not None:
            gl.store(ptr_confidence + offs, 1.0 / l_i, mask=mask_row)  # the weight of the largest logit: exp(m - m) / l
        if ptr_visible is not None:
            from_key = gl.maximum(query + (offset - left), 0)
            to_key = gl.minimum(query + (offset + right), num_keys - 1)
            gl.store(ptr_visible + offs, (to_key - from_key + 1).to(gl.float32), mask=mask_row)
        if ENTROPY:
            mean = gl.convert_layout(gl.sum(acc_entropy, axis=1), ROWS) / l_i
            gl.store(ptr_entropy + offs, (log_l - mean) * LN2, mask=mask_row)
        normalizer = gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        _store_output(ptr_output, o * gl.expand_dims(normalizer, 1), row, stop_row, DIM_VALUE)


@gluon.jit(
    do_not_specialize=(
        "pairs", "total", "batch", "heads", "group", "num_queries", "num_keys", "offset", "left", "right", "scale",
    )
)  # fmt: skip
def ragged_kernel(
    desc_q, desc_k, desc_v, ptr_output, ptr_positions, ptr_offsets,
    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_visible, ptr_poison,
    pairs, total, batch, heads, group, num_queries, num_keys, offset, left, right, scale,
    D: gl.constexpr, DV: gl.constexpr, DIM_VALUE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    BY_HEAD: gl.constexpr, WINDOW: gl.constexpr, ENTROPY: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = desc_q.dtype
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], desc_q.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], desc_k.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, DV], desc_v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_warpgroup in gl.static_range(2):
        mbarrier.init(q_ready.index(i_warpgroup), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    barrier()

    # In reverse, since the last rows of a pair have the most keys: programs that start late should be short.
    i_pair, first_row, stop_row = _find_rows(ptr_offsets, pairs, total, gl.num_programs(0) - 1 - gl.program_id(0))
    safe_pair = gl.where(i_pair == pairs, 0, i_pair)
    if BY_HEAD:
        i_batch, i_head = safe_pair % batch, safe_pair // batch
    else:
        i_batch, i_head = safe_pair // heads, safe_pair % heads
    i_kv_head = i_head // group
    i_kv_pair = i_batch * (heads // group) + i_kv_head
    # The tiles visible to the block's rows; none for a block without rows, and none for padding.
    first_tile = first_row * 0
    last_tile = first_tile - 1
    if (first_row < stop_row) & (i_pair < pairs):
        first_position = gl.load(ptr_positions + first_row) + offset
        last_position = gl.load(ptr_positions + gl.minimum(first_row + 127, stop_row - 1)) + offset
        first_tile = gl.maximum(first_position - left, 0) // BLOCK_N
        last_tile = gl.minimum(last_position + right, num_keys - 1) // BLOCK_N

    sm_scale_log2 = scale * LOG2E
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, ptr_output, q_smem, k_smem, v_smem, q_ready, ready, free,
                    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_visible, ptr_poison, ptr_positions,
                    i_kv_pair, first_row, stop_row, first_tile, last_tile,
                    num_queries, num_keys, offset, left, right, sm_scale_log2,
                    D, DV, DIM_VALUE, BLOCK_N, STAGES, WINDOW, ENTROPY,
                ),
            ),
            (
                _consumer,
                (
                    1, ptr_output, q_smem, k_smem, v_smem, q_ready, ready, free,
                    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_visible, ptr_poison, ptr_positions,
                    i_kv_pair, first_row, stop_row, first_tile, last_tile,
                    num_queries, num_keys, offset, left, right, sm_scale_log2,
                    D, DV, DIM_VALUE, BLOCK_N, STAGES, WINDOW, ENTROPY,
                ),
            ),
            (
                _producer,
                (
                    desc_q, desc_k, desc_v, q_smem, k_smem, v_smem, q_ready, ready, free,
                    i_batch, i_kv_head, first_row, first_tile, last_tile, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


def can_serve(selected: SelectedRows, call: KernelCall) -> bool:
    """Return True if this kernel supports the tensors, the mask and the statistics.

    With at most 64 rows per pair on average, half a block, the smaller blocks of `forward` are faster.
    """
    return (
        call.query.shape[0] > 64 * (selected.offsets.shape[0] - 1)
        and supports_band(call, call.query[None, None], selected.num_queries)
        and _SUPPORTED_STATISTICS.issuperset(call.names)
    )


def ragged_forward(
    selected: SelectedRows, call: KernelCall, *, row_poison: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`forward.ragged_forward` for a band of keys; `scale` must be positive.

    `row_poison` [batch, kv_heads, num_queries] is NaN for queries that see a non-finite key, else 0; it is added to the
    max logit and the sum of a row.
    """
    query, key, value, names = call.query, call.key, call.value, call.names
    left, right, num_queries = call.mask.left, call.mask.right, selected.num_queries
    total, dim = query.shape
    batch, kv_heads, keys, dim_value = value.shape
    pairs = selected.offsets.shape[0] - 1
    heads = pairs // batch
    output = query.new_empty(total, dim_value)
    logsumexp = query.new_empty(total, dtype=torch.float32)
    statistics = {name: torch.empty_like(logsumexp) for name in names}
    width, value_width = padded_dim(dim, 64), padded_dim(dim_value, 64)
    with torch.cuda.device_of(query):
        ragged_kernel[(total // 128 + pairs + 1,)](
            descriptor(query[None, None], 64, width),
            descriptor(key, 128, width),
            descriptor(value, 128, value_width),
            output,
            selected.positions,
            selected.offsets,
            logsumexp,
            *map(statistics.get, STATISTICS),
            row_poison,
            pairs,
            total,
            batch,
            heads,
            heads // kv_heads,
            num_queries,
            keys,
            keys - num_queries,
            bounded(left),
            bounded(right),
            call.scale,
            D=width,
            DV=value_width,
            DIM_VALUE=dim_value,
            BLOCK_N=128,
            STAGES=3 if max(width, value_width) == 64 else 2,
            BY_HEAD=selected.by_head,
            WINDOW=left is not None,
            ENTROPY="entropy" in names,
            num_warps=4,
        )
    return output, logsumexp, statistics

"""Attention with row statistics on Hopper's own units, in Gluon: the faster twin of `forward` for bands of keys.

One program holds 128 query rows. A warp copies keys and values into shared memory with the tensor memory accelerator;
two warpgroups take 64 rows each and multiply with wgmma. Within a warpgroup the product with V of one tile runs while
the softmax of the next is computed, and the two warpgroups fill each other's gaps.

Bound by the matrix units at head_dim 128 and by the exponentials at head_dim 64. The statistics cost one
multiply-add a weight each (entropy, reach), done while the matrix units are busy. Sums over a row are kept apart for
the four threads that share it, and meet once, at the end.
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

from polyhead.ops.attention.kernels.outputs import output_like
from polyhead.ops.common.kernels.availability import capability, multiprocessors
from polyhead.ops.common.kernels.hopper import DTYPES, FAR, LN2, LOG2E, descriptor, is_readable, row_sums
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two

STATISTICS = ("max_logit", "entropy", "confidence", "mean_distance", "mean_offset", "visible_keys")

_GIVEN = frozenset(STATISTICS)
_HIDDEN = gl.constexpr(-1.0e30)  # a hidden logit: finite, so that 0 * hidden is 0
_LOWEST = gl.constexpr(-1.0e20)  # no running maximum is below it, so that the weight of a hidden logit is 0


@gluon.jit
def _packed(x, DTYPE: gl.constexpr):
    """Weights rounded to the dtype of the values, two to a 32-bit register, [64, columns / 2]."""
    low, high = gl.split(gl.reshape(x, [64, x.type.shape[1] // 2, 2]))
    NAME: gl.constexpr = "bf16x2" if gl.bfloat16 == DTYPE else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpacked(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights of `_packed` as an operand of a matrix product."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    weights = gl.reshape(gl.join(low, high), [64, x.type.shape[1] * 2]).to(DTYPE, bitcast=True)
    return gl.convert_layout(weights, LAYOUT, assert_trivial=True)


@gluon.jit
def _block_of(index, blocks, num_heads, num_queries, num_keys, offset, left, right, BLOCK_N: gl.constexpr):
    """Which rows of which head an index means, and the tiles of keys that they see, first and last."""
    i_pair = index // blocks
    # Rows with the most keys first, so that no long block is left for the end.
    first_row = (blocks - 1 - index % blocks) * 128
    last_row = gl.minimum(first_row + 127, num_queries - 1)
    first_tile = gl.maximum(first_row + offset - left, 0) // BLOCK_N
    last_tile = gl.minimum(last_row + offset + right, num_keys - 1) // BLOCK_N
    return i_pair, first_row, first_tile, last_tile


@gluon.jit
def _producer(
    desc_q, desc_k, desc_v, q_smem, k_smem, v_smem, q_ready, q_free, ready, free,
    num_heads, group, num_queries, num_keys, offset, left, right, blocks, total,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies queries; and with each tile of keys the values of the tile before it, which one step needs together."""
    step = 0
    phase = 1
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        i_pair, first_row, first_tile, last_tile = _block_of(
            index, blocks, num_heads, num_queries, num_keys, offset, left, right, BLOCK_N
        )
        i_batch = i_pair // num_heads
        i_head = i_pair % num_heads
        for which in gl.static_range(2):
            mbarrier.wait(q_free.index(which), phase)
            mbarrier.expect(q_ready.index(which), desc_q.block_type.nbytes)
            tma.async_copy_global_to_shared(
                desc_q, [i_batch, i_head, first_row + which * 64, 0], q_ready.index(which), q_smem.index(which)
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
            tma.async_copy_global_to_shared(
                desc_k, [i_batch, i_head // group, column, 0], bar, k_smem.index(stage), pred=has_key
            )
            tma.async_copy_global_to_shared(
                desc_v, [i_batch, i_head // group, column + BLOCK_N, 0], bar, v_smem.index(stage), pred=has_value
            )
            step += 1


@gluon.jit
def _distance(row, column, offset, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Key minus query position of every pair of a tile."""
    rows = row + offset + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(columns, 0) - gl.expand_dims(rows, 1)


@gluon.jit
def _weigh(
    s, m, sums, mixed, far, signed, row, column, num_keys, offset, left, right, scale2,
    BLOCK_N: gl.constexpr, CAREFUL: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """One tile of logits to weights (relative to the running maximum), with every running sum moved along.

    `sums` of weights, `mixed` of weight times shifted logit (base 2), `far` of weight times |distance|, `signed` of
    weight times distance. A tile that is not CAREFUL lies wholly inside the band, on one side of the diagonal.
    """
    LAYOUT: gl.constexpr = s.type.layout
    PARTS: gl.constexpr = sums.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, PARTS)
    if CAREFUL:
        distance = _distance(row, column, offset, BLOCK_N, LAYOUT)
        inside = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)) < num_keys
        s = gl.where((distance <= right) & (distance >= -left) & gl.expand_dims(inside, 0), s, _HIDDEN)
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale2)
    t = s * scale2 - gl.expand_dims(m_new, 1)
    p = gl.exp2(t)
    fall = m - m_new
    alpha = gl.exp2(fall)
    decay = gl.expand_dims(gl.convert_layout(alpha, ROWS, assert_trivial=True), 1)
    if ENTROPY:
        step = gl.expand_dims(gl.convert_layout(fall, ROWS, assert_trivial=True), 1)
        mixed = decay * (mixed + step * sums) + row_sums(p * t, BLOCK_N)
    tile_sums = row_sums(p, BLOCK_N)
    sums = sums * decay + tile_sums
    if DISTANCE or SIGNED:
        # Columns of a tile are 8 g + 2 c + b; a thread knows its own c, and 8 g + b is a constant of each register.
        constant = (gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)) & ~6).to(gl.float32)
        weighted = row_sums(p * gl.expand_dims(constant, 0), BLOCK_N)
        own = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, PARTS)) * 2, 0) - gl.expand_dims(
            gl.arange(0, 64, ROWS) + (row + offset), 1
        )
        tile_signed = weighted + tile_sums * (own + column).to(gl.float32)
        if SIGNED:
            signed = signed * decay + tile_signed
        if DISTANCE:
            if CAREFUL:
                tile_far = row_sums(p * gl.abs(distance).to(gl.float32), BLOCK_N)
            else:
                tile_far = gl.where(column > row + offset, tile_signed, -tile_signed)
            far = far * decay + tile_far
    return p, alpha, m_new, sums, mixed, far, signed


@gluon.jit
def _tiles(
    o, p, m, sums, mixed, far, signed, step, from_tile, to_tile, q, k_smem, v_smem, ready, free,
    row, num_keys, offset, left, right, scale2,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAREFUL: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """Tiles from `from_tile` down to `to_tile`, both included.

    A tile is entered with the weights `p` of the one before it. Its logits are computed first; then the product of `p`
    with V runs while the softmax is computed.
    """
    O_LAYOUT: gl.constexpr = o.type.layout
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
        o_next = warpgroup_mma(_unpacked(p, DTYPE, OPERAND), v, o, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        weights, alpha, m, sums, mixed, far, signed = _weigh(
            s, m, sums, mixed, far, signed, row, tile * BLOCK_N, num_keys, offset, left, right, scale2,
            BLOCK_N, CAREFUL, ENTROPY, DISTANCE, SIGNED,
        )  # fmt: skip
        o = warpgroup_mma_wait(0, deps=(o_next,))
        mbarrier.arrive(free.index(stage), count=1)
        decay = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        o = o * gl.expand_dims(decay, 1)
        p = _packed(weights, DTYPE)
        step += 1
    return o, p, m, sums, mixed, far, signed, step


@gluon.jit
def _consumer(
    which: gl.constexpr, desc_o, q_smem, k_smem, v_smem, o_smem, q_ready, q_free, ready, free,
    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_signed, ptr_visible, ptr_poison,
    num_heads, group, num_queries, num_keys, offset, left, right, scale2, blocks, total,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, FULL: gl.constexpr, WINDOW: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """64 rows of each block: logits, softmax and sums, tile after tile, from the right end of the band to the left."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    DTYPE: gl.constexpr = q_smem.dtype
    q = q_smem.index(which).reshape([64, D])
    out = o_smem.index(which)
    zero = gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    step = 0
    phase = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        i_pair, first_row, first_tile, last_tile = _block_of(
            index, blocks, num_heads, num_queries, num_keys, offset, left, right, BLOCK_N
        )
        row = first_row + which * 64
        mbarrier.wait(q_ready.index(which), phase)
        m = gl.full([64], _LOWEST, gl.float32, ROWS)
        sums = row_sums(zero, BLOCK_N)
        mixed = sums
        far = sums
        signed = sums

        # The last tile, always with care: the end of the keys may cross it.
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        k = k_smem.index(stage).reshape([BLOCK_N, D])
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(free.index(stage), count=1)
        step += 1
        o = gl.full([64, DV], 0.0, gl.float32, O_LAYOUT)
        weights, _, m, sums, mixed, far, signed = _weigh(
            s, m, sums, mixed, far, signed, row, last_tile * BLOCK_N, num_keys, offset, left, right, scale2,
            BLOCK_N, True, ENTROPY, DISTANCE, SIGNED,
        )  # fmt: skip
        p = _packed(weights, DTYPE)
        tile = last_tile - 1

        # Tiles that an edge of the band or the diagonal crosses, and those between, which need no such care.
        place = row + offset
        below = gl.maximum(place // BLOCK_N, first_tile)  # the last tile that the diagonal crosses
        if FULL and not (DISTANCE or SIGNED):
            below = gl.maximum(gl.minimum(num_keys // BLOCK_N, tile + 1), first_tile)
        if not CAUSAL and (DISTANCE or not FULL):
            # Right of the diagonal.
            above = gl.maximum((place + 63) // BLOCK_N + 1, first_tile)
            edge = gl.minimum(gl.maximum((gl.minimum(place + right, num_keys - 1) + 1) // BLOCK_N, above), tile + 1)
            o, p, m, sums, mixed, far, signed, step = _tiles(
                o, p, m, sums, mixed, far, signed, step, tile, edge, q, k_smem, v_smem, ready, free,
                row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, True, ENTROPY, DISTANCE, SIGNED,
            )  # fmt: skip
            above = gl.minimum(above, edge)
            o, p, m, sums, mixed, far, signed, step = _tiles(
                o, p, m, sums, mixed, far, signed, step, edge - 1, above, q, k_smem, v_smem, ready, free,
                row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, False, ENTROPY, DISTANCE, SIGNED,
            )  # fmt: skip
            tile = above - 1
        below = gl.minimum(below, tile + 1)
        o, p, m, sums, mixed, far, signed, step = _tiles(
            o, p, m, sums, mixed, far, signed, step, tile, below, q, k_smem, v_smem, ready, free,
            row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, True, ENTROPY, DISTANCE, SIGNED,
        )  # fmt: skip
        clear = first_tile
        if WINDOW:
            clear = gl.minimum(
                gl.maximum((gl.maximum(place + 63 - left, 0) + BLOCK_N - 1) // BLOCK_N, first_tile), below
            )
        o, p, m, sums, mixed, far, signed, step = _tiles(
            o, p, m, sums, mixed, far, signed, step, below - 1, clear, q, k_smem, v_smem, ready, free,
            row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, False, ENTROPY, DISTANCE, SIGNED,
        )  # fmt: skip
        if WINDOW:
            o, p, m, sums, mixed, far, signed, step = _tiles(
                o, p, m, sums, mixed, far, signed, step, clear - 1, first_tile, q, k_smem, v_smem, ready, free,
                row, num_keys, offset, left, right, scale2, BLOCK_N, STAGES, True, ENTROPY, DISTANCE, SIGNED,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(which), count=1)
        phase ^= 1

        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        v = v_smem.index(stage).reshape([BLOCK_N, DV])
        o = warpgroup_mma(_unpacked(p, DTYPE, OPERAND), v, o, is_async=True)

        all_sums = gl.convert_layout(gl.sum(sums, axis=1), ROWS)
        offs = row + gl.arange(0, 64, ROWS)
        inside = offs < num_queries
        address = i_pair.to(gl.int64) * num_queries + offs
        if ptr_poison is not None:
            # NaN for a row that sees a key whose NaN or Inf was taken out, 0 for any other.
            i_kv = (i_pair // num_heads) * (num_heads // group) + (i_pair % num_heads) // group
            poison = gl.load(ptr_poison + i_kv.to(gl.int64) * num_queries + offs, mask=inside, other=0.0)
            all_sums += poison
            m += poison
        log_sums = gl.log2(all_sums)
        gl.store(ptr_lse + address, (m + log_sums) * LN2, mask=inside)
        if ptr_max is not None:
            gl.store(ptr_max + address, m * LN2, mask=inside)
        if ptr_confidence is not None:
            gl.store(ptr_confidence + address, 1.0 / all_sums, mask=inside)  # the largest weight is exp(m - m) / sums
        if ptr_visible is not None:
            from_key = gl.maximum(offs + (offset - left), 0)
            to_key = gl.minimum(offs + (offset + right), num_keys - 1)
            gl.store(ptr_visible + address, (to_key - from_key + 1).to(gl.float32), mask=inside)
        if ENTROPY:
            mean = gl.convert_layout(gl.sum(mixed, axis=1), ROWS) / all_sums
            gl.store(ptr_entropy + address, (log_sums - mean) * LN2, mask=inside)
        if DISTANCE:
            gl.store(ptr_distance + address, gl.convert_layout(gl.sum(far, axis=1), ROWS) / all_sums, mask=inside)
        if SIGNED:
            gl.store(ptr_signed + address, gl.convert_layout(gl.sum(signed, axis=1), ROWS) / all_sums, mask=inside)
        share = gl.convert_layout(1.0 / all_sums, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(free.index(stage), count=1)
        step += 1
        o = o * gl.expand_dims(share, 1)
        tma.store_wait(0)
        out.reshape([64, DV]).store(o.to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(desc_o, [i_pair // num_heads, i_pair % num_heads, row, 0], out)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=(
        "num_heads", "group", "num_queries", "num_keys", "offset", "left", "right", "scale", "blocks", "total",
    )
)  # fmt: skip
def forward_kernel(
    desc_q, desc_k, desc_v, desc_o,
    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_signed, ptr_visible, ptr_poison,
    num_heads, group, num_queries, num_keys, offset, left, right, scale, blocks, total,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, FULL: gl.constexpr, WINDOW: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SIGNED: gl.constexpr,
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
    for which in gl.static_range(2):
        mbarrier.init(q_ready.index(which), count=1)
        mbarrier.init(q_free.index(which), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()

    scale2 = scale * LOG2E
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, desc_o, q_smem, k_smem, v_smem, o_smem, q_ready, q_free, ready, free,
                    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_signed, ptr_visible, ptr_poison,
                    num_heads, group, num_queries, num_keys, offset, left, right, scale2, blocks, total,
                    D, DV, BLOCK_N, STAGES, CAUSAL, FULL, WINDOW, ENTROPY, DISTANCE, SIGNED,
                ),
            ),
            (
                _consumer,
                (
                    1, desc_o, q_smem, k_smem, v_smem, o_smem, q_ready, q_free, ready, free,
                    ptr_lse, ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_signed, ptr_visible, ptr_poison,
                    num_heads, group, num_queries, num_keys, offset, left, right, scale2, blocks, total,
                    D, DV, BLOCK_N, STAGES, CAUSAL, FULL, WINDOW, ENTROPY, DISTANCE, SIGNED,
                ),
            ),
            (
                _producer,
                (
                    desc_q, desc_k, desc_v, q_smem, k_smem, v_smem, q_ready, q_free, ready, free,
                    num_heads, group, num_queries, num_keys, offset, left, right, blocks, total, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


def can_serve(query: Tensor, key: Tensor, value: Tensor, mask: MaskArguments, names: tuple[str, ...]) -> bool:
    """Whether this kernel takes such tensors and this mask; what it does not ask about, it does not have."""
    queries, keys = query.shape[2], key.shape[2]
    tensors = (query, key, value)
    return (
        query.dtype in DTYPES
        and capability(query.device.index)[0] == 9
        and all(32 < x.shape[3] <= 128 and is_readable(x) for x in tensors)
        and queries > 0
        and keys >= queries
        and mask.offset == keys - queries
        and mask.is_band
        and _GIVEN.issuperset(names)
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    left: int | None,
    right: int | None,
    row_poison: Tensor | None,
    names: tuple[str, ...],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, log-sum-exp and the named statistics for a band of keys; `scale` must be positive.

    `row_poison` [batch, kv_heads, queries] is added to what a row gives: NaN for a row that sees a broken key.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    offset = keys - queries
    output = output_like(query, value_dim)
    logsumexp = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    found = {name: torch.empty_like(logsumexp) for name in names}
    dim, value_dim = max(64, power_of_two(dim)), max(64, power_of_two(value_dim))
    block = 128
    blocks = blocks_of(queries, 128)
    total = blocks * batch * heads
    is_full = left is None and right is None
    # Every block of a full mask takes the same time: one program a multiprocessor then walks through its share, and
    # loads the next block while it ends the last.
    programs = min(total, multiprocessors(query.get_device())) if is_full else total
    with torch.cuda.device_of(query):
        forward_kernel[(programs,)](
            descriptor(query, 64, dim),
            descriptor(key, block, dim),
            descriptor(value, block, value_dim),
            descriptor(output, 64, value_dim),
            logsumexp,
            found.get("max_logit"),
            found.get("entropy"),
            found.get("confidence"),
            found.get("mean_distance"),
            found.get("mean_offset"),
            found.get("visible_keys"),
            row_poison,
            heads,
            heads // kv_heads,
            queries,
            keys,
            offset,
            FAR if left is None else min(left, FAR),
            FAR if right is None else min(right, FAR),
            scale,
            blocks,
            total,
            D=dim,
            DV=value_dim,
            BLOCK_N=block,
            STAGES=3 if max(dim, value_dim) == 64 else 2,
            CAUSAL=right == 0,
            FULL=is_full,
            WINDOW=left is not None,
            ENTROPY="entropy" in names,
            DISTANCE="mean_distance" in names,
            SIGNED="mean_offset" in names,
            num_warps=4,
        )
    return output, logsumexp, found

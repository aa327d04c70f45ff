"""Attention of a few new tokens over latents: a token's one vector [c ; r] is key and, by its first part, value.

What `decode` does for keys and values of their own: programs walk their share of the keys and leave their sums and
unnormalised outputs, and `decode_parts.join_kernel` joins them. Here c is brought once and multiplied twice, from the
same shared memory, and heads are many: all of them share the one key, so they are the rows of a tile. Up to 16 rows it
is bound by bytes; with 128 heads by the matrix units, where `decode_latent_hopper` serves on Hopper.

Tiles that every row sees whole, and where no asked mass stands, are loaded without a mask, as in `decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.availability import has_hopper_kernels
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.mask_tiles import added_tile, visible_tile
from polyhead.ops.common.kernels.resources import launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of
from polyhead.ops.common.kernels.softmax_tiles import add_product, products, tanh
from polyhead.ops.decode.kernels.latent_tiles import LatentBlocks, Latents, Numbers, plan_latent_blocks
from polyhead.ops.decode.kernels.parts import Places, exp, load_rows, store_sums


@triton.jit
def _spans(mask, places, length, first_position, stop, sink_keys, window, BLOCK_N: tl.constexpr):
    """The tiles of keys that rows from `first_position` on see, and which of them whole.

    Tiles are counted without those that a window's left edge hides: `kept` from key 0 on, then from tile `first` on.
    Whole ones, which every row sees and where no asked mass stands, go from `inner_from` to `inner_to`.
    """
    first, kept = 0, 0
    whole_from, whole_to = 0, stop
    if mask.left is not None:
        first = tl.maximum(first_position - mask.left, 0) // BLOCK_N
        whole_from = tl.maximum(length - 1 - mask.left, 0)
        if mask.sinks is not None:
            kept = tl.minimum(tl.cdiv(mask.sinks, BLOCK_N), first)
    if mask.right is not None:
        whole_to = tl.minimum(whole_to, first_position + mask.right + 1)
    if places.sink_mass is not None:
        whole_from = tl.maximum(whole_from, sink_keys)
    if (places.self_mass is not None) or (places.previous_mass is not None) or (places.next_mass is not None):
        whole_to = tl.minimum(whole_to, first_position - 1)
    if places.window_mass is not None:
        whole_to = tl.minimum(whole_to, first_position - window)
    tiles = kept + tl.maximum(tl.cdiv(stop, BLOCK_N) - first, 0)
    inner_from = kept + tl.maximum(tl.cdiv(whole_from, BLOCK_N) - first, 0)
    inner_to = kept + tl.maximum(tl.maximum(whole_to, 0) // BLOCK_N - first, 0)
    return first, kept, tiles, inner_from, inner_to


@triton.jit
def _logits(tile_query, tile_turned, tile_latent, tile_turning):
    """q_c . c + q_r . r, float32 [BLOCK_M, BLOCK_N]; the second term only where something turns."""
    if tile_query.dtype == tl.float32:
        logits = products(tile_query, tile_latent)
        if tile_turned is not None:
            logits += products(tile_turned, tile_turning)
    elif tile_turned is not None:
        logits = tl.dot(tile_turned, tl.trans(tile_turning))
        logits = tl.dot(tile_query, tl.trans(tile_latent), logits)
    else:
        logits = tl.dot(tile_query, tl.trans(tile_latent))
    return logits


@triton.jit(do_not_specialize=["num_slots", "splits", "num_rows", "sink_keys", "window"])
def latent_kernel(
    ptr_query,
    ptr_sums,  # [2 + statistics, splits, rows], rows are [batch, heads, queries]: as `decode.decode_kernel` leaves them
    ptr_parts,  # [splits, rows, RANK]
    ptr_head_scale,
    latents,
    mask,
    places,
    stride_query_batch,
    stride_query_head,
    stride_query_token,
    scale,
    softcap,
    sink_keys,
    window,
    num_slots,
    splits,
    num_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_TURNING: tl.constexpr,
    STAGES: tl.constexpr,
):
    EXACT: tl.constexpr = ptr_query.dtype.element_ty == tl.float32
    ROWS: tl.constexpr = GROUP * QUERIES
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    i_pair = tl.program_id(0) // ROW_BLOCKS  # batch * KV_HEADS + KV head
    i_batch, i_kv_head = i_pair // KV_HEADS, i_pair % KV_HEADS
    i_split = tl.program_id(1)
    # [BLOCK_M]: the rows of a KV head are its query heads times the new tokens
    offs_m = (tl.program_id(0) % ROW_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < ROWS
    offs_query = offs_m % QUERIES
    offs_head = i_kv_head * GROUP + offs_m // QUERIES
    offs_row = i_pair.to(tl.int64) * ROWS + offs_m

    # Lengths come from the device, so what they say is held to what can be read.
    length, new_length = num_slots, QUERIES
    if latents.lengths is not None:
        length = tl.minimum(tl.load(latents.lengths + i_batch).to(tl.int32), num_slots)
    if latents.new_lengths is not None:
        new_length = tl.load(latents.new_lengths + i_batch).to(tl.int32)
    mask_real = mask_m & (offs_query < new_length)
    first_position = length - new_length
    position = first_position + offs_query
    stop = tl.where(new_length > 0, length, 0)
    first, kept, tiles, inner_from, inner_to = _spans(
        mask, places, length, first_position, stop, sink_keys, window, BLOCK_N
    )
    tiles_each = tl.cdiv(tiles, splits)
    tile_from = tl.minimum(i_split * tiles_each, tiles)
    tile_to = tl.minimum(tile_from + tiles_each, tiles)
    inner_from = tl.minimum(tl.maximum(inner_from, tile_from), tile_to)
    inner_to = tl.maximum(tl.minimum(inner_to, tile_to), inner_from)

    # [BLOCK_M, BLOCK_RANK] and [BLOCK_M, BLOCK_TURNING]
    ptr_rows = ptr_query + i_batch.to(tl.int64) * stride_query_batch
    ptr_rows += offs_head.to(tl.int64) * stride_query_head + offs_query.to(tl.int64) * stride_query_token
    tile_query = load_rows(ptr_rows, mask_real, RANK, BLOCK_RANK)
    tile_turned = None
    if TURNING > 0:
        tile_turned = load_rows(ptr_rows + RANK, mask_real, TURNING, BLOCK_TURNING)
    row_scale = tl.zeros([BLOCK_M], tl.float32) + scale
    if ptr_head_scale is not None:
        row_scale *= tl.load(ptr_head_scale + offs_head, mask=mask_m, other=0.0).to(tl.float32)
    ptr_held = latents.held + i_batch.to(tl.int64) * latents.batch + i_kv_head.to(tl.int64) * latents.head

    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest_size = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    mean_distance = tl.zeros([BLOCK_M], tl.float32)
    mean_offset = tl.zeros([BLOCK_M], tl.float32)
    mean_squared_distance = tl.zeros([BLOCK_M], tl.float32)
    sink_mass = tl.zeros([BLOCK_M], tl.float32)
    self_mass = tl.zeros([BLOCK_M], tl.float32)
    previous_mass = tl.zeros([BLOCK_M], tl.float32)
    next_mass = tl.zeros([BLOCK_M], tl.float32)
    window_mass = tl.zeros([BLOCK_M], tl.float32)
    visible_keys = tl.zeros([BLOCK_M], tl.int32)
    tile_output = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)

    # The edge before the whole tiles, the whole tiles, the edge behind them.
    WHOLE: tl.constexpr = 1
    for i_zone in tl.static_range(3):
        if i_zone == 0:
            zone_from, zone_to = tile_from, inner_from
        elif i_zone == WHOLE:
            zone_from, zone_to = inner_from, inner_to
        else:
            zone_from, zone_to = inner_to, tile_to
        for i_tile in tl.range(zone_from, zone_to, num_stages=STAGES if i_zone == WHOLE else 2):
            if i_zone == WHOLE:
                column = (i_tile + (first - kept)) * BLOCK_N
            else:
                column = (i_tile + tl.where(i_tile >= kept, first - kept, 0)) * BLOCK_N
            offs_n = column + tl.arange(0, BLOCK_N)
            # [BLOCK_M, BLOCK_N]
            distance = offs_n[None, :] - position[:, None]
            mask_n = None
            seen = mask_m[:, None] & (offs_n >= 0)[None, :]
            if i_zone != WHOLE:
                seen = seen & visible_tile(mask, i_batch, offs_head, offs_query, offs_n, distance, new_length, stop)
                mask_n = tl.max(seen.to(tl.int32), 0) > 0
            ptr_tokens = ptr_held + offs_n.to(tl.int64) * latents.token
            # [BLOCK_N, BLOCK_RANK] and [BLOCK_N, BLOCK_TURNING]
            tile_latent = load_rows(ptr_tokens, mask_n, RANK, BLOCK_RANK)
            tile_turning = None
            if TURNING > 0:
                tile_turning = load_rows(ptr_tokens + RANK, mask_n, TURNING, BLOCK_TURNING)

            logits = _logits(tile_query, tile_turned, tile_latent, tile_turning) * row_scale[:, None]
            if softcap is not None:
                logits = softcap * tanh(logits / softcap, EXACT)
            if mask.table is not None:
                logits += added_tile(mask, i_batch, offs_head[:, None], offs_query, offs_n, distance, seen)
            if i_zone != WHOLE:
                if QUERIES > 1:
                    # A value that one row sees and another does not: if it is broken, only the first may know.
                    broken = (tile_latent - tile_latent) != 0.0
                    tile_latent = tl.where(broken, 0.0, tile_latent)
                    logits += tl.where(tl.max(broken.to(tl.int32), 1) > 0, float("nan"), 0.0)[None, :]
                logits = tl.where(seen, logits, -float("inf"))

            new_largest = tl.maximum(largest, tl.max(logits, 1))
            shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
            below = logits - shift[:, None]
            exponential = exp(below, EXACT)
            shrink = exp(largest - shift, EXACT)
            if places.entropy is not None:
                # Never two numbers of the logits' size: when the maximum moves, the sum moves by the difference.
                moved = tl.where(largest == -float("inf"), 0.0, largest - shift)
                product = tl.where(exponential > 0.0, exponential * below, 0.0)
                spread = shrink * (spread + moved * total) + tl.sum(product, 1)
            total = total * shrink + tl.sum(exponential, 1)
            if places.max_abs_logit is not None:
                size = tl.where(logits == -float("inf"), 0.0, tl.abs(logits))
                largest_size = tl.maximum(largest_size, tl.max(size, 1))
            far = distance.to(tl.float32)
            if places.mean_distance is not None:
                mean_distance = mean_distance * shrink + tl.sum(exponential * tl.abs(far), 1)
            if places.mean_offset is not None:
                mean_offset = mean_offset * shrink + tl.sum(exponential * far, 1)
            if places.mean_squared_distance is not None:
                mean_squared_distance = mean_squared_distance * shrink + tl.sum(exponential * far * far, 1)
            if places.visible_keys is not None:
                visible_keys += tl.sum(seen.to(tl.int32), 1)
            # Masses at fixed places stand in no whole tile, and shrink there as the others do.
            sink_mass *= shrink
            self_mass *= shrink
            previous_mass *= shrink
            next_mass *= shrink
            window_mass *= shrink
            if i_zone != WHOLE:
                if places.sink_mass is not None:
                    sink_mass += tl.sum(tl.where((offs_n < sink_keys)[None, :], exponential, 0.0), 1)
                if places.self_mass is not None:
                    self_mass += tl.sum(tl.where(distance == 0, exponential, 0.0), 1)
                if places.previous_mass is not None:
                    previous_mass += tl.sum(tl.where(distance == -1, exponential, 0.0), 1)
                if places.next_mass is not None:
                    next_mass += tl.sum(tl.where(distance == 1, exponential, 0.0), 1)
                if places.window_mass is not None:
                    window_mass += tl.sum(tl.where(tl.abs(distance) <= window, exponential, 0.0), 1)
            weights = exponential.to(tile_latent.dtype)
            tile_output = add_product(tile_output * shrink[:, None], weights, tile_latent)
            largest = new_largest

    # Whole tiles ask nobody whether a row is real, so rows past the real ones are emptied here.
    largest = tl.where(mask_real, largest, -float("inf"))
    total = tl.where(mask_real, total, 0.0)
    num_rows = num_rows.to(tl.int64)
    offs_part, mask_filled = store_sums(
        ptr_sums,
        places,
        i_split,
        splits,
        num_rows,
        offs_row,
        mask_m,
        largest,
        total,
        largest_size,
        spread,
        mean_distance,
        mean_offset,
        mean_squared_distance,
        sink_mass,
        self_mass,
        previous_mass,
        next_mass,
        window_mass,
        visible_keys.to(tl.float32),
    )
    # [BLOCK_M, BLOCK_RANK]
    offs_rank = tl.arange(0, BLOCK_RANK)
    ptr = ptr_parts + offs_part[:, None] * RANK + offs_rank[None, :]
    tl.store(ptr, tile_output, mask=mask_filled[:, None] & (offs_rank < RANK)[None, :])


def plan_parts(
    query: Tensor,
    latents: Latents,
    rank: int,
    mask: MaskArguments,
    places: Places,
    head_scale: Tensor | None,
    numbers: Numbers,
) -> LatentBlocks:
    """The tiles that `leave_parts` will walk in, and by which kernel."""
    if has_hopper_kernels(query.device):
        from polyhead.ops.decode.kernels import latent_hopper as hopper

        if hopper.can_serve(query, latents, rank, mask, places, head_scale, numbers):
            return hopper.plan(rank)
    group = query.shape[1] // latents.held.shape[1]
    return plan_latent_blocks(group * query.shape[2], query.shape[3], rank, query.element_size())


def leave_parts(
    query: Tensor,
    latents: Latents,
    rank: int,
    sums: Tensor,
    parts: Tensor,
    mask: MaskArguments,
    places: Places,
    head_scale: Tensor | None,
    numbers: Numbers,
    blocks: LatentBlocks,
) -> None:
    """Fill `sums` and `parts` for `decode_parts.join_kernel`; how many splits there are, their shapes say."""
    if blocks.on_hopper:
        from polyhead.ops.decode.kernels import latent_hopper as hopper

        hopper.leave_parts(query, latents, rank, sums, parts, mask, places, numbers, blocks)
        return
    batch, heads, queries, width = query.shape
    kv_heads, slots = latents.held.shape[1:3]
    _, splits, rows = sums.shape
    group = heads // kv_heads

    def launch(tile: LatentBlocks) -> None:
        latent_kernel[(batch * kv_heads * blocks_of(group * queries, tile.rows), splits)](
            query,
            sums,
            parts,
            head_scale,
            latents,
            mask,
            places,
            *query.stride()[:3],
            *numbers,
            slots,
            splits,
            rows,
            KV_HEADS=kv_heads,
            GROUP=group,
            QUERIES=queries,
            RANK=rank,
            TURNING=width - rank,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_RANK=tile.rank,
            BLOCK_TURNING=tile.turning,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )

    launch_fitting(launch, blocks, LatentBlocks.smaller, lambda: ("latents", blocks, query.dtype, query.device))

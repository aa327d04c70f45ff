"""Decoding over the latents of multi-head latent attention (MLA, DeepSeek-V2) in its absorbed form.

A token has one vector [c ; r], c the compressed latent and r the rotary key; it is the key, and c is also the value. As
in `split_keys`, programs process their share of the keys and store partial results, which `parts.join_kernel` reduces.
Here c is loaded once and multiplied twice from the same shared memory, and all heads share the one key, so the heads
are the rows of a tile. Up to 16 rows the kernel is memory-bound; with 128 heads it is compute-bound, and on Hopper
`latent_hopper` is used instead.

Full tiles, which every row sees and which contribute to no requested mass, are loaded without a mask, as in
`split_keys`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.availability import has_hopper_kernels
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.mask_tiles import added_tile, visible_tile
from polyhead.ops.common.kernels.resources import launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of
from polyhead.ops.common.kernels.softmax_tiles import add_product, products, tanh
from polyhead.ops.decode.kernels.latent_tiles import LatentBlocks, Latents, SoftmaxOptions, plan_latent_blocks
from polyhead.ops.decode.kernels.parts import load_rows, store_sums
from polyhead.ops.decode.kernels.row_state import empty_state, reset_padding, update_state


@triton.jit
def _key_tiles(mask, stat_slots, length, first_position, stop, sink_keys, window, BLOCK_N: tl.constexpr):
    """Return the tiles of keys visible to rows from `first_position` on, and which are full.

    Tiles masked by a window's left edge are not counted: there are `sink_tiles` from key 0 on, then those from
    `first_tile` on. The full tiles, which every row sees and which contribute to no requested mass, are `inner_from` to
    `inner_to`.
    """
    first_tile, sink_tiles = 0, 0
    full_from, full_to = 0, stop
    if mask.left is not None:
        first_tile = tl.maximum(first_position - mask.left, 0) // BLOCK_N
        full_from = tl.maximum(length - 1 - mask.left, 0)
        if mask.sinks is not None:
            sink_tiles = tl.minimum(tl.cdiv(mask.sinks, BLOCK_N), first_tile)
    if mask.right is not None:
        full_to = tl.minimum(full_to, first_position + mask.right + 1)
    if stat_slots.sink_mass is not None:
        full_from = tl.maximum(full_from, sink_keys)
    if (
        (stat_slots.self_mass is not None)
        or (stat_slots.previous_mass is not None)
        or (stat_slots.next_mass is not None)
    ):
        full_to = tl.minimum(full_to, first_position - 1)
    if stat_slots.window_mass is not None:
        full_to = tl.minimum(full_to, first_position - window)
    tiles = sink_tiles + tl.maximum(tl.cdiv(stop, BLOCK_N) - first_tile, 0)
    inner_from = sink_tiles + tl.maximum(tl.cdiv(full_from, BLOCK_N) - first_tile, 0)
    inner_to = sink_tiles + tl.maximum(tl.maximum(full_to, 0) // BLOCK_N - first_tile, 0)
    return first_tile, sink_tiles, tiles, inner_from, inner_to


@triton.jit
def _logits(tile_query, tile_query_rope, tile_latent, tile_key_rope):
    """Return q_c . c + q_r . r, float32 [BLOCK_M, BLOCK_N].

    The second term is omitted if there are no rotary channels.
    """
    if tile_query.dtype == tl.float32:
        qk = products(tile_query, tile_latent)
        if tile_query_rope is not None:
            qk += products(tile_query_rope, tile_key_rope)
    elif tile_query_rope is not None:
        qk = tl.dot(tile_query_rope, tl.trans(tile_key_rope))
        qk = tl.dot(tile_query, tl.trans(tile_latent), qk)
    else:
        qk = tl.dot(tile_query, tl.trans(tile_latent))
    return qk


@triton.jit(do_not_specialize=["num_slots", "splits", "num_rows", "sink_keys", "window"])
def latent_kernel(
    ptr_query,
    ptr_sums,  # [2 + statistics, splits, rows], rows are [batch, heads, queries]; as in `split_keys.decode_kernel`
    ptr_parts,  # [splits, rows, RANK]
    ptr_head_scale,
    latents,
    mask,
    stat_slots,
    stride_query_batch,
    stride_query_head,
    stride_query_token,
    sm_scale,
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
    ROPE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
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

    # Lengths are read on the device and cannot be checked by the host, so they are clamped to the slots.
    length, new_length = num_slots, QUERIES
    if latents.lengths is not None:
        length = tl.minimum(tl.load(latents.lengths + i_batch).to(tl.int32), num_slots)
    if latents.new_lengths is not None:
        new_length = tl.load(latents.new_lengths + i_batch).to(tl.int32)
    mask_real = mask_m & (offs_query < new_length)
    first_position = length - new_length
    position = first_position + offs_query
    stop = tl.where(new_length > 0, length, 0)
    first_tile, sink_tiles, tiles, inner_from, inner_to = _key_tiles(
        mask, stat_slots, length, first_position, stop, sink_keys, window, BLOCK_N
    )
    tiles_each = tl.cdiv(tiles, splits)
    tile_from = tl.minimum(i_split * tiles_each, tiles)
    tile_to = tl.minimum(tile_from + tiles_each, tiles)
    inner_from = tl.minimum(tl.maximum(inner_from, tile_from), tile_to)
    inner_to = tl.maximum(tl.minimum(inner_to, tile_to), inner_from)

    # [BLOCK_M, BLOCK_RANK] and [BLOCK_M, BLOCK_ROPE]
    ptr_rows = ptr_query + i_batch.to(tl.int64) * stride_query_batch
    ptr_rows += offs_head.to(tl.int64) * stride_query_head + offs_query.to(tl.int64) * stride_query_token
    tile_query = load_rows(ptr_rows, mask_real, RANK, BLOCK_RANK)
    tile_query_rope = None
    if ROPE_DIM > 0:
        tile_query_rope = load_rows(ptr_rows + RANK, mask_real, ROPE_DIM, BLOCK_ROPE)
    head_sm_scale = tl.zeros([BLOCK_M], tl.float32) + sm_scale
    if ptr_head_scale is not None:
        head_sm_scale *= tl.load(ptr_head_scale + offs_head, mask=mask_m, other=0.0).to(tl.float32)
    ptr_latents = latents.data + i_batch.to(tl.int64) * latents.batch + i_kv_head.to(tl.int64) * latents.head

    state = empty_state(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)

    # Partial tiles before the full ones, full tiles, partial tiles after them.
    FULL: tl.constexpr = 1
    for i_zone in tl.static_range(3):
        if i_zone == 0:
            zone_from, zone_to = tile_from, inner_from
        elif i_zone == FULL:
            zone_from, zone_to = inner_from, inner_to
        else:
            zone_from, zone_to = inner_to, tile_to
        for i_tile in tl.range(zone_from, zone_to, num_stages=STAGES if i_zone == FULL else 2):
            if i_zone == FULL:
                column = (i_tile + (first_tile - sink_tiles)) * BLOCK_N
            else:
                column = (i_tile + tl.where(i_tile >= sink_tiles, first_tile - sink_tiles, 0)) * BLOCK_N
            offs_n = column + tl.arange(0, BLOCK_N)
            # [BLOCK_M, BLOCK_N]
            distance = offs_n[None, :] - position[:, None]
            mask_n = None
            visible = mask_m[:, None] & (offs_n >= 0)[None, :]
            if i_zone != FULL:
                visible = visible & visible_tile(
                    mask, i_batch, offs_head, offs_query, offs_n, distance, new_length, stop
                )
                mask_n = tl.max(visible.to(tl.int32), 0) > 0
            ptr_tokens = ptr_latents + offs_n.to(tl.int64) * latents.token
            # [BLOCK_N, BLOCK_RANK] and [BLOCK_N, BLOCK_ROPE]
            tile_latent = load_rows(ptr_tokens, mask_n, RANK, BLOCK_RANK)
            tile_key_rope = None
            if ROPE_DIM > 0:
                tile_key_rope = load_rows(ptr_tokens + RANK, mask_n, ROPE_DIM, BLOCK_ROPE)

            qk = _logits(tile_query, tile_query_rope, tile_latent, tile_key_rope) * head_sm_scale[:, None]
            if softcap is not None:
                qk = softcap * tanh(qk / softcap, EXACT)
            if mask.table is not None:
                qk += added_tile(mask, i_batch, offs_head[:, None], offs_query, offs_n, distance, visible)
            if i_zone != FULL:
                if QUERIES > 1:
                    # A non-finite value must reach only the rows that see its key: 0 * NaN would reach the others.
                    nonfinite = (tile_latent - tile_latent) != 0.0
                    tile_latent = tl.where(nonfinite, 0.0, tile_latent)
                    qk += tl.where(tl.max(nonfinite.to(tl.int32), 1) > 0, float("nan"), 0.0)[None, :]
                qk = tl.where(visible, qk, -float("inf"))

            state, p, alpha = update_state(
                state, stat_slots, qk, distance, visible, mask, i_batch, offs_n, stop, sink_keys, window,
                i_zone == FULL, BLOCK_N, EXACT,
            )  # fmt: skip
            weights = p.to(tile_latent.dtype)
            acc = add_product(acc * alpha[:, None], weights, tile_latent)

    state = reset_padding(state, mask_real)
    num_rows = num_rows.to(tl.int64)
    offs_part, mask_filled = store_sums(ptr_sums, stat_slots, i_split, splits, num_rows, offs_row, mask_m, state)
    # [BLOCK_M, BLOCK_RANK]
    offs_rank = tl.arange(0, BLOCK_RANK)
    ptr = ptr_parts + offs_part[:, None] * RANK + offs_rank[None, :]
    tl.store(ptr, acc, mask=mask_filled[:, None] & (offs_rank < RANK)[None, :])


def plan_parts(
    query: Tensor,
    latents: Latents,
    rank: int,
    mask: MaskArguments,
    stat_slots: Any,
    head_scale: Tensor | None,
    options: SoftmaxOptions,
) -> LatentBlocks:
    """Return the tile sizes for `leave_parts`, and by them the kernel that it launches."""
    if has_hopper_kernels(query.device):
        from polyhead.ops.decode.kernels import latent_hopper as hopper

        if hopper.can_serve(query, latents, rank, mask, stat_slots, head_scale, options):
            return hopper.plan(rank)
    group = query.shape[1] // latents.data.shape[1]
    return plan_latent_blocks(group * query.shape[2], query.shape[3], rank, query.element_size())


def leave_parts(
    query: Tensor,
    latents: Latents,
    rank: int,
    sums: Tensor,
    parts: Tensor,
    mask: MaskArguments,
    stat_slots: Any,
    head_scale: Tensor | None,
    options: SoftmaxOptions,
    blocks: LatentBlocks,
) -> None:
    """Fill `sums` and `parts` for `parts.join_kernel`; the number of splits follows from their shapes."""
    if blocks.on_hopper:
        from polyhead.ops.decode.kernels import latent_hopper as hopper

        hopper.leave_parts(query, latents, rank, sums, parts, mask, stat_slots, options, blocks)
        return
    batch, heads, queries, width = query.shape
    kv_heads, slots = latents.data.shape[1:3]
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
            stat_slots,
            *query.stride()[:3],
            *options,
            slots,
            splits,
            rows,
            KV_HEADS=kv_heads,
            GROUP=group,
            QUERIES=queries,
            RANK=rank,
            ROPE_DIM=width - rank,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_RANK=tile.rank,
            BLOCK_ROPE=tile.rope_dim,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )

    launch_fitting(launch, blocks, LatentBlocks.smaller, lambda: ("latents", blocks, query.dtype, query.device))

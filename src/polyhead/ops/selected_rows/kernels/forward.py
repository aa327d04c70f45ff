"""Forward kernel for selected rows: `attention.kernels.forward` over blocks of selected queries.

The rows of a (batch, head) pair are adjacent in memory, so a block of them is loaded as usual; only their query
indices, which determine the mask, are looked up. They ascend, so the first and the last of a block bound its visible
keys. It has the same bottleneck as `forward`. The number of programs depends on sizes alone, and each program searches
its own rows, so nothing synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.attention.kernels.forward import plan_launch, row_descriptor
from polyhead.ops.attention.kernels.forward_tiles import (
    RowPointers,
    Sizes,
    first_state,
    full_tiles,
    store_rows,
    update_softmax_state,
)
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.mask_tiles import query_positions
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of
from polyhead.ops.common.kernels.softmax_tiles import LOG2E
from polyhead.ops.selected_rows.kernels.tiles import (
    Rows,
    find_rows,
    first_and_last,
    load_queries,
    sequence_and_head,
    visible_keys_span,
)
from polyhead.ops.selected_rows.rows import SelectedRows


@triton.jit
def _ragged_kernel(
    ptr_query,
    source_key,
    source_value,
    ptr_output,
    ptr_logsumexp,
    rows,
    stat_pointers,
    ptr_head_scale,
    ptr_sinks,
    mask,
    sizes,
    stride_query,
    strides_key,
    strides_value,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    ADDED: tl.constexpr,
    HAS_FULL: tl.constexpr,
    SIGNED: tl.constexpr,
    HEAVY_LAST: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    i_program = tl.program_id(0)
    if HEAVY_LAST:
        # Under a causal mask the last rows have the most work; they start first, to avoid a long tail.
        i_program = tl.num_programs(0) - 1 - i_program
    i_pair, first_row, stop_row = find_rows(rows, i_program, BLOCK_M)
    if first_row >= stop_row:
        return
    is_padding = i_pair == rows.pairs
    i_batch, i_head = sequence_and_head(rows, tl.where(is_padding, 0, i_pair))
    # [BLOCK_M]
    offs_row = first_row + tl.arange(0, BLOCK_M)
    mask_m = offs_row < stop_row
    # Padding is not read.
    offs_m = load_queries(rows, offs_row, tl.where(is_padding, first_row, stop_row), sizes.queries)
    positions = query_positions(mask, i_batch, offs_m, sizes.queries)
    first, last = first_and_last(offs_m, sizes.queries)

    # [BLOCK_M, BLOCK_KEY]
    offs_dim = tl.arange(0, BLOCK_KEY)
    ptr_rows = ptr_query + (offs_row.to(tl.int64) * stride_query)[:, None] + offs_dim[None, :]
    tile_q = tl.load(ptr_rows, mask=(offs_m < sizes.queries)[:, None] & (offs_dim < DIM_KEY)[None, :], other=0.0)
    qk_scale = scale
    if ptr_head_scale is not None:
        qk_scale = qk_scale * tl.load(ptr_head_scale + i_head).to(tl.float32)
    if SIGNED:
        # The row max of the products is that of the logits only for a positive scale: the sign is moved to the queries.
        sign = tl.where(qk_scale > 0, 1.0, tl.where(qk_scale < 0, -1.0, 0.0))
        tile_q = (tile_q * sign).to(tile_q.dtype)
        qk_scale = tl.abs(qk_scale)
    tanh_scale, sm_scale = qk_scale, qk_scale
    if SOFTCAP:
        tanh_scale, sm_scale = qk_scale / softcap, softcap
    EXACT: tl.constexpr = tile_q.dtype == tl.float32
    BASE_TWO: tl.constexpr = not (ADDED or EXACT)  # row max, sink and sm_scale are those of logits in base 2
    if BASE_TWO:
        sm_scale = sm_scale * LOG2E

    sink = None
    if ptr_sinks is not None:
        # Padding rows have no head, hence no sink.
        sink = tl.where(is_padding, -float("inf"), tl.load(ptr_sinks + i_head).to(tl.float32))
    state = first_state(sink, ADDED, BASE_TWO, BLOCK_M, BLOCK_N, BLOCK_VALUE)

    sink_stop, start, stop = visible_keys_span(
        mask, rows, i_batch, offs_m, first, last, sizes.queries, sizes.keys, BLOCK_N
    )
    sink_tiles, first_tile, last_tile = sink_stop // BLOCK_N, start // BLOCK_N, tl.cdiv(stop, BLOCK_N)
    full_from, full_to, near_from, near_to = first_tile, first_tile, first_tile, first_tile
    if HAS_FULL:
        full_from, full_to, near_from, near_to = full_tiles(
            mask, stat_pointers, sizes, i_batch, first, last - first + 1, BLOCK_N, first_tile, last_tile
        )
        for i in tl.range(0, full_to - full_from - (near_to - near_from)):
            i_tile = full_from + i
            i_tile = tl.where(i_tile >= near_from, i_tile + (near_to - near_from), i_tile)
            state = update_softmax_state(
                state, tile_q, source_key, source_value, strides_key, strides_value, mask, stat_pointers, sizes, None,
                0, sm_scale, tanh_scale, i_batch, i_head, offs_m, positions, i_tile, True, ADDED, SOFTCAP, DIM_KEY,
                DIM_VALUE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, DESCRIPTORS,
            )  # fmt: skip
    partial_tiles = sink_tiles + (full_from - first_tile) + (near_to - near_from) + (last_tile - full_to)
    for i in tl.range(0, partial_tiles):
        # Partial tiles in order: of sink keys, before the full tiles, near the diagonal, after the full tiles.
        i_tile = tl.where(i >= sink_tiles, i + (first_tile - sink_tiles), i)
        i_tile = tl.where(i_tile >= full_from, i_tile + (near_from - full_from), i_tile)
        i_tile = tl.where(i_tile >= near_to, i_tile + (full_to - near_to), i_tile)
        state = update_softmax_state(
            state, tile_q, source_key, source_value, strides_key, strides_value, mask, stat_pointers, sizes, None, 0,
            sm_scale, tanh_scale, i_batch, i_head, offs_m, positions, i_tile, False, ADDED, SOFTCAP, DIM_KEY,
            DIM_VALUE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, DESCRIPTORS,
        )  # fmt: skip
    # [BLOCK_M, BLOCK_VALUE]
    tile_o = store_rows(
        state,
        sink,
        mask.poison is not None,
        stat_pointers,
        ptr_logsumexp,
        offs_row,
        mask_m,
        sm_scale,
        ADDED,
        BASE_TWO,
        EXACT,
    )
    offs_value = tl.arange(0, BLOCK_VALUE)
    ptr_rows = ptr_output + (offs_row.to(tl.int64) * DIM_VALUE)[:, None] + offs_value[None, :]
    mask_output = mask_m[:, None] & (offs_value < DIM_VALUE)[None, :]
    tl.store(ptr_rows, tile_o.to(ptr_output.dtype.element_ty), mask=mask_output)


def num_programs(total: int, pairs: int, rows: int) -> int:
    """Return the number of programs that cover all pairs and the padding, for any offsets."""
    return total // rows + pairs + 1


def pack_rows(rows: SelectedRows, mask: MaskArguments, batch: int) -> Rows:
    """Return the rows as kernels read them."""
    positions, offsets, pairs = rows.positions, rows.offsets, rows.offsets.shape[0] - 1
    sizes = (positions.shape[0], pairs, batch, pairs // batch)
    return Rows(positions, offsets, mask.first_key, mask.last_key, *sizes, tl.constexpr(rows.by_head))


def without_full_spans(call: KernelCall) -> KernelCall:
    """Return a call without the full spans of its mask, which assume that the rows of a block are adjacent."""
    return replace(call, mask=call.mask._replace(full_key=None, full_query=None))


def ragged_forward(
    selected: SelectedRows, call: KernelCall, *, descriptors: bool | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return output [total, value_dim], log-sum-exp [total] and the named statistics, [total] each.

    The query is [total, head_dim]; the last axis of query, key and value must be contiguous, and so must the rows'
    tensors. The mask is that of all queries. `descriptors`: load keys and values through tensor descriptors (TMA);
    None: if the device and the tensors support it.
    """
    call = without_full_spans(call)
    query, key, value, mask, scale = call.query, call.key, call.value, call.mask, call.scale
    (head_scale, sinks), softcap = call.head_vectors, call.softcap
    total = query.shape[0]
    batch, kv_heads, keys, dim_value = value.shape
    pairs = selected.offsets.shape[0] - 1
    heads = pairs // batch
    output = query.new_empty(total, dim_value)
    logsumexp = query.new_empty(total, dtype=torch.float32)
    statistics = {name: torch.empty_like(logsumexp) for name in call.names}
    if not total:
        return output, logsumexp, statistics

    # Pairs usually have different numbers of rows; the tile sizes are chosen for the mean.
    mean_rows = blocks_of(total, pairs)
    blocks, constants = plan_launch(
        call, (key, value), queries=mean_rows, requested=len(statistics), descriptors=descriptors
    )
    rows = pack_rows(selected, mask, batch)
    plain_mask = mask._replace(first_key=None, last_key=None, first_query=None, last_query=None)
    stat_pointers = RowPointers(**statistics)

    def launch(blocks: Blocks) -> None:
        sources: list[Any] = [key, value]
        if constants["DESCRIPTORS"]:
            sources = [
                row_descriptor(key, blocks.columns, constants["BLOCK_KEY"]),
                row_descriptor(value, blocks.columns, constants["BLOCK_VALUE"]),
            ]
        _ragged_kernel[(num_programs(total, pairs, blocks.rows),)](
            query,
            *sources,
            output,
            logsumexp,
            rows,
            stat_pointers,
            head_scale,
            sinks,
            plain_mask,
            Sizes(heads, heads // kv_heads, selected.num_queries, keys, call.sink_keys, call.window),
            query.stride(0),
            key.stride()[:3],
            value.stride()[:3],
            scale,
            softcap or 0.0,
            ADDED=mask.bias is not None or mask.table is not None,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            **constants,
            **blocks.options,
        )

    def compile_key() -> Hashable:
        present = tuple(x is not None for x in (*stat_pointers, *mask, head_scale, sinks, softcap))
        return "ragged", query.device, query.dtype, blocks, present, *constants.values()

    with torch.cuda.device_of(query):
        launch_fitting(launch, blocks, Blocks.smaller, compile_key)
    return output, logsumexp, statistics

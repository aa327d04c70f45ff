"""The forward of chosen rows: what `forward` does for blocks of all queries, done for blocks of those that were chosen.

The rows of a (batch, head) pair lie together, so a block of them is loaded as ever; only the queries they are, and with
them their places under the mask, are looked up. As they ascend, the first and the last of a block bound the keys that
it may see. Bound by what bounds `forward`. The number of programs follows from sizes alone, and each finds its rows by
itself, so that nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.attention.kernels.forward import (
    RowPointers,
    Sizes,
    _absorb,
    _descriptor,
    _first_state,
    _fits_descriptor,
    _full_tiles,
    _store_rows,
    choose_blocks,
    fit_blocks,
)
from polyhead.ops.common.kernels.availability import capability
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.mask_tiles import query_positions
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting, shared_memory
from polyhead.ops.common.kernels.sizes import power_of_two
from polyhead.ops.common.kernels.softmax_tiles import LOG2E
from polyhead.ops.selected_rows.kernels.tiles import (
    Rows,
    find_rows,
    first_and_last,
    queries_of,
    sequence_and_head,
    spans_of_keys,
)


@triton.jit
def _ragged_kernel(
    ptr_query,
    source_key,
    source_value,
    ptr_output,
    ptr_logsumexp,
    rows,
    told,
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
    BAND: tl.constexpr,
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
        # Under a causal edge the last rows have the most to do; begun first, they do not keep everybody waiting.
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
    offs_m = queries_of(rows, offs_row, tl.where(is_padding, first_row, stop_row), sizes.queries)
    positions = query_positions(mask, i_batch, offs_m, sizes.queries)
    first, last = first_and_last(offs_m, sizes.queries)

    # [BLOCK_M, BLOCK_KEY]
    offs_dim = tl.arange(0, BLOCK_KEY)
    ptr_rows = ptr_query + (offs_row.to(tl.int64) * stride_query)[:, None] + offs_dim[None, :]
    tile_q = tl.load(ptr_rows, mask=(offs_m < sizes.queries)[:, None] & (offs_dim < DIM_KEY)[None, :], other=0.0)
    factor = scale
    if ptr_head_scale is not None:
        factor = factor * tl.load(ptr_head_scale + i_head).to(tl.float32)
    if SIGNED:
        # The largest product gives the largest logit only under a positive factor: the sign goes to the queries.
        sign = tl.where(factor > 0, 1.0, tl.where(factor < 0, -1.0, 0.0))
        tile_q = (tile_q * sign).to(tile_q.dtype)
        factor = tl.abs(factor)
    bend, gain = factor, factor
    if SOFTCAP:
        bend, gain = factor / softcap, softcap
    EXACT: tl.constexpr = tile_q.dtype == tl.float32
    BASE_TWO: tl.constexpr = not (ADDED or EXACT)  # shift, sink and gain are those of logits in base 2
    if BASE_TWO:
        gain = gain * LOG2E

    sink = None
    if ptr_sinks is not None:
        # Padding has no head, and so no sink.
        sink = tl.where(is_padding, -float("inf"), tl.load(ptr_sinks + i_head).to(tl.float32))
    state = _first_state(sink, ADDED, BASE_TWO, BLOCK_M, BLOCK_N, BLOCK_VALUE)

    kept, start, stop = spans_of_keys(mask, rows, i_batch, offs_m, first, last, sizes.queries, sizes.keys, BLOCK_N)
    kept_tiles, first_tile, last_tile = kept // BLOCK_N, start // BLOCK_N, tl.cdiv(stop, BLOCK_N)
    full_from, full_to, near_from, near_to = first_tile, first_tile, first_tile, first_tile
    if BAND:
        full_from, full_to, near_from, near_to = _full_tiles(
            mask, told, sizes, first, last - first + 1, BLOCK_N, first_tile, last_tile
        )
        for i in tl.range(0, full_to - full_from - (near_to - near_from)):
            i_tile = full_from + i
            i_tile = tl.where(i_tile >= near_from, i_tile + (near_to - near_from), i_tile)
            state = _absorb(
                state, tile_q, source_key, source_value, strides_key, strides_value, mask, told, sizes, None, 0,
                gain, bend, i_batch, i_head, offs_m, positions, i_tile, True, ADDED, SOFTCAP, DIM_KEY,
                DIM_VALUE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, DESCRIPTORS,
            )  # fmt: skip
    edges = kept_tiles + (full_from - first_tile) + (near_to - near_from) + (last_tile - full_to)
    for i in tl.range(0, edges):
        # The edge tiles in their order: kept ones, those before the full ones, those near, those behind.
        i_tile = tl.where(i >= kept_tiles, i + (first_tile - kept_tiles), i)
        i_tile = tl.where(i_tile >= full_from, i_tile + (near_from - full_from), i_tile)
        i_tile = tl.where(i_tile >= near_to, i_tile + (full_to - near_to), i_tile)
        state = _absorb(
            state, tile_q, source_key, source_value, strides_key, strides_value, mask, told, sizes, None, 0,
            gain, bend, i_batch, i_head, offs_m, positions, i_tile, False, ADDED, SOFTCAP, DIM_KEY,
            DIM_VALUE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, DESCRIPTORS,
        )  # fmt: skip
    # [BLOCK_M, BLOCK_VALUE]
    tile_o = _store_rows(
        state, sink, mask.poison is not None, told, ptr_logsumexp, offs_row, mask_m, gain, ADDED, BASE_TWO, EXACT
    )
    offs_value = tl.arange(0, BLOCK_VALUE)
    ptr_rows = ptr_output + (offs_row.to(tl.int64) * DIM_VALUE)[:, None] + offs_value[None, :]
    mask_output = mask_m[:, None] & (offs_value < DIM_VALUE)[None, :]
    tl.store(ptr_rows, tile_o.to(ptr_output.dtype.element_ty), mask=mask_output)


def programs_of(total: int, pairs: int, rows: int) -> int:
    """How many programs of so many rows serve all pairs and the padding, wherever the pairs begin."""
    return total // rows + pairs + 1


def rows_of(positions: Tensor, offsets: Tensor, mask: MaskArguments, batch: int, by_head: bool) -> Rows:
    """The rows as kernels read them."""
    pairs = offsets.shape[0] - 1
    return Rows(
        positions,
        offsets,
        mask.first_key,
        mask.last_key,
        positions.shape[0],
        pairs,
        batch,
        pairs // batch,
        tl.constexpr(by_head),
    )


def ragged_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    offsets: Tensor,
    *,
    num_queries: int,
    by_head: bool,
    scale: float,
    head_scale: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask: MaskArguments,
    names: tuple[str, ...],
    sink_keys: int,
    window: int,
    descriptors: bool | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output [total, value_dim], log-sum-exp [total] and the statistics that `names` asks for, [total] each.

    query is [total, head_dim], key and value [batch, kv_heads, keys, head_dim or value_dim]; the last axis of each must
    lie together in memory. `positions` and `offsets` are int32 and contiguous. `mask` is that of all `num_queries`
    queries. `descriptors` says whether keys and values are fetched through tensor descriptors (TMA); None takes them
    where the machine has them and the tensors allow it.
    """
    total, dim_key = query.shape
    batch, kv_heads, keys, dim_value = value.shape
    pairs = offsets.shape[0] - 1
    heads = pairs // batch
    output = query.new_empty(total, dim_value)
    logsumexp = query.new_empty(total, dtype=torch.float32)
    statistics = {name: torch.empty_like(logsumexp) for name in names}
    if not total:
        return output, logsumexp, statistics

    block_key, block_value = (max(16, power_of_two(dim)) for dim in (dim_key, dim_value))
    device = query.get_device() if query.is_cuda else None
    machine = (9, 0) if device is None else capability(device)
    size = query.element_size()
    # Pairs are seldom alike; the middle one is what tiles are made for.
    blocks = choose_blocks(max(block_key, block_value), size, -(-total // pairs), len(statistics), machine)
    blocks = fit_blocks(blocks, (block_key, block_value), size, mask, machine, shared_memory(device))
    if descriptors is None:
        descriptors = query.is_cuda and machine >= (9, 0) and all(_fits_descriptor(x) for x in (key, value))
    by_token = (mask.query_position, mask.query_document, mask.allowed, mask.bias, mask.key_ordinal)
    rows = rows_of(positions, offsets, mask, batch, by_head)
    plain_mask = mask._replace(first_key=None, last_key=None, first_query=None, last_query=None)
    told = RowPointers(**statistics)

    def launch(blocks: Blocks) -> None:
        sources: list[Any] = [key, value]
        if descriptors:
            sources = [
                _descriptor(key, blocks.columns, block_key),
                _descriptor(value, blocks.columns, block_value),
            ]
        _ragged_kernel[(programs_of(total, pairs, blocks.rows),)](
            query,
            *sources,
            output,
            logsumexp,
            rows,
            told,
            head_scale,
            sinks,
            plain_mask,
            Sizes(heads, heads // kv_heads, num_queries, keys, sink_keys, window),
            query.stride(0),
            key.stride()[:3],
            value.stride()[:3],
            scale,
            softcap or 0.0,
            SOFTCAP=softcap is not None,
            ADDED=mask.bias is not None or mask.table is not None,
            BAND=all(x is None for x in by_token),
            SIGNED=head_scale is not None or scale <= 0,
            HEAVY_LAST=mask.right is not None and mask.left is None,
            DIM_KEY=dim_key,
            DIM_VALUE=dim_value,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            BLOCK_KEY=block_key,
            BLOCK_VALUE=block_value,
            DESCRIPTORS=descriptors,
            **blocks.options,
        )

    def kind() -> Hashable:
        there = tuple(x is not None for x in (*told, *mask, head_scale, sinks, softcap))
        return "ragged", device, query.dtype, dim_key, dim_value, blocks, there, descriptors

    with torch.cuda.device_of(query):
        launch_fitting(launch, blocks, Blocks.smaller, kind)
    return output, logsumexp, statistics

"""Attention in one pass over the keys, with row statistics from its online softmax.

The loop is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691). Bound by tensor cores at head dims of 128 and more,
by exponentials at 64 and less: a logit costs 4 * head_dim FLOPs, one exponential, and about four instructions for max,
subtraction and sums. Each statistic adds one or two multiply-adds per logit (entropy, mean distance) or a few
instructions in the tiles near the diagonal (masses).

One program processes BLOCK_M rows of one head over their visible tiles of keys. Tiles that need no mask, and contain no
distance that a mass counts, come first and without any comparison ("full"); all others after them ("edge"). Logits stay
unscaled, and `sm_scale` scales them to base 2 inside the multiply-add that subtracts the row max. Only if there is a
bias are they converted to natural logits first: a bias may be as large as a float32 can be, and a factor could overflow
it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from polyhead.ops.attention.kernels.forward_tiles import (
    RowPointers,
    Sizes,
    first_state,
    full_tiles,
    load_head_rows,
    store_rows,
    update_softmax_state,
)
from polyhead.ops.attention.kernels.outputs import output_like
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.availability import capability
from polyhead.ops.common.kernels.launching import launch_repeated
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.mask_tiles import key_spans, query_positions
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting, shared_memory
from polyhead.ops.common.kernels.sizes import blocks_of, tile_dims
from polyhead.ops.common.kernels.softmax_tiles import LOG2E


@triton.jit
def _forward_kernel(
    source_query,
    source_key,
    source_value,
    ptr_output,
    ptr_logsumexp,
    rows,
    ptr_head_scale,
    ptr_sinks,
    ptr_seed,
    mask,
    sizes,
    strides_query,
    strides_key,
    strides_value,
    strides_output,
    scale,
    softcap,
    threshold,
    survival,
    SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    blocks = tl.cdiv(sizes.queries, BLOCK_M)
    i_pair = tl.program_id(0) // blocks  # batch * heads + head
    i_block = tl.program_id(0) % blocks
    if HEAVY_LAST:
        # Under a causal mask the last rows have the most work; starting them first shortens the tail.
        i_block = blocks - 1 - i_block
    i_batch, i_head = i_pair // sizes.heads, i_pair % sizes.heads
    first_row = i_block * BLOCK_M
    # [BLOCK_M]
    offs_m = first_row + tl.arange(0, BLOCK_M)
    positions = query_positions(mask, i_batch, offs_m, sizes.queries)

    # [BLOCK_M, BLOCK_KEY]
    tile_q = load_head_rows(
        source_query, strides_query, i_batch, i_head, first_row, sizes.queries, BLOCK_M, DIM_KEY, BLOCK_KEY,
        DESCRIPTORS, False,
    )  # fmt: skip
    factor = scale
    if ptr_head_scale is not None:
        factor = factor * tl.load(ptr_head_scale + i_head).to(tl.float32)
    if SIGNED:
        # The max dot product is the max logit only if the scale is positive: its sign is moved to the queries.
        sign = tl.where(factor > 0, 1.0, tl.where(factor < 0, -1.0, 0.0))
        tile_q = (tile_q * sign).to(tile_q.dtype)
        factor = tl.abs(factor)
    softcap_scale, sm_scale = factor, factor
    if SOFTCAP:
        softcap_scale, sm_scale = factor / softcap, softcap
    EXACT: tl.constexpr = tile_q.dtype == tl.float32
    BASE_TWO: tl.constexpr = not (HAS_BIAS or EXACT)  # row max, sink and scale are those of logits in base 2
    if BASE_TWO:
        sm_scale = sm_scale * LOG2E

    sink = None
    if ptr_sinks is not None:
        sink = tl.load(ptr_sinks + i_head).to(tl.float32)
    state = first_state(sink, HAS_BIAS, BASE_TWO, BLOCK_M, BLOCK_N, BLOCK_VALUE)

    sink_stop, start, stop = key_spans(mask, i_batch, first_row, sizes.queries, sizes.keys, BLOCK_M, BLOCK_N)
    sink_tiles, first_tile, last_tile = sink_stop // BLOCK_N, start // BLOCK_N, tl.cdiv(stop, BLOCK_N)
    full_from, full_to, near_from, near_to = first_tile, first_tile, first_tile, first_tile
    if HAS_FULL:
        full_from, full_to, near_from, near_to = full_tiles(
            mask, rows, sizes, i_batch, first_row, BLOCK_M, BLOCK_N, first_tile, last_tile
        )
        for i in tl.range(0, full_to - full_from - (near_to - near_from)):
            i_tile = full_from + i
            i_tile = tl.where(i_tile >= near_from, i_tile + (near_to - near_from), i_tile)
            state = update_softmax_state(
                state, tile_q, source_key, source_value, strides_key, strides_value, mask, rows, sizes, ptr_seed,
                threshold, sm_scale, softcap_scale, i_batch, i_head, offs_m, positions, i_tile, True, HAS_BIAS,
                SOFTCAP, DIM_KEY, DIM_VALUE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, DESCRIPTORS,
            )  # fmt: skip
    edges = sink_tiles + (full_from - first_tile) + (near_to - near_from) + (last_tile - full_to)
    for i in tl.range(0, edges):
        # The edge tiles in order: sinks, before the full ones, near the diagonal, after the full ones.
        i_tile = tl.where(i >= sink_tiles, i + (first_tile - sink_tiles), i)
        i_tile = tl.where(i_tile >= full_from, i_tile + (near_from - full_from), i_tile)
        i_tile = tl.where(i_tile >= near_to, i_tile + (full_to - near_to), i_tile)
        state = update_softmax_state(
            state, tile_q, source_key, source_value, strides_key, strides_value, mask, rows, sizes, ptr_seed,
            threshold, sm_scale, softcap_scale, i_batch, i_head, offs_m, positions, i_tile, False, HAS_BIAS,
            SOFTCAP, DIM_KEY, DIM_VALUE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, DESCRIPTORS,
        )  # fmt: skip
    mask_m = offs_m < sizes.queries
    offs_row = i_pair.to(tl.int64) * sizes.queries + offs_m
    # [BLOCK_M, BLOCK_VALUE]
    tile_o = store_rows(
        state, sink, mask.poison is not None, rows, ptr_logsumexp, offs_row, mask_m, sm_scale, HAS_BIAS, BASE_TWO, EXACT
    )
    offs_dim = tl.arange(0, BLOCK_VALUE)
    if ptr_seed is not None:
        tile_o = tile_o * survival
    start_output = i_batch.to(tl.int64) * strides_output[0] + i_head.to(tl.int64) * strides_output[1]
    offs_output = (offs_m.to(tl.int64) * strides_output[2])[:, None] + offs_dim[None, :]
    mask_output = mask_m[:, None] & (offs_dim < DIM_VALUE)[None, :]
    tl.store(ptr_output + start_output + offs_output, tile_o.to(ptr_output.dtype.element_ty), mask=mask_output)


@functools.cache
def choose_blocks(width: int, element_size: int, queries: int, requested: int, capability: tuple[int, int]) -> Blocks:
    """Return the tile of one program.

    `width` is the larger of the padded head dims, `element_size` the bytes per element, `requested` the number of
    statistics: each keeps one or two sums in registers, and a narrower tile frees registers for them.
    """
    if element_size == 4:
        # Products of float32 do not use tensor cores; the tiles must stay in registers.
        blocks = Blocks(64, 32, 8, 2) if width <= 64 else Blocks(32, 32, 8, 2) if width <= 128 else Blocks(32, 16, 8, 2)
    elif capability < (9, 0):
        # Shared memory of 100 to 163 KiB.
        blocks = (
            Blocks(128, 64, 8, 3) if width <= 64 else Blocks(128, 64, 8, 2) if width <= 128 else Blocks(64, 32, 8, 2)
        )
    elif width <= 64:
        blocks = Blocks(128, 64, 4, 3) if requested <= 4 else Blocks(128, 64, 8, 3)
    elif width <= 128:
        blocks = Blocks(128, 128, 8, 3) if requested <= 4 else Blocks(128, 64, 8, 3)
    else:
        blocks = Blocks(128, 64, 8, 2) if requested <= 4 else Blocks(128, 32, 8, 2)
    if queries <= 16:
        return blocks._replace(rows=16, warps=4)
    if queries <= 64:
        return blocks._replace(rows=min(blocks.rows, 64), warps=4 if element_size < 4 else blocks.warps)
    return blocks


def fit_blocks(
    blocks: Blocks,
    widths: tuple[int, int],
    element_size: int,
    mask: MaskArguments,
    capability: tuple[int, int],
    shared: int,
) -> Blocks:
    """Return the blocks, or smaller ones if a program with these would not fit into `shared` bytes.

    `widths` are the padded dims of keys and values. Tensors with one element per logit are pipelined together with the
    tiles of keys and values. Queries are in shared memory on GPUs whose tensor cores read them from there.
    """
    query_bytes = widths[0] * element_size if (9, 0) <= capability < (12, 0) else 0
    per_key = (widths[0] + widths[1]) * element_size
    per_logit = 0 if mask.bias is None else mask.bias.element_size()
    per_logit += 0 if mask.table is None else mask.table.element_size()
    mask_bytes = 0 if mask.allowed is None else 1
    has_tensors = per_logit or mask_bytes or mask.query_position is not None or mask.query_document is not None
    # For barriers, reductions over several warps, and per-token tensors.
    overhead = 6144 if has_tensors else 2048
    while True:
        rows, num_columns, _, stages, _ = blocks
        queue = stages * num_columns * (per_key + rows * per_logit)
        if rows * query_bytes + queue + rows * num_columns * mask_bytes + overhead <= shared:
            return blocks
        smaller_blocks = blocks.smaller()
        if smaller_blocks is None:
            return blocks
        blocks = smaller_blocks


def plan_launch(
    call: KernelCall, described: Sequence[Tensor], *, queries: int, requested: int, descriptors: bool | None
) -> tuple[Blocks, dict[str, Any]]:
    """Return the tile of one program and the constants of the kernel that do not depend on it.

    `described` are the tensors that `descriptors`, as in `forward`, are for. `queries` are the rows per head, and
    `requested` is as in `choose_blocks`.
    """
    query, mask, dim_key, dim_value = call.query, call.mask, call.key.shape[3], call.value.shape[3]
    block_key, block_value = tile_dims(dim_key, dim_value)
    device = query.get_device() if query.is_cuda else None
    compute_capability = (9, 0) if device is None else capability(device)
    size = query.element_size()
    blocks = choose_blocks(max(block_key, block_value), size, min(queries, 65), requested, compute_capability)
    blocks = fit_blocks(blocks, (block_key, block_value), size, mask, compute_capability, shared_memory(device))
    if descriptors is None:
        descriptors = query.is_cuda and compute_capability >= (9, 0) and all(map(fits_descriptor, described))
    terms = (mask.query_position, mask.query_document, mask.key_ordinal, mask.allowed, mask.bias)
    return blocks, {
        "SOFTCAP": call.softcap is not None,
        "HAS_FULL": all(x is None for x in terms) or mask.full_key is not None,
        "SIGNED": call.head_scale is not None or call.scale <= 0,
        "HEAVY_LAST": mask.right is not None and mask.left is None,
        "DIM_KEY": dim_key,
        "DIM_VALUE": dim_value,
        "BLOCK_KEY": block_key,
        "BLOCK_VALUE": block_value,
        "DESCRIPTORS": descriptors,
    }


def forward(
    call: KernelCall, *, argmax: bool = False, descriptors: bool | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return output, log-sum-exp, the named statistics and, with `argmax`, the keys of their maxima.

    The output is [batch, heads, queries, value_dim], the others are [batch, heads, queries]; for the keys see
    `RowPointers`. The last axis of query, key and value must be contiguous. `descriptors`
    selects loads through tensor descriptors (TMA); None uses them if the GPU and the tensors support them.
    """
    query, key, value, mask, names = call.query, call.key, call.value, call.mask, call.names
    (head_scale, sinks), softcap, scale, dropout = call.head_vectors, call.softcap, call.scale, call.dropout
    batch, heads, queries, _ = query.shape
    kv_heads, keys, dim_value = value.shape[1:]
    output = output_like(query, dim_value)
    shape = (batch, heads, queries)
    logsumexp = query.new_empty(shape, dtype=torch.float32)
    statistics = {name: torch.empty_like(logsumexp) for name in names}
    indices = {}
    if argmax and ("max_logit" in names or "confidence" in names):
        indices["argmax"] = query.new_empty(shape, dtype=torch.int32)
    if argmax and "max_abs_logit" in names:
        indices["argmax_abs"] = query.new_empty(shape, dtype=torch.int32)
    if not logsumexp.numel():
        return output, logsumexp, statistics, indices

    requested = len(statistics) + len(indices)
    blocks, constants = plan_launch(
        call, (query, key, value), queries=queries, requested=requested, descriptors=descriptors
    )
    rows = RowPointers(**statistics, **indices)

    def launch(blocks: Blocks) -> None:
        sources: list[Any] = [query, key, value]
        if constants["DESCRIPTORS"]:
            sources = [
                row_descriptor(query, blocks.rows, constants["BLOCK_KEY"]),
                row_descriptor(key, blocks.columns, constants["BLOCK_KEY"]),
                row_descriptor(value, blocks.columns, constants["BLOCK_VALUE"]),
            ]
        arguments = (
            *sources,
            output,
            logsumexp,
            rows,
            head_scale,
            sinks,
            call.seed if dropout else None,
            mask,
            Sizes(heads, heads // kv_heads, queries, keys, call.sink_keys, call.window),
            query.stride()[:3],
            key.stride()[:3],
            value.stride()[:3],
            output.stride()[:3],
            scale,
            softcap or 0.0,
            round(dropout * (1 << 24)),
            1.0 / (1.0 - dropout),
        )
        has_bias = mask.bias is not None or mask.table is not None
        tiles = {"HAS_BIAS": has_bias, "BLOCK_M": blocks.rows, "BLOCK_N": blocks.columns}
        programs = batch * heads * blocks_of(queries, blocks.rows)
        launch_repeated(
            _forward_kernel, programs, arguments, {**tiles, **constants}, blocks.options, device=query.get_device()
        )

    def kind() -> Hashable:
        present = tuple(x is not None for x in (*rows, *mask, head_scale, sinks, softcap))
        return "forward", query.device, query.dtype, blocks, present, bool(dropout), *constants.values()

    with torch.cuda.device_of(query):
        launch_fitting(launch, blocks, Blocks.smaller, kind)
    return output, logsumexp, statistics, indices


def fits_descriptor(x: Tensor) -> bool:
    """Return True if TMA can load rows of the tensor: every stride is a positive multiple of 16 bytes."""
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def row_descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Return a tensor descriptor of [batch, heads, tokens, dim] for blocks of `rows` tokens and `width` channels."""
    # The stride of an axis of one element is never used, and may be any valid one.
    aligned = blocks_of(x.shape[3], 16) * 16
    strides = [stride if size > 1 else aligned for size, stride in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, width])

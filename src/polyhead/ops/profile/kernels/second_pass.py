"""Second pass over Q K^T: recompute weights from the log-sum-exp in tiles, and reduce them.

There are two kernels over the same tiles. The column kernel keeps a block of keys and iterates over the queries: the
weight a key receives is accumulated in registers, and a tile has its queries along the registers of a thread, so that a
sum over them needs almost no exchange between threads. It computes received weight, block map and, with `crossing`,
offsets. The row kernel keeps a block of queries and iterates over the keys: only it can compute the argmax, the top
keys and the mass of a row; it adds to the columns with atomics.

A tile costs half the products of a forward and as many exponentials: one fused multiply-add, one exp2 and one add per
weight. At head dim 128 a Hopper multiprocessor is limited about equally by both (128² exponentials at 16 per cycle,
128³ products at 2,048 per cycle), at 64 by the exponentials. Full tiles, without masked elements, skip the mask.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels import mask_tiles
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim, power_of_two
from polyhead.ops.profile.kernels.crossing import add_crossing
from polyhead.ops.profile.kernels.offsets import OFFSET_BINS
from polyhead.ops.profile.kernels.prepare import Problem, tiles_for
from polyhead.ops.profile.kernels.tiles import (
    accumulate_columns,
    column_span,
    full_tiles,
    head_sm_scale,
    load_rows,
    log2_weights,
)


class ColumnResults(NamedTuple):
    """Output tensors of results per column; None if not requested. The kernels add to map and offsets."""

    received: Tensor | None = None  # [batch, heads, columns]
    map: Tensor | None = None  # [batch, heads, map_rows, map_columns], allocated as zeros
    offsets: Tensor | None = None  # [batch, heads, OFFSET_BINS], allocated as zeros
    block_height: int = 1
    block_width: int = 1
    map_rows: int = 0
    map_columns: int = 0


class RowResults(NamedTuple):
    """Output tensors of results per row; None if not requested."""

    argmax: Tensor | None = None  # int64 [batch, heads, rows]
    top_value: Tensor | None = None  # [batch, heads, rows, TOP], log2 of the weights
    top_key: Tensor | None = None  # int64 [batch, heads, rows, TOP]
    mass: Tensor | None = None  # [batch, heads, rows]
    key_set: Tensor | None = None  # uint8 [batch or 1, keys]
    key_set_batch: int = 0


@triton.jit
def _column_tile(
    problem,
    mask,
    columns,
    i_pair,
    tile_k,
    sm_scale,
    received,
    first_row,
    first_column,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POOL_M: tl.constexpr,
    POOL_N: tl.constexpr,
    BY_MAX: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    MASKED: tl.constexpr,
):
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    offs_m = first_row + tl.arange(0, BLOCK_M)
    ptr_query = problem.query + i_batch * problem.query_batch + i_head * problem.query_head
    # [BLOCK_M, BLOCK_DIM]
    tile_q = load_rows(ptr_query, problem.query_token, first_row, problem.row_stop, DIM, BLOCK_DIM, BLOCK_M, MASKED)
    # Rows are padded to whole blocks, so that the compiler can vectorise the load and no mask is needed.
    row = tl.multiple_of(first_row - problem.row_start, BLOCK_M)
    # [BLOCK_M]
    lse = tl.load(problem.lse + (i_pair * problem.lse_rows + row) + tl.arange(0, BLOCK_M))
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    log2_p = log2_weights(problem, mask, tile_q, tile_k, lse, sm_scale, i_batch, i_head, offs_m, offs_n, MASKED, True)
    return accumulate_columns(
        problem, mask, columns, i_pair, log2_p, received, first_row, first_column, BLOCK_M, BLOCK_N, POOL_M, POOL_N,
        BY_MAX, EXCLUSIVE, True,
    )  # fmt: skip


@triton.jit
def _column_kernel(
    problem,
    mask,
    columns,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POOL_M: tl.constexpr,
    POOL_N: tl.constexpr,
    BY_MAX: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    IS_BAND: tl.constexpr,
):
    """Column kernel: one block of keys per program, with a loop over the queries."""
    row_start, row_stop = problem.row_start, problem.row_stop
    column_start, column_stop = problem.column_start, problem.column_stop
    blocks = tl.cdiv(column_stop - column_start, BLOCK_N)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * heads + head
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    first_column = column_start + (tl.program_id(0) % blocks) * BLOCK_N
    sm_scale = head_sm_scale(problem, i_head)
    ptr_key = problem.key + i_batch * problem.key_batch + i_head // problem.group * problem.key_head
    # [BLOCK_N, BLOCK_DIM]
    tile_k = load_rows(ptr_key, problem.key_token, first_column, column_stop, DIM, BLOCK_DIM, BLOCK_N, True)

    start, stop = mask_tiles.query_span(mask, i_batch, first_column, row_stop, column_stop, BLOCK_N, BLOCK_M)
    start = row_start + tl.maximum(start - row_start, 0) // BLOCK_M * BLOCK_M
    stop = tl.maximum(tl.minimum(stop, row_stop), start)
    # The rows that see every key of the block.
    full_start, full_stop = start, start
    if IS_BAND:
        first, last = start, tl.where(first_column + BLOCK_N <= column_stop, stop, start)
        if mask.right is not None:
            first = first_column + BLOCK_N - 1 - mask.right - mask.offset
        if mask.left is not None:
            last = tl.minimum(last, first_column + mask.left - mask.offset + 1)
        full_start, full_stop = full_tiles(start, stop, first, last, BLOCK_M)

    # [BLOCK_N]
    received = tl.zeros([BLOCK_N], tl.float32)
    for first_row in tl.range(full_start, full_stop, BLOCK_M):
        received = _column_tile(
            problem, mask, columns, i_pair, tile_k, sm_scale, received, first_row, first_column, DIM, BLOCK_DIM,
            BLOCK_M, BLOCK_N, POOL_M, POOL_N, BY_MAX, EXCLUSIVE, False,
        )  # fmt: skip
    # The edge tiles: `before` tiles up to the full ones, then those after them.
    before = (full_start - start) // BLOCK_M
    for i_tile in tl.range(0, before + tl.cdiv(stop - full_stop, BLOCK_M)):
        first_row = tl.where(i_tile < before, start, full_stop - before * BLOCK_M) + i_tile * BLOCK_M
        received = _column_tile(
            problem, mask, columns, i_pair, tile_k, sm_scale, received, first_row, first_column, DIM, BLOCK_DIM,
            BLOCK_M, BLOCK_N, POOL_M, POOL_N, BY_MAX, EXCLUSIVE, True,
        )  # fmt: skip
    if columns.received is not None:
        offs_n = first_column + tl.arange(0, BLOCK_N)
        ptr_received = columns.received + i_pair * (column_stop - column_start) + (offs_n - column_start)
        tl.store(ptr_received, received, mask=offs_n < column_stop)


@triton.jit
def _ranks_before(value, key, best, best_key):
    """Return True where a weight is larger, or equal with a lower key; False for masked weights."""
    return (value > best) | ((value == best) & (key < best_key) & (value > -float("inf")))


@triton.jit
def _worst(top_value, top_key):
    """Return the entry of each row to replace next: the smallest value, the highest key among equals."""
    value = tl.min(top_value, 1)
    return value, tl.max(tl.where(top_value == value[:, None], top_key, -1), 1)


@triton.jit
def _update_top(log2_p, first_column, top_value, top_key, BLOCK_N: tl.constexpr):
    """Replace the worst entries of each row by better ones of the tile.

    One entry per row is replaced at a time, while any row has a better one. After the first tiles few rows have one: a
    row of n keys in random order makes about k log(n / k) replacements in total.
    """
    offs_n = first_column + tl.arange(0, BLOCK_N)
    value, index = tl.max(log2_p, 1, return_indices=True)
    worst_value, worst_key = _worst(top_value, top_key)
    better = _ranks_before(value, first_column + index, worst_value, worst_key)
    while tl.max(better.to(tl.int32), 0) > 0:
        key = first_column + index
        replaced = (top_value == worst_value[:, None]) & (top_key == worst_key[:, None]) & better[:, None]
        top_value = tl.where(replaced, value[:, None], top_value)
        top_key = tl.where(replaced, key[:, None], top_key)
        log2_p = tl.where((offs_n[None, :] == key[:, None]) & better[:, None], -float("inf"), log2_p)
        value, index = tl.max(log2_p, 1, return_indices=True)
        worst_value, worst_key = _worst(top_value, top_key)
        better = _ranks_before(value, first_column + index, worst_value, worst_key)
    return top_value, top_key


@triton.jit
def _row_tile(
    problem,
    mask,
    columns,
    row_results,
    i_pair,
    tile_q,
    lse,
    sm_scale,
    first_row,
    first_column,
    best,
    best_key,
    mass,
    top_value,
    top_key,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POOL_M: tl.constexpr,
    POOL_N: tl.constexpr,
    BY_MAX: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    MASKED: tl.constexpr,
):
    column_stop = problem.column_stop
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    ptr_key = problem.key + i_batch * problem.key_batch + i_head // problem.group * problem.key_head
    # [BLOCK_N, BLOCK_DIM]
    tile_k = load_rows(ptr_key, problem.key_token, first_column, column_stop, DIM, BLOCK_DIM, BLOCK_N, MASKED)
    offs_m, offs_n = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    log2_p = log2_weights(problem, mask, tile_q, tile_k, lse, sm_scale, i_batch, i_head, offs_m, offs_n, MASKED, False)
    received = accumulate_columns(
        problem, mask, columns, i_pair, log2_p, tl.zeros([BLOCK_N], tl.float32), first_row, first_column, BLOCK_M,
        BLOCK_N, POOL_M, POOL_N, BY_MAX, EXCLUSIVE, False,
    )  # fmt: skip
    if columns.received is not None:
        ptr_received = columns.received + i_pair * (column_stop - problem.column_start)
        offs_column = offs_n - problem.column_start
        tl.atomic_add(ptr_received + offs_column, received, mask=offs_n < column_stop, sem="relaxed")
    if row_results.mass is not None:
        ptr_key_set = row_results.key_set + i_batch * row_results.key_set_batch
        member = tl.load(ptr_key_set + offs_n, mask=offs_n < column_stop, other=0) != 0
        mass += tl.sum(tl.where(member[None, :], tl.exp2(log2_p), 0.0), 1)
    if row_results.argmax is not None:
        value, index = tl.max(log2_p, 1, return_indices=True)
        better = _ranks_before(value, first_column + index, best, best_key)
        best = tl.where(better, value, best)
        best_key = tl.where(better, first_column + index, best_key)
    if row_results.top_value is not None:
        top_value, top_key = _update_top(log2_p, first_column, top_value, top_key, BLOCK_N)
    return best, best_key, mass, top_value, top_key


@triton.jit
def _row_kernel(
    problem,
    mask,
    columns,
    row_results,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POOL_M: tl.constexpr,
    POOL_N: tl.constexpr,
    BY_MAX: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    IS_BAND: tl.constexpr,
    TOP: tl.constexpr,
):
    """Row kernel: one block of queries per program, with a loop over the keys.

    The last blocks, which see the most keys under a causal mask, are launched first.
    """
    row_start, row_stop = problem.row_start, problem.row_stop
    blocks = tl.cdiv(row_stop - row_start, BLOCK_M)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * heads + head
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    first_row = row_start + (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    sm_scale = head_sm_scale(problem, i_head)
    ptr_query = problem.query + i_batch * problem.query_batch + i_head * problem.query_head
    # [BLOCK_M, BLOCK_DIM]
    tile_q = load_rows(ptr_query, problem.query_token, first_row, row_stop, DIM, BLOCK_DIM, BLOCK_M, True)
    # [BLOCK_M]
    offs_m = first_row + tl.arange(0, BLOCK_M)
    mask_row = offs_m < row_stop
    offs_row = i_pair * (row_stop - row_start) + (offs_m - row_start)
    lse = tl.load(problem.lse + i_pair * problem.lse_rows + (offs_m - row_start))

    sink_tiles, start, stop = column_span(problem, mask, i_batch, first_row, BLOCK_M, BLOCK_N)
    # The columns that every row sees. Rows past the end have zero weights, masked or not.
    full_start, full_stop = start, start
    if IS_BAND:
        first, last = start, stop
        if mask.left is not None:
            first = tl.minimum(first_row + BLOCK_M, row_stop) - 1 + mask.offset - mask.left
        if mask.right is not None:
            last = first_row + mask.offset + mask.right + 1
        full_start, full_stop = full_tiles(start, stop, first, last, BLOCK_N)

    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    best_key = tl.full([BLOCK_M], -1, tl.int32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    # [BLOCK_M, TOP]; empty entries have different keys, so that one at a time is replaced.
    top_value = tl.full([BLOCK_M, TOP], -float("inf"), tl.float32)
    top_key = tl.zeros([BLOCK_M, TOP], tl.int32) + (2147483647 - tl.arange(0, TOP))[None, :]
    for first_column in tl.range(full_start, full_stop, BLOCK_N):
        best, best_key, mass, top_value, top_key = _row_tile(
            problem, mask, columns, row_results, i_pair, tile_q, lse, sm_scale, first_row, first_column,
            best, best_key, mass, top_value, top_key, DIM, BLOCK_DIM, BLOCK_M, BLOCK_N, POOL_M, POOL_N, BY_MAX,
            EXCLUSIVE, False,
        )  # fmt: skip
    # The edge tiles: those of attention sinks, those from `start` up to the full tiles, then those after the full ones.
    before = sink_tiles + (full_start - start) // BLOCK_N
    for i_tile in tl.range(0, before + tl.cdiv(stop - full_stop, BLOCK_N)):
        first_column = tl.where(i_tile < before, start - sink_tiles * BLOCK_N, full_stop - before * BLOCK_N)
        first_column = tl.where(i_tile < sink_tiles, problem.column_start, first_column) + i_tile * BLOCK_N
        best, best_key, mass, top_value, top_key = _row_tile(
            problem, mask, columns, row_results, i_pair, tile_q, lse, sm_scale, first_row, first_column,
            best, best_key, mass, top_value, top_key, DIM, BLOCK_DIM, BLOCK_M, BLOCK_N, POOL_M, POOL_N, BY_MAX,
            EXCLUSIVE, True,
        )  # fmt: skip
    if row_results.argmax is not None:
        tl.store(row_results.argmax + offs_row, best_key.to(tl.int64), mask=mask_row)
    if row_results.mass is not None:
        tl.store(row_results.mass + offs_row, mass, mask=mask_row)
    if row_results.top_value is not None:
        offs_top = offs_row[:, None] * TOP + tl.arange(0, TOP)[None, :]
        tl.store(row_results.top_value + offs_top, top_value, mask=mask_row[:, None])
        tl.store(row_results.top_key + offs_top, top_key.to(tl.int64), mask=mask_row[:, None])


def second_pass(
    problem: Problem,
    mask: MaskArguments,
    *,
    received: bool = False,
    block: tuple[int, int] | None = None,
    by_max: bool = False,
    offsets: bool = False,
    argmax: bool = False,
    topk: int = 0,
    key_set: Tensor | None = None,
    by_columns: bool | None = None,
) -> dict[str, Tensor]:
    """Compute all requested results, by name.

    `top_log2_weights` and `top_keys` have at least `topk` entries, unsorted.

    The row kernel is used if a result per row is requested or `by_columns` is False, else the column kernel, which
    needs a mask that was packed for it.
    """
    query, batch, heads = problem.query, problem.batch, problem.heads
    needs_rows = argmax or topk > 0 or key_set is not None
    by_columns = not needs_rows and by_columns is not False
    is_band = _is_band(mask)
    register_heavy = not is_band or topk > 0 or (offsets and not by_columns)
    tiles = tiles_for(query, by_columns=by_columns, register_heavy=register_heavy)
    if block is not None and 0 in _blocks_per_tile(block, tiles)[:2]:
        # Each element computes its block, which takes more registers.
        tiles = tiles_for(query, by_columns=by_columns, register_heavy=True)
    top_size = power_of_two(topk) if topk else 1

    def allocate(*shape: int, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
        create = torch.zeros if zero else torch.empty
        return create(batch, heads, *shape, dtype=dtype, device=query.device)

    rows, columns = problem.rows, problem.columns
    results: dict[str, Tensor] = {}
    if received:
        results["received"] = allocate(columns, zero=not by_columns)
    if block is not None:
        results["block_map"] = allocate(blocks_of(rows, block[0]), blocks_of(columns, block[1]), zero=True)
    if offsets:
        results["offsets"] = allocate(OFFSET_BINS.value, zero=True)
    if argmax:
        results["argmax"] = allocate(rows, dtype=torch.int64)
    if topk:
        results["top_log2_weights"], results["top_keys"] = (
            allocate(rows, top_size),
            allocate(rows, top_size, dtype=torch.int64),
        )
    if key_set is not None:
        results["key_set_mass"] = allocate(rows)
    if not batch or not rows or not columns:
        return {name: x.fill_(_EMPTY_VALUES.get(name, 0.0)) for name, x in results.items()}

    column_results = ColumnResults(results.get("received"), results.get("block_map"), results.get("offsets"))
    if block is not None:
        height, width = results["block_map"].shape[2:]
        column_results = column_results._replace(
            block_height=block[0], block_width=block[1], map_rows=height, map_columns=width
        )
    row_results = RowResults(
        argmax=results.get("argmax"),
        top_value=results.get("top_log2_weights"),
        top_key=results.get("top_keys"),
        mass=results.get("key_set_mass"),
        key_set=None if key_set is None else key_set.contiguous().view(torch.uint8),
        key_set_batch=0 if key_set is None or key_set.shape[0] == 1 else key_set.shape[1],
    )

    def launch(tiles: Blocks) -> None:
        pool_rows, pool_columns, exclusive = (1, 1, False) if block is None else _blocks_per_tile(block, tiles)
        constants: dict[str, Any] = {
            "DIM": query.shape[3],
            "BLOCK_DIM": padded_dim(query.shape[3]),
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.columns,
            "POOL_M": pool_rows,
            "POOL_N": pool_columns,
            "BY_MAX": by_max,
            "EXCLUSIVE": exclusive,
            "IS_BAND": is_band,
            **tiles.options,
        }
        if by_columns:
            _column_kernel[(batch * heads * blocks_of(columns, tiles.columns),)](
                problem, mask, column_results, **constants
            )
        else:
            _row_kernel[(batch * heads * blocks_of(rows, tiles.rows),)](
                problem, mask, column_results, row_results, **constants, TOP=top_size
            )

    def compile_key() -> Hashable:
        return "profile", *problem.compile_key(mask), by_columns, tiles, block, by_max, *sorted(results)

    with torch.cuda.device_of(query):
        launched_tiles = launch_fitting(launch, tiles, Blocks.halved, compile_key)
    if offsets and by_columns:
        add_crossing(
            problem, mask, results["offsets"], launched_tiles, tiles_for(query, by_columns=True, register_heavy=True)
        )
    return results


# Values of results without queries or keys, if not 0.
_EMPTY_VALUES = {"argmax": -1, "top_keys": -1, "top_log2_weights": -torch.inf}


def _is_band(mask: MaskArguments) -> bool:
    """Return True if causal and window edges alone determine which tiles are full."""
    tensors = (mask.query_position, mask.query_document, mask.allowed, mask.bias, mask.table)
    return all(x is None for x in tensors)


def _blocks_per_tile(block: tuple[int, int], tiles: Blocks) -> tuple[int, int, bool]:
    """Return POOL_M, POOL_N and EXCLUSIVE of `accumulate_columns` for the blocks of a map.

    The first two are the numbers of blocks per tile along each axis: 0 if blocks and tiles do not line up, but -1 for
    columns if blocks are wider than a tile, which then meets at most two. The third is True if no other tile adds to
    these blocks.
    """
    counts, exclusive = [], True
    for size, tile in zip(block, (tiles.rows, tiles.columns), strict=True):
        if tile % size == 0:
            counts.append(tile // size)
        else:
            counts.append(1 if size % tile == 0 else 0)
            exclusive = False
    if counts[1] == 0 and block[1] > tiles.columns:
        counts[1] = -1
    return counts[0], counts[1], exclusive

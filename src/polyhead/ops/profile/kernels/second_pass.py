"""The second pass: weights again from Q K^T and the log-sum-exp, a tile at a time, and what is told of them.

Two walks over the same tiles. A walk down the columns holds a block of keys and lets the queries pass: what a key
receives adds up in registers, and a tile lies with its queries along the registers of a thread, so that a sum over them
needs hardly another thread. It serves received weight, block map and, with `profile_crossing`, offsets. A walk along
the rows holds a block of queries: it alone can tell the argmax, the top keys and the mass of a row, and adds to the
columns by atomics.

A tile costs half the products of a forward and as many exponentials: one fused multiply-add, one exp2 and one add a
weight. At head dim 128 a Hopper multiprocessor is bound about equally by both (128² exponentials at 16 a cycle beside
128³ products at 2,048 a cycle), at 64 by the exponentials. Tiles that a causal edge or a window leaves whole are not
masked.
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
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two
from polyhead.ops.profile.kernels.crossing import add_crossing
from polyhead.ops.profile.kernels.offsets import OFFSET_BINS
from polyhead.ops.profile.kernels.prepare import Problem, block_dim, tiles_for
from polyhead.ops.profile.kernels.tiles import (
    column_span,
    head_factor,
    load_rows,
    log2_weights,
    take_columns,
    whole_span,
)


class ColumnResults(NamedTuple):
    """Where a walk leaves what it tells of columns, None for what was not asked for."""

    received: Tensor | None = None  # [batch, heads, columns]
    map: Tensor | None = None  # [batch, heads, map_rows, map_columns], zeros
    offsets: Tensor | None = None  # [batch, heads, OFFSET_BINS], zeros
    block_height: int = 1
    block_width: int = 1
    map_rows: int = 0
    map_columns: int = 0


class RowResults(NamedTuple):
    """Where a walk along the rows leaves what it tells of them, None for what was not asked for."""

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
    factor,
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
    ALONE: tl.constexpr,
    MASKED: tl.constexpr,
):
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    offs_m = first_row + tl.arange(0, BLOCK_M)
    ptr_query = problem.query + i_batch * problem.query_batch + i_head * problem.query_head
    # [BLOCK_M, BLOCK_DIM]
    tile_q = load_rows(ptr_query, problem.query_token, first_row, problem.row_stop, DIM, BLOCK_DIM, BLOCK_M, MASKED)
    # A step of whole blocks, and rows padded to them: the compiler may read several at once, and none needs a mask.
    row = tl.multiple_of(first_row - problem.row_start, BLOCK_M)
    # [BLOCK_M]
    shift = tl.load(problem.shift + (i_pair * problem.shift_rows + row) + tl.arange(0, BLOCK_M))
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    logs = log2_weights(problem, mask, tile_q, tile_k, shift, factor, i_batch, i_head, offs_m, offs_n, MASKED, True)
    return take_columns(
        problem, mask, columns, i_pair, logs, received, first_row, first_column, BLOCK_M, BLOCK_N, POOL_M, POOL_N,
        BY_MAX, ALONE, True,
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
    ALONE: tl.constexpr,
    IS_BAND: tl.constexpr,
):
    """A block of keys, past which the queries go."""
    row_start, row_stop = problem.row_start, problem.row_stop
    column_start, column_stop = problem.column_start, problem.column_stop
    blocks = tl.cdiv(column_stop - column_start, BLOCK_N)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * heads + head
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    first_column = column_start + (tl.program_id(0) % blocks) * BLOCK_N
    factor = head_factor(problem, i_head)
    ptr_key = problem.key + i_batch * problem.key_batch + i_head // problem.group * problem.key_head
    # [BLOCK_N, BLOCK_DIM]
    tile_k = load_rows(ptr_key, problem.key_token, first_column, column_stop, DIM, BLOCK_DIM, BLOCK_N, True)

    start, stop = mask_tiles.query_span(mask, i_batch, first_column, row_stop, column_stop, BLOCK_N, BLOCK_M)
    start = row_start + tl.maximum(start - row_start, 0) // BLOCK_M * BLOCK_M
    stop = tl.maximum(tl.minimum(stop, row_stop), start)
    # The rows that see every key of the block.
    whole_start, whole_stop = start, start
    if IS_BAND:
        first, last = start, tl.where(first_column + BLOCK_N <= column_stop, stop, start)
        if mask.right is not None:
            first = first_column + BLOCK_N - 1 - mask.right - mask.offset
        if mask.left is not None:
            last = tl.minimum(last, first_column + mask.left - mask.offset + 1)
        whole_start, whole_stop = whole_span(start, stop, first, last, BLOCK_M)

    # [BLOCK_N]
    received = tl.zeros([BLOCK_N], tl.float32)
    for first_row in tl.range(whole_start, whole_stop, BLOCK_M):
        received = _column_tile(
            problem, mask, columns, i_pair, tile_k, factor, received, first_row, first_column, DIM, BLOCK_DIM, BLOCK_M,
            BLOCK_N, POOL_M, POOL_N, BY_MAX, ALONE, False,
        )  # fmt: skip
    before = (whole_start - start) // BLOCK_M
    for i_tile in tl.range(0, before + tl.cdiv(stop - whole_stop, BLOCK_M)):
        first_row = tl.where(i_tile < before, start, whole_stop - before * BLOCK_M) + i_tile * BLOCK_M
        received = _column_tile(
            problem, mask, columns, i_pair, tile_k, factor, received, first_row, first_column, DIM, BLOCK_DIM, BLOCK_M,
            BLOCK_N, POOL_M, POOL_N, BY_MAX, ALONE, True,
        )  # fmt: skip
    if columns.received is not None:
        offs_n = first_column + tl.arange(0, BLOCK_N)
        ptr_received = columns.received + i_pair * (column_stop - column_start) + (offs_n - column_start)
        tl.store(ptr_received, received, mask=offs_n < column_stop)


@triton.jit
def _comes_before(value, key, best, best_key):
    """Whether a weight ranks before another: it is larger, or as large and of a lower key. Nothing hidden does."""
    return (value > best) | ((value == best) & (key < best_key) & (value > -float("inf")))


@triton.jit
def _worst(top_value, top_key):
    """The entry of each row that would go first: the smallest, of the highest key among equals."""
    value = tl.min(top_value, 1)
    return value, tl.max(tl.where(top_value == value[:, None], top_key, -1), 1)


@triton.jit
def _update_top(logs, first_column, top_value, top_key, BLOCK_N: tl.constexpr):
    """Exchange the worst entries for better ones of the tile, one a row at a time, while any row has a better one.

    After the first tiles few do: a row of n keys in random order exchanges about k log(n / k) times in all.
    """
    offs_n = first_column + tl.arange(0, BLOCK_N)
    value, index = tl.max(logs, 1, return_indices=True)
    worst_value, worst_key = _worst(top_value, top_key)
    better = _comes_before(value, first_column + index, worst_value, worst_key)
    while tl.max(better.to(tl.int32), 0) > 0:
        key = first_column + index
        out = (top_value == worst_value[:, None]) & (top_key == worst_key[:, None]) & better[:, None]
        top_value = tl.where(out, value[:, None], top_value)
        top_key = tl.where(out, key[:, None], top_key)
        logs = tl.where((offs_n[None, :] == key[:, None]) & better[:, None], -float("inf"), logs)
        value, index = tl.max(logs, 1, return_indices=True)
        worst_value, worst_key = _worst(top_value, top_key)
        better = _comes_before(value, first_column + index, worst_value, worst_key)
    return top_value, top_key


@triton.jit
def _row_tile(
    problem,
    mask,
    columns,
    of_rows,
    i_pair,
    tile_q,
    shift,
    factor,
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
    ALONE: tl.constexpr,
    MASKED: tl.constexpr,
):
    column_stop = problem.column_stop
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    ptr_key = problem.key + i_batch * problem.key_batch + i_head // problem.group * problem.key_head
    # [BLOCK_N, BLOCK_DIM]
    tile_k = load_rows(ptr_key, problem.key_token, first_column, column_stop, DIM, BLOCK_DIM, BLOCK_N, MASKED)
    offs_m, offs_n = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    # [BLOCK_M, BLOCK_N]
    logs = log2_weights(problem, mask, tile_q, tile_k, shift, factor, i_batch, i_head, offs_m, offs_n, MASKED, False)
    received = take_columns(
        problem, mask, columns, i_pair, logs, tl.zeros([BLOCK_N], tl.float32), first_row, first_column, BLOCK_M,
        BLOCK_N, POOL_M, POOL_N, BY_MAX, ALONE, False,
    )  # fmt: skip
    if columns.received is not None:
        ptr_received = columns.received + i_pair * (column_stop - problem.column_start)
        offs_column = offs_n - problem.column_start
        tl.atomic_add(ptr_received + offs_column, received, mask=offs_n < column_stop, sem="relaxed")
    if of_rows.mass is not None:
        ptr_key_set = of_rows.key_set + i_batch * of_rows.key_set_batch
        member = tl.load(ptr_key_set + offs_n, mask=offs_n < column_stop, other=0) != 0
        mass += tl.sum(tl.where(member[None, :], tl.exp2(logs), 0.0), 1)
    if of_rows.argmax is not None:
        value, index = tl.max(logs, 1, return_indices=True)
        better = _comes_before(value, first_column + index, best, best_key)
        best = tl.where(better, value, best)
        best_key = tl.where(better, first_column + index, best_key)
    if of_rows.top_value is not None:
        top_value, top_key = _update_top(logs, first_column, top_value, top_key, BLOCK_N)
    return best, best_key, mass, top_value, top_key


@triton.jit
def _row_kernel(
    problem,
    mask,
    columns,
    of_rows,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POOL_M: tl.constexpr,
    POOL_N: tl.constexpr,
    BY_MAX: tl.constexpr,
    ALONE: tl.constexpr,
    IS_BAND: tl.constexpr,
    TOP: tl.constexpr,
):
    """A block of queries, which goes along the keys. The last blocks, which see most under a causal mask, go first."""
    row_start, row_stop = problem.row_start, problem.row_stop
    blocks = tl.cdiv(row_stop - row_start, BLOCK_M)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * heads + head
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    first_row = row_start + (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    factor = head_factor(problem, i_head)
    ptr_query = problem.query + i_batch * problem.query_batch + i_head * problem.query_head
    # [BLOCK_M, BLOCK_DIM]
    tile_q = load_rows(ptr_query, problem.query_token, first_row, row_stop, DIM, BLOCK_DIM, BLOCK_M, True)
    # [BLOCK_M]
    offs_m = first_row + tl.arange(0, BLOCK_M)
    there = offs_m < row_stop
    offs_row = i_pair * (row_stop - row_start) + (offs_m - row_start)
    shift = tl.load(problem.shift + i_pair * problem.shift_rows + (offs_m - row_start))

    count_kept, start, stop = column_span(problem, mask, i_batch, first_row, BLOCK_M, BLOCK_N)
    # The columns that every row sees. A row past the end has no weight on anything, masked or not.
    whole_start, whole_stop = start, start
    if IS_BAND:
        first, last = start, stop
        if mask.left is not None:
            first = tl.minimum(first_row + BLOCK_M, row_stop) - 1 + mask.offset - mask.left
        if mask.right is not None:
            last = first_row + mask.offset + mask.right + 1
        whole_start, whole_stop = whole_span(start, stop, first, last, BLOCK_N)

    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    best_key = tl.full([BLOCK_M], -1, tl.int32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    # [BLOCK_M, TOP]; places that nothing has taken yet differ in their keys, so that one at a time is taken.
    top_value = tl.full([BLOCK_M, TOP], -float("inf"), tl.float32)
    top_key = tl.zeros([BLOCK_M, TOP], tl.int32) + (2147483647 - tl.arange(0, TOP))[None, :]
    for first_column in tl.range(whole_start, whole_stop, BLOCK_N):
        best, best_key, mass, top_value, top_key = _row_tile(
            problem, mask, columns, of_rows, i_pair, tile_q, shift, factor, first_row, first_column,
            best, best_key, mass, top_value, top_key, DIM, BLOCK_DIM, BLOCK_M, BLOCK_N, POOL_M, POOL_N, BY_MAX, ALONE,
            False,
        )  # fmt: skip
    before = count_kept + (whole_start - start) // BLOCK_N
    for i_tile in tl.range(0, before + tl.cdiv(stop - whole_stop, BLOCK_N)):
        first_column = tl.where(i_tile < before, start - count_kept * BLOCK_N, whole_stop - before * BLOCK_N)
        first_column = tl.where(i_tile < count_kept, problem.column_start, first_column) + i_tile * BLOCK_N
        best, best_key, mass, top_value, top_key = _row_tile(
            problem, mask, columns, of_rows, i_pair, tile_q, shift, factor, first_row, first_column,
            best, best_key, mass, top_value, top_key, DIM, BLOCK_DIM, BLOCK_M, BLOCK_N, POOL_M, POOL_N, BY_MAX, ALONE,
            True,
        )  # fmt: skip
    if of_rows.argmax is not None:
        tl.store(of_rows.argmax + offs_row, best_key.to(tl.int64), mask=there)
    if of_rows.mass is not None:
        tl.store(of_rows.mass + offs_row, mass, mask=there)
    if of_rows.top_value is not None:
        offs_top = offs_row[:, None] * TOP + tl.arange(0, TOP)[None, :]
        tl.store(of_rows.top_value + offs_top, top_value, mask=there[:, None])
        tl.store(of_rows.top_key + offs_top, top_key.to(tl.int64), mask=there[:, None])


def walk(
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
    """All that was asked for in one walk, by name; `top_log2_weights` and `top_keys` hold at least `topk`, in no order.

    `by_columns` chooses the walk where nothing is asked of the rows and both can serve. A walk down the columns needs
    a mask that was packed for it.
    """
    query, batch, heads = problem.query, problem.batch, problem.heads
    of_rows = argmax or topk > 0 or key_set is not None
    by_columns = not of_rows and by_columns is not False
    is_band = _is_band(mask)
    busy = not is_band or topk > 0 or (offsets and not by_columns)
    tiles = tiles_for(query, by_columns=by_columns, busy=busy)
    if block is not None and 0 in _pools(block, tiles)[:2]:
        tiles = tiles_for(query, by_columns=by_columns, busy=True)
    top = power_of_two(topk) if topk else 1

    def new(*shape: int, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
        make = torch.zeros if zero else torch.empty
        return make(batch, heads, *shape, dtype=dtype, device=query.device)

    rows, columns = problem.rows, problem.columns
    found: dict[str, Tensor] = {}
    if received:
        found["received"] = new(columns, zero=not by_columns)
    if block is not None:
        found["block_map"] = new(blocks_of(rows, block[0]), blocks_of(columns, block[1]), zero=True)
    if offsets:
        found["offsets"] = new(OFFSET_BINS.value, zero=True)
    if argmax:
        found["argmax"] = new(rows, dtype=torch.int64)
    if topk:
        found["top_log2_weights"], found["top_keys"] = new(rows, top), new(rows, top, dtype=torch.int64)
    if key_set is not None:
        found["key_set_mass"] = new(rows)
    if not batch or not rows or not columns:
        return {name: x.fill_(_NOTHING.get(name, 0.0)) for name, x in found.items()}

    column_results = ColumnResults(found.get("received"), found.get("block_map"), found.get("offsets"))
    if block is not None:
        height, width = found["block_map"].shape[2:]
        column_results = column_results._replace(
            block_height=block[0], block_width=block[1], map_rows=height, map_columns=width
        )
    row_results = RowResults(
        argmax=found.get("argmax"),
        top_value=found.get("top_log2_weights"),
        top_key=found.get("top_keys"),
        mass=found.get("key_set_mass"),
        key_set=None if key_set is None else key_set.contiguous().view(torch.uint8),
        key_set_batch=0 if key_set is None or key_set.shape[0] == 1 else key_set.shape[1],
    )

    def launch(tiles: Blocks) -> None:
        pool_rows, pool_columns, alone = (1, 1, False) if block is None else _pools(block, tiles)
        constants: dict[str, Any] = {
            "DIM": query.shape[3],
            "BLOCK_DIM": block_dim(query),
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.columns,
            "POOL_M": pool_rows,
            "POOL_N": pool_columns,
            "BY_MAX": by_max,
            "ALONE": alone,
            "IS_BAND": is_band,
            **tiles.options,
        }
        if by_columns:
            _column_kernel[(batch * heads * blocks_of(columns, tiles.columns),)](
                problem, mask, column_results, **constants
            )
        else:
            _row_kernel[(batch * heads * blocks_of(rows, tiles.rows),)](
                problem, mask, column_results, row_results, **constants, TOP=top
            )

    def kind() -> Hashable:
        return "profile", *problem.kind(mask), by_columns, tiles, block, by_max, *sorted(found)

    with torch.cuda.device_of(query):
        used = launch_fitting(launch, tiles, Blocks.halved, kind)
    if offsets and by_columns:
        add_crossing(problem, mask, found["offsets"], used, tiles_for(query, by_columns=True, busy=True))
    return found


# What there is to tell where there is no query or no key, if it is not 0.
_NOTHING = {"argmax": -1, "top_keys": -1, "top_log2_weights": -torch.inf}


def _is_band(mask: MaskArguments) -> bool:
    """Whether the edges alone say which tiles are whole."""
    tensors = (mask.query_position, mask.query_document, mask.allowed, mask.bias, mask.table)
    return all(x is None for x in tensors)


def _pools(block: tuple[int, int], tiles: Blocks) -> tuple[int, int, bool]:
    """Into how many blocks a tile falls along each axis, and whether no other tile shares them; see `take_columns`."""
    pools, alone = [], True
    for size, tile in zip(block, (tiles.rows, tiles.columns), strict=True):
        if tile % size == 0:
            pools.append(tile // size)
        else:
            pools.append(1 if size % tile == 0 else 0)
            alone = False
    if pools[1] == 0 and block[1] > tiles.columns:
        pools[1] = -1
    return pools[0], pools[1], alone

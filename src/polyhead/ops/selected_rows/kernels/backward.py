"""The gradients of the attention of chosen rows, from its output and log-sum-exp: `backward`, walked by chosen rows.

The same three kernels: one number a row, which `backward` itself computes; the gradients of queries, a block of rows
after the keys it sees; the gradients of keys and values, a block of keys after the rows that see it, which in each pair
lie together and are found by a search. No block adds to what another writes. What a tile does is `backward_tiles`'
affair: it is told of rows by the queries they are.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.attention.kernels.backward import (
    _constants_kernel,
    _fresh_like,
    _full_columns,
    _full_rows,
    _strided,
    choose_blocks,
)
from polyhead.ops.attention.kernels.backward_tiles import (
    Problem,
    RowTerms,
    distance_tile,
    head_scales,
    load_tile,
    store_tile,
    tile_gradients,
)
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.mask_tiles import query_span, visible_tile
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two
from polyhead.ops.common.kernels.softmax_tiles import add_product, products
from polyhead.ops.selected_rows.kernels.forward import programs_of, rows_of
from polyhead.ops.selected_rows.kernels.tiles import (
    find_rows,
    first_and_last,
    first_from,
    pair_of,
    queries_of,
    sequence_and_head,
    spans_of_keys,
)


@triton.jit
def _load_rows(problem, first_row, stop, BLOCK_M: tl.constexpr):
    """Log-sum-exp, +inf where there is none, and C of the rows from `first_row` to `stop`, float32 [BLOCK_M] each."""
    offs_row = first_row + tl.arange(0, BLOCK_M)
    logsumexp = tl.load(problem.logsumexp + offs_row, mask=offs_row < stop, other=float("inf"))
    constant = tl.load(problem.constant + offs_row, mask=offs_row < stop, other=0.0)
    return tl.where(logsumexp == -float("inf"), float("inf"), logsumexp), constant


@triton.jit
def _step(
    problem,
    tile_q,
    tile_k,
    tile_do,
    tile_v,
    logsumexp,
    constant,
    i_batch,
    i_head,
    offs_m,
    offs_n,
    BLOCK_M: tl.constexpr,
    EDGE: tl.constexpr,
    TURNED: tl.constexpr,
):
    """The weights of a tile and the gradients of its products, [rows, columns], or [columns, rows] if TURNED."""
    num_queries, num_keys = problem.num_queries, problem.num_keys
    # [BLOCK_M, BLOCK_N]
    distance = distance_tile(problem, i_batch, offs_m, offs_n)
    visible = distance == distance
    if EDGE:
        visible = visible_tile(problem.mask, i_batch, i_head, offs_m, offs_n, distance, num_queries, num_keys)
        # Rows that see nothing may hold NaN. With a learned sink their log-sum-exp does not tell them from others.
        filled = logsumexp != float("inf")
        if problem.SINKS:
            filled = filled & (tl.max(visible.to(tl.int32), 1) > 0)
        visible = visible & filled[:, None]
        if TURNED:
            tile_q = tl.where(filled[:, None], tile_q, 0.0).to(tile_q.dtype)
            tile_do = tl.where(filled[:, None], tile_do, 0.0).to(tile_do.dtype)
    if TURNED:
        # This way round, weights and gradients go from registers into the next products.
        tile_s = products(tile_k, tile_q)
        tile_dp = products(tile_v, tile_do)
    else:
        tile_s = products(tile_q, tile_k)
        tile_dp = products(tile_do, tile_v)
    # From here on a row is known by its query, which is `first` and its number in the tile.
    first = offs_m - tl.arange(0, BLOCK_M)
    tile_p, _, tile_raw = tile_gradients(
        problem, tile_s, tile_dp, visible, logsumexp, constant, i_batch, i_head, first, offs_n, BLOCK_M, EDGE, TURNED
    )
    return tile_p, tile_raw, tile_q, tile_do


@triton.jit
def _queries_step(
    problem,
    tile_dq,
    tile_q,
    tile_do,
    logsumexp,
    constant,
    i_batch,
    i_head,
    offs_m,
    first_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
):
    """What one block of keys adds to the gradient of a block of rows."""
    num_keys = problem.num_keys
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    i_kv_head = i_head // problem.group
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # [BLOCK_N, BLOCK_KEY], [BLOCK_N, BLOCK_VALUE]
    tile_k = load_tile(problem.key, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_KEY, BLOCK_KEY, not EDGE)
    tile_v = load_tile(
        problem.value, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE, not EDGE
    )
    _, tile_raw, _, _ = _step(
        problem, tile_q, tile_k, tile_do, tile_v, logsumexp, constant, i_batch, i_head, offs_m, offs_n, BLOCK_M, EDGE,
        False,
    )  # fmt: skip
    return add_product(tile_dq, tile_raw.to(tile_k.dtype), tile_k)


@triton.jit
def _ragged_queries_kernel(
    problem, rows, grad_query, HEAVY_LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    i_program = tl.program_id(0)
    if HEAVY_LAST:
        # Under a causal mask the last rows have the most to do, so they go first.
        i_program = tl.num_programs(0) - 1 - i_program
    i_pair, first_row, stop_row = find_rows(rows, i_program, BLOCK_M)
    if first_row >= stop_row:
        return
    is_padding = i_pair == rows.pairs
    i_batch, i_head = sequence_and_head(rows, tl.where(is_padding, 0, i_pair))
    i_batch = i_batch.to(tl.int64)
    i_all = i_batch * 0  # rows are one sequence of one head
    read_to = tl.where(is_padding, first_row, stop_row)  # padding is not read
    # [BLOCK_M]
    offs_m = queries_of(rows, first_row + tl.arange(0, BLOCK_M), read_to, problem.num_queries)
    first, last = first_and_last(offs_m, problem.num_queries)
    logsumexp, constant = _load_rows(problem, first_row, stop_row, BLOCK_M)
    # [BLOCK_M, BLOCK_KEY], [BLOCK_M, BLOCK_VALUE]
    tile_q = load_tile(problem.query, i_all, i_all, first_row, read_to, BLOCK_M, DIM_KEY, BLOCK_KEY, False)
    tile_do = load_tile(problem.grad_output, i_all, i_all, first_row, read_to, BLOCK_M, DIM_VALUE, BLOCK_VALUE, False)
    tile_dq = tl.zeros([BLOCK_M, BLOCK_KEY], tl.float32)

    kept, start, stop = spans_of_keys(
        problem.mask, rows, i_batch, offs_m, first, last, problem.num_queries, problem.num_keys, BLOCK_N
    )
    full_start, full_stop = start, start
    if problem.BAND:
        full_start, full_stop = _full_columns(problem, first, start, stop, last - first + 1, BLOCK_N)
        # Rows past the end see nothing, so a block that has any has no full tile.
        full_stop = tl.where(first_row + BLOCK_M <= stop_row, full_stop, full_start)
        for column in range(full_start, full_stop, BLOCK_N):
            tile_dq = _queries_step(
                problem, tile_dq, tile_q, tile_do, logsumexp, constant, i_batch, i_head, offs_m, column, BLOCK_M,
                BLOCK_N, False,
            )  # fmt: skip
    kept_tiles = kept // BLOCK_N
    before = kept_tiles + (full_start - start) // BLOCK_N
    edges = before + tl.cdiv(tl.maximum(stop - full_stop, 0), BLOCK_N)
    for i_edge in range(edges):
        behind = full_stop + (i_edge - before) * BLOCK_N
        column = tl.where(i_edge < before, start + (i_edge - kept_tiles) * BLOCK_N, behind)
        column = tl.where(i_edge < kept_tiles, i_edge * BLOCK_N, column)
        tile_dq = _queries_step(
            problem, tile_dq, tile_q, tile_do, logsumexp, constant, i_batch, i_head, offs_m, column, BLOCK_M, BLOCK_N,
            True,
        )  # fmt: skip
    scale, _ = head_scales(problem, i_head)
    store_tile(grad_query, tile_dq * scale, i_all, i_all, first_row, stop_row, BLOCK_M, DIM_KEY, BLOCK_KEY)


@triton.jit
def _keys_step(
    problem,
    rows,
    tile_dk,
    tile_dv,
    tile_k,
    tile_v,
    i_batch,
    i_head,
    first_row,
    stop_row,
    offs_n,
    BLOCK_M: tl.constexpr,
    EDGE: tl.constexpr,
):
    """What the rows from `first_row` to `stop_row`, a block at most, add to the gradients of a block of keys."""
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    i_all = i_batch * 0
    # [BLOCK_M]
    offs_m = queries_of(rows, first_row + tl.arange(0, BLOCK_M), stop_row, problem.num_queries)
    logsumexp, constant = _load_rows(problem, first_row, stop_row, BLOCK_M)
    # [BLOCK_M, BLOCK_KEY], [BLOCK_M, BLOCK_VALUE]
    tile_q = load_tile(problem.query, i_all, i_all, first_row, stop_row, BLOCK_M, DIM_KEY, BLOCK_KEY, not EDGE)
    tile_do = load_tile(
        problem.grad_output, i_all, i_all, first_row, stop_row, BLOCK_M, DIM_VALUE, BLOCK_VALUE, not EDGE
    )
    # [BLOCK_N, BLOCK_M]
    tile_p, tile_raw, tile_q, tile_do = _step(
        problem, tile_q, tile_k, tile_do, tile_v, logsumexp, constant, i_batch, i_head, offs_m, offs_n, BLOCK_M, EDGE,
        True,
    )  # fmt: skip
    if problem.head_scale is not None:
        _, own = head_scales(problem, i_head)
        tile_raw *= own  # the heads of a group share one sum
    tile_dv = add_product(tile_dv, tile_p.to(tile_do.dtype), tile_do)
    tile_dk = add_product(tile_dk, tile_raw.to(tile_q.dtype), tile_q)
    return tile_dk, tile_dv


@triton.jit
def _ragged_keys_kernel(
    problem, rows, grad_key, grad_value, HIDES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    mask, num_keys, group = problem.mask, problem.num_keys, problem.group
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    blocks = tl.cdiv(num_keys, BLOCK_N)
    i_batch = (tl.program_id(0) // blocks // problem.kv_heads).to(tl.int64)
    i_kv_head = tl.program_id(0) // blocks % problem.kv_heads
    first_column = (tl.program_id(0) % blocks) * BLOCK_N
    # [BLOCK_N]
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # [BLOCK_N, BLOCK_KEY], [BLOCK_N, BLOCK_VALUE]
    tile_k = load_tile(problem.key, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_KEY, BLOCK_KEY, False)
    tile_v = load_tile(
        problem.value, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE, False
    )
    tile_dk = tl.zeros([BLOCK_N, BLOCK_KEY], tl.float32)
    tile_dv = tl.zeros([BLOCK_N, BLOCK_VALUE], tl.float32)

    for i_member in range(group):
        i_head = i_kv_head * group + i_member
        i_pair = pair_of(rows, i_batch, i_head)
        begin = tl.load(rows.offsets + i_pair)
        end = tl.load(rows.offsets + i_pair + 1)
        full_begin, full_end = begin, begin
        if problem.BAND:
            full_end = end
        if HIDES:
            # As queries first, then as rows.
            start, stop = query_span(mask, i_batch, first_column, problem.num_queries, num_keys, BLOCK_N, 1)
            begin, end = first_from(rows, begin, end, start), first_from(rows, begin, end, stop)
            full_begin, full_end = begin, begin
            if problem.BAND:
                full_start, full_stop = _full_rows(problem, first_column, start, stop, 1, BLOCK_N)
                full_begin = first_from(rows, begin, end, full_start)
                full_end = first_from(rows, full_begin, end, full_stop)
        # Whole blocks of rows that see all of these keys, those before them and those behind.
        full_end = full_begin + (full_end - full_begin) // BLOCK_M * BLOCK_M
        if problem.BAND:
            for row in range(full_begin, full_end, BLOCK_M):
                tile_dk, tile_dv = _keys_step(
                    problem, rows, tile_dk, tile_dv, tile_k, tile_v, i_batch, i_head, row, row + BLOCK_M,
                    offs_n, BLOCK_M, False,
                )  # fmt: skip
        before = tl.cdiv(full_begin - begin, BLOCK_M)
        edges = before + tl.cdiv(end - full_end, BLOCK_M)
        for i_edge in range(edges):
            is_before = i_edge < before
            row = tl.where(is_before, begin + i_edge * BLOCK_M, full_end + (i_edge - before) * BLOCK_M)
            row_end = tl.minimum(row + BLOCK_M, tl.where(is_before, full_begin, end))
            tile_dk, tile_dv = _keys_step(
                problem, rows, tile_dk, tile_dv, tile_k, tile_v, i_batch, i_head, row, row_end, offs_n,
                BLOCK_M, True,
            )  # fmt: skip
    tile_dk *= problem.scale
    store_tile(grad_key, tile_dk, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_KEY, BLOCK_KEY)
    store_tile(grad_value, tile_dv, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE)


def ragged_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    offsets: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    num_queries: int,
    by_head: bool,
    scale: float,
    head_scale: Tensor | None,
    softcap: float | None,
    has_sinks: bool,
    mask: MaskArguments,
    row_gradients: dict[str, Tensor],
    row_values: dict[str, Tensor],
    full_gradients: dict[str, Tensor],
    sink_keys: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, and C, the number of each row that a learned sink's gradient is made of.

    Args:
        grad_output: [total, value_dim], as `output` is.
        query, key, value, positions, offsets, num_queries, by_head: as `ragged_forward` takes them.
        output, logsumexp: what the forward gave.
        mask: packed with `for_columns=True`.
        row_gradients: float32 [total] each, of "logsumexp" and of statistics, none of them a maximum.
        row_values: the statistics themselves, under the same names.
        full_gradients: those of `row_gradients` whose part differs from key to key, laid out as those of all queries,
            [batch, heads, num_queries], with zeros for the rows that nobody chose.
    """
    total, head_dim = query.shape
    batch, kv_heads, num_keys, value_dim = value.shape
    pairs = offsets.shape[0] - 1
    grad_key, grad_value = _fresh_like(key), _fresh_like(value)
    grad_query = query.new_empty(total, head_dim)
    constant = query.new_empty(total, dtype=torch.float32)
    by_key = RowTerms(**full_gradients)
    block_value = max(16, power_of_two(value_dim))
    problem = Problem(
        query=_strided(query[None, None]),
        key=_strided(key),
        value=_strided(value),
        grad_output=_strided(grad_output[None, None]),
        logsumexp=logsumexp,
        constant=constant,
        gradients=by_key,
        mask=mask._replace(first_key=None, last_key=None),
        num_queries=num_queries,
        num_keys=num_keys,
        kv_heads=kv_heads,
        group=pairs // batch // kv_heads,
        scale=float(scale),
        head_scale=head_scale,
        softcap=None if softcap is None else float(softcap),
        seed=None,
        threshold=0,
        kept_scale=1.0,
        sink_keys=sink_keys,
        window=window,
        DIM_KEY=tl.constexpr(head_dim),
        DIM_VALUE=tl.constexpr(value_dim),
        BLOCK_KEY=tl.constexpr(max(16, power_of_two(head_dim))),
        BLOCK_VALUE=tl.constexpr(block_value),
        BASE_TWO=tl.constexpr(
            query.dtype is not torch.float32 and softcap is None and mask.bias is None and mask.table is None
        ),
        BAND=tl.constexpr(all(x is None for x in (mask.query_position, mask.query_document, mask.allowed, mask.bias))),
        SINKS=tl.constexpr(has_sinks),
        LINEAR_TERMS=tl.constexpr(any(x is not None for x in by_key._replace(entropy=None))),
    )
    rows = rows_of(positions, offsets, mask, batch, by_head)
    hides = any(x is not None for x in (mask.left, mask.right, mask.first_query))
    for_keys, for_queries = choose_blocks(head_dim, value_dim, query.dtype)

    def launch_queries(blocks: Blocks) -> None:
        _ragged_queries_kernel[(programs_of(total, pairs, blocks.rows),)](
            problem._replace(mask=problem.mask._replace(first_query=None, last_query=None)),
            rows,
            _strided(grad_query[None, None]),
            HEAVY_LAST=mask.right is not None and mask.left is None,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            **blocks.options,
        )

    def launch_keys(blocks: Blocks) -> None:
        _ragged_keys_kernel[(batch * kv_heads * blocks_of(num_keys, blocks.columns),)](
            problem,
            rows,
            _strided(grad_key),
            _strided(grad_value),
            HIDES=hides,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            **blocks.options,
        )

    def kind() -> tuple[Hashable, ...]:
        there = tuple(x is not None for x in (*by_key, *mask, head_scale, softcap))
        return query.get_device(), query.dtype, head_dim, value_dim, there, has_sinks

    with torch.cuda.device_of(query):
        if total:
            block_m = max(1, min(64, 8192 // block_value))
            _constants_kernel[(blocks_of(total, block_m),)](
                # All rows as those of one head.
                problem._replace(num_queries=total, kv_heads=1, group=1),
                _strided(output[None, None]),
                RowTerms(**row_gradients),
                RowTerms(**{name: row_values[name] for name in row_gradients if name != "logsumexp"}),
                BLOCK_M=block_m,
            )
            launch_fitting(launch_queries, for_queries, Blocks.smaller, lambda: ("ragged queries", *kind()))
        if grad_key.numel():
            launch_fitting(launch_keys, for_keys, Blocks.smaller, lambda: ("ragged keys", *kind()))
    return grad_query, grad_key, grad_value, constant

"""The tensors of attention in tiles of plain operators, which serve on a CPU what PyTorch's kernels do not."""

from __future__ import annotations

from polyhead.costs.memory.recorder import INDEX, Heads, Recorder
from polyhead.costs.memory.tape import Block
from polyhead.ops.common.tiles import TILE_COLUMNS, TILE_ELEMENTS, tile_sizes


def record_tiles(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    """Softmax attention, in float32: part after part of the heads, and in a part one block of rows after another."""
    work, wide = call.requested.work, call.wide
    rows, seen = work.batch * heads.queries * work.queries, work.batch * heads.keys * work.keys
    queries, keys = wide(rows * heads.head_dim), wide(seen * heads.head_dim)
    values, out = wide(seen * heads.value_dim), wide(rows * heads.value_dim)
    group, all_pairs = heads.queries // heads.keys, max(1, work.batch * heads.keys)
    height, columns, pairs = tile_sizes(all_pairs, group, work.queries, work.keys)
    height = min(work.queries, height)

    def part(size: int, *, of_rows: bool = False) -> int:
        """What a part has of a tensor; a block of rows of it."""
        share = size * pairs // all_pairs
        return share * height // max(1, work.queries) if of_rows else share

    one = height * columns
    tile, band = wide(pairs * group * one), 0 if call.requested.mask is None else (INDEX + 1) * one
    in_parts = pairs < all_pairs
    # Where there is one part, it is copied as a whole; of several, each has its output beside that of all.
    forward = part(keys) + (part(out) + 2 * part(out, of_rows=True) if in_parts else queries + values + out)
    backward = 2 * (out + part(keys) + part(values)) + part(queries, of_rows=True) + part(keys, of_rows=True)
    backward += 0 if in_parts else queries + out
    of_bias = gradient_of_bias = dense = 0
    if call.bias is not None:
        by_head = wide(min(pairs * group, heads.queries) * one)
        # The gradient of a tile is added up by distance in float64.
        of_bias, gradient_of_bias = tile + by_head, INDEX * one + 3 * by_head
    if call.is_dense:
        dense = wide(heads.queries * work.queries * work.keys)
        gradient_of_bias = tile + 2 * dense + dense // 4
    output = call.tape.step(
        query,
        key,
        value,
        gives=out,
        keeps=(key, value),
        keeps_result=True,
        own=queries + 3 * 4 * rows + dense + (keys + values if call.is_narrow else 0),
        work=forward + tile + band + of_bias,
        gradient_work=backward + 2 * tile + band + gradient_of_bias,
    )
    output.is_apart = True
    return output


def talking_tiles(call: Recorder, heads: int) -> tuple[int, int]:
    """Bytes of the tiles that talking heads hold at once, in a forward and in a backward.

    A second block of columns is made while Python still has names for what was made of the first.
    """
    work = call.requested.work
    columns = max(1, min(TILE_COLUMNS, work.keys))
    rows = max(16, min(1024, TILE_ELEMENTS // max(1, work.batch * heads * columns)))
    tile = call.wide(work.batch * heads * min(rows, work.queries) * columns)
    forward, backward = (5, 9) if work.keys <= columns else (10, 11)
    return forward * tile, backward * tile

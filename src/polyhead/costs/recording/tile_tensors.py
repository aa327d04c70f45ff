"""Tensors of blockwise attention in PyTorch operators, used on a CPU where PyTorch's kernels do not apply."""

from __future__ import annotations

from polyhead.costs.recording.recorder import INDEX, Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.ops.common.tiles import TILE_COLUMNS, TILE_ELEMENTS, tile_sizes


def record_tiles(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    """Record softmax attention in float32, one part of the heads at a time and one block of rows within a part."""
    work, wide = call.work, call.wide
    rows, key_rows = work.batch * heads.queries * work.queries, work.batch * heads.keys * work.keys
    queries, keys = wide(rows * heads.head_dim), wide(key_rows * heads.head_dim)
    values, out = wide(key_rows * heads.value_dim), wide(rows * heads.value_dim)
    group, all_pairs = heads.queries // heads.keys, max(1, work.batch * heads.keys)
    height, columns, pairs = tile_sizes(all_pairs, group, work.queries, work.keys)
    height = min(work.queries, height)

    def part(size: int, *, of_rows: bool = False) -> int:
        """Return the bytes of a tensor of `size` bytes that one part has, or one block of rows of the part."""
        share = size * pairs // all_pairs
        return share * height // max(1, work.queries) if of_rows else share

    area = height * columns
    tile, band = wide(pairs * group * area), 0 if call.mask is None else (INDEX + 1) * area
    in_parts = pairs < all_pairs
    # A single part is copied as a whole; with several, each has its own output in addition to the full one.
    forward = part(keys) + (part(out) + 2 * part(out, of_rows=True) if in_parts else queries + values + out)
    backward = 2 * (out + part(keys) + part(values)) + part(queries, of_rows=True) + part(keys, of_rows=True)
    backward += 0 if in_parts else queries + out
    of_bias = gradient_of_bias = dense = 0
    if call.bias is not None:
        by_head = wide(min(pairs * group, heads.queries) * area)
        # The gradient of a tile is accumulated by distance in float64.
        of_bias, gradient_of_bias = tile + by_head, INDEX * area + 3 * by_head
    if call.is_dense:
        dense = wide(heads.queries * work.queries * work.keys)
        gradient_of_bias = tile + 2 * dense + dense // 4
    output = call.tape.step(
        query,
        key,
        value,
        output_size=out,
        saves=(key, value),
        save_output=True,
        saved_bytes=queries + 3 * 4 * rows + dense + (keys + values if call.is_narrow else 0),
        workspace=forward + tile + band + of_bias,
        backward_workspace=backward + 2 * tile + band + gradient_of_bias,
    )
    output.is_strided = True
    return output


def talking_tiles(call: Recorder, heads: int) -> tuple[int, int]:
    """Return the bytes of the live tiles of talking heads, in the forward and in the backward.

    A second block of columns is allocated while Python still references the tensors of the first.
    """
    work = call.work
    columns = max(1, min(TILE_COLUMNS, work.keys))
    rows = max(16, min(1024, TILE_ELEMENTS // max(1, work.batch * heads * columns)))
    tile = call.wide(work.batch * heads * min(rows, work.queries) * columns)
    forward, backward = (5, 9) if work.keys <= columns else (10, 11)
    return forward * tile, backward * tile

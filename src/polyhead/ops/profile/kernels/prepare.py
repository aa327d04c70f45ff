"""Kernel arguments of the profile: tensors, strides and scalars, with the log-sum-exp in base 2."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.resources import Blocks
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim, power_of_two
from polyhead.ops.common.kernels.softmax_tiles import LOG2E

_LOG2_E = LOG2E.value
MAX_TILE = 128


class Problem(NamedTuple):
    """Queries, keys and the window of them that is profiled; the last axis of both is contiguous."""

    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    lse: Tensor  # [batch * heads, lse_rows]: log-sum-exp of the window in base 2, +inf for empty rows and padding
    lse_rows: int  # a multiple of every tile's height
    head_sm_scales: Tensor | None  # [heads]: factors of the dot products; None: `sm_scale` for every head
    sm_scale: float
    softcap_log2: float | None  # the softcap in base 2
    query_batch: int  # strides
    query_head: int
    query_token: int
    key_batch: int
    key_head: int
    key_token: int
    heads: int
    group: int  # query heads that share a KV head
    row_start: int
    row_stop: int
    column_start: int
    column_stop: int

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def columns(self) -> int:
        return self.column_stop - self.column_start

    def compile_key(self, mask: MaskArguments) -> tuple[Hashable, ...]:
        """Return the properties of the problem that kernels are specialised for."""
        present = tuple(x is not None for x in (*mask, self.head_sm_scales, self.softcap_log2))
        return self.query.get_device(), self.query.dtype, self.query.shape[3], present


def prepare(
    query: Tensor,
    key: Tensor,
    logsumexp: Tensor,
    scale: float | Tensor,
    softcap: float | None,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> Problem:
    """Return the kernel arguments of a window of queries and keys.

    In base 2 a logit is the dot product times a rounded scale * log2(e). The log-sum-exp is multiplied by that same
    rounded number divided by the scale, so that the two agree however large the logits are.
    """
    query, key = _with_supported_strides(query), _with_supported_strides(key)
    batch, heads = query.shape[:2]
    row_count = rows[1] - rows[0]
    padded = blocks_of(row_count, MAX_TILE) * MAX_TILE
    lse = torch.empty(batch * heads, padded, device=query.device, dtype=torch.float32)
    to_base_two = _LOG2_E if softcap is None else 2 * _LOG2_E / softcap  # for the softcap see `tiles.log2_weights`
    head_sm_scales, ratios, sm_scale, ratio = None, None, 0.0, _LOG2_E
    if isinstance(scale, Tensor):
        exact = scale.double()
        head_sm_scales = (exact * to_base_two).float()
        ratios = torch.full_like(exact, _LOG2_E)
        if softcap is None:
            ratios = torch.where(exact == 0, ratios, head_sm_scales.double() / exact)
    else:
        sm_scale = _round_to_float32(scale * to_base_two)
        if softcap is None and scale != 0:
            ratio = sm_scale / scale
    ratio_high = _round_to_float32(ratio)  # two float32 numbers have the digits of the ratio
    if lse.numel():
        block = min(1024, power_of_two(padded))
        with torch.cuda.device_of(query):
            _lse_kernel[(batch * heads * blocks_of(padded, block),)](
                logsumexp,
                lse,
                ratios,
                ratio_high,
                ratio - ratio_high,
                *logsumexp.stride(),
                rows[0],
                row_count,
                padded,
                heads,
                BLOCK=block,
            )
    query_batch, query_head, query_token, _ = query.stride()
    key_batch, key_head, key_token, _ = key.stride()
    return Problem(
        query,
        key,
        lse,
        padded,
        head_sm_scales,
        sm_scale,
        None if softcap is None else softcap * _LOG2_E,
        query_batch,
        query_head,
        query_token,
        key_batch,
        key_head,
        key_token,
        heads,
        heads // key.shape[1],
        rows[0],
        rows[1],
        columns[0],
        columns[1],
    )


@triton.jit
def _lse_kernel(
    ptr_logsumexp,
    ptr_lse,
    ptr_ratios,
    ratio_high,
    ratio_low,
    stride_batch,
    stride_head,
    stride_row,
    row_start,
    rows,
    padded,
    heads,
    BLOCK: tl.constexpr,
):
    """Multiply the log-sum-exp by the ratio, in float64.

    The product is as large as the logits, and its absolute error is the relative error of every weight of the row, so
    it is rounded only once.
    """
    blocks = tl.cdiv(padded, BLOCK)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)
    i_batch, i_head = i_pair // heads, i_pair % heads
    # [BLOCK]
    offs = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pointers = ptr_logsumexp + i_batch * stride_batch + i_head * stride_head + (row_start + offs) * stride_row
    logsumexp = tl.load(pointers, mask=offs < rows, other=-float("inf")).to(tl.float64)
    if ptr_ratios is not None:
        lse = logsumexp * tl.load(ptr_ratios + i_head)
    else:
        lse = logsumexp * ratio_high + logsumexp * ratio_low
    lse = tl.where(logsumexp == -float("inf"), float("inf"), lse)
    tl.store(ptr_lse + i_pair * padded + offs, lse.to(tl.float32), mask=offs < padded)


def tiles_for(query: Tensor, *, by_columns: bool, register_heavy: bool = False, heads_at_once: int = 1) -> Blocks:
    """Return tile sizes by head dim and dtype, reduced until they fit into the device's shared memory.

    Two programs of the column kernel share a multiprocessor up to head dim 128 (97 KiB and 128 registers per thread):
    one multiplies while the other computes exponentials. `register_heavy`: a tile of weights stays in registers for
    further work, so tiles are smaller. `heads_at_once`: heads of which a program holds tiles at the same time.
    """
    dim = padded_dim(query.shape[3])
    if query.dtype is torch.float32:
        tiles = Blocks(32, 32, 4, 1 if heads_at_once > 1 else 2)
    elif heads_at_once > 1 or register_heavy:
        tiles = Blocks(64, 64, 4, 2) if dim <= 128 else Blocks(32, 32, 4, 2)
    elif dim <= 128:
        tiles = Blocks(128, 128, 8, 3 if dim <= 64 else 2, 128 if by_columns else None)
    else:
        tiles = Blocks(64, 128, 8, 2) if by_columns else Blocks(64, 64, 4, 2)
    if query.device.type != "cuda":
        return tiles
    properties = torch.cuda.get_device_properties(query.device)
    available = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    while (
        _shared_bytes(tiles, dim * query.element_size() * heads_at_once, by_columns) > available and tiles.columns > 16
    ):
        tiles = Blocks(max(16, tiles.rows // 2), max(16, tiles.columns // 2), 4, tiles.stages)
    return tiles


def _shared_bytes(tiles: Blocks, row_bytes: int, by_columns: bool) -> int:
    """Return the shared memory of a program: one resident tile, and one streamed tile per pipeline stage."""
    resident, streamed = (tiles.columns, tiles.rows) if by_columns else (tiles.rows, tiles.columns)
    return (resident + streamed * tiles.stages) * row_bytes + 4096  # for reductions across warps


def _with_supported_strides(x: Tensor) -> Tensor:
    """Return `x` with a contiguous last axis, and the rows of a tile within 2**31 elements of each other."""
    return x if x.stride(3) == 1 and x.stride(2) < 1 << 24 else x.contiguous()


def _round_to_float32(x: float) -> float:
    """Round to float32, the type of a kernel's scalar arguments."""
    return float(torch.tensor(x, dtype=torch.float32))

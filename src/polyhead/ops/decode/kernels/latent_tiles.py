"""Arguments, supported sizes and tile sizes of the decode kernels for latents, without Triton."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from polyhead.ops.common.kernels.sizes import padded_dim, power_of_two

MAX_RANK = 512
MAX_ROPE_DIM = 128
_MAX_TILE_BYTES = 40 * 1024  # of one tile of keys


class Latents(NamedTuple):
    """Latents [batch, kv_heads, slots, rank + rope_dim] with strides; the last axis is contiguous."""

    data: Tensor
    batch: int  # strides, in elements
    head: int
    token: int
    lengths: Tensor | None = None  # [batch]: tokens of each sequence, the new ones included; None: every slot
    new_lengths: Tensor | None = None  # [batch]: non-padding queries; None: all


class SoftmaxOptions(NamedTuple):
    """Scalar options of the attention and its statistics."""

    sm_scale: float
    softcap: float | None
    sink_keys: int
    window: int


class LatentBlocks(NamedTuple):
    """Tile sizes of a program, and the number of programs resident on an SM."""

    rows: int
    keys: int
    rank: int
    rope_dim: int
    stages: int
    warps: int
    resident: int
    on_hopper: bool = False  # use the Hopper kernel

    def smaller(self) -> LatentBlocks | None:
        """Return the next smaller tile sizes, or None."""
        if self.rows > 16:
            return self._replace(rows=self.rows // 2)
        return self._replace(keys=self.keys // 2) if self.keys > 16 else None


def latent_reasons(width: int, rank: int) -> list[str]:
    """Return the reasons why the kernels do not support latents of this size.

    Keys have `width` channels: `rank` latent ones, the others rotary.
    """
    reasons = []
    if rank % 16 or not 16 <= rank <= MAX_RANK:
        reasons.append(f"latents must have a multiple of 16 channels up to {MAX_RANK}, got {rank}")
    rope_dim = width - rank
    if rope_dim % 8 or not 0 <= rope_dim <= MAX_ROPE_DIM:
        reasons.append(f"rotary channels of latents must be a multiple of 8 up to {MAX_ROPE_DIM}, got {rope_dim}")
    return reasons


@functools.lru_cache(maxsize=256)
def plan_latent_blocks(rows: int, width: int, rank: int, itemsize: int) -> LatentBlocks:
    """Choose tiles that fit into registers and shared memory, by the compiler's resource report for sm_90.

    `rows` is the number of query heads per KV head times the new tokens. In float32, more rows would not fit together
    with the keys.
    """
    block_m = min(padded_dim(rows), 16 if itemsize == 4 else 64)
    block_rank, block_rope = power_of_two(rank), padded_dim(width - rank)
    max_keys = _MAX_TILE_BYTES // ((block_rank + block_rope) * itemsize)
    block_n = min(max(16, power_of_two(max_keys + 1) // 2), 128)
    is_small = block_m == 16 and itemsize == 2
    return LatentBlocks(
        block_m,
        block_n,
        block_rank,
        block_rope,
        stages=3,
        warps=4 if is_small else 8,
        resident=2 if is_small else 1,
    )

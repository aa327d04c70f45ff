"""Dropout as a hash of (seed, batch, head, query, key): backends of polyhead drop the same weights.

A row hash and a column hash are mixed in one dimension each, where it is cheap; their sum is then scrambled by two
rounds of multiply and xor-shift. Kernels repeat this with unsigned 32-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
_GOLDEN = 0x9E3779B9
_RESOLUTION = 24  # bits of the uniform number that is compared with the rate


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from PyTorch's generator of the device, without synchronising."""
    return torch.randint(0, 1 << 62, (1,), device=device, dtype=torch.int64)


def keep_tile(
    seed: Tensor, rate: float, batch: int, heads: int, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """Return the dropout mask (True: keep), boolean [batch, heads, rows, columns]."""
    device = seed.device
    index = torch.arange(batch * heads, device=device).view(batch, heads, 1)
    stream = _scramble(_scramble(_low(seed) ^ _low(index)) + _low(seed >> 32))
    row = _scramble(stream + _low(torch.arange(rows[0], rows[1], device=device) * _GOLDEN))
    column = _scramble(_low(torch.arange(columns[0], columns[1], device=device) * _GOLDEN + 1))
    bits = _scramble(row[..., None] + column)
    uniform = (bits >> (32 - _RESOLUTION)) & ((1 << _RESOLUTION) - 1)
    return uniform >= round(rate * (1 << _RESOLUTION))


def _low(x: Tensor) -> Tensor:
    """Return the low 32 bits of a 64-bit integer, as a signed 32-bit integer."""
    x = x & 0xFFFFFFFF
    return torch.where(x > 0x7FFFFFFF, x - (1 << 32), x).to(torch.int32)


def _scramble(x: Tensor) -> Tensor:
    """Apply a low-bias bijection of 32-bit integers; products wrap, shifts fill with zeros."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _MULTIPLIER_1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _MULTIPLIER_2
    return x ^ ((x >> 16) & 0xFFFF)

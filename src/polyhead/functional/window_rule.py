"""Where `auto` leaves PyTorch's kernels though they could serve: said once, for who chooses and for who predicts it.

PyTorch knows no window. One is a mask tensor to it, which takes memory, and every pair that it hides is computed.
"""

from __future__ import annotations

import torch

LARGEST_MASK = 1 << 30  # bytes of a mask tensor beyond which tiles are preferred
# Sequences x heads x queries x keys x head_dim from which a window is left to our kernel, which skips what it hides. On
# an H200 in bfloat16 both wait for their host up to 2^34, and PyTorch's is the lighter; at 2^36 ours is 2.5 to 3.9
# times faster, at 2^38 6 to 13 times.
LARGEST_WINDOWED = 1 << 35
DEVICE, DTYPES = "cuda", (torch.bfloat16, torch.float16)  # for which this was measured


def is_mask_too_large(size: int) -> bool:
    """Of so many bytes."""
    return size > LARGEST_MASK


def is_window_too_large(
    device: str, dtype: torch.dtype, batch: int, heads: int, queries: int, keys: int, head_dim: int
) -> bool:
    """Of a mask that is a window and nothing else: whether the pairs that it hides cost more than our kernel does."""
    if device != DEVICE or dtype not in DTYPES:
        return False
    return batch * heads * queries * keys * head_dim >= LARGEST_WINDOWED

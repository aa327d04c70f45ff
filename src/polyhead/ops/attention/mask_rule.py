"""Masks with which `auto` leaves PyTorch's kernels though they could serve: said once, for who chooses and predicts.

PyTorch knows no window. One is a mask tensor to it, which takes memory, and every pair that it hides is computed. Nor
does it know a bias by distance: that is a number for every head and pair, and so is its gradient.
"""

from __future__ import annotations

import torch

LARGEST_MASK = 1 << 30  # bytes of a mask tensor beyond which tiles are preferred
# Sequences x heads x queries x keys x head_dim from which a window is left to our kernel, which skips what it hides. On
# an H200 in bfloat16 both wait for their host up to 2^34, and PyTorch's is the lighter; at 2^36 ours is 2.5 to 3.9
# times faster, at 2^38 6 to 13 times.
LARGEST_WINDOWED = 1 << 35
# Sequences x heads x queries x keys from which the gradient of a learned bias by distance is left to our kernel. On an
# H200 in bfloat16, 2 sequences of 16 heads: at 512 tokens (2^23) both wait for their host, and PyTorch's is the
# lighter; at 2,048 (2^27) a step takes 12.5 to 13.7 ms with PyTorch's and 1.5 to 2.3 with ours. There a forward takes
# 0.36 to 0.75 as long with ours, and a step that learns no bias 0.99 to 1.68.
MOST_LEARNED_PAIRS = 1 << 24
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


def is_bias_read_by_distance(device: str, dtype: torch.dtype, *, training: bool, learned: bool, pairs: int) -> bool:
    """Of a mask with a bias by distance: whether it is left to our kernel, which reads a table [heads, distances].

    `pairs` are those of all sequences and heads.
    """
    if device != DEVICE or dtype not in DTYPES:
        return False
    return pairs >= MOST_LEARNED_PAIRS if training and learned else not training

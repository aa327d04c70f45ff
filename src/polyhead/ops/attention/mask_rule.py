"""Masks and sizes for which `auto` avoids PyTorch's kernels; shared by dispatch and cost prediction.

PyTorch's kernels have no sliding window: it becomes a mask tensor, which takes memory, and every masked pair is
computed. Nor do they have a bias by distance: it becomes a number per head and pair, and so does its gradient.
"""

from __future__ import annotations

import torch

LARGEST_MASK = 1 << 30  # bytes of a mask tensor beyond which `auto` chooses another backend
# Batch x heads x queries x keys x head_dim from which our kernel runs a window, skipping masked blocks. On an H200 in
# bfloat16 both are bound by the host up to 2^34, where PyTorch has less overhead; at 2^36 ours is 2.5 to 3.9 times
# faster, at 2^38 6 to 13 times.
LARGEST_WINDOWED = 1 << 35
# Batch x heads x queries x keys from which our kernel computes the gradient of a learned bias by distance. On an H200
# in bfloat16, 2 sequences of 16 heads: at 512 tokens (2^23) both are bound by the host, and PyTorch has less overhead;
# at 2,048 (2^27) a step takes 12.5 to 13.7 ms with PyTorch's and 1.5 to 2.3 with ours. There a forward takes 0.36 to
# 0.75 as long with ours, and a step without a learned bias 0.99 to 1.68.
MOST_LEARNED_PAIRS = 1 << 24
# Tokens from which our Hopper kernel is faster than cuDNN's in a forward of plain self-attention, with head dims from
# 65 to 128; with smaller and larger ones cuDNN's is. On an H200 in bfloat16, ours / cuDNN's: unmasked 1.16 at 512
# tokens, 0.99 at 2,048, 0.97 at 4,096, 0.94 at 32,768; causal 1.41, 1.03, 0.95 and 0.88, where a check for NaN after
# cuDNN's takes 0.30, 0.11, 0.06 and less of its time, and 0.07, 0.02, 0.01 after ours.
PLAIN_TOKENS, CAUSAL_TOKENS = 3072, 2048
DEVICE, DTYPES = "cuda", (torch.bfloat16, torch.float16)  # these were measured


def is_mask_too_large(size: int) -> bool:
    """Return True if a mask tensor of `size` bytes should not be materialised."""
    return size > LARGEST_MASK


def is_window_too_large(
    device: str, dtype: torch.dtype, batch: int, heads: int, queries: int, keys: int, head_dim: int
) -> bool:
    """Return True if a sliding window is too large for PyTorch's kernels: ours is faster, as it skips masked blocks."""
    if device != DEVICE or dtype not in DTYPES:
        return False
    return batch * heads * queries * keys * head_dim >= LARGEST_WINDOWED


def is_bias_read_by_distance(device: str, dtype: torch.dtype, *, training: bool, learned: bool, pairs: int) -> bool:
    """Return True if a bias by distance is left to our kernel, which reads a table [heads, distances].

    `pairs` is batch x heads x queries x keys.
    """
    if device != DEVICE or dtype not in DTYPES:
        return False
    return pairs >= MOST_LEARNED_PAIRS if training and learned else not training


def is_plain_forward_for_hopper(
    device: str, dtype: torch.dtype, *, causal: bool, queries: int, keys: int, head_dim: int
) -> bool:
    """Return True if our Hopper kernel is faster than PyTorch's in a forward of unmasked or causal self-attention."""
    if device != DEVICE or dtype not in DTYPES or not 64 < head_dim <= 128:
        return False
    return queries == keys >= (CAUSAL_TOKENS if causal else PLAIN_TOKENS)

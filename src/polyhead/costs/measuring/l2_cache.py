"""Working sets larger than a GPU's L2 cache, for timings of memory-bound work."""

from __future__ import annotations

import torch

TIMES_L2 = 3


def caches_beyond(l2: int, cache: int) -> int:
    """Return the number of caches to alternate between so that none is in L2 when it is read again.

    >>> caches_beyond(50, 40), caches_beyond(50, 1000)
    (4, 2)
    """
    return max(2, -(-TIMES_L2 * l2 // cache))


def l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size

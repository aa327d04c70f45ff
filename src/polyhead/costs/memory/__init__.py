"""What a layer holds in memory at its peak: its tensors, followed from where they are made to where they are let go."""

from __future__ import annotations

from polyhead.costs.memory.estimate import MemoryEstimate, estimate_memory, memory_doubts

__all__ = ["MemoryEstimate", "estimate_memory", "memory_doubts"]

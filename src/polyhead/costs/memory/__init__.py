"""Peak memory of attention layers: every tensor is tracked from allocation to release."""

from __future__ import annotations

from polyhead.costs.memory.estimate import MemoryEstimate, estimate_memory, memory_doubts

__all__ = ["MemoryEstimate", "estimate_memory", "memory_doubts"]

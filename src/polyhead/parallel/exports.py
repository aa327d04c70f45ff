"""Public names of `polyhead.parallel`."""

from polyhead.parallel.head_split import HeadSplit
from polyhead.parallel.layer import HeadParallelism, HeadParallelLayer
from polyhead.parallel.style import FeedForwardParallel, HeadParallel, head_parallel_plan

__all__ = [
    "FeedForwardParallel",
    "HeadParallel",
    "HeadParallelLayer",
    "HeadParallelism",
    "HeadSplit",
    "head_parallel_plan",
]

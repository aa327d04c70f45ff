"""Public names of `polyhead.parallel`."""

from polyhead.parallel.context.api import context_attention
from polyhead.parallel.context.layers import context_parallel
from polyhead.parallel.context.layout import gather_sequence, shard_positions, shard_sequence
from polyhead.parallel.context.received import context_received
from polyhead.parallel.context.traffic import ContextBytes, context_bytes
from polyhead.parallel.tensor.head_split import HeadSplit
from polyhead.parallel.tensor.layer import HeadParallelism, HeadParallelLayer
from polyhead.parallel.tensor.style import FeedForwardParallel, HeadParallel, head_parallel_plan
from polyhead.parallel.workers import Workers, join_workers

__all__ = [
    "ContextBytes",
    "FeedForwardParallel",
    "HeadParallel",
    "HeadParallelLayer",
    "HeadParallelism",
    "HeadSplit",
    "Workers",
    "context_attention",
    "context_bytes",
    "context_parallel",
    "context_received",
    "gather_sequence",
    "head_parallel_plan",
    "join_workers",
    "shard_positions",
    "shard_sequence",
]

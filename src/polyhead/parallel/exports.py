"""Public names of `polyhead.parallel`."""

from polyhead.parallel.context.api import context_attention
from polyhead.parallel.context.layers import context_parallel
from polyhead.parallel.context.layout import gather_sequence, shard_positions, shard_sequence
from polyhead.parallel.context.received import context_received
from polyhead.parallel.context.traffic import ContextBytes, context_bytes

__all__ = [
    "ContextBytes",
    "context_attention",
    "context_bytes",
    "context_parallel",
    "context_received",
    "gather_sequence",
    "shard_positions",
    "shard_sequence",
]

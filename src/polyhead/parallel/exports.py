"""Public names of `polyhead.parallel`."""

from polyhead.parallel.context.api import context_attention as context_attention
from polyhead.parallel.context.layers import context_parallel as context_parallel
from polyhead.parallel.context.layout import gather_sequence as gather_sequence
from polyhead.parallel.context.layout import shard_positions as shard_positions
from polyhead.parallel.context.layout import shard_sequence as shard_sequence
from polyhead.parallel.context.received import context_received as context_received
from polyhead.parallel.context.traffic import ContextBytes as ContextBytes
from polyhead.parallel.context.traffic import context_bytes as context_bytes
from polyhead.parallel.tensor.head_split import HeadSplit as HeadSplit
from polyhead.parallel.tensor.layer import HeadParallelism as HeadParallelism
from polyhead.parallel.tensor.layer import HeadParallelLayer as HeadParallelLayer
from polyhead.parallel.tensor.style import FeedForwardParallel as FeedForwardParallel
from polyhead.parallel.tensor.style import HeadParallel as HeadParallel
from polyhead.parallel.tensor.style import head_parallel_plan as head_parallel_plan
from polyhead.parallel.workers import Workers as Workers
from polyhead.parallel.workers import join_workers as join_workers

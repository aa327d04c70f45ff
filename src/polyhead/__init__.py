"""polyhead: multi-head attention you can run, watch and reshape, one head at a time."""

from polyhead.costs.choosing import choose
from polyhead.costs.planning import plan
from polyhead.geometry import HeadId
from polyhead.inspection.comparison import compare
from polyhead.layers import KVCache, LatentAttention, MultiHeadAttention, build_attention
from polyhead.masks import Mask
from polyhead.observation import HeadProfile, observe
from polyhead.ops.attention import AttentionOutput, Statistics, attention, explain
from polyhead.ops.profile import profile
from polyhead.surgery.storage.loading import load
from polyhead.version import VERSION
from polyhead.workflows.converting import convert
from polyhead.workflows.inspecting import inspect
from polyhead.workflows.merging import merge
from polyhead.workflows.pruning import prune
from polyhead.workflows.shrinking import shrink
from polyhead.workflows.treebank_syntax import syntax
from polyhead.workflows.undoing import undo

__version__ = VERSION

__all__ = [
    "AttentionOutput",
    "HeadId",
    "HeadProfile",
    "KVCache",
    "LatentAttention",
    "Mask",
    "MultiHeadAttention",
    "Statistics",
    "__version__",
    "attention",
    "build_attention",
    "choose",
    "compare",
    "convert",
    "explain",
    "inspect",
    "load",
    "merge",
    "observe",
    "plan",
    "profile",
    "prune",
    "shrink",
    "syntax",
    "undo",
]

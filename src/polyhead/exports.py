"""The public names of `polyhead`, imported with all they need when the first of them is used."""

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
from polyhead.workflows.converting import convert
from polyhead.workflows.inspecting import inspect
from polyhead.workflows.merging import merge
from polyhead.workflows.pruning import prune
from polyhead.workflows.shrinking import shrink
from polyhead.workflows.treebank_syntax import syntax
from polyhead.workflows.undoing import undo

__all__ = [
    "AttentionOutput",
    "HeadId",
    "HeadProfile",
    "KVCache",
    "LatentAttention",
    "Mask",
    "MultiHeadAttention",
    "Statistics",
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

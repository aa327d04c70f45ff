"""The public names of `polyhead`, imported with all they need when the first of them is used."""

from polyhead.costs.choosing import choose as choose
from polyhead.costs.planning import plan as plan
from polyhead.geometry import HeadId as HeadId
from polyhead.inspection.comparison import compare as compare
from polyhead.layers import KVCache as KVCache
from polyhead.layers import LatentAttention as LatentAttention
from polyhead.layers import MultiHeadAttention as MultiHeadAttention
from polyhead.layers import build_attention as build_attention
from polyhead.masks import Mask as Mask
from polyhead.observation import HeadProfile as HeadProfile
from polyhead.observation import observe as observe
from polyhead.ops.attention import AttentionOutput as AttentionOutput
from polyhead.ops.attention import Statistics as Statistics
from polyhead.ops.attention import attention as attention
from polyhead.ops.attention import explain as explain
from polyhead.ops.profile import profile as profile
from polyhead.surgery.storage.loading import load as load
from polyhead.workflows.converting import convert as convert
from polyhead.workflows.inspecting import inspect as inspect
from polyhead.workflows.merging import merge as merge
from polyhead.workflows.pruning import prune as prune
from polyhead.workflows.shrinking import shrink as shrink
from polyhead.workflows.treebank_syntax import syntax as syntax
from polyhead.workflows.undoing import undo as undo

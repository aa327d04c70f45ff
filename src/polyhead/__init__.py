"""polyhead: multi-head attention you can run, watch and reshape, one head at a time."""

from polyhead.geometry import HeadId
from polyhead.layers import (
    AttentionConfig,
    KVCache,
    LatentAttention,
    MultiHeadAttention,
    build_attention,
    config_of,
)
from polyhead.masks import Mask
from polyhead.observation import HeadProfile, observe
from polyhead.ops.attention import AttentionOutput, Statistics, attention, explain
from polyhead.ops.profile import profile
from polyhead.sources.models import open_folders as _open_folders
from polyhead.surgery.storage.loading import load
from polyhead.surgery.storage.loading import load_saved as _load_saved
from polyhead.version import VERSION

__version__ = VERSION

# Let models be loaded by name also where the folder contains a model with edited heads.
_open_folders(_load_saved)

__all__ = [
    "AttentionConfig",
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
    "config_of",
    "explain",
    "load",
    "observe",
    "profile",
]

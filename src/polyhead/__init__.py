"""polyhead: multi-head attention you can run, watch and reshape, one head at a time."""

from polyhead import huggingface as huggingface
from polyhead.functional import (
    AttentionOutput,
    AttentionProfile,
    BlockMap,
    Explanation,
    RowStatistics,
    Statistics,
    attention,
    explain,
    offset_bins,
    profile,
    talking_attention,
)
from polyhead.geometry import HeadId, HeadLayout
from polyhead.huggingface.attention import WATCHERS as _WATCHERS
from polyhead.huggingface.registration import register as _register
from polyhead.layers import (
    AttentionConfig,
    CollaborativeAttention,
    DifferentialAttention,
    GroupedHeads,
    GrowingCache,
    HeadMatrices,
    HeadMix,
    KVCache,
    LatentAttention,
    LatentCache,
    MultiHeadAttention,
    MultiHeadConfig,
    PagedCache,
    PreallocatedCache,
    PreallocatedLatentCache,
    QuantizedCache,
    RollingCache,
    RoutedHeads,
    TalkingHeads,
    build_attention,
    config_of,
)
from polyhead.masks import Mask
from polyhead.observatory import HeadProfile, observe
from polyhead.observatory.transformers_models import open_entrance as _open_entrance
from polyhead.sources.models import open_folders as _open_folders
from polyhead.surgery.storage.loading import load
from polyhead.surgery.storage.loading import load_saved as _load_saved
from polyhead.version import VERSION

__version__ = VERSION

# Rooms beside each other do not import each other: here the one that watches is shown into transformers' models.
_open_entrance(_register, _WATCHERS)
# And models are read by their names, those whose heads were edited as well.
_open_folders(_load_saved)

__all__ = [
    "AttentionConfig",
    "AttentionOutput",
    "AttentionProfile",
    "BlockMap",
    "CollaborativeAttention",
    "DifferentialAttention",
    "Explanation",
    "GroupedHeads",
    "GrowingCache",
    "HeadId",
    "HeadLayout",
    "HeadMatrices",
    "HeadMix",
    "HeadProfile",
    "KVCache",
    "LatentAttention",
    "LatentCache",
    "Mask",
    "MultiHeadAttention",
    "MultiHeadConfig",
    "PagedCache",
    "PreallocatedCache",
    "PreallocatedLatentCache",
    "QuantizedCache",
    "RollingCache",
    "RoutedHeads",
    "RowStatistics",
    "Statistics",
    "TalkingHeads",
    "__version__",
    "attention",
    "build_attention",
    "config_of",
    "explain",
    "load",
    "observe",
    "offset_bins",
    "profile",
    "talking_attention",
]

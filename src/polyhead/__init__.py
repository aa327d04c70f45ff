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
)
from polyhead.geometry import HeadId, HeadLayout
from polyhead.layers import (
    GrowingCache,
    HeadMatrices,
    KVCache,
    MultiHeadAttention,
    PagedCache,
    PreallocatedCache,
    QuantizedCache,
    RollingCache,
)
from polyhead.masks import Mask

__version__ = "0.1.0"

__all__ = [
    "AttentionOutput",
    "AttentionProfile",
    "BlockMap",
    "Explanation",
    "GrowingCache",
    "HeadId",
    "HeadLayout",
    "HeadMatrices",
    "KVCache",
    "Mask",
    "MultiHeadAttention",
    "PagedCache",
    "PreallocatedCache",
    "QuantizedCache",
    "RollingCache",
    "RowStatistics",
    "Statistics",
    "__version__",
    "attention",
    "explain",
    "offset_bins",
    "profile",
]

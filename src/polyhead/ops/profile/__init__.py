"""`profile`: statistics of attention weights that need the final log-sum-exp."""

from polyhead.ops.profile.api import profile
from polyhead.ops.profile.request import AttentionProfile, BlockMap, offset_bins

__all__ = ["AttentionProfile", "BlockMap", "offset_bins", "profile"]

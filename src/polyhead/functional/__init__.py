"""What attention computes, apart from how: one function, one result, several backends."""

from polyhead.functional.api import attention, explain
from polyhead.functional.attended import Attended
from polyhead.functional.backends import BACKENDS, Choice, Explanation
from polyhead.functional.combined import CombinedWeights
from polyhead.functional.profile_request import AttentionProfile, BlockMap, offset_bins
from polyhead.functional.profiling import profile
from polyhead.functional.ragged import RaggedRows, ragged_attention
from polyhead.functional.request import AttentionOutput
from polyhead.functional.sdpa import straight
from polyhead.functional.statistics import RowStatistics, Statistics
from polyhead.functional.talking import talking_attention
from polyhead.functional.uneven import uneven_attention

__all__ = [
    "BACKENDS",
    "Attended",
    "AttentionOutput",
    "AttentionProfile",
    "BlockMap",
    "Choice",
    "CombinedWeights",
    "Explanation",
    "RaggedRows",
    "RowStatistics",
    "Statistics",
    "attention",
    "explain",
    "offset_bins",
    "profile",
    "ragged_attention",
    "straight",
    "talking_attention",
    "uneven_attention",
]

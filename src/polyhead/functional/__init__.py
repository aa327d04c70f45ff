"""What attention computes, apart from how: one function, one result, several backends."""

from polyhead.functional.api import attention, explain
from polyhead.functional.attended import Attended
from polyhead.functional.backends import BACKENDS, Choice, Explanation
from polyhead.functional.profile_request import AttentionProfile, BlockMap, offset_bins
from polyhead.functional.profiling import profile
from polyhead.functional.request import AttentionOutput
from polyhead.functional.sdpa import straight
from polyhead.functional.statistics import RowStatistics, Statistics

__all__ = [
    "BACKENDS",
    "Attended",
    "AttentionOutput",
    "AttentionProfile",
    "BlockMap",
    "Choice",
    "Explanation",
    "RowStatistics",
    "Statistics",
    "attention",
    "explain",
    "offset_bins",
    "profile",
    "straight",
]

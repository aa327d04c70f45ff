"""Softmax attention with per-row statistics: `attention` and `explain`."""

from polyhead.ops.attention.api import attention, explain
from polyhead.ops.attention.dispatch import BACKENDS, Choice, Explanation
from polyhead.ops.attention.plain_calls import self_attention
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import RowStatistics, Statistics

__all__ = [
    "BACKENDS",
    "AttentionOutput",
    "Choice",
    "Explanation",
    "RowStatistics",
    "Statistics",
    "attention",
    "explain",
    "self_attention",
]

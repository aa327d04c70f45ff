"""Watching the heads of a running model: `observe`, and the mergeable values it gathers."""

from polyhead.observatory.gathering import Gathered, Gatherer, Notes
from polyhead.observatory.head_profile import HeadProfile
from polyhead.observatory.observations import Observations
from polyhead.observatory.session import Session, observe
from polyhead.observatory.statistics import AttentionSite

__all__ = [
    "AttentionSite",
    "Gathered",
    "Gatherer",
    "HeadProfile",
    "Notes",
    "Observations",
    "Session",
    "observe",
]

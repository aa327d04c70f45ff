"""Public names of `polyhead.training`."""

from polyhead.training.gated_heads import DropHead, HeadGates
from polyhead.training.head_history import HeadHistory, HeadLocation, StepRecord
from polyhead.training.monitor import HeadMonitor, MonitorCallback
from polyhead.training.qk_clip import ClippedHeads, QKClip
from polyhead.training.regularizers import entropy_band, output_overlap, position_overlap, weight_overlap

__all__ = [
    "ClippedHeads",
    "DropHead",
    "HeadGates",
    "HeadHistory",
    "HeadLocation",
    "HeadMonitor",
    "MonitorCallback",
    "QKClip",
    "StepRecord",
    "entropy_band",
    "output_overlap",
    "position_overlap",
    "weight_overlap",
]

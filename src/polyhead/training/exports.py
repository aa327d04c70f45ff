"""Public names of `polyhead.training`."""

from polyhead.training.alarms import Alarm, HeadAlarms
from polyhead.training.gated_heads import DropHead, HeadGates
from polyhead.training.head_history import HeadHistory, HeadLocation, StepRecord
from polyhead.training.monitor import HeadMonitor, MonitorCallback
from polyhead.training.qk_clip import ClippedHeads, QKClip
from polyhead.training.regularizers import entropy_band, weight_overlap

__all__ = [
    "Alarm",
    "ClippedHeads",
    "DropHead",
    "HeadAlarms",
    "HeadGates",
    "HeadHistory",
    "HeadLocation",
    "HeadMonitor",
    "MonitorCallback",
    "QKClip",
    "StepRecord",
    "entropy_band",
    "weight_overlap",
]

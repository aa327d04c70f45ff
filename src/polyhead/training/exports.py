"""Public names of `polyhead.training`."""

from polyhead.training.alarms import Alarm, HeadAlarms
from polyhead.training.dynamic_heads import DynamicHeads, HeadChange
from polyhead.training.gated_heads import DropHead, HeadGates
from polyhead.training.head_history import HeadHistory, HeadLocation, StepRecord
from polyhead.training.loggers import TensorBoardLogger, WandbLogger
from polyhead.training.monitor import HeadMonitor, MonitorCallback
from polyhead.training.optimizer_state import edit_heads
from polyhead.training.qk_clip import ClippedHeads, QKClip
from polyhead.training.regularizers import entropy_band, output_overlap, position_overlap, weight_overlap
from polyhead.training.run_directory import RunDirectory, inspect_step, load_run

__all__ = [
    "Alarm",
    "ClippedHeads",
    "DropHead",
    "DynamicHeads",
    "HeadAlarms",
    "HeadChange",
    "HeadGates",
    "HeadHistory",
    "HeadLocation",
    "HeadMonitor",
    "MonitorCallback",
    "QKClip",
    "RunDirectory",
    "StepRecord",
    "TensorBoardLogger",
    "WandbLogger",
    "edit_heads",
    "entropy_band",
    "inspect_step",
    "load_run",
    "output_overlap",
    "position_overlap",
    "weight_overlap",
]

"""Public names of `polyhead.training`."""

from polyhead.training.gated_heads import DropHead, HeadGates
from polyhead.training.head_history import HeadHistory, HeadLocation, StepRecord
from polyhead.training.loggers import TensorBoardLogger, WandbLogger
from polyhead.training.monitor import HeadMonitor, MonitorCallback
from polyhead.training.qk_clip import ClippedHeads, QKClip
from polyhead.training.regularizers import entropy_band, weight_overlap
from polyhead.training.run_directory import RunDirectory, inspect_step, load_run

__all__ = [
    "ClippedHeads",
    "DropHead",
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
    "entropy_band",
    "inspect_step",
    "load_run",
    "weight_overlap",
]

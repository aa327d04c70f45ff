"""Public names of `polyhead.training`."""

from polyhead.training.alarms import Alarm as Alarm
from polyhead.training.alarms import HeadAlarms as HeadAlarms
from polyhead.training.dynamic_heads import DynamicHeads as DynamicHeads
from polyhead.training.dynamic_heads import HeadChange as HeadChange
from polyhead.training.gated_heads import DropHead as DropHead
from polyhead.training.gated_heads import HeadGates as HeadGates
from polyhead.training.head_history import HeadHistory as HeadHistory
from polyhead.training.head_history import HeadLocation as HeadLocation
from polyhead.training.head_history import StepRecord as StepRecord
from polyhead.training.loggers import TensorBoardLogger as TensorBoardLogger
from polyhead.training.loggers import WandbLogger as WandbLogger
from polyhead.training.monitor import HeadMonitor as HeadMonitor
from polyhead.training.monitor import MonitorCallback as MonitorCallback
from polyhead.training.optimizer_state import edit_heads as edit_heads
from polyhead.training.qk_clip import ClippedHeads as ClippedHeads
from polyhead.training.qk_clip import QKClip as QKClip
from polyhead.training.regularizers import entropy_band as entropy_band
from polyhead.training.regularizers import output_overlap as output_overlap
from polyhead.training.regularizers import position_overlap as position_overlap
from polyhead.training.regularizers import weight_overlap as weight_overlap
from polyhead.training.run_directory import RunDirectory as RunDirectory
from polyhead.training.run_directory import inspect_step as inspect_step
from polyhead.training.run_directory import load_run as load_run

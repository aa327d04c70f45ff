"""A whole inspection: a model and a text in, what every head does out; what `polyhead inspect` runs."""

from polyhead.inspection.comparing import Comparison, compare
from polyhead.inspection.examples import Example
from polyhead.inspection.files import load_inspection, save_inspection
from polyhead.inspection.result import Finding, Group, Inspection, Pair
from polyhead.inspection.running import inspect_model
from polyhead.inspection.settings import Progress, Settings

__all__ = [
    "Comparison",
    "Example",
    "Finding",
    "Group",
    "Inspection",
    "Pair",
    "Progress",
    "Settings",
    "compare",
    "inspect_model",
    "load_inspection",
    "save_inspection",
]

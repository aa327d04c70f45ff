"""Public names of `polyhead.inspection`."""

from polyhead.inspection.comparison import Comparison, compare
from polyhead.inspection.example_weights import Example
from polyhead.inspection.heads import Pair, RedundantHead
from polyhead.inspection.inspection_files import load_inspection, save_inspection
from polyhead.inspection.result import Inspection
from polyhead.inspection.settings import Settings
from polyhead.inspection.wording import Finding

__all__ = [
    "Comparison",
    "Example",
    "Finding",
    "Inspection",
    "Pair",
    "RedundantHead",
    "Settings",
    "compare",
    "load_inspection",
    "save_inspection",
]

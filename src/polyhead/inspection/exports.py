"""Public names of `polyhead.inspection`."""

from polyhead.inspection.comparison import Comparison as Comparison
from polyhead.inspection.comparison import compare as compare
from polyhead.inspection.example_weights import Example as Example
from polyhead.inspection.heads import Pair as Pair
from polyhead.inspection.heads import RedundantHead as RedundantHead
from polyhead.inspection.inspection_files import load_inspection as load_inspection
from polyhead.inspection.inspection_files import save_inspection as save_inspection
from polyhead.inspection.result import Inspection as Inspection
from polyhead.inspection.settings import Settings as Settings
from polyhead.inspection.wording import Finding as Finding

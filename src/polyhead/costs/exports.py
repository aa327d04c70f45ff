"""Public names of `polyhead.costs`."""

from polyhead.costs.cost import CostEstimate as CostEstimate
from polyhead.costs.cost import estimate_cost as estimate_cost
from polyhead.costs.cost import layer_work as layer_work
from polyhead.costs.descriptions import describe as describe
from polyhead.costs.descriptions.layer_description import LayerDescription as LayerDescription
from polyhead.costs.layouts.layout_sources import from_sizes as from_sizes
from polyhead.costs.layouts.layout_sources import read_layout as read_layout
from polyhead.costs.layouts.model_layout import LayerGroup as LayerGroup
from polyhead.costs.layouts.model_layout import ModelLayout as ModelLayout
from polyhead.costs.memory import MemoryEstimate as MemoryEstimate
from polyhead.costs.memory import estimate_memory as estimate_memory
from polyhead.costs.memory import memory_caveats as memory_caveats
from polyhead.costs.options import Ranks as Ranks
from polyhead.costs.ranks_plan import Collective as Collective
from polyhead.costs.ranks_plan import HeadShare as HeadShare
from polyhead.costs.ranks_plan import RankPhase as RankPhase
from polyhead.costs.ranks_plan import RanksPlan as RanksPlan
from polyhead.costs.work import AttentionCore as AttentionCore
from polyhead.costs.work import MatrixFlops as MatrixFlops
from polyhead.costs.work import Product as Product
from polyhead.costs.work import Traffic as Traffic
from polyhead.costs.work import Work as Work
from polyhead.costs.workload import Workload as Workload
from polyhead.costs.workload import visible_pairs as visible_pairs

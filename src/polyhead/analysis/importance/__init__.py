"""Importance scores of heads: the exact loss increase by ablation (`ablate`), and gradients (`gradient_scores`)."""

from polyhead.analysis.importance.ablation import ablate as ablate
from polyhead.analysis.importance.examples import Examples as Examples
from polyhead.analysis.importance.gradients import gradient_scores as gradient_scores
from polyhead.analysis.importance.head_importance import Importance as Importance
from polyhead.analysis.importance.losses import Classification as Classification
from polyhead.analysis.importance.losses import Language as Language
from polyhead.analysis.importance.losses import Loss as Loss
from polyhead.analysis.importance.losses import Masked as Masked
from polyhead.analysis.importance.losses import Representation as Representation
from polyhead.analysis.importance.losses import RowLosses as RowLosses
from polyhead.analysis.importance.losses import as_loss as as_loss
from polyhead.analysis.importance.overlap import GradientOverlap as GradientOverlap

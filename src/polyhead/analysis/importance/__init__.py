"""Importance scores of heads: the exact loss increase by ablation (`ablate`), and gradients (`gradient_scores`)."""

from polyhead.analysis.importance.ablation import ablate
from polyhead.analysis.importance.examples import Examples
from polyhead.analysis.importance.gradients import gradient_scores
from polyhead.analysis.importance.head_importance import Importance
from polyhead.analysis.importance.losses import (
    Classification,
    Language,
    Loss,
    Masked,
    Representation,
    RowLosses,
    as_loss,
)
from polyhead.analysis.importance.overlap import GradientOverlap

__all__ = [
    "Classification",
    "Examples",
    "GradientOverlap",
    "Importance",
    "Language",
    "Loss",
    "Masked",
    "Representation",
    "RowLosses",
    "ablate",
    "as_loss",
    "gradient_scores",
]

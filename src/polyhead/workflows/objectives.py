"""Objectives by which heads are selected, depending on the kind of model."""

from __future__ import annotations

from polyhead.analysis.importance.losses import Masked
from polyhead.errors import OptionError
from polyhead.sources.models import LoadedModel
from polyhead.surgery.selection.criteria import CRITERIA
from polyhead.surgery.selection.measurements import Objectives, Weighting
from polyhead.surgery.selection.quality import Probe, language_slope


def objectives_of(loaded: LoadedModel) -> Objectives:
    """Return the objective of a model: its token loss (causal or masked), else fidelity of its representations."""
    if loaded.kind == "causal":
        return Objectives(slope=language_slope, ablated="language", gradient="language", slopes=8, ablations=1)
    if loaded.kind == "masked":
        loss = Masked(loaded.tokenizer.mask_token_id)
        return Objectives(slope=Probe(), ablated=loss, gradient=loss, slopes=8, ablations=1)
    return Objectives(slope=Probe(), ablated="representation", slopes=8, ablations=1)


def weighting_of(criterion: str) -> Weighting:
    """Return per-token weighting by the loss for criteria that support weights, else none; raises on unknown ones."""
    check_criterion(criterion)
    return "token" if CRITERIA[criterion].weighs else "none"


def check_criterion(criterion: str) -> None:
    """Raise if there is no such criterion."""
    if criterion not in CRITERIA:
        raise OptionError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")

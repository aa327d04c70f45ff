"""Objectives by which heads are selected, depending on the kind of model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyhead.sources.models import LoadedModel
    from polyhead.surgery.selection.measurements import Judge, Weighting


def judge_of(loaded: LoadedModel) -> Judge:
    """Return the objective of a model: its token loss (causal or masked), else fidelity of its representations."""
    from polyhead.analysis.importance.losses import Masked
    from polyhead.surgery.selection.measurements import Judge
    from polyhead.surgery.selection.quality import Probe, language_slope

    if loaded.kind == "causal":
        return Judge(slope=language_slope, ablated="language", gradient="language", slopes=8, ablations=1)
    if loaded.kind == "masked":
        loss = Masked(loaded.tokenizer.mask_token_id)
        return Judge(slope=Probe(), ablated=loss, gradient=loss, slopes=8, ablations=1)
    return Judge(slope=Probe(), ablated="representation", slopes=8, ablations=1)


def weighting_of(criterion: str) -> Weighting:
    """Return per-token weighting by the loss for criteria that support weights, else none."""
    from polyhead.surgery.selection.criteria import CRITERIA

    return "token" if criterion in CRITERIA and CRITERIA[criterion].weighs else "none"

"""By what the heads of a model are judged where they are chosen, which its kind decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyhead.sources.models import LoadedModel
    from polyhead.surgery.selection.measurements import Judge, Weighting


def judge_of(loaded: LoadedModel) -> Judge:
    """The tokens that a model predicts, masked ones among them; of another its likeness to the whole."""
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
    """An error weighs what it costs the model, token by token, for a criterion that measures errors at all."""
    from polyhead.surgery.selection.criteria import CRITERIA

    return "token" if criterion in CRITERIA and CRITERIA[criterion].weighs else "none"

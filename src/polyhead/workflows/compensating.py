"""Compensation of pruned heads, as `polyhead.prune` and `polyhead.shrink` do it: least squares, then distillation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyhead.progress import ProgressCallback, Step
from polyhead.surgery.compensation.distillation import distil
from polyhead.surgery.compensation.least_squares import OutputProjection, unchanged_projections
from polyhead.surgery.selection.journal import Journal
from polyhead.surgery.selection.pruned_model import PrunedModel
from polyhead.surgery.selection.quality import Quality
from polyhead.surgery.selection.shrinker import RemovedHeads
from polyhead.workflows.calibration_text import CalibrationText, model_inputs

LEAST_SQUARES = "compensated by least squares"
DISTILLED = "compensated by least squares and distillation"
NOT_COMPENSATED = "not compensated: compensation was worse"


def compensate(
    pruned: PrunedModel,
    removed: RemovedHeads,
    text: CalibrationText,
    kind: type[Quality],
    progress: ProgressCallback,
    *,
    journal: Journal | None = None,
) -> tuple[Mapping[str, OutputProjection], str]:
    """Return W_O of the pruned layers, and how it was compensated.

    The output projections are solved by least squares, and then distilled. If that is worse than no compensation on the
    selecting part of the text, as it may be if few heads are left or the text is short, none is taken. Without such a
    part they are not distilled.
    """
    journal = Journal() if journal is None else journal
    solved = pruned.compensated(removed)
    if not text.selecting:
        return solved, LEAST_SQUARES

    def distilled() -> dict[str, dict[str, Tensor]]:
        batches, recorded = pruned.evidence.batches, pruned.evidence.recorded
        # Batches are sorted by length; the steps should not be.
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0)).tolist()
        step = Step(progress, "Distil the output projections", len(batches), "steps")
        found = distil(
            pruned.model,
            pruned.evidence.layers,
            solved,
            [batches[index] for index in order],
            kind,
            recorded=[recorded[index] for index in order] if len(recorded) == len(batches) else (),
            progress=step.advance,
        )
        return {path: projection.to_tensors() for path, projection in found.items()}

    stored = journal.by_layer("distilled", distilled)
    candidates = {
        DISTILLED: {path: OutputProjection.from_tensors(tensors) for path, tensors in stored.items()},
        NOT_COMPENSATED: unchanged_projections(pruned.model, pruned.evidence.layers, removed),
    }
    inputs = list(model_inputs(text.loaded, text.selecting))
    quality = kind(pruned.model, inputs, journal=journal, role="select", loss_only=True)
    losses = {name: pruned.loss(projections, quality) for name, projections in candidates.items()}
    best = min(losses, key=losses.__getitem__)
    return candidates[best], best

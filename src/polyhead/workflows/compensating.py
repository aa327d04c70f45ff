"""Compensation of pruned heads, as `polyhead.prune` and `polyhead.shrink` do it: least squares, then distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.progress import ProgressCallback, Step
from polyhead.surgery.compensation.distillation import distil
from polyhead.surgery.compensation.least_squares import OutputProjection, unchanged_projections
from polyhead.surgery.selection.budgets import RemovedHeads
from polyhead.surgery.selection.evidence import Evidence
from polyhead.surgery.selection.quality import Quality
from polyhead.workflows.calibration_text import CalibrationText, model_inputs

LEAST_SQUARES = "compensated by least squares"
DISTILLED = "compensated by least squares and distillation"
NOT_COMPENSATED = "not compensated: compensation was worse"


@dataclass(frozen=True, slots=True, eq=False)
class Compensated:
    """W_O of the pruned layers, by path, and how it was compensated."""

    projections: Mapping[str, OutputProjection]
    method: str


def compensate(
    evidence: Evidence, removed: RemovedHeads, text: CalibrationText, progress: ProgressCallback
) -> Compensated:
    """Solve the output projections of the pruned layers by least squares, and distil them.

    If that is worse than no compensation on the selecting part of the text, as it may be if few heads are left or the
    text is short, they are unchanged. Without such a part they are not distilled.
    """
    solved = evidence.compensated(removed)
    if not text.selecting:
        return Compensated(solved, LEAST_SQUARES)
    distilled = evidence.journal.by_layer("distilled", lambda: _distil(evidence, solved, text.kind, progress))
    candidates = (
        Compensated({path: OutputProjection.from_tensors(x) for path, x in distilled.items()}, DISTILLED),
        Compensated(unchanged_projections(evidence.model, evidence.layers, removed), NOT_COMPENSATED),
    )
    inputs = list(model_inputs(text.loaded, text.selecting))
    quality = text.kind(evidence.model, inputs, journal=evidence.journal, role="select", loss_only=True)
    return min(candidates, key=lambda candidate: quality.loss(candidate.projections))


def _distil(
    evidence: Evidence, solved: Mapping[str, OutputProjection], kind: type[Quality], progress: ProgressCallback
) -> dict[str, dict[str, Tensor]]:
    """Distil output projections on the calibration text; returns tensors, which can be stored."""
    batches, recorded = evidence.batches, evidence.recorded
    # Batches are sorted by length; the steps should not be.
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0)).tolist()
    step = Step(progress, "Distil the output projections", len(batches), "steps")
    distilled = distil(
        evidence.model,
        evidence.layers,
        solved,
        [batches[index] for index in order],
        kind,
        recorded=[recorded[index] for index in order] if len(recorded) == len(batches) else (),
        progress=step.advance,
    )
    return {path: projection.to_tensors() for path, projection in distilled.items()}

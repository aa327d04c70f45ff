"""A speed target that is measured on this machine instead of counted in FLOPs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from polyhead.costs.measuring import runner
from polyhead.errors import OptionError
from polyhead.integrations.huggingface import register, set_attention
from polyhead.progress import ProgressCallback, Step, ignore_progress
from polyhead.surgery.edits.applying import apply
from polyhead.surgery.options import Target
from polyhead.surgery.selection.budgets import RemovedHeads, prune_edits
from polyhead.surgery.selection.evidence import Evidence
from polyhead.surgery.selection.free import FreeSelection
from polyhead.surgery.selection.uniform import UniformSelection

STAGES = 20  # sets of heads that are timed, about, if they are of any numbers per layer


def heads_for_measured_target(
    selection: UniformSelection | FreeSelection, target: Target, *, progress: ProgressCallback = ignore_progress
) -> RemovedHeads:
    """Return the first of increasing sets of removed heads that reaches a speed target on this machine."""
    evidence, removed_sets = selection.evidence, stages(selection)
    step = Step(progress, "Time the model with fewer and fewer heads", len(removed_sets), "runs")
    ratio = 0.0
    for removed in removed_sets:
        (ratio,) = evidence.journal.numbers("times faster", partial(_measure_speedup, evidence, removed))
        step.advance()
        if ratio >= target.amount:
            return removed
    raise OptionError(
        f"the target must be at most {ratio:.2f}x-faster, measured here without all removable heads, got "
        f"{target.amount:g}x-faster"
    )


def stages(selection: UniformSelection | FreeSelection) -> list[RemovedHeads]:
    """Return sets of heads to prune, the fewest first, up to all that can be pruned.

    Those of the uniform form, one for each layout, need not contain each other.
    """
    if isinstance(selection, UniformSelection):
        return [selection.removed(layout) for layout in selection.layouts]
    stride = max(1, selection.steps // STAGES)
    return [selection.removed(steps, selection.orders) for steps in range(stride, selection.steps + 1, stride)]


def _measure_speedup(evidence: Evidence, removed: Mapping[str, Sequence[int]]) -> tuple[float]:
    """Return the original model's time over the pruned model's, measured in alternation."""
    # Copies, since both run on polyhead's attention, which supports uneven groups; the model itself is not changed.
    original, pruned = (copy.deepcopy(evidence.model) for _ in range(2))
    apply(pruned, prune_edits(evidence.layers, removed))
    for candidate in (original, pruned):
        set_attention(candidate, register())
    batch: Mapping[str, Any] = max(evidence.batches, key=lambda inputs: inputs["input_ids"].numel())
    with torch.no_grad():
        timings = runner.alternate(
            {"original": lambda: original(**batch), "pruned": lambda: pruned(**batch)},
            device=next(pruned.parameters()).device,
            alternations=7,
        )
    return (timings.median_ms("original") / timings.median_ms("pruned"),)

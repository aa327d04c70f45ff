"""Speed of a model without some of its heads, measured on this machine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from polyhead.costs.measuring import runner
from polyhead.errors import OptionError
from polyhead.integrations.huggingface import register, set_attention
from polyhead.surgery.edits.applying import apply
from polyhead.surgery.selection.budgets import Target
from polyhead.surgery.selection.journal import Journal
from polyhead.surgery.selection.shrinker import BaseShrinker, RemovedHeads


def meet_measured_target(
    shrinker: BaseShrinker,
    stages: Sequence[RemovedHeads],
    target: Target,
    batches: Sequence[Mapping[str, Any]],
    journal: Journal,
    *,
    progress: Callable[[int], None],
) -> RemovedHeads:
    """Return the first of increasing sets of removed heads that reaches the target on this machine.

    `progress` is called with 1 after every measurement.
    """
    ratio = 0.0
    for removed in stages:
        (ratio,) = journal.numbers("times faster", partial(_speedup, shrinker, removed, batches))
        progress(1)
        if ratio >= target.amount:
            return removed
    raise OptionError(
        f"the target must be at most {ratio:.2f}x-faster, measured here without all removable heads, got "
        f"{target.amount:g}x-faster"
    )


def _speedup(shrinker: BaseShrinker, removed: RemovedHeads, batches: Sequence[Mapping[str, Any]]) -> tuple[float]:
    """Return the original model's time over the pruned model's, measured in alternation."""
    # Copies, since both run on polyhead's attention, which supports uneven groups; the model itself is not changed.
    model: Any = shrinker.model
    original, pruned = (copy.deepcopy(model) for _ in range(2))
    apply(pruned, shrinker.edits(removed))
    for candidate in (original, pruned):
        set_attention(candidate, register())
    batch = max(batches, key=lambda inputs: inputs["input_ids"].numel())
    with torch.no_grad():
        timings = runner.alternate(
            {"original": lambda: original(**batch), "pruned": lambda: pruned(**batch)},
            device=next(pruned.parameters()).device,
            alternations=7,
        )
    return (timings.median_ms("original") / timings.median_ms("pruned"),)

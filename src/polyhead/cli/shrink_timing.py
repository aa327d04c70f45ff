"""`polyhead shrink --measured`: a speed target measured on this machine."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from polyhead.cli.progress import bar

if TYPE_CHECKING:
    from polyhead.surgery.selection.budgets import Target, Trials
    from polyhead.surgery.selection.journal import Journal


def meet_measured_target(
    trials: Trials,
    stages: Sequence[dict[str, tuple[int, ...]]],
    target: Target,
    batches: Sequence[Mapping[str, Any]],
    journal: Journal,
) -> dict[str, tuple[int, ...]]:
    """Return the first of increasing sets of removed heads that reaches the target on this machine."""
    from polyhead.errors import OptionError

    ratio = 0.0
    with bar("Time the model with fewer and fewer heads", len(stages)) as step:
        for removed in stages:
            (ratio,) = journal.numbers("times faster", partial(_timed, trials, removed, batches))
            step(1)
            if ratio >= target.amount:
                return removed
    raise OptionError(
        f"the target must be at most {ratio:.2f}x-faster, measured here without all removable heads, got "
        f"{target.amount:g}x-faster"
    )


def _timed(
    trials: Trials, removed: Mapping[str, tuple[int, ...]], batches: Sequence[Mapping[str, Any]]
) -> tuple[float]:
    return (_speedup(trials, removed, batches),)


def _speedup(trials: Trials, removed: Mapping[str, tuple[int, ...]], batches: Sequence[Mapping[str, Any]]) -> float:
    """Return the original model's time over the pruned model's, measured in alternation."""
    import torch

    from polyhead.costs.measuring.runner import alternate
    from polyhead.integrations.huggingface import register
    from polyhead.surgery import apply

    # Copies, since both run on polyhead's attention, which supports uneven groups; the model itself is not changed.
    model: Any = trials.model
    original, pruned = (copy.deepcopy(model) for _ in range(2))
    apply(pruned, trials.edits(removed))
    for candidate in (original, pruned):
        candidate.set_attn_implementation(register())
    batch = max(batches, key=lambda inputs: inputs["input_ids"].numel())
    device = next(pruned.parameters()).device
    with torch.no_grad():
        timings = alternate(
            {"original": lambda: original(**batch), "pruned": lambda: pruned(**batch)},
            device=device,
            alternations=7,
        )
    return timings.median_ms("original") / timings.median_ms("pruned")

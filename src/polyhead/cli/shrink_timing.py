"""`polyhead shrink --measured`: a target in time, which this machine is asked for."""

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
    """The first of ever more heads without which the model runs so many times faster on this machine."""
    from polyhead.errors import OptionError

    ratio = 0.0
    with bar("Time the model without more and more heads", len(stages)) as step:
        for gone in stages:
            (ratio,) = journal.numbers("times faster", partial(_timed, trials, gone, batches))
            step(1)
            if ratio >= target.amount:
                return gone
    raise OptionError(
        f"without any head that can go, this model is {ratio:.2f} times faster on this machine, got a target of "
        f"{target.amount:g}x-faster"
    )


def _timed(trials: Trials, gone: Mapping[str, tuple[int, ...]], batches: Sequence[Mapping[str, Any]]) -> tuple[float]:
    return (_times_faster(trials, gone, batches),)


def _times_faster(trials: Trials, gone: Mapping[str, tuple[int, ...]], batches: Sequence[Mapping[str, Any]]) -> float:
    """The whole model's time over that of the model without these heads, in turns."""
    import torch

    from polyhead.costs.measuring.runner import alternate
    from polyhead.integrations.huggingface import register
    from polyhead.surgery import apply

    # Copies, since both run on polyhead's attention, which knows groups of any sizes; the model itself stays.
    model: Any = trials.model
    whole, fewer = (copy.deepcopy(model) for _ in range(2))
    apply(fewer, trials.edits(gone))
    for one in (whole, fewer):
        one.set_attn_implementation(register())
    batch = max(batches, key=lambda own: own["input_ids"].numel())
    device = next(fewer.parameters()).device
    with torch.no_grad():
        found = alternate(
            {"whole": lambda: whole(**batch), "fewer": lambda: fewer(**batch)},
            device=device,
            alternations=7,
        )
    return found.median_ms("whole") / found.median_ms("fewer")

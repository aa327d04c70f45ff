"""Summary of the comparison so far: one line for each variant under each budget."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.training.trials import BUDGETS, RATES, Budget, Contest, Result, best_rate


@dataclass(frozen=True)
class Standing:
    """Result of one variant under one budget, over its seeds."""

    variant: str
    budget: Budget
    rate: float
    bits: tuple[float, ...]  # seed by seed
    steps: int
    parameters: int
    flops: int
    at_an_end: bool  # the best rate was the smallest or the largest that was tried

    @property
    def mean(self) -> float:
        return statistics.fmean(self.bits)

    @property
    def spread(self) -> float:
        """Return the standard deviation over seeds; NaN for a single one."""
        return statistics.stdev(self.bits) if len(self.bits) > 1 else math.nan


def standings(contest: Contest, results: Sequence[Result]) -> list[Standing]:
    """Return the standings so far, in the order of the variants."""
    found = []
    for budget in BUDGETS:
        for name in contest.variants:
            requested = contest.budget_of(name, budget)
            rate = best_rate(results, name, requested)
            mine = [
                result
                for result in sorted(results, key=lambda result: result.trial.seed)
                if (result.trial.variant, result.trial.budget, result.trial.rate) == (name, requested, rate)
            ]
            if rate is None or not len(mine):
                continue
            first, bits = mine[0], tuple(result.bits for result in mine)
            at_an_end = rate in (min(RATES), max(RATES))
            found.append(Standing(name, budget, rate, bits, first.steps, first.parameters, first.flops, at_an_end))
    return found


def rows(found: Sequence[Standing]) -> list[tuple[str, ...]]:
    """Return the standings as a table, header first; the first one of each budget is the baseline."""
    header = ("variant", "equal", "parameters", "PFLOP", "steps", "rate", "bits a byte", "spread", "to the first")
    lines: list[tuple[str, ...]] = [header]
    first = {standing.budget: standing for standing in reversed(found)}
    for standing in found:
        other = first[standing.budget]
        lines.append(
            (
                standing.variant,
                standing.budget,
                f"{standing.parameters:,}",
                f"{standing.flops / 1e15:.2f}",
                f"{standing.steps}",
                f"{standing.rate:g}" + (" (an end)" if standing.at_an_end else ""),
                f"{standing.mean:.4f}",
                f"{standing.spread:.4f} of {len(standing.bits)}",
                "" if standing is other else f"{standing.mean - other.mean:+.4f}",
            )
        )
    return lines

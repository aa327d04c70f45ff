"""Training runs of the comparison, and the file of finished ones from which it resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.measuring.json_lines import read_lines
from benchmarks.training.model import Sizes, parameters, step_flops
from polyhead.errors import OptionError
from polyhead.layers import AttentionConfig

Budget = Literal["tokens", "compute"]
BUDGETS: tuple[Budget, ...] = ("tokens", "compute")
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)  # the first is that of the sweep over rates


@dataclass(frozen=True)
class Contest:
    """Variants by name; the first is the baseline."""

    variants: Mapping[str, AttentionConfig]
    sizes: Sizes
    batch: int
    steps: int  # of the baseline

    @property
    def baseline(self) -> str:
        return next(iter(self.variants))

    def sizes_of(self, name: str) -> Sizes:
        """Return the sizes with feed-forward networks so wide that the model has about the baseline's parameters."""
        if name == self.baseline:
            return self.sizes
        config = self.variants[name]
        wanted = parameters(self.variants[self.baseline], self.sizes)
        none = parameters(config, replace(self.sizes, hidden=0))
        each = parameters(config, replace(self.sizes, hidden=1)) - none
        hidden = 8 * round((wanted - none) / each / 8)  # odd widths are slow
        if hidden < 8:
            raise OptionError(f"{name!r} alone has more parameters than the whole baseline: {none:,} of {wanted:,}")
        return replace(self.sizes, hidden=hidden)

    def steps_of(self, name: str, budget: Budget) -> int:
        """Return the number of steps: the baseline's, or as many as cost the same."""
        if budget == "tokens" or name == self.baseline:
            return self.steps
        ours, theirs = (step_flops(self.variants[x], self.sizes_of(x), self.batch) for x in (name, self.baseline))
        return max(1, round(self.steps * theirs / ours))

    def budget_of(self, name: str, budget: Budget) -> Budget:
        """Return the budget under which it is trained: the first if both have the same number of steps."""
        return BUDGETS[0] if self.steps_of(name, budget) == self.steps else budget


@dataclass(frozen=True)
class Trial:
    """One training."""

    variant: str
    budget: Budget
    rate: float
    seed: int


@dataclass(frozen=True)
class Result:
    """Result of a trial. `bits` are those of a held-out byte, on average; NaN if the training diverged."""

    trial: Trial
    bits: float
    steps: int
    tokens: int
    parameters: int
    flops: int
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        found = asdict(self)
        return json.dumps({**found, "bits": None if math.isnan(self.bits) else self.bits})

    @classmethod
    def from_json(cls, text: str) -> Result:
        found = json.loads(text)
        bits = math.nan if found["bits"] is None else found["bits"]
        return cls(**{**found, "trial": Trial(**found["trial"]), "bits": bits})


def read_results(path: Path) -> list[Result]:
    return read_lines(path, Result.from_json)


def best_rate(results: Iterable[Result], variant: str, budget: Budget) -> float | None:
    """Return the rate with the fewest bits at the first seed; None until the sweep is finished, or if all diverged."""
    swept = {
        result.trial.rate: result.bits
        for result in results
        if (result.trial.variant, result.trial.budget, result.trial.seed) == (variant, budget, SEEDS[0])
    }
    if any(rate not in swept for rate in RATES) or all(math.isnan(bits) for bits in swept.values()):
        return None
    return min((rate for rate in RATES if not math.isnan(swept[rate])), key=swept.__getitem__)


def next_trial(contest: Contest, results: Sequence[Result], under_way: Iterable[Trial] = ()) -> Trial | None:
    """Return the next run: of the sweep of every variant, then of the other seeds at the best rate.

    None if nothing is left, or nothing that can begin before a training that is `under_way` has ended.
    """
    taken = {result.trial for result in results} | set(under_way)
    for budget in BUDGETS:
        for name in contest.variants:
            if contest.budget_of(name, budget) != budget:
                continue
            rate = best_rate(results, name, budget)
            trials = [Trial(name, budget, x, SEEDS[0]) for x in RATES]
            trials += [] if rate is None else [Trial(name, budget, rate, seed) for seed in SEEDS[1:]]
            for trial in trials:
                if trial not in taken:
                    return trial
    return None

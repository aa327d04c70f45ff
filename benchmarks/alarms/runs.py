"""Runs of the study of alarms: healthy ones, and ones with an instability that is planted from a given step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.alarms.stacked_model import COLUMNS, VOCABULARY, Sizes, StackedModels
from benchmarks.training.text import english_text
from polyhead.training import HeadLocation, StepRecord

Data = Literal["text", "repeats", "chain", "topics", "previous"]
Plant = Literal["query", "layer rate", "rate"]
WARM_UP, PLANTED, QUICK_STEPS = 50, 200, 110  # steps
WINDOW, DEVIATIONS, LENGTH = 100, 5.0, 5  # of a spike
GROWTH: dict[str, float] = {"query": 1.08, "layer rate": 1.02, "rate": 1.01}  # per step
HEALTHY_SIZES = (
    Sizes(16, 2, 1),
    Sizes(16, 2, 2),
    Sizes(16, 4, 2),
    Sizes(24, 2, 2),
    Sizes(24, 4, 1),
    Sizes(24, 2, 1),
    Sizes(16, 4, 1),
    Sizes(32, 2, 2),
    Sizes(32, 4, 1),
    Sizes(16, 2, 3),
)
PER_STACK = 30
CANDIDATES: dict[Plant, int] = {"query": 60, "layer rate": 22, "rate": 24}  # of which those that spike are counted
# Learning rates at which most runs of this length spike.
RATES: dict[Plant, tuple[float, ...]] = {"query": (6e-3, 1e-2), "layer rate": (3e-3,), "rate": (3e-3,)}


@dataclass(frozen=True)
class Run:
    """One training: a model, its data, and what is planted, if anything."""

    seed: int
    rate: float
    data: Data
    sizes: Sizes
    plant: Plant | None = None
    steps: int = 500

    @property
    def place(self) -> tuple[int, int]:
        """Layer and head of what is planted."""
        numbers = np.random.default_rng(self.seed)
        return int(numbers.integers(self.sizes.layers)), int(numbers.integers(self.sizes.heads))


@dataclass(frozen=True, eq=False)
class Trace:
    """Losses [steps] and statistics [steps, columns, heads] of a run."""

    run: Run
    losses: Tensor
    values: Tensor

    def records(self) -> Iterator[StepRecord]:
        """Yield what a `HeadMonitor` passes to its callbacks."""
        sizes = self.run.sizes
        heads = tuple(
            HeadLocation(f"layers.{layer}.attention", "self", layer, head, str(head))
            for layer in range(sizes.layers)
            for head in range(sizes.heads)
        )
        for step, (loss, values) in enumerate(zip(self.losses.tolist(), self.values, strict=True)):
            yield StepRecord(step, loss, heads, COLUMNS, values)

    @property
    def spike(self) -> int | None:
        """First step of a spike."""
        return first_spike(self.losses)


def first_spike(losses: Tensor) -> int | None:
    """Return the first step of a spike: a loss 5 MAD above the median of the last 100 steps, for 5 steps."""
    if len(losses) < WINDOW + LENGTH:
        return None
    values = losses.double().numpy()
    before = np.lib.stride_tricks.sliding_window_view(values, WINDOW)[:-1]
    center = np.median(before, 1)
    limit = center + DEVIATIONS * np.median(abs(before - center[:, None]), 1)
    for index in range(len(limit) - LENGTH + 1):
        # Each step of a spike is compared with what came before the spike.
        if not (values[WINDOW + index : WINDOW + index + LENGTH] <= limit[index]).any():
            return WINDOW + index
    return None


def healthy_runs(stack: int, count: int, first_seed: int) -> list[Run]:
    """Return runs of one size with various data and learning rates, log-uniform in [5e-4, 5e-3]."""
    runs = []
    for seed in range(first_seed + 1000 * stack, first_seed + 1000 * stack + count):
        numbers = np.random.default_rng(seed)
        rate = float(5e-4 * 10 ** numbers.uniform())
        runs.append(Run(seed, rate, get_args(Data)[seed % 4], HEALTHY_SIZES[stack]))
    return runs


def planted_runs(plant: Plant, count: int, first_seed: int) -> list[Run]:
    """Return candidates of planted runs; those that spike are counted."""
    first = first_seed + 1000 * (len(HEALTHY_SIZES) + get_args(Plant).index(plant))
    rates = RATES[plant]
    sizes, steps = (Sizes(32, 1, 2, 24, 8), 380) if plant == "query" else (Sizes(32, 2, 2), 480)
    steps += 80 * (plant == "rate")
    return [Run(first + i, rates[i % len(rates)], "repeats", sizes, plant, steps) for i in range(count)]


def study(first_seed: int, *, quick: bool = False) -> dict[str, list[Run]]:
    """Return all runs, in stacks of equal sizes."""
    if quick:
        short = [planted_runs(plant, 2, first_seed) for plant in get_args(Plant)] + [healthy_runs(0, 2, first_seed)]
        return {f"quick{index}": [replace(run, steps=QUICK_STEPS) for run in runs] for index, runs in enumerate(short)}
    stacks = {plant.replace(" ", "-"): planted_runs(plant, CANDIDATES[plant], first_seed) for plant in get_args(Plant)}
    stacks["query-more"] = planted_runs("query", 12, first_seed + CANDIDATES["query"])
    # A token that depends on the one before the last takes a head that attends to a single token.
    sharp = healthy_runs(len(HEALTHY_SIZES) - 3, PER_STACK, first_seed + 20_000)
    stacks["sharp"] = [replace(run, data="previous") for run in sharp]
    return stacks | {
        f"healthy{index}": healthy_runs(index, PER_STACK, first_seed) for index in range(len(HEALTHY_SIZES))
    }


def train(runs: Sequence[Run]) -> list[Trace]:
    """Train the models of runs with equal sizes and steps side by side."""
    sizes, steps = runs[0].sizes, runs[0].steps
    models = StackedModels(sizes, [run.seed for run in runs], [run.rate for run in runs])
    sources = [_Source(run) for run in runs]
    losses, values = [], []
    for step in range(steps):
        for index, run in enumerate(runs):
            if run.plant is not None and step >= PLANTED:
                _plant(models, index, run, step)
        found = models.step(torch.stack([source.draw() for source in sources]), min(1.0, (step + 1) / WARM_UP))
        losses.append(found[0])
        values.append(found[1])
    by_run = zip(runs, torch.stack(losses, 1), torch.stack(values, 1), strict=True)
    return [Trace(run, *x) for run, *x in by_run]


def _plant(models: StackedModels, index: int, run: Run, step: int) -> None:
    layer, head = run.place
    growth = GROWTH[str(run.plant)]
    if run.plant == "query":
        models.scale_query(index, layer, head, growth)
    elif run.plant == "layer rate":
        for name in ("query", "key", "value", "output"):
            models.rate_factor[index, models.part(f"{layer}.{name}")] = growth ** (step - PLANTED)
    else:
        models.rate_factor[index] = growth ** (step - PLANTED)


@cache
def _text() -> Tensor:
    """The English default texts, with letters as 1 to 26, and everything else as six other symbols."""
    others = {" ": 0, "\n": 27, ",": 28, ".": 29, "-": 30}
    symbols = [ord(x) - 96 if "a" <= x <= "z" else others.get(x, 31) for x in english_text().lower()]
    return torch.tensor(symbols)


class _Source:
    """Sequences of a run: text, random halves that are repeated, Markov chains, symbols of a random set."""

    def __init__(self, run: Run) -> None:
        self.run, self.generator = run, torch.Generator().manual_seed(run.seed)
        self.chain = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=self.generator)

    def draw(self) -> Tensor:
        """Return [batch, context + 1]."""
        sizes, generator = self.run.sizes, self.generator
        batch, length = sizes.batch, sizes.context + 1
        if self.run.data == "text":
            places = torch.randint(len(_text()) - length, (batch, 1), generator=generator)
            return _text()[places + torch.arange(length)]
        if self.run.data == "repeats":
            half = torch.randint(VOCABULARY, (batch, -(-length // 2)), generator=generator)
            return torch.cat([half, half], 1)[:, :length]
        if self.run.data == "topics":
            symbols = torch.randint(VOCABULARY, (batch, 3), generator=generator)
            return symbols.gather(1, torch.randint(3, (batch, length), generator=generator))
        if self.run.data == "previous":
            order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(self.run.seed))
            sequence = torch.randint(VOCABULARY, (batch, length), generator=generator)
            is_kept = torch.rand(batch, length, generator=generator) < 0.9
            for place in range(2, length):
                sequence[:, place] = torch.where(is_kept[:, place], order[sequence[:, place - 2]], sequence[:, place])
            return sequence
        tokens = [torch.randint(VOCABULARY, (batch,), generator=generator)]
        choices = torch.randint(4, (length, batch), generator=generator)
        for choice in choices[1:]:
            tokens.append(self.chain[tokens[-1], choice])
        return torch.stack(tokens, 1)

"""Training runs of the stability benchmark, when a run counts as diverged, and which run comes next."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.alarms import runs as alarm_runs
from benchmarks.alarms.runs import Plant, first_spike
from benchmarks.measuring.json_lines import read_lines
from benchmarks.training import loop
from benchmarks.training.model import Sizes, parameters, step_flops
from polyhead.layers import MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig

Part = Literal["clip", "alarms"]
Contender = Literal["plain", "QK-clip", "QK-norm"]
Optimizer = Literal["adamw", "muon"]
CONTENDERS: tuple[Contender, ...] = ("plain", "QK-clip", "QK-norm")
PLANTS: tuple[Plant | None, ...] = (None, "query", "rate")  # None: a healthy run
FINAL = 50  # steps whose median loss is the final loss
MARGIN = 0.5  # nats per byte by which a final loss is clearly above the best
LOWER = 3.0  # divisor of the learning rate where the lowest one of a search diverged


@dataclass(frozen=True)
class Setting:
    """Everything that the contenders have in common, except the learning rate."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 512
    batch: int = 16
    steps: int = 500
    warm_up: int = 100  # steps; the learning rate is constant after them
    weight_decay: float = 0.0
    optimizer: Optimizer = "adamw"
    qk_rate_factor: float = 1.0  # of the learning rate, for W_Q and W_K
    seed: int = 0

    @property
    def sizes(self) -> Sizes:
        """Sizes of the model; the feed-forward networks are 16/3 as wide as it, rounded to 8."""
        return Sizes(self.width, self.layers, self.context, 8 * round(self.width * 2 / 3))

    def attention(self, contender: Contender = "plain") -> MultiHeadConfig:
        norm: Literal["rms"] | None = "rms" if contender == "QK-norm" else None
        return MultiHeadConfig(self.width, self.heads, causal=True, bias=False, positions=RotaryConfig(), qk_norm=norm)

    @property
    def parameters(self) -> int:
        return parameters(self.attention(), self.sizes)

    @property
    def step_flops(self) -> int:
        """FLOPs of the matrix products of a step, forward and backward."""
        return step_flops(self.attention(), self.sizes, self.batch)

    def __str__(self) -> str:
        optimizer = {"adamw": "AdamW", "muon": "Muon"}[self.optimizer]
        decay = f"weight decay {self.weight_decay:g}" if self.weight_decay else "no weight decay"
        parts = [
            f"{self.layers} layers, {self.heads} heads of {self.width // self.heads}",
            f"{self.parameters / 1e6:.3g}M parameters",
            f"{self.batch} x {self.context} bytes per step",
            f"{self.steps} steps, {self.warm_up} of them warm-up",
            f"{optimizer}, {decay}",
        ]
        if self.qk_rate_factor != 1:
            parts.append(f"learning rate of W_Q and W_K times {self.qk_rate_factor:g}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Trial:
    """One training run: a contender at a learning rate, or a run in which something is planted.

    `threshold` is that of QK-clip, None for other contenders.
    """

    part: Part
    contender: Contender
    rate: float
    setting: Setting
    threshold: float | None = None
    plant: Plant | None = None

    @property
    def label(self) -> str:
        return self.contender if self.threshold is None else f"{self.contender} at {self.threshold:g}"

    def __str__(self) -> str:
        name = self.label if self.part == "clip" else f"alarms, {plant_name(self.plant)}"
        return f"{name}, rate {self.rate:g}"


def plant_name(plant: Plant | None) -> str:
    """Return what is planted, in words."""
    if plant is None:
        return "healthy"
    growth = f"times {alarm_runs.GROWTH[plant]:g} per step"
    return {"query": f"W_Q of one head {growth}", "rate": f"learning rate {growth}"}[plant]


@dataclass(frozen=True)
class Result:
    """Result of a trial, step by step until its end or the first loss that is not finite.

    `max_logits` are the largest logits of all heads, `clipped` the number of heads that QK-clip scaled, and `outcome`
    is what `benchmarks.alarms.outcomes` returns for a run with alarms.
    """

    trial: Trial
    losses: Sequence[float]
    max_logits: Sequence[float]
    clipped: Sequence[int] | None
    outcome: Mapping[str, Any] | None
    parameters: int
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        losses, logits = [_or_none(x, 6) for x in self.losses], [_or_none(x, 4) for x in self.max_logits]
        return json.dumps(asdict(self) | {"losses": losses, "max_logits": logits})

    @classmethod
    def from_json(cls, text: str) -> Result:
        found = json.loads(text)
        trial = {**found["trial"], "setting": Setting(**found["trial"]["setting"])}
        curves = {name: [math.nan if x is None else x for x in found[name]] for name in ("losses", "max_logits")}
        return cls(**{**found, **curves, "trial": Trial(**trial)})


def _or_none(value: float, digits: int) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def read_results(path: Path) -> list[Result]:
    """Return the finished runs of a file."""
    return read_lines(path, Result.from_json)


@dataclass(frozen=True)
class Verdict:
    """Whether a run diverged: a spike, a loss that is not finite, or a final loss clearly above the best.

    `spike` and `nonfinite` are steps. `final` is the median loss of the last 50 steps, NaN if the run ended early;
    `best` is the lowest median of 50 steps of this run and of the plain runs at this and lower learning rates.
    """

    spike: int | None
    nonfinite: int | None
    final: float
    best: float

    @property
    def is_behind(self) -> bool:
        return self.final - self.best > MARGIN

    @property
    def diverged(self) -> bool:
        return self.spike is not None or self.nonfinite is not None or self.is_behind

    def __str__(self) -> str:
        reasons = [f"spike at step {self.spike}"] if self.spike is not None else []
        reasons += [f"not finite at step {self.nonfinite}"] if self.nonfinite is not None else []
        reasons += [f"final loss {self.final - self.best:.2f} above the best"] if self.is_behind else []
        return ", ".join(reasons) or "no"


def verdict(result: Result, results: Iterable[Result]) -> Verdict:
    """Return whether a run diverged, compared with the plain runs of its setting at this and lower learning rates."""
    trial = result.trial
    compared = [
        x
        for x in results
        if (x.trial.part, x.trial.contender, x.trial.setting) == (trial.part, "plain", trial.setting)
        and x.trial.rate <= trial.rate
        and x.trial.plant is None
    ]
    losses = torch.tensor(result.losses, dtype=torch.float64)
    wrong = (~losses.isfinite()).nonzero()[:, 0].tolist()
    final = math.nan if wrong else _medians(result)[-1]
    best = min((x for each in (result, *compared) for x in _medians(each)), default=math.nan)
    return Verdict(first_spike(losses), wrong[0] if wrong else None, final, best)


def _medians(result: Result) -> list[float]:
    """Return the median loss of every 50 successive steps, up to the first that is not finite."""
    values = np.array(result.losses)
    finite = values[: np.argmin(np.isfinite(values))] if not np.isfinite(values).all() else values
    if not len(finite):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(finite, min(FINAL, len(finite)))
    return [float(x) for x in np.median(windows, 1)]


@dataclass(frozen=True)
class Study:
    """Requested runs.

    `contests` is the number of learning rates at which the remedies are tried: the lowest ones at which the plain run
    diverged. `alarm_rate` is the learning rate of the runs with alarms.
    """

    setting: Setting
    rates: Sequence[float]
    threshold: float
    alarm_rate: float
    parts: Sequence[Part] = ("clip", "alarms")
    contests: int = 1


def next_trial(study: Study, results: Sequence[Result]) -> Trial | None:
    """Return the next run; None if all have finished."""
    done = {result.trial: result for result in results}
    for part in study.parts:
        for trial in _clip_trials(study, done) if part == "clip" else _alarm_trials(study):
            if trial not in done:
                return trial
    return None


def _clip_trials(study: Study, done: Mapping[Trial, Result]) -> Iterator[Trial]:
    """Yield plain runs at ascending learning rates, and the remedies where one has diverged."""
    contests = 0
    for index, rate in enumerate(sorted(study.rates)):
        plain = Trial("clip", "plain", rate, study.setting)
        yield plain
        if not verdict(done[plain], done.values()).diverged:
            continue
        yield replace(plain, contender="QK-clip", threshold=study.threshold)
        yield replace(plain, contender="QK-norm")
        if not index:
            yield replace(plain, rate=rate / LOWER)
        contests += 1
        if contests == study.contests:
            return


def _alarm_trials(study: Study) -> Iterator[Trial]:
    """Yield a healthy run and the planted ones, with the schedule and the weight decay of the alarms' own benchmark."""
    warm_up = min(alarm_runs.WARM_UP, study.setting.warm_up)
    setting = replace(study.setting, warm_up=warm_up, weight_decay=loop.DECAY, optimizer="adamw", qk_rate_factor=1.0)
    for plant in PLANTS:
        yield Trial("alarms", "plain", study.alarm_rate, setting, plant=plant)

"""Errors of predicted times against measured ones, on layers that no calibration saw, beside a datasheet's roofline."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.verdicts import judge
from benchmarks.plan_accuracy.shapes import REGIMES, Ranges, Regime, Shape
from polyhead.costs.calibration.calls import layer_call
from polyhead.costs.calibration.compiling import Task, compile_ahead, layer_tasks
from polyhead.costs.calibration.timing import MOST_OF_THE_HOST, steady_samples
from polyhead.costs.measuring.runner import is_out_of_memory
from polyhead.costs.timing.limits import Bound
from polyhead.costs.timing.machine import Datasheet, Machine
from polyhead.costs.timing.predict import Prediction, predict, roofline
from polyhead.errors import OptionError
from polyhead.observation.saving import write_atomically

__all__ = ["Outcome", "Summary", "measure", "predict_again", "summaries", "to_dict", "write"]

MEDIAN_BOUND, WORST_BOUND = 0.15, 0.35
VISITS, HOST_VISITS = 3, 9  # the second of shapes that may wait for their host
MOST_COMPILED_BYTES = 8e9  # of a layer that is compiled for ahead, beside others


@dataclass(frozen=True, slots=True)
class Outcome:
    """One shape: what was said and what it took."""

    shape: Shape
    regime: Regime
    measured: float | None  # seconds, of an undisturbed moment; None where there was no memory
    usual: float | None  # the middle of all moments
    predicted: float
    promised: float  # by the datasheet's roofline
    bound: Bound
    device_seconds: float
    host_seconds: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return _error(self.predicted, self.measured)

    @property
    def usual_error(self) -> float:
        """Of the prediction, as a share of what a call took in the middle of all moments, disturbed ones among them."""
        return _error(self.predicted, self.usual)

    @property
    def datasheet_error(self) -> float:
        return _error(self.promised, self.measured)


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of one regime, or of all."""

    regime: str
    shapes: int
    median: float
    worst: float
    usual_median: float
    usual_worst: float
    datasheet_median: float
    datasheet_worst: float

    @property
    def missed(self) -> bool:
        """True if the median error or the worst is above its bound."""
        return any(
            judge(x, x, x, bound) == "miss" for x, bound in ((self.median, MEDIAN_BOUND), (self.worst, WORST_BOUND))
        )


def measure(
    shapes: Mapping[Shape, Regime],
    machine: Machine,
    ranges: Ranges,
    *,
    device: torch.device,
    seconds: float = math.inf,
    seed: int = 0,
) -> Iterator[Outcome]:
    """Predict, then time, shape by shape, and begin none after so many seconds.

    A layer's calls follow one another, as layers do in a model. Every shape is visited several times, as far apart as
    the run is long, and told of after each visit with the fastest of its moments so far, and their middle: a host whose
    cores others use is up to twice as slow for seconds at a time, which no one can say ahead. What may wait for it is
    visited more often.
    """
    began, times = time.perf_counter(), {shape: list[float]() for shape in shapes}
    compile_ahead(_tasks(shapes, ranges.dtype), device)
    for visit in range(HOST_VISITS):
        for shape, regime in shapes.items():
            if time.perf_counter() - began > seconds:
                return
            if visit >= VISITS and not _may_wait(predict(shape.work(ranges.dtype), machine)):
                continue
            times[shape] += _measured(shape, device, ranges.dtype, seed)
            yield _outcome(shape, regime, times[shape], machine, ranges.dtype)


def _may_wait(said: Prediction) -> bool:
    """Return True if a disturbed host takes as long as the device."""
    return said.host_seconds > MOST_OF_THE_HOST * said.device_seconds


def predict_again(content: Mapping[str, Any], machine: Machine) -> list[Outcome]:
    """Predict the times that `write` has stored again, with another calibration, or a better prediction."""
    dtype = getattr(torch, content["dtype"])
    return [
        dataclasses.replace(
            _outcome(Shape(**row["shape"]), row["regime"], (), machine, dtype),
            measured=row["measured"],
            usual=row["usual"],
        )
        for row in content["rows"]
    ]


def _outcome(shape: Shape, regime: Regime, samples: Sequence[float], machine: Machine, dtype: torch.dtype) -> Outcome:
    work, sheet = shape.work(dtype), promise(machine, dtype)
    found = predict(work, machine)
    promised = roofline(work, sheet.flops, sheet.bandwidth)
    times = (found.seconds, promised, found.bound, found.device_seconds, found.host_seconds)
    fastest, usual = (min(samples), statistics.median(samples)) if len(samples) else (None, None)
    return Outcome(shape, regime, fastest, usual, *times)


def _tasks(shapes: Iterable[Shape], dtype: torch.dtype) -> list[Task]:
    """Return tasks that compile our kernels for these layers, except the largest, since tasks share the memory."""
    tasks: list[Task] = []
    for shape in shapes:
        work = shape.work(dtype)
        cached = 2 * shape.batch * shape.tokens * shape.kv_heads * shape.head_dim * dtype.itemsize
        if work.bytes + (cached if shape.phase == "decode" else 0) <= MOST_COMPILED_BYTES:
            tasks += layer_tasks(shape.config, shape.workload, work, dtype)
    return tasks


def promise(machine: Machine, dtype: torch.dtype) -> Datasheet:
    """The vendor's figures, or, where none are known, the best that the machine reached."""
    return machine.datasheet or Datasheet(machine.matrix_rate(dtype), machine.bandwidth)


def _measured(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> list[float]:
    """Seconds of a call at some moments; none where there is no memory for it."""
    torch.manual_seed(seed)
    try:
        return steady_samples(layer_call(shape.config, shape.workload, device=device, dtype=dtype), device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return []
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def summaries(outcomes: Sequence[Outcome]) -> list[Summary]:
    """Of each regime that has any, then of all. Shapes that found no memory are not counted."""
    ran = [outcome for outcome in outcomes if outcome.measured is not None]
    groups = {regime: [x for x in ran if x.regime == regime] for regime in REGIMES} | {"all": ran}
    return [_summary(name, group) for name, group in groups.items() if group]


def _summary(name: str, outcomes: Sequence[Outcome]) -> Summary:
    ours, usual, theirs = (
        [abs(error) for error in errors]
        for errors in zip(*((x.error, x.usual_error, x.datasheet_error) for x in outcomes), strict=True)
    )
    found = (figure for errors in (ours, usual, theirs) for figure in (statistics.median(errors), max(errors)))
    return Summary(name, len(outcomes), *found)


def _error(said: float, taken: float | None) -> float:
    if taken is None:
        raise OptionError("there is no error without a measurement, got a shape that found no memory")
    return said / taken - 1


def to_dict(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Rows as they are written."""
    rows = []
    for outcome in outcomes:
        row = {**asdict(outcome), "shape": asdict(outcome.shape)}
        if outcome.measured is not None:
            errors = {"error": outcome.error, "usual_error": outcome.usual_error}
            errors["datasheet_error"] = outcome.datasheet_error
            row |= {name: round(error, 4) for name, error in errors.items()}
        rows.append({name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in row.items()})
    return rows


def write(path: Path, facts: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """The whole run with its errors by regime, as JSON."""
    found = summaries(outcomes)
    content = {
        **facts,
        "bounds": {"median": MEDIAN_BOUND, "worst": WORST_BOUND},
        "summary": [{**asdict(summary), "missed": summary.missed} for summary in found],
        "rows": to_dict(outcomes),
    }
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

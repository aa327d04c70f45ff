"""Errors of predicted times on layers that no calibration has seen, compared with the roofline of a datasheet."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.verdicts import judge
from benchmarks.plan_accuracy.shapes import REGIMES, Ranges, Rates, Regime, Shape, roofline
from polyhead.costs.calibration.calls import layer_call
from polyhead.costs.calibration.compiling import Task, compile_ahead, layer_tasks
from polyhead.costs.calibration.timing import MAX_HOST_SHARE, MIN_SAMPLES, SAMPLES, SLOW_SECONDS, Call
from polyhead.costs.measuring.runner import seconds_of
from polyhead.costs.quantities import dtype_name
from polyhead.costs.timing.limits import Bound
from polyhead.costs.timing.machine import Datasheet, Machine, shipped
from polyhead.costs.timing.machine_files import SHIPPED
from polyhead.costs.timing.predict import Prediction, predict
from polyhead.errors import OptionError
from polyhead.observation.saving import write_atomically
from polyhead.out_of_memory import is_out_of_memory

__all__ = ["Outcome", "Summary", "measure", "predict_again", "summaries", "to_dict", "write"]

MEDIAN_BOUND, WORST_BOUND = 0.15, 0.35
VISITS, HOST_VISITS = 3, 9  # the second for shapes that may be host-bound
STEADY_SECONDS = {"cuda": 3e-2, "cpu": 2e-4}  # so long that the first and the last call make no difference
MAX_COMPILED_BYTES = 8e9  # of a layer whose kernels are compiled ahead, in parallel with others


@dataclass(frozen=True, slots=True)
class Outcome:
    """Predicted and measured time of one shape."""

    shape: Shape
    regime: Regime
    measured: float | None  # fastest sample in seconds; None if memory did not suffice
    usual: float | None  # median of all samples
    predicted: float
    promised: float  # roofline time of the datasheet
    bound: Bound
    device_seconds: float
    host_seconds: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return _error(self.predicted, self.measured)

    @property
    def usual_error(self) -> float:
        """Relative error of the prediction to the median of all samples, which include disturbed ones."""
        return _error(self.predicted, self.usual)

    @property
    def datasheet_error(self) -> float:
        return _error(self.promised, self.measured)


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of one regime, or of all."""

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
    """Predict and time shape by shape, and start none after `seconds`.

    Calls of a layer run back to back, as layers do in a model. Every shape is visited several times, spread over the
    run, and its outcome so far is yielded after each visit: a host that other processes use is up to twice as slow for
    seconds at a time, which cannot be predicted. Shapes that may be host-bound are visited more often.
    """
    began, times = time.perf_counter(), {shape: list[float]() for shape in shapes}
    compile_ahead(_tasks(shapes, ranges.dtype), device)
    for visit in range(HOST_VISITS):
        for shape, regime in shapes.items():
            if time.perf_counter() - began > seconds:
                return
            if visit >= VISITS and not _may_be_host_bound(predict(shape.work(ranges.dtype), machine)):
                continue
            times[shape] += _measured(shape, device, ranges.dtype, seed)
            yield _outcome(shape, regime, times[shape], machine, ranges.dtype)


def _may_be_host_bound(prediction: Prediction) -> bool:
    """Return True if a disturbed host may take longer than the device."""
    return prediction.host_seconds > MAX_HOST_SHARE * prediction.device_seconds


def predict_again(content: Mapping[str, Any], machine: Machine) -> list[Outcome]:
    """Predict the measured times of a file of `write` again, with another calibration or version of the library."""
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
    prediction = predict(work, machine)
    return Outcome(
        shape,
        regime,
        measured=min(samples, default=None),
        usual=statistics.median(samples) if len(samples) else None,
        predicted=prediction.seconds,
        promised=roofline(work, sheet.flops, sheet.bandwidth),
        bound=prediction.bound,
        device_seconds=prediction.device_seconds,
        host_seconds=prediction.host_seconds,
    )


def _tasks(shapes: Iterable[Shape], dtype: torch.dtype) -> list[Task]:
    """Return tasks that compile our kernels for these layers, except the largest, since tasks share the memory."""
    tasks: list[Task] = []
    for shape in shapes:
        work = shape.work(dtype)
        cached = 2 * shape.batch * shape.tokens * shape.kv_heads * shape.head_dim * dtype.itemsize
        if work.bytes + (cached if shape.phase == "decode" else 0) <= MAX_COMPILED_BYTES:
            tasks += layer_tasks(shape.config, shape.workload, work, dtype)
    return tasks


def promise(machine: Machine, dtype: torch.dtype) -> Rates:
    """Return the vendor's figures, or the best measured rates if none are known."""
    sheet = datasheet_of(machine)
    if sheet is None:
        return Rates(machine.matrix_rate(dtype), machine.bandwidth)
    return Rates(sheet.flops[dtype_name(dtype)], sheet.bandwidth)


def datasheet_of(machine: Machine) -> Datasheet | None:
    """Return a machine's datasheet: its own, or the shipped one whose model is a word of the processor's name."""
    if machine.sheet is not None:
        return machine.sheet
    parts = re.split(r"[^A-Za-z0-9]+", str(machine.facts.get("processor", machine.name)).upper())
    sheets = (shipped(path.stem).sheet for path in sorted(SHIPPED.glob("*.json")))
    return next((sheet for sheet in sheets if sheet is not None and sheet.model in parts), None)


def steady_samples(call: Call, device: torch.device) -> list[float]:
    """Return seconds per call of many calls in a row, whether host or device bounds them."""
    call()
    once = min(seconds_of(call, 1, device) for _ in range(2))
    times = max(1, math.ceil(STEADY_SECONDS[device.type] / once))
    count = MIN_SAMPLES if once > SLOW_SECONDS else SAMPLES[device.type]
    return [seconds_of(call, times, device) / times for _ in range(count)]


def _measured(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> list[float]:
    """Return samples of the seconds of a call; none if memory does not suffice."""
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
    """Return the summary of each regime with outcomes, then of all; shapes without a measurement are not counted."""
    ran = [outcome for outcome in outcomes if outcome.measured is not None]
    groups = {regime: [x for x in ran if x.regime == regime] for regime in REGIMES} | {"all": ran}
    return [_summary(name, group) for name, group in groups.items() if group]


def _summary(name: str, outcomes: Sequence[Outcome]) -> Summary:
    ours, usual, theirs = (
        [abs(error) for error in errors]
        for errors in zip(*((x.error, x.usual_error, x.datasheet_error) for x in outcomes), strict=True)
    )
    figures = (figure for errors in (ours, usual, theirs) for figure in (statistics.median(errors), max(errors)))
    return Summary(name, len(outcomes), *figures)


def _error(predicted: float, measured: float | None) -> float:
    if measured is None:
        raise OptionError("an error needs a measurement, got a shape for which memory did not suffice")
    return predicted / measured - 1


def to_dict(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the outcomes as rows of a results file."""
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
    """Write the run with its errors by regime as JSON."""
    content = {
        **facts,
        "bounds": {"median": MEDIAN_BOUND, "worst": WORST_BOUND},
        "summary": [{**asdict(summary), "missed": summary.missed} for summary in summaries(outcomes)],
        "rows": to_dict(outcomes),
    }
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

"""Machines that times are predicted for: measured ones, and ones known by their datasheet.

A measured machine consists of timed pieces of work and the host overhead of a call, and all its rates are measured. A
machine without samples has the peak rates of its datasheet, times the efficiency that a measured machine reaches; its
fixed times and host overhead are those of a measured machine of the same kind of device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch

from polyhead.costs.options import Phase
from polyhead.costs.quantities import dtype_name, named_dtype
from polyhead.costs.timing.machine_files import ELSEWHERE, RULE, SHIPPED, MachineKind, find_machine, own_folder
from polyhead.costs.work import AttentionCore, Device, Piece, Product, Traffic
from polyhead.errors import OptionError
from polyhead.files import as_type, build, read_json, refusing, short

Route = Literal["plain", "masked", "tiled"]
FORMAT = 2
EFFICIENCY_FROM = "nvidia-h200"  # measured, and described by a datasheet
LIKE: Mapping[Device, str] = {"cuda": "nvidia-h200", "cpu": "cpu-2-cores"}  # measured machine of each kind of device
_MOST = 1 << 62
_PIECES: Mapping[str, type[Piece]] = {"product": Product, "attention": AttentionCore, "traffic": Traffic}


@dataclass(frozen=True, slots=True)
class Sample:
    """One piece of work and its measured device time on an idle device.

    `route` is the attention route at the time of the measurement, which may differ from today's.
    """

    piece: Piece
    seconds: float
    route: Route = "plain"


@dataclass(frozen=True, slots=True)
class HostCost:
    """Host time of one call of a layer with negligible device work, by phase and attention route.

    `launches` is the number that `polyhead.costs.layer_work` counts for that call. On a CPU, where the call and its
    work run in sequence, the time of the work is subtracted.
    """

    phase: Phase
    route: Route
    seconds: float
    launches: int


@dataclass(frozen=True, slots=True)
class Datasheet:
    """Vendor figures: FLOPs per second of dense matrix products by dtype, bytes per second, and where they are printed.

    `model` is the word by which the driver's name of a processor is recognised.
    """

    model: str
    flops: dict[str, float]
    bandwidth: float
    source: str


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Relative errors of predicted times on layers that no calibration has seen."""

    median: float
    worst: float
    layers: int


@dataclass(frozen=True, slots=True)
class MachineSummary:
    """Name of a machine, and what its predicted times rest on; `error` is None if it was not measured."""

    name: str
    kind: MachineKind
    error: PredictionError | None
    source: str | None  # documents of a datasheet


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the datasheet's rates that the measured machine with a datasheet reaches."""

    matrix: Mapping[torch.dtype, float]
    bandwidth: float


@dataclass(frozen=True, eq=False)
class Machine:
    """Performance of one machine: measured, or from its datasheet.

    A GPU runs asynchronously to its host, so the longer of host and device time counts; on a CPU the two add up.
    `processors` are the multiprocessors of a GPU or the cores of a CPU.

    >>> machine = Machine.load("cpu-2-cores")
    >>> machine.device, machine.processors
    ('cpu', 2)
    """

    name: str
    device: Device
    processors: int
    memory_bytes: int
    launch_seconds: float  # host time of calling one operator on a tiny tensor
    samples: tuple[Sample, ...]
    host: tuple[HostCost, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)  # processor, versions, commit, date
    sheet: Datasheet | None = None
    error: PredictionError | None = None

    @property
    def kind(self) -> MachineKind:
        return "measured" if self.samples else "datasheet"

    @property
    def summary(self) -> MachineSummary:
        source = self.sheet.source if self.sheet is not None and self.kind == "datasheet" else None
        return MachineSummary(self.name, self.kind, self.error, source)

    @functools.cached_property
    def measured(self) -> Machine:
        """This machine if it was measured, else a measured one of the same kind of device."""
        return self if self.kind == "measured" else shipped(LIKE[self.device])

    # ---- best rates, measured or expected of the datasheet

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes with rates of matrix products."""
        return tuple(self._matrix_rates)

    @functools.cached_property
    def _matrix_rates(self) -> Mapping[torch.dtype, float]:
        if self.kind == "datasheet":
            peaks = {named_dtype(name): peak for name, peak in self._sheet.flops.items()}
            return {dtype: peak * efficiency().matrix[dtype] for dtype, peak in peaks.items()}
        rates: dict[torch.dtype, float] = {}
        for sample in self.samples:
            if isinstance(sample.piece, Product):
                dtype = sample.piece.dtype
                rates[dtype] = max(rates.get(dtype, 0.0), sample.piece.flops / sample.seconds)
        return rates

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """Return the FLOPs per second of the fastest product."""
        self.check_dtype(dtype)
        return self._matrix_rates[dtype]

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in self._matrix_rates:
            dtypes = ", ".join(map(dtype_name, self.dtypes))
            known, hint = "was calibrated", "recalibrate it with that dtype"
            if self.kind == "datasheet":
                known, hint = "has rates", "choose one of these"
            raise OptionError(f"machine {self.name!r} {known} in {dtypes}, got {dtype_name(dtype)}; {hint}")

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second of the fastest copy that exceeds the caches."""
        if self.kind == "datasheet":
            return self._sheet.bandwidth * efficiency().bandwidth
        return max(size / seconds for size, seconds in self.copies if size >= self.uncached_bytes)

    @property
    def uncached_bytes(self) -> int:
        """Size from which copies are taken to exceed the caches: a sixteenth of the largest copy."""
        return self.copies[-1][0] // 16

    @functools.cached_property
    def copies(self) -> tuple[tuple[int, float], ...]:
        """Bytes and seconds of each measured copy, smallest first.

        Those of a machine known by its datasheet are scaled by the bandwidth, except for the fixed time of a kernel.
        """
        if self.kind == "datasheet":
            slower, fixed = self.measured.bandwidth / self.bandwidth, self.shortest["traffic"]
            return tuple((size, fixed + (seconds - fixed) * slower) for size, seconds in self.measured.copies)
        copies = [(x.piece.bytes, x.seconds) for x in self.samples if isinstance(x.piece, Traffic)]
        if not copies:
            raise OptionError(
                f"machine {self.name!r} must have samples of copies, got {len(self.samples)} others; recalibrate it"
            )
        return tuple(sorted(copies))

    @functools.cached_property
    def shortest(self) -> Mapping[str, float]:
        """Shortest measured product, copy, and attention by direction: the fixed time of a kernel."""
        if self.kind == "datasheet":
            return self.measured.shortest
        seconds: dict[str, float] = {}
        for sample in self.samples:
            piece = sample.piece
            kind = piece.direction if isinstance(piece, AttentionCore) else type(piece).__name__.lower()
            seconds[kind] = min(sample.seconds, seconds.get(kind, sample.seconds))
        return seconds

    @functools.cached_property
    def exponential_rate(self) -> float:
        """Highest measured rate of exponentials per second in attention, a lower bound of what the units can do.

        That of a machine known by its datasheet is scaled by the rate in float32.
        """
        if self.kind == "datasheet":
            faster = self.matrix_rate(torch.float32) / self.measured.matrix_rate(torch.float32)
            return self.measured.exponential_rate * faster
        cores = [x for x in self.samples if isinstance(x.piece, AttentionCore) and x.piece.direction == "forward"]
        if not cores:
            raise OptionError(f"machine {self.name!r} must have samples of attention, got none; recalibrate it")
        return max(x.piece.exponentials / x.seconds for x in cores)

    @property
    def _sheet(self) -> Datasheet:
        if self.sheet is None:
            raise OptionError(f"machine {self.name!r} must have samples or a datasheet, got neither; recalibrate it")
        return self.sheet

    # ---- files

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Self:
        """Load a machine by a name from `list_machines`, or from a file."""
        path = find_machine(name)
        content = read_json(path, RULE)
        with refusing(path, RULE):
            return cls.from_dict(content)

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the machine to the user's folder, or to `path`, and return the path."""
        hint = ELSEWHERE if path is None else "choose another file"
        path = own_folder() / f"{self.name}.json" if path is None else Path(path)
        content = self.to_dict()
        samples = ",\n".join("  " + json.dumps(sample) for sample in content.pop("samples", ()))
        head = json.dumps(content, indent=1, ensure_ascii=False)
        unfinished = path.with_suffix(".unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(f'{head[:-2]},\n "samples": [\n{samples}\n ]\n}}\n', encoding="utf-8")
            return unfinished.replace(path)
        except OSError as error:
            raise OptionError(f"a machine is saved to a writable folder, got {error}; {hint}") from error

    def to_dict(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "format": FORMAT,
            "kind": self.kind,
            "name": self.name,
            "device": self.device,
            "processors": self.processors,
            "memory_bytes": self.memory_bytes,
            "facts": dict(self.facts),
        }
        content |= {} if self.sheet is None else {"datasheet": dataclasses.asdict(self.sheet)}
        content |= {} if self.error is None else {"error": dataclasses.asdict(self.error)}
        if self.kind == "measured":
            content["launch_seconds"] = float(f"{self.launch_seconds:.5g}")
            content["host"] = [dataclasses.asdict(cost) for cost in self.host]
            content["samples"] = [_sample_to_dict(sample) for sample in self.samples]
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        if not isinstance(content, Mapping):
            raise OptionError(f"a machine file must contain a JSON object, got a {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise OptionError(
                f"a machine file must have format {FORMAT}, got {content.get('format')!r}; recalibrate the machine"
            )
        sheet, error = content.get("datasheet"), content.get("error")
        sizes = content["name"], content["device"], content["processors"], content["memory_bytes"]
        options: dict[str, Any] = {
            "facts": dict(content["facts"]),
            "sheet": None if sheet is None else build(Datasheet, sheet),
            "error": None if error is None else build(PredictionError, error),
        }
        kind = content.get("kind", "measured")
        if kind == "datasheet" and content["device"] in LIKE:
            like = shipped(LIKE[content["device"]])
            machine = cls(*sizes, like.launch_seconds, (), like.host, **options)
        elif kind == "measured":
            samples = tuple(map(_sample_from_dict, content["samples"]))
            host = tuple(build(HostCost, cost) for cost in content["host"])
            machine = cls(*sizes, content["launch_seconds"], samples, host, **options)
        else:
            raise OptionError(
                f"a machine must be measured or datasheet with a device cuda or cpu, got {kind!r} and "
                f"{content['device']!r}"
            )
        machine._check(kind)
        return machine

    def _check(self, kind: MachineKind) -> None:
        """Validate a machine from a file: positive numbers, and samples of every kind or a datasheet."""
        if not isinstance(self.name, str) or self.device not in get_args(Device):
            raise OptionError(
                f"a machine must have a name and a device cuda or cpu, got {self.name!r} and {self.device!r}"
            )
        for name in ("processors", "memory_bytes", "launch_seconds"):
            _check_positive(name, getattr(self, name))
        for sample in self.samples:
            _check_positive("seconds", sample.seconds)
        for cost in self.host:
            _check_positive("seconds", cost.seconds, zero=True)  # 0 on a CPU if the call was all work
        if self.sheet is not None:
            _check_datasheet(self.sheet)
        if kind == "datasheet":
            if torch.float32 not in self.dtypes:
                raise OptionError(f"machine {self.name!r} must have a rate in float32 on its datasheet, got none")
            return
        kinds = {type(sample.piece) for sample in self.samples}
        missing = [name for name, kind in _PIECES.items() if kind not in kinds]
        if missing:
            raise OptionError(
                f"machine {self.name!r} must have samples of every kind, got "
                f"{len(self.samples)} samples without {', '.join(missing)}; recalibrate it"
            )


@functools.cache
def shipped(name: str) -> Machine:
    """Load a machine that is shipped with the library, even if the user has calibrated one of the same name."""
    return Machine.load(SHIPPED / f"{name}.json")


@functools.cache
def efficiency() -> Efficiency:
    """Return the share of its datasheet's rates that a measured machine reaches, by which all datasheets are scaled.

    >>> found = efficiency()
    >>> {dtype_name(dtype): round(share, 2) for dtype, share in found.matrix.items()}, round(found.bandwidth, 2)
    ({'bfloat16': 0.82, 'float16': 0.75, 'float32': 0.75}, 0.88)
    """
    machine = shipped(EFFICIENCY_FROM)
    sheet = machine._sheet
    matrix = {dtype: machine.matrix_rate(dtype) / sheet.flops[dtype_name(dtype)] for dtype in machine.dtypes}
    return Efficiency(matrix, machine.bandwidth / sheet.bandwidth)


def _check_datasheet(sheet: Datasheet) -> None:
    _check_positive("bandwidth", sheet.bandwidth)
    for name, peak in sheet.flops.items():
        _check_positive(f"flops in {name}", peak)
    unknown = [name for name in sheet.flops if name not in ("bfloat16", "float16", "float32")]
    if unknown:
        raise OptionError(f"flops of a datasheet are in bfloat16, float16 or float32, got {', '.join(unknown)}")


def _check_positive(what: str, value: Any, *, zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise OptionError(f"{what} of a machine must be a positive number, got {value!r}; recalibrate it")


def _sample_to_dict(sample: Sample) -> dict[str, Any]:
    """Return the kind of the piece, all its fields that differ from their defaults, the route and the seconds."""
    (kind,) = (name for name, piece_class in _PIECES.items() if type(sample.piece) is piece_class)
    content: dict[str, Any] = {"kind": kind}
    for item in dataclasses.fields(sample.piece):
        value = getattr(sample.piece, item.name)
        if value != item.default:
            content[item.name] = dtype_name(value) if isinstance(value, torch.dtype) else value
    content |= {} if sample.route == "plain" else {"route": sample.route}
    return {**content, "seconds": float(f"{sample.seconds:.5g}")}


def _sample_from_dict(content: Mapping[str, Any]) -> Sample:
    fields: dict[str, Any] = {name: named_dtype(x) if name.endswith("dtype") else x for name, x in content.items()}
    kind, seconds = _PIECES[fields.pop("kind")], as_type(fields.pop("seconds"), float, "seconds")
    route = as_type(fields.pop("route", "plain"), Route, "route")
    piece = build(kind, fields)
    for name, value in dataclasses.asdict(piece).items():
        if isinstance(value, int) and not 0 <= value <= _MOST:
            raise OptionError(f"{name} of a {kind.__name__} must be 0 to {_MOST:,}, got {short(value)}")
    return Sample(piece, seconds, route)

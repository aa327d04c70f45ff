"""Calibrated machines: timed pieces of work, and the host overhead of a call.

All rates are measured; `Datasheet` holds vendor figures for comparison only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch

from polyhead.costs.options import Phase
from polyhead.costs.quantities import dtype_name, named_dtype
from polyhead.costs.work import AttentionCore, Device, Piece, Product, Traffic
from polyhead.errors import OptionError
from polyhead.files import as_type, build, read_json, refusing, short

Route = Literal["plain", "masked", "tiled"]
SHIPPED = Path(__file__).parent / "machines"
FORMAT = 2
_MOST = 1 << 62
_ELSEWHERE = "set POLYHEAD_MACHINES to another folder"
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
    """Vendor figures: FLOPs per second of dense 16-bit matrix products, and bytes per second."""

    flops: float
    bandwidth: float


# Keyed by the model in the driver's name of a GPU; figures of the SXM parts.
DATASHEETS: Mapping[str, Datasheet] = {
    "H200": Datasheet(989.5e12, 4.8e12),
    "H100": Datasheet(989.5e12, 3.35e12),
    "A100": Datasheet(312e12, 2.039e12),
}


@dataclass(frozen=True, eq=False)
class Machine:
    """Measured performance of one machine.

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

    # ---- best measured rates

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes with measured matrix products."""
        return tuple(self._matrix_rates)

    @functools.cached_property
    def _matrix_rates(self) -> Mapping[torch.dtype, float]:
        rates: dict[torch.dtype, float] = {}
        for sample in self.samples:
            if isinstance(sample.piece, Product):
                dtype = sample.piece.dtype
                rates[dtype] = max(rates.get(dtype, 0.0), sample.piece.flops / sample.seconds)
        return rates

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """Return the FLOPs per second of the fastest measured product."""
        self.check_dtype(dtype)
        return self._matrix_rates[dtype]

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in self._matrix_rates:
            dtypes = ", ".join(map(dtype_name, self.dtypes))
            raise OptionError(
                f"machine {self.name!r} was calibrated in {dtypes}, got {dtype_name(dtype)}; "
                "recalibrate it with that dtype"
            )

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second of the fastest copy that exceeds the caches."""
        return max(size / seconds for size, seconds in self.copies if size >= self.uncached_bytes)

    @property
    def uncached_bytes(self) -> int:
        """Size from which copies are taken to exceed the caches: a sixteenth of the largest copy."""
        return self.copies[-1][0] // 16

    @functools.cached_property
    def copies(self) -> tuple[tuple[int, float], ...]:
        """Bytes and seconds of each measured copy, smallest first."""
        copies = [(x.piece.bytes, x.seconds) for x in self.samples if isinstance(x.piece, Traffic)]
        if not copies:
            raise OptionError(
                f"machine {self.name!r} must have samples of copies, got {len(self.samples)} others; recalibrate it"
            )
        return tuple(sorted(copies))

    @functools.cached_property
    def shortest(self) -> Mapping[str, float]:
        """Shortest measured product, copy, and attention by direction: the fixed time of a kernel."""
        seconds: dict[str, float] = {}
        for sample in self.samples:
            piece = sample.piece
            kind = piece.direction if isinstance(piece, AttentionCore) else type(piece).__name__.lower()
            seconds[kind] = min(sample.seconds, seconds.get(kind, sample.seconds))
        return seconds

    @functools.cached_property
    def exponential_rate(self) -> float:
        """Highest measured rate of exponentials per second in attention, a lower bound of what the units can do."""
        cores = [x for x in self.samples if isinstance(x.piece, AttentionCore) and x.piece.direction == "forward"]
        if not cores:
            raise OptionError(f"machine {self.name!r} must have samples of attention, got none; recalibrate it")
        return max(x.piece.exponentials / x.seconds for x in cores)

    @property
    def datasheet(self) -> Datasheet | None:
        """Vendor figures, if known."""
        parts = re.split(r"[^A-Za-z0-9]+", str(self.facts.get("processor", self.name)).upper())
        return next((sheet for name, sheet in DATASHEETS.items() if name in parts), None)

    # ---- files

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Self:
        """Load a machine by a name from `list_machines`, or from a file."""
        path = Path(name)
        if path.suffix != ".json":
            known = _files()
            if str(name) not in known:
                raise OptionError(
                    f"machine must be one of {', '.join(known)}, or a .json file; got {str(name)!r}; "
                    "run `polyhead plan --calibrate` to add this machine"
                )
            path = known[str(name)]
        if not path.exists():
            raise OptionError(f"a machine file must exist, got {str(path)!r}")
        rule = "a machine file must contain a calibrated machine"
        content = read_json(path, rule)
        with refusing(path, rule):
            return cls.from_dict(content)

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the machine to the user's folder, or to `path`, and return the path."""
        hint = _ELSEWHERE if path is None else "choose another file"
        path = own_folder() / f"{self.name}.json" if path is None else Path(path)
        content = self.to_dict()
        samples = ",\n".join("  " + json.dumps(sample) for sample in content.pop("samples"))
        head = json.dumps(content, indent=1, ensure_ascii=False)
        unfinished = path.with_suffix(".unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(f'{head[:-2]},\n "samples": [\n{samples}\n ]\n}}\n', encoding="utf-8")
            return unfinished.replace(path)
        except OSError as error:
            raise OptionError(f"a machine is saved to a writable folder, got {error}; {hint}") from error

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "device": self.device,
            "processors": self.processors,
            "memory_bytes": self.memory_bytes,
            "launch_seconds": float(f"{self.launch_seconds:.5g}"),
            "facts": dict(self.facts),
            "host": [dataclasses.asdict(cost) for cost in self.host],
            "samples": [_sample_to_dict(sample) for sample in self.samples],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        if not isinstance(content, Mapping):
            raise OptionError(f"a machine file must contain a JSON object, got a {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise OptionError(
                f"a machine file must have format {FORMAT}, got {content.get('format')!r}; recalibrate the machine"
            )
        machine = cls(
            content["name"],
            content["device"],
            content["processors"],
            content["memory_bytes"],
            content["launch_seconds"],
            tuple(map(_sample_from_dict, content["samples"])),
            tuple(build(HostCost, cost) for cost in content["host"]),
            dict(content["facts"]),
        )
        machine._check()
        return machine

    def _check(self) -> None:
        """Validate a machine from a file: predictions need positive numbers and samples of every kind."""
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
        kinds = {type(sample.piece) for sample in self.samples}
        missing = [name for name, kind in _PIECES.items() if kind not in kinds]
        if missing:
            raise OptionError(
                f"machine {self.name!r} must have samples of every kind, got "
                f"{len(self.samples)} samples without {', '.join(missing)}; recalibrate it"
            )


def list_machines() -> tuple[str, ...]:
    """Return the names of all machines: those shipped with the library, and those calibrated by the user."""
    return tuple(_files())


def own_folder() -> Path:
    """Return the folder of machines calibrated by the user: $POLYHEAD_MACHINES, or the XDG data folder."""
    if folder := os.environ.get("POLYHEAD_MACHINES"):
        return Path(folder)
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "polyhead" / "machines"


def check_own_folder() -> None:
    """Raise if a machine could not be saved, before minutes are spent on calibration."""
    folder = own_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"machines are saved to a writable folder, got {folder}: {error}; {_ELSEWHERE}") from error


def _check_positive(what: str, value: Any, *, zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise OptionError(f"{what} of a machine must be a positive number, got {value!r}; recalibrate it")


def _files() -> dict[str, Path]:
    """Return the files of all machines by name; the user's take precedence over shipped ones."""
    files = {path.stem: path for folder in (SHIPPED, own_folder()) for path in folder.glob("*.json")}
    return dict(sorted(files.items()))


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

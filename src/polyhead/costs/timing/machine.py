"""A machine as it was measured: pieces of work with the seconds they took, what a call costs its host, and when.

Nothing here is read off a datasheet but `Datasheet`, which is there to be compared with.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import tempfile
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch

from polyhead.costs.work import AttentionCore, Phase, Piece, Product, Traffic
from polyhead.errors import OptionError
from polyhead.files import as_type, build, read_json, refusing, short

Route = Literal["plain", "masked", "tiled"]
Device = Literal["cuda", "cpu"]
SHIPPED = Path(__file__).parent / "machines"
FORMAT = 2
_MOST = 1 << 62
_ELSEWHERE = "name another folder in POLYHEAD_MACHINES"
_PIECES: Mapping[str, type[Piece]] = {"product": Product, "attention": AttentionCore, "traffic": Traffic}


@dataclass(frozen=True, slots=True)
class Sample:
    """One piece of work and the seconds it took on the device, everything before it having finished.

    `route` is how attention was served when it was timed, whatever would serve it now.
    """

    piece: Piece
    seconds: float
    route: Route = "plain"


@dataclass(frozen=True, slots=True)
class HostCost:
    """What one call of a layer too small to compute anything takes, by phase and by how its attention is served.

    `launches` are those that `polyhead.costs.layer_work` counts for that call. On a CPU, where a call and its work take
    turns, the work is taken off.
    """

    phase: Phase
    route: Route
    seconds: float
    launches: int


@dataclass(frozen=True, slots=True)
class Datasheet:
    """What a vendor states: FLOPs a second in dense 16-bit matrix products, and bytes a second."""

    flops: float
    bandwidth: float


# By the words that the driver names a GPU with; of the SXM parts.
DATASHEETS: Mapping[str, Datasheet] = {
    "H200": Datasheet(989.5e12, 4.8e12),
    "H100": Datasheet(989.5e12, 3.35e12),
    "A100": Datasheet(312e12, 2.039e12),
}


@dataclass(frozen=True, eq=False)
class Machine:
    """What one machine reached.

    A GPU works while its host prepares the next call, so there the longer of the two counts; on a CPU they are one and
    their times add up. `processors` are a GPU's multiprocessors or a CPU's cores.

    >>> machine = Machine.load("cpu-2-cores")
    >>> machine.device, machine.processors
    ('cpu', 2)
    """

    name: str
    device: Device
    processors: int
    memory_bytes: int
    launch_seconds: float  # that calling one operator on next to nothing costs the host
    samples: tuple[Sample, ...]
    host: tuple[HostCost, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)  # processor, versions, commit, date

    # ---- what was reached at best

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those whose matrix products were measured."""
        return tuple(dict.fromkeys(x.piece.dtype for x in self.samples if isinstance(x.piece, Product)))

    @functools.cached_property
    def _matrix_rates(self) -> Mapping[torch.dtype, float]:
        products = [x for x in self.samples if isinstance(x.piece, Product)]
        return {
            dtype: max(
                x.piece.flops / x.seconds
                for x in products
                if x.piece.dtype is dtype  # type: ignore[union-attr]
            )
            for dtype in self.dtypes
        }

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """FLOPs a second of the fastest product."""
        self.check_dtype(dtype)
        return self._matrix_rates[dtype]

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in self._matrix_rates:
            raise OptionError(
                f"machine {self.name!r} was calibrated in {', '.join(map(_short, self.dtypes))}, got {_short(dtype)}; "
                "calibrate it anew with that dtype"
            )

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes a second of the fastest of the copies that no cache holds."""
        return max(size / seconds for size, seconds in self.copies if size >= self.uncached_bytes)

    @property
    def uncached_bytes(self) -> int:
        """From here on copies are as large as those that no cache holds: a sixteenth of the largest."""
        return self.copies[-1][0] // 16

    @functools.cached_property
    def copies(self) -> tuple[tuple[int, float], ...]:
        """Bytes of each copy that was timed and its seconds, the smallest first."""
        found = [(x.piece.bytes, x.seconds) for x in self.samples if isinstance(x.piece, Traffic)]
        if not found:
            raise OptionError(f"machine {self.name!r} holds no copies, got {len(self.samples)} samples; calibrate it")
        return tuple(sorted(found))

    @functools.cached_property
    def shortest(self) -> Mapping[str, float]:
        """Seconds of the shortest product, copy, and attention by direction: what a kernel takes if it does nothing."""
        found: dict[str, float] = {}
        for sample in self.samples:
            piece = sample.piece
            kind = piece.direction if isinstance(piece, AttentionCore) else type(piece).__name__.lower()
            found[kind] = min(sample.seconds, found.get(kind, sample.seconds))
        return found

    @functools.cached_property
    def exponential_rate(self) -> float:
        """Exponentials a second of the attention that made most of them: at the least what the units can."""
        cores = [x for x in self.samples if isinstance(x.piece, AttentionCore) and x.piece.direction == "forward"]
        if not cores:
            raise OptionError(f"machine {self.name!r} holds no attention; calibrate it")
        return max(x.piece.exponentials / x.seconds for x in cores)

    @property
    def datasheet(self) -> Datasheet | None:
        """The vendor's figures where they are known."""
        words = re.split(r"[^A-Za-z0-9]+", str(self.facts.get("processor", self.name)).upper())
        return next((sheet for name, sheet in DATASHEETS.items() if name in words), None)

    # ---- files

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """A machine by the name that `list_machines` gives, or from a file."""
        path = Path(name)
        if path.suffix != ".json":
            known = _files()
            if str(name) not in known:
                raise OptionError(
                    f"a machine is one of {', '.join(known)}, or a .json file; got {str(name)!r}; "
                    "`polyhead plan --calibrate` measures this one"
                )
            path = known[str(name)]
        if not path.exists():
            raise OptionError(f"a machine's file must exist, got {str(path)!r}")
        rule = "a machine's file must hold a calibrated machine"
        found = read_json(path, rule)
        with refusing(path, rule):
            return cls.from_dict(found)

    def save(self, path: Path | None = None) -> Path:
        """Write it where `load` finds it by its name, or to `path`; the place is returned."""
        hint = _ELSEWHERE if path is None else "name another file"
        path = own_folder() / f"{self.name}.json" if path is None else path
        content = self.to_dict()
        samples = ",\n".join("  " + json.dumps(sample) for sample in content.pop("samples"))
        head = json.dumps(content, indent=1, ensure_ascii=False)
        unfinished = path.with_suffix(".unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(f'{head[:-2]},\n "samples": [\n{samples}\n ]\n}}\n', encoding="utf-8")
            return unfinished.replace(path)
        except OSError as error:
            raise OptionError(f"a machine is kept in a folder that can be written, got {error}; {hint}") from error

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
            raise OptionError(f"a machine's file must hold a JSON object, got a {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise OptionError(
                f"a machine's file must have format {FORMAT}, got {content.get('format')!r}; calibrate the machine anew"
            )
        made = cls(
            content["name"],
            content["device"],
            content["processors"],
            content["memory_bytes"],
            content["launch_seconds"],
            tuple(map(_sample_from_dict, content["samples"])),
            tuple(build(HostCost, cost) for cost in content["host"]),
            dict(content["facts"]),
        )
        made._check()
        return made

    def _check(self) -> None:
        """What a prediction needs, and a file may lack that another hand wrote."""
        if not isinstance(self.name, str) or self.device not in get_args(Device):
            raise OptionError(f"a machine has a name and is cuda or cpu, got {self.name!r} and {self.device!r}")
        for name in ("processors", "memory_bytes", "launch_seconds"):
            _check_positive(name, getattr(self, name))
        for sample in self.samples:
            _check_positive("seconds", sample.seconds)
        for cost in self.host:
            _check_positive("seconds", cost.seconds, zero=True)  # on a CPU, where all of it was work
        kinds = {type(sample.piece) for sample in self.samples}
        missing = [name for name, kind in _PIECES.items() if kind not in kinds]
        if missing:
            raise OptionError(
                f"machine {self.name!r} must hold timed pieces of every kind, got "
                f"{len(self.samples)} samples without {', '.join(missing)}; calibrate it anew"
            )


def list_machines() -> tuple[str, ...]:
    """Names of the machines that can be loaded: those that come with the library, and those calibrated here."""
    return tuple(_files())


def own_folder() -> Path:
    """Where machines that were calibrated here are kept; $POLYHEAD_MACHINES says otherwise."""
    if folder := os.environ.get("POLYHEAD_MACHINES"):
        return Path(folder)
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "polyhead" / "machines"


def check_own_folder() -> None:
    """That a machine can be kept, before minutes are spent on measuring it."""
    folder = own_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(
            f"machines are kept in a folder that can be written, got {folder}: {error}; {_ELSEWHERE}"
        ) from error


def _check_positive(what: str, found: Any, *, zero: bool = False) -> None:
    number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    if not number or found < 0 or (found == 0 and not zero):
        raise OptionError(f"{what} of a machine must be a positive number, got {found!r}; calibrate it anew")


def _files() -> dict[str, Path]:
    """One calibrated here hides one of the same name that came with the library."""
    found = {path.stem: path for folder in (SHIPPED, own_folder()) for path in folder.glob("*.json")}
    return dict(sorted(found.items()))


def _sample_to_dict(sample: Sample) -> dict[str, Any]:
    found = _to_dict(sample.piece)
    found |= {} if sample.route == "plain" else {"route": sample.route}
    return {**found, "seconds": float(f"{sample.seconds:.5g}")}


def _sample_from_dict(content: Mapping[str, Any]) -> Sample:
    piece = _from_dict({name: x for name, x in content.items() if name not in ("seconds", "route")})
    route = as_type(content.get("route", "plain"), Route, "route")
    return Sample(piece, as_type(content["seconds"], float, "seconds"), route)


def _to_dict(piece: Piece) -> dict[str, Any]:
    """Its kind and every field that differs from the usual, dtypes by name."""
    (kind,) = (name for name, of in _PIECES.items() if type(piece) is of)
    found: dict[str, Any] = {"kind": kind}
    for each in dataclasses.fields(piece):
        value = getattr(piece, each.name)
        if value != each.default:
            found[each.name] = _short(value) if isinstance(value, torch.dtype) else value
    return found


def _from_dict(content: dict[str, Any]) -> Piece:
    kind = _PIECES[content.pop("kind")]
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, x in content.items():
        if name not in hints:
            raise OptionError(f"a {kind.__name__} has no field {short(name)}")
        values[name] = _dtype(x) if name.endswith("dtype") else as_type(x, hints[name], name)
        if isinstance(values[name], int) and not 0 <= values[name] <= _MOST:
            raise OptionError(f"{name} of a {kind.__name__} must be 0 to {_MOST:,}, got {short(x)}")
    return kind(**values)


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise OptionError(f"a dtype is named like float32, got {short(name)}")
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""How long work takes on a machine that was calibrated: physics, times what its kernels were seen to make of it.

Each piece takes as long as its scarcest resource needs (`limits`), times a correction that runs smoothly through the
calibration's samples. Pieces follow one another. A GPU is fed by its host, and where the calls of a layer cost the host
longer than the kernels run, that is the time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from polyhead.costs.timing.correction import Correction
from polyhead.costs.timing.limits import Bound, limits, route
from polyhead.costs.timing.machine import HostCost, Machine, Route, Sample
from polyhead.costs.work import AttentionCore, Phase, Piece, Product, Stage, Traffic, Work
from polyhead.errors import OptionError

Kind = tuple[str, str, torch.dtype]  # "product" or a direction of attention, route, dtype


@dataclass(frozen=True, slots=True)
class Part:
    """One piece, in one layer."""

    piece: Piece
    seconds: float
    bound: Bound

    @property
    def stage(self) -> Stage:
        return self.piece.stage


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of all layers, what they are bound by, and what they are made of.

    `device_seconds` is the time of the kernels alone, as in a CUDA graph, and `host_seconds` that of the calls.
    """

    seconds: float
    bound: Bound
    parts: tuple[Part, ...]
    device_seconds: float
    host_seconds: float

    @property
    def stages(self) -> Mapping[Stage, float]:
        """Seconds of the device by stage, of all layers."""
        once = sum(part.seconds for part in self.parts)
        layers = self.device_seconds / once if once else 0.0
        found: dict[Stage, float] = {}
        for part in self.parts:
            found[part.stage] = found.get(part.stage, 0.0) + layers * part.seconds
        return found


def predict(work: Work, machine: Machine) -> Prediction:
    """The seconds that `work` takes on `machine`.

    >>> from polyhead.layers import MultiHeadConfig
    >>> from polyhead.costs import Workload
    >>> from polyhead.costs.layer_work import layer_work
    >>> work = layer_work(MultiHeadConfig(512, 8), Workload.forward(1024), dtype=torch.float32)
    >>> prediction = predict(work, Machine.load("cpu-2-cores"))
    >>> list(prediction.stages), prediction.seconds > prediction.device_seconds
    (['projection', 'attention', 'output'], True)
    """
    parts = tuple(predict_piece(piece, machine) for piece in work.pieces)
    device = work.layers * sum(part.seconds for part in parts)
    host = work.layers * _host_seconds(work, machine)
    seconds = max(device, host) if machine.device == "cuda" else device + host
    return Prediction(seconds, "launch" if host > device else _bound(parts), parts, device, host)


def predict_piece(piece: Piece, machine: Machine) -> Part:
    """One piece by itself, on the device."""
    least = limits(piece, machine)
    if isinstance(piece, Traffic) or not piece.launches:
        return Part(piece, least.seconds if piece.launches else 0.0, least.bound)
    return Part(piece, least.before + least.kernel_seconds * _factor(piece, machine), least.bound)


def roofline(work: Work, flops: float, bandwidth: float) -> float:
    """What a datasheet promises: the longer of all FLOPs at one rate and all bytes at another."""
    return max(work.flops / flops, work.bytes / bandwidth)


def place(piece: Product | AttentionCore, served: Route) -> tuple[float, ...]:
    """Where a piece lies among others that are served alike, in octaves; what kernels are made for weighs double."""
    if isinstance(piece, Product):
        return _logarithms(piece.rows * piece.count, piece.columns, piece.inner)
    ratio = piece.heads / max(piece.kv_heads, 1)
    width = 2 * math.log2(max(piece.head_dim + piece.value_dim, 1) / 2)
    if piece.direction == "decode":
        hidden = piece.keys / max(piece.visible_keys, 1)
        return (*_logarithms(piece.batch * piece.kv_heads, piece.visible_keys, ratio * piece.queries, hidden), width)
    sizes = (*_logarithms(piece.batch * piece.heads, piece.queries, piece.keys), width, math.log2(ratio) / 2)
    if served == "plain":
        return (*sizes, 2.0 if piece.is_causal else 0.0)
    if served == "tiled":
        visible = piece.pairs / max(piece.batch * piece.queries, 1)
        return (*sizes, *_logarithms(visible))
    return sizes


def correction_of(kind: Kind, machine: Machine) -> Correction | None:
    """The curve through the samples of one kind, where there are any."""
    return _corrections(machine).get(kind)


def _logarithms(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log2(max(size, 1)) for size in sizes)


@functools.lru_cache(maxsize=16)
def _corrections(machine: Machine) -> Mapping[Kind, Correction]:
    places: dict[Kind, list[tuple[float, ...]]] = {}
    ratios: dict[Kind, list[float]] = {}
    for sample in machine.samples:
        piece = sample.piece
        if not isinstance(piece, Traffic):
            kind = _kind(piece, sample.route)
            places.setdefault(kind, []).append(place(piece, sample.route))
            ratios.setdefault(kind, []).append(_ratio(sample, machine))
    return {kind: Correction.fit(places[kind], ratios[kind]) for kind in places}


def _ratio(sample: Sample, machine: Machine) -> float:
    """How much longer than by physics the kernel took; at the least a tenth of the time is its own."""
    least = limits(sample.piece, machine, sample.route)
    return max(sample.seconds - least.before, 0.1 * sample.seconds) / least.kernel_seconds


def _kind(piece: Product | AttentionCore, served: Route) -> Kind:
    return ("product" if isinstance(piece, Product) else piece.direction, served, piece.dtype)


def _factor(piece: Product | AttentionCore, machine: Machine) -> float:
    """How much longer than by physics. What was not timed in this form gets the middle of the form nearest to it."""
    machine.check_dtype(piece.dtype)
    corrections = _corrections(machine)
    by: Route = "plain" if isinstance(piece, Product) else route(piece, machine.device)
    kind, served, dtype = _kind(piece, by)
    if (kind, served, dtype) in corrections:
        return corrections[kind, served, dtype](place(piece, by))
    nearest: list[Kind] = [(kind, "plain", dtype), *((kind, served, other) for other in machine.dtypes)]
    for other in (*nearest, ("forward", "plain", dtype)):
        if other in corrections:
            return math.exp(corrections[other].mean)
    raise OptionError(f"machine {machine.name!r} holds no samples of {kind} in {dtype}; calibrate it anew")


def _host_seconds(work: Work, machine: Machine) -> float:
    """Of one layer: what the call of a small one took, and a launch for each that this one has more."""
    launches = sum(piece.launches for piece in work.pieces)
    routes = [route(piece, machine.device) for piece in work.pieces if isinstance(piece, AttentionCore)]
    cost = host_cost(work.phase, "plain" if not routes else max(routes, key=_UNUSUAL.index), machine.host)
    if cost is None:
        return 0.0
    return max(cost.seconds + (launches - cost.launches) * machine.launch_seconds, 0.0) if launches else 0.0


_UNUSUAL: tuple[Route, ...] = ("plain", "tiled", "masked")


def host_cost(phase: Phase, served: Route, costs: Iterable[HostCost]) -> HostCost | None:
    """What was measured of such calls, the middle of several layers; of the plain ones where these were not."""
    same = [cost for cost in costs if cost.phase == phase]
    found = [cost for cost in same if cost.route == served] or [cost for cost in same if cost.route == "plain"]
    return sorted(found, key=lambda cost: cost.seconds)[(len(found) - 1) // 2] if found else None


def _bound(parts: Iterable[Part]) -> Bound:
    """What most of the time goes by."""
    shares: dict[Bound, float] = {}
    for part in parts:
        shares[part.bound] = shares.get(part.bound, 0.0) + part.seconds
    return max(shares, key=lambda bound: shares[bound], default="launch")

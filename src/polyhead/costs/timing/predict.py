"""Predict the time of work on a machine: a roofline limit times a correction.

Each piece takes the time of its slowest resource (`limits`), times a correction interpolated between the calibration
samples; a machine known by its datasheet takes the correction of a measured one at the same sizes. Pieces run in
sequence. On a GPU the host launches the kernels; if launching a layer takes longer than running it, the host time
counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from polyhead.costs.options import Phase
from polyhead.costs.timing.correction import Correction
from polyhead.costs.timing.limits import Bound, limits, route
from polyhead.costs.timing.machine import HostCost, Machine, Route, Sample
from polyhead.costs.work import AttentionCore, Piece, Product, Stage, Traffic, Work
from polyhead.errors import OptionError

Kind = tuple[str, str, torch.dtype]  # "product" or a direction of attention, route, dtype


@dataclass(frozen=True, slots=True)
class Part:
    """Prediction for one piece of one layer."""

    piece: Piece
    seconds: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of all layers, the resource that bounds them, and the parts of one layer.

    `device_seconds` is kernel time alone, as under a CUDA graph; `host_seconds` is the time of the calls.
    """

    seconds: float
    bound: Bound
    parts: tuple[Part, ...]
    device_seconds: float
    host_seconds: float

    @property
    def stages(self) -> Mapping[Stage, float]:
        """Device seconds by stage, of all layers."""
        per_layer = sum(part.seconds for part in self.parts)
        layers = self.device_seconds / per_layer if per_layer else 0.0
        seconds: dict[Stage, float] = {}
        for part in self.parts:
            seconds[part.piece.stage] = seconds.get(part.piece.stage, 0.0) + layers * part.seconds
        return seconds


def predict(work: Work, machine: Machine) -> Prediction:
    """Predict the time of `work` on `machine`.

    >>> from polyhead.layers import MultiHeadConfig
    >>> from polyhead.costs import Workload, layer_work
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
    """Predict the device time of a single piece."""
    limit = limits(piece, machine)
    if isinstance(piece, Traffic) or not piece.launches:
        return Part(piece, limit.seconds if piece.launches else 0.0, limit.bound)
    return Part(piece, limit.before + limit.kernel_seconds * _factor(piece, machine), limit.bound)


def place(piece: Product | AttentionCore, served: Route) -> tuple[float, ...]:
    """Return the coordinates of a piece among others of its kind, in octaves; head_dim and causality weigh double."""
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
    """Return measured over roofline time of the kernel, which counts for at least a tenth of the sample."""
    limit = limits(sample.piece, machine, sample.route)
    return max(sample.seconds - limit.before, 0.1 * sample.seconds) / limit.kernel_seconds


def _kind(piece: Product | AttentionCore, served: Route) -> Kind:
    return ("product" if isinstance(piece, Product) else piece.direction, served, piece.dtype)


def _factor(piece: Product | AttentionCore, machine: Machine) -> float:
    """Return the correction of a piece at its sizes; kinds without samples get the median of the nearest kind."""
    machine.check_dtype(piece.dtype)
    corrections = _corrections(machine.measured)
    by: Route = "plain" if isinstance(piece, Product) else route(piece, machine.device)
    kind, served, dtype = _kind(piece, by)
    if (kind, served, dtype) in corrections:
        return corrections[kind, served, dtype](place(piece, by))
    nearest: list[Kind] = [(kind, "plain", dtype), *((kind, served, other) for other in machine.measured.dtypes)]
    for other in (*nearest, ("forward", "plain", dtype)):
        if other in corrections:
            return math.exp(corrections[other].mean)
    raise OptionError(f"machine {machine.name!r} has no samples of {kind} in {dtype}; recalibrate it")


def _host_seconds(work: Work, machine: Machine) -> float:
    """Return the host time of one layer: that of a small call, plus one launch per additional kernel."""
    launches = sum(piece.launches for piece in work.pieces)
    routes = [route(piece, machine.device) for piece in work.pieces if isinstance(piece, AttentionCore)]
    cost = host_cost(work.phase, "plain" if not routes else max(routes, key=_UNUSUAL.index), machine.host)
    if cost is None:
        return 0.0
    return max(cost.seconds + (launches - cost.launches) * machine.launch_seconds, 0.0) if launches else 0.0


_UNUSUAL: tuple[Route, ...] = ("plain", "tiled", "masked")


def host_cost(phase: Phase, served: Route, costs: Iterable[HostCost]) -> HostCost | None:
    """Return the median measured cost of such calls, or of plain ones if these were not measured."""
    of_phase = [cost for cost in costs if cost.phase == phase]
    matching = [cost for cost in of_phase if cost.route == served] or [x for x in of_phase if x.route == "plain"]
    return sorted(matching, key=lambda cost: cost.seconds)[(len(matching) - 1) // 2] if matching else None


def _bound(parts: Iterable[Part]) -> Bound:
    """Return the resource that bounds most of the time."""
    shares: dict[Bound, float] = {}
    for part in parts:
        shares[part.bound] = shares.get(part.bound, 0.0) + part.seconds
    return max(shares, key=lambda bound: shares[bound], default="launch")

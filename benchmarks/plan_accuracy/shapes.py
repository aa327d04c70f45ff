"""Layers that no calibration has timed, drawn by a seed, on which predictions are evaluated.

The rules by which a shape is drawn, sorted or excluded depend on its sizes alone and were fixed before any measurement.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch

from polyhead.costs.cost import layer_work
from polyhead.costs.options import PHASES, Phase
from polyhead.costs.timing.limits import MASK_TRAFFIC, route
from polyhead.costs.work import AttentionCore, Device, Piece, Work
from polyhead.costs.workload import Workload
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadConfig

Regime = Literal["prefill", "decode", "training", "launch-bound"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
SEED = 20_261_118
MULTIPLE = 8  # of which lengths are
SHORTEST_WINDOW = 64
MAX_DRAWS = 200_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of multi-head attention, causal or windowed, and its workload.

    `tokens` is the length of a sequence: of the prompt, or of the cache including the decoded token.
    """

    phase: Phase
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    window: int | None = None

    @property
    def config(self) -> MultiHeadConfig:
        return MultiHeadConfig(
            self.heads * self.head_dim,
            self.heads,
            num_kv_heads=self.kv_heads,
            causal=True,
            window=self.window,
            bias=False,
            finite=True,
        )

    @property
    def workload(self) -> Workload:
        if self.phase == "decode":
            return Workload.decode(past=self.tokens - 1, batch=self.batch)
        return Workload(self.tokens, self.batch, training=self.phase == "training")

    def work(self, dtype: torch.dtype) -> Work:
        return layer_work(self.config, self.workload, dtype=dtype)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.batch}x{heads}x{self.tokens}x{self.head_dim}" + (
            f", window {self.window}" if self.window else ""
        )


class Rates(NamedTuple):
    """FLOPs and bytes per second of a roofline."""

    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges that shapes are drawn from, and upper limits of their cost."""

    device: Device
    tokens: tuple[int, int]
    batch: tuple[int, int]
    heads: tuple[int, int]
    dims: tuple[int, ...]
    dtype: torch.dtype
    max_flops: float  # of one call, including the masked pairs of mask tensors
    max_bytes: float  # moved by one call, and of masks
    quotas: Mapping[Regime, int]
    nominal: Rates  # rates that decide what is launch-bound
    launch_seconds: float  # of one kernel; a call is launch-bound if its launches take longer than its work


GPU = Ranges(
    device="cuda",
    tokens=(128, 131_072),
    batch=(1, 64),
    heads=(1, 128),
    dims=(64, 128, 256),
    dtype=torch.bfloat16,
    max_flops=3e13,
    max_bytes=4e10,
    quotas={"prefill": 14, "decode": 14, "training": 14, "launch-bound": 10},
    nominal=Rates(989.5e12, 4.8e12),  # datasheet of the H200
    launch_seconds=15e-6,
)
# Small enough for two slow cores, as a functional check.
CPU = Ranges(
    device="cpu",
    tokens=(32, 1024),
    batch=(1, 4),
    heads=(1, 8),
    dims=(64, 128),
    dtype=torch.float32,
    max_flops=2e9,
    max_bytes=5e8,
    quotas={"prefill": 4, "decode": 3, "training": 3, "launch-bound": 2},
    nominal=Rates(50e9, 10e9),
    launch_seconds=15e-6,
)


def on_a_gpu(ranges: Ranges) -> Ranges:
    """Return the same ranges for a GPU, in its dtype."""
    return replace(ranges, device=GPU.device, dtype=GPU.dtype)


def draw(ranges: Ranges, *, seed: int = SEED, known: Iterable[Piece] = ()) -> dict[Shape, Regime]:
    """Draw shapes until the quota of every regime is full, except those too large or `known` to a calibration."""
    generator = random.Random(seed)
    timed = {_place(piece) for piece in known if isinstance(piece, AttentionCore)}
    found: dict[Shape, Regime] = {}
    missing = dict(ranges.quotas)
    for _ in range(MAX_DRAWS):
        shape = _one(generator, ranges)
        work = shape.work(ranges.dtype)
        regime = regime_of(shape, work, ranges)
        if not missing[regime] or shape in found or not fits(shape, work, ranges):
            continue
        if any(_place(piece) in timed for piece in work.pieces if isinstance(piece, AttentionCore)):
            continue
        found[shape] = regime
        missing[regime] -= 1
        if not any(missing.values()):
            return _in_turns(found)
    raise OptionError(f"{MAX_DRAWS} draws must fill the quotas, got {missing} missing; widen the ranges")


def roofline(work: Work, flops: float, bandwidth: float) -> float:
    """Return the classic roofline time: the longer of all FLOPs at one rate and all bytes at another."""
    return max(work.flops / flops, work.bytes / bandwidth)


def regime_of(shape: Shape, work: Work, ranges: Ranges) -> Regime:
    """Return the phase, or launch-bound if the roofline of the datasheet is shorter than the launches."""
    promised = roofline(work, ranges.nominal.flops, ranges.nominal.bandwidth)
    return "launch-bound" if promised < ranges.launch_seconds * work.launches else shape.phase


def fits(shape: Shape, work: Work, ranges: Ranges) -> bool:
    """Return True if a call is neither too long nor too large."""
    pairs = shape.tokens**2
    flops, moved = work.flops, work.bytes
    for piece in work.pieces:
        if isinstance(piece, AttentionCore) and route(piece, ranges.device) == "masked":
            flops += int(piece.flops * (shape.batch * pairs / piece.pairs - 1))
            moved += MASK_TRAFFIC * pairs if piece.direction == "forward" else 0
    return flops <= ranges.max_flops and moved <= ranges.max_bytes


def _in_turns(found: Mapping[Shape, Regime]) -> dict[Shape, Regime]:
    """Return the shapes with regimes taking turns, so that a run that is cut short has some of each."""
    queues = [[shape for shape, of in found.items() if of == regime] for regime in REGIMES]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    return {shape: found[shape] for shape in turns if shape is not None}


def _one(generator: random.Random, ranges: Ranges) -> Shape:
    heads = _log_uniform(generator, ranges.heads)
    ratio = generator.choice([ratio for ratio in range(1, min(heads, 16) + 1) if heads % ratio == 0])
    tokens = max(MULTIPLE, _log_uniform(generator, ranges.tokens) // MULTIPLE * MULTIPLE)
    window = None
    if generator.random() < 0.5 and tokens > 2 * SHORTEST_WINDOW:
        window = _log_uniform(generator, (SHORTEST_WINDOW, tokens // 2))
    batch, dim = _log_uniform(generator, ranges.batch), generator.choice(ranges.dims)
    return Shape(generator.choice(PHASES), batch, heads, heads // ratio, dim, tokens, window)


def _log_uniform(generator: random.Random, between: tuple[int, int]) -> int:
    low, high = between
    return min(high, int(math.exp(generator.uniform(math.log(low), math.log(high + 1)))))


def _place(core: AttentionCore) -> tuple[object, ...]:
    return core.batch, core.heads, core.kv_heads, core.queries, core.keys, core.head_dim, core.left

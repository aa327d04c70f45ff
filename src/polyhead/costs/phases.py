"""Costs of one phase over all layers of a model: FLOPs, bytes moved, memory, and predicted time."""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from polyhead.costs.cost import layer_work
from polyhead.costs.descriptions import describe
from polyhead.costs.layouts.model_layout import ModelLayout
from polyhead.costs.memory import MemoryEstimate, estimate_memory
from polyhead.costs.options import Phase
from polyhead.costs.recording.recorder import Form
from polyhead.costs.timing.machine import Machine
from polyhead.costs.timing.predict import Prediction, predict
from polyhead.costs.work import MatrixFlops, Work
from polyhead.costs.workload import Workload
from polyhead.layers.config import AttentionConfig
from polyhead.layers.latent.config import LatentConfig

USABLE = 0.8  # of a machine's memory; the rest is for activations outside attention, logits and the CUDA context
Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class PhaseSizes:
    """Sequences and tokens of each, and the dtypes of the layers and of their cache."""

    batch: int
    context: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Timing:
    """Predicted seconds of a phase: total, by stage, and the resource that bounds them.

    The stage "launch" is the time the device waits for the host to launch kernels; the other stages are device time.
    """

    seconds: float
    bound: str  # of most of the time, see `Prediction.bound`
    stages: dict[str, float]

    @property
    def device_seconds(self) -> float:
        """Device time without launch overhead, as under a CUDA graph."""
        return self.seconds - self.stages.get("launch", 0.0)

    @classmethod
    def of(cls, predictions: Sequence[Prediction]) -> Timing:
        """Sum the predictions of consecutive layers."""
        stages: dict[str, float] = {}
        bounds: dict[str, float] = {}
        for prediction in predictions:
            for stage, seconds in prediction.stages.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
            bounds[prediction.bound] = bounds.get(prediction.bound, 0.0) + prediction.seconds
        total = sum(prediction.seconds for prediction in predictions)
        waiting = total - sum(stages.values())
        if waiting > 1e-9 * total:
            stages["launch"] = waiting
        return cls(total, max(bounds, key=lambda bound: bounds[bound]), stages)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """Costs of one phase: a training step, the prefill of a context, or the decoding of its last token.

    `flops` and `exponentials` include the backward pass of a training step. `bytes` is the minimum traffic between
    memory and chip by stage; scores, softmax and values form one stage, `attention`, since they are fused. `fused` and
    `materialised` are the memory with fused and with materialised attention, where caches store every token;
    `rolling_cache` is the size of the caches if those of windowed layers are rolling. `other_weights` are the bytes of
    the weights outside attention, and of their gradients in training; `optimizer_state` is that of AdamW in training,
    8 bytes per parameter of the whole model. Both are 0 if the number of parameters outside attention is unknown.
    """

    phase: Phase
    flops: MatrixFlops
    exponentials: int
    bytes: dict[str, int]
    launches: int
    fused: MemoryEstimate
    materialised: MemoryEstimate
    rolling_cache: int
    timing: Timing | None = None
    other_weights: int = 0
    optimizer_state: int = 0

    @property
    def needed(self) -> int:
        """Peak memory of fused attention, the weights of the rest of the model, and the optimizer's state."""
        return self.fused.total + self.other_weights + self.optimizer_state

    def verdict(self, memory_bytes: int) -> Verdict:
        """Return whether `needed` fits into a memory, see `verdict`."""
        return verdict(self.needed, memory_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def rolling_total(self) -> int:
        """Peak memory of fused attention with rolling caches in windowed layers."""
        return self.fused.total - self.fused.cache + self.rolling_cache

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: matrix FLOPs per byte moved."""
        return self.flops.total / self.total_bytes if self.total_bytes else 0.0


def verdict(needed: int, memory_bytes: int) -> Verdict:
    """Return "fits" if at most 80% of the memory is needed, "does not fit" if more than all of it, else "tight"."""
    if needed > memory_bytes:
        return "does not fit"
    return "fits" if needed <= USABLE * memory_bytes else "tight"


def plan_phase(model: ModelLayout, phase: Phase, sizes: PhaseSizes, machine: Machine | None = None) -> PhasePlan:
    """Compute the costs of one phase over all layers; times need a `machine` with rates in the dtype of the layers."""
    works = phase_works(model, phase, sizes)
    timing = None
    if machine is not None and sizes.dtype in machine.dtypes:
        timing = Timing.of([predict(work, machine) for work in works])
    moved: dict[str, int] = {}
    for work in works:
        for stage in work.stages:
            moved[stage] = moved.get(stage, 0) + work.only(stage).bytes
    return PhasePlan(
        phase=phase,
        flops=sum((work.matrix_flops for work in works), MatrixFlops()),
        exponentials=sum(work.exponentials for work in works),
        bytes=moved,
        launches=sum(work.launches for work in works),
        fused=_phase_memory(model, phase, sizes, machine),
        materialised=_phase_memory(model, phase, sizes, machine, form="materialised"),
        rolling_cache=rolling_cache_bytes(model, sizes) if has_cache(model, phase, sizes.context) else 0,
        timing=timing,
        **_outside(model, phase, sizes.dtype),
    )


class Need(NamedTuple):
    """Peak memory of a phase at one batch and context.

    `least` is the part that grows with batch and context whichever kernels are selected; `kernel_choices` are
    `MemoryEstimate.kernel_choices`.
    """

    bytes: int
    least: int
    kernel_choices: tuple[Hashable, ...]


def largest_fitting(at: Callable[[int], Need], machine: Machine, limit: int = 1 << 32) -> int:
    """Return the largest batch or context up to `limit` whose bytes fit (`verdict`), 0 if there is none.

    A smaller one may not fit: memory drops where larger calls are served by a kernel that needs less, such as one that
    reads a sliding window without a mask tensor. Between two sizes of equal kernels it grows.

    >>> from polyhead.layers import MultiHeadConfig
    >>> model, dtype = ModelLayout.of(MultiHeadConfig(512, 8, causal=True), 4), torch.bfloat16
    >>> machine = Machine.load("nvidia-l4")
    >>> def at(batch):
    ...     return need(model, "decode", PhaseSizes(batch, 8192, dtype, dtype), machine)
    >>> largest_fitting(at, machine)
    285
    """
    at, usable = functools.cache(at), USABLE * machine.memory_bytes

    def largest(first: int, last: int) -> int:
        if at(first).least > usable:
            return 0
        if at(first).kernel_choices == at(last).kernel_choices:
            fitting = bisect.bisect_right(range(first, last + 1), usable, key=lambda size: at(size).bytes)
            return first - 1 + fitting if fitting else 0
        middle = (first + last) // 2
        return largest(middle + 1, last) or largest(first, middle)

    return largest(1, limit)


def need(model: ModelLayout, phase: Phase, sizes: PhaseSizes, machine: Machine) -> Need:
    """Return the memory of a phase, `PhasePlan.needed`, without the rest of the plan."""
    memory, outside = _phase_memory(model, phase, sizes, machine), sum(_outside(model, phase, sizes.dtype).values())
    least = memory.parameters + memory.gradients + memory.cache + memory.inputs + outside
    return Need(memory.total + outside, least, memory.kernel_choices)


def _outside(model: ModelLayout, phase: Phase, dtype: torch.dtype) -> dict[str, int]:
    return outside_bytes(model.other_parameters, model.parameters.total, phase, dtype)


def outside_bytes(others: int | None, attention: int, phase: Phase, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of a phase that are not attention's, by field of `PhasePlan`.

    Args:
        others: parameters outside attention, None if unknown.
        attention: parameters of attention, whose optimizer state counts as well.
        phase: the phase.
        dtype: dtype of the parameters.
    """
    if others is None:
        return {"other_weights": 0, "optimizer_state": 0}
    weights = others * dtype.itemsize
    if phase != "training":
        return {"other_weights": weights, "optimizer_state": 0}
    return {"other_weights": 2 * weights, "optimizer_state": 8 * (attention + others)}  # two float32 moments


def _phase_memory(
    model: ModelLayout, phase: Phase, sizes: PhaseSizes, machine: Machine | None, form: Form = "fused"
) -> MemoryEstimate:
    options = call_options(model, phase, sizes)
    options |= {"form": form, "device": "cuda" if machine is None else machine.device}
    groups = (estimate_memory(group.config, **options, layers=group.layers) for group in model.groups)
    return functools.reduce(operator.add, groups)


def phase_works(model: ModelLayout, phase: Phase, sizes: PhaseSizes) -> list[Work]:
    """Return the work of each kind of layer in one phase."""
    options = call_options(model, phase, sizes)
    return [layer_work(group.config, **options, layers=group.layers) for group in model.groups]


def rolling_cache_bytes(model: ModelLayout, sizes: PhaseSizes) -> int:
    """Return the cache bytes of all layers, with rolling caches in the layers that support them (`can_roll`).

    A rolling cache stores the tokens of the window, any other cache all tokens.

    >>> from polyhead.layers import MultiHeadConfig
    >>> model = ModelLayout.of(MultiHeadConfig(64, 4, causal=True, window=128), 3)
    >>> rolling_cache_bytes(model, PhaseSizes(1, 1000, torch.bfloat16, torch.bfloat16)) == 3 * 128 * 2 * 64 * 2
    True
    """
    total = 0
    for group in model.groups:
        per_token = describe(group.config).cache_bytes_per_token(sizes.cache_dtype)
        window = getattr(group.config, "window", None) if can_roll(group.config, sizes.cache_dtype) else None
        total += group.layers * per_token * (sizes.context if window is None else min(sizes.context, window))
    return sizes.batch * total


def can_roll(config: AttentionConfig, cache_dtype: torch.dtype) -> bool:
    """Return True for layers with a window and a cache that can roll: not int8 and not latent."""
    windowed = getattr(config, "window", None) is not None
    return windowed and cache_dtype is not torch.int8 and not isinstance(config, LatentConfig)


def call_options(model: ModelLayout, phase: Phase, sizes: PhaseSizes) -> dict[str, Any]:
    """Return the arguments of `layer_work` and `estimate_memory` that all layers share."""
    batch, context = sizes.batch, sizes.context
    work = {
        "training": lambda: Workload.training_step(context, batch=batch),
        "prefill": lambda: Workload.prefill(context, batch=batch),
        "decode": lambda: Workload.decode(context - 1, batch=batch),
    }[phase]()
    dtypes = {"dtype": sizes.dtype, "cache_dtype": sizes.cache_dtype}
    return {"work": work, "cached": has_cache(model, phase, context), **dtypes}


def has_cache(model: ModelLayout, phase: Phase, context: int) -> bool:
    return model.is_causal if phase == "prefill" else phase == "decode" and context > 1

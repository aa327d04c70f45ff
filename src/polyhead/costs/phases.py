"""One phase of all layers of a model: what it computes, moves and holds, and how long that takes on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyhead.costs.cost import CostEstimate, MatrixFlops, estimate_cost
from polyhead.costs.layer_work import layer_work
from polyhead.costs.layouts.model import ModelLayout
from polyhead.costs.memory import MemoryEstimate, estimate_memory
from polyhead.costs.timing.machine import Machine
from polyhead.costs.timing.predict import Prediction, predict
from polyhead.costs.work import Phase, Work
from polyhead.costs.workload import Workload
from polyhead.layers.config import AttentionConfig
from polyhead.layers.latent.config import LatentConfig


@dataclass(frozen=True, slots=True)
class Timing:
    """Predicted seconds of a phase: in all, by stage, and what they are bound by.

    The stage "launch" is what the device waits for the host that issues its kernels; the others are its work.
    """

    seconds: float
    bound: str
    stages: dict[str, float]

    @property
    def working(self) -> float:
        """Seconds that the device works: all there would be if the kernels were issued at once, as in a CUDA graph."""
        return self.seconds - self.stages.get("launch", 0.0)

    @classmethod
    def of(cls, predictions: Sequence[Prediction]) -> Timing:
        """Of layers that follow one another."""
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
    """One phase of all layers: a training step, the prefill of a whole context, or the token that completes it.

    `flops` and `exponentials` have the backward in them where there is one. `bytes` are moved between memory and chip,
    by stage and at the least; scores, softmax and values are one stage there, `attention`, since they are fused.
    `fused` and `materialised` have caches of every token; `rolling_cache` are the bytes of caches of which those of
    windowed layers roll.
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

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def rolling_total(self) -> int:
        """Memory at the peak of fused attention, with caches that roll where there is a window."""
        return self.fused.total - self.fused.cache + self.rolling_cache

    @property
    def intensity(self) -> float:
        """FLOPs of matrix products a byte moved."""
        return self.flops.total / self.total_bytes if self.total_bytes else 0.0


def plan_phase(
    model: ModelLayout,
    phase: Phase,
    batch: int,
    context: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    machine: Machine | None = None,
) -> PhasePlan:
    """One phase of all layers."""
    work, cached = workload_of(phase, batch, context, cached=is_causal(model))
    options: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype}
    device = "cuda" if machine is None else machine.device
    costs: list[CostEstimate] = []
    works: list[Work] = []
    memory: dict[str, MemoryEstimate | None] = {"fused": None, "materialised": None}
    for group in model.groups:
        costs.append(estimate_cost(group.config, work, **options))
        works.append(layer_work(group.config, work, **options, cached=cached, layers=group.layers))
        for form, before in memory.items():
            found = estimate_memory(
                group.config,
                work,
                form=form,  # type: ignore[arg-type]
                cached=cached,
                layers=group.layers,
                device=device,
                **options,
            )
            memory[form] = found if before is None else before + found
    flops = MatrixFlops()
    for group, cost in zip(model.groups, costs, strict=True):
        flops = flops + (cost.forward + cost.backward).times(group.layers)
    moved: dict[str, int] = {}
    for done in works:
        for stage in done.stages:
            moved[stage] = moved.get(stage, 0) + done.only(stage).bytes
    fused, materialised = memory["fused"], memory["materialised"]
    assert fused is not None and materialised is not None
    return PhasePlan(
        phase=phase,
        flops=flops,
        exponentials=sum(done.exponentials for done in works),
        bytes=moved,
        launches=sum(done.launches for done in works),
        fused=fused,
        materialised=materialised,
        rolling_cache=rolling_cache_bytes(model, cache_dtype, batch, context) if cached else 0,
        timing=None if machine is None else Timing.of([predict(done, machine) for done in works]),
    )


def rolling_cache_bytes(model: ModelLayout, dtype: torch.dtype, batch: int, context: int) -> int:
    """Bytes of the caches of all layers: those of the window where a `RollingCache` can hold them, of all tokens else.

    >>> from polyhead.layers.config import MultiHeadConfig
    >>> model = ModelLayout.of(MultiHeadConfig(64, 4, causal=True, window=128), 3)
    >>> rolling_cache_bytes(model, torch.bfloat16, 1, 1000) == 3 * 128 * 2 * 64 * 2
    True
    """
    held = 0
    for group in model.groups:
        per_token = estimate_cost(group.config, Workload.cross(1, 1), cache_dtype=dtype).cache_bytes_per_token
        window = getattr(group.config, "window", None) if can_roll(group.config, dtype) else None
        held += group.layers * per_token * (context if window is None else min(context, window))
    return batch * held


def can_roll(config: AttentionConfig, cache_dtype: torch.dtype) -> bool:
    """Whether a layer's tokens see no more than a window, and a rolling cache holds that: none has int8 or latents."""
    windowed = getattr(config, "window", None) is not None
    return windowed and cache_dtype is not torch.int8 and not isinstance(config, LatentConfig)


def workload_of(phase: Phase, batch: int, context: int, *, cached: bool = True) -> tuple[Workload, bool]:
    """What a phase asks of each layer, and whether it writes a cache."""
    if phase == "training":
        return Workload.training_step(context, batch=batch), False
    if phase == "prefill":
        return Workload.prefill(context, batch=batch), cached
    return Workload.decode(context - 1, batch=batch), context > 1


def is_causal(model: ModelLayout) -> bool:
    """Whether tokens see no later ones, so that a token can be decoded behind others."""
    return all(getattr(group.config, "causal", False) for group in model.groups)

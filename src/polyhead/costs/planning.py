"""Plan of a model's attention: counted costs of each phase, and predicted times on a machine."""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polyhead.costs.cost import estimate_cost
from polyhead.costs.descriptions import describe
from polyhead.costs.layout_warnings import Warned, warnings_of
from polyhead.costs.layouts.layout_sources import read_layout
from polyhead.costs.layouts.model_layout import ModelLayout
from polyhead.costs.memory import memory_caveats
from polyhead.costs.options import PHASES, Phase, Ranks, check_sizes, parse_phases
from polyhead.costs.parameters import ParameterIdentity, Parameters, four_squares
from polyhead.costs.phases import (
    Need,
    PhasePlan,
    PhaseSizes,
    Verdict,
    can_roll,
    largest_fitting,
    need,
    plan_phase,
    rolling_cache_bytes,
)
from polyhead.costs.quantities import dtype_name
from polyhead.costs.ranks_plan import RanksPlan
from polyhead.costs.timing.machine import Machine, MachineSummary
from polyhead.costs.workload import Workload
from polyhead.errors import DtypeError, OptionError
from polyhead.layers.config import AttentionConfig

COMPUTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes that layers compute in
CONTEXT = 4096  # tokens, or the model's maximum if that is less
_LONGEST = 1 << 32  # upper limit of the search for a crossover


@dataclass(frozen=True, slots=True)
class Fit:
    """Peak memory of a phase and the memory of the plan's machine, in bytes, and what would fit.

    `needed_bytes` is `PhasePlan.needed`: attention and, if the number of parameters outside it is known, their weights,
    and in training their gradients and the state of AdamW for all parameters. `verdict` is "fits" if that is at most
    80% of the machine's memory, since other activations, logits and the CUDA context are not counted; training assumes
    activation checkpointing outside attention.

    `max_batch` is the largest batch that fits at the plan's context, `max_context` the largest context, up to the
    plan's, that fits at its batch; 0 if there is none. A smaller size may not fit, if it runs on a kernel that needs
    more memory. `rolling_bytes` is the peak with rolling caches in windowed layers, `int8_bytes` with an int8 cache;
    None without a cache, or if it is of 8 bits or cannot be.
    """

    phase: Phase
    verdict: Verdict
    needed_bytes: int
    rolling_bytes: int
    machine_bytes: int
    max_batch: int
    max_context: int
    int8_bytes: int | None


@dataclass(frozen=True)
class Plan:
    """Costs of a model's attention layers; embeddings and feed-forward layers are excluded.

    `crossover` is the shortest context at which scores and values cost more FLOPs than all projections, None if there
    is none (a sliding window). All totals cover all layers; `identity` describes the most common layer. `cache_bytes`
    covers every token in every layer; `rolling_cache_bytes` is smaller if windowed layers use rolling caches.
    `warnings` are collected over all kinds of layers and all phases; `fits` has one entry per phase if the plan has a
    machine. All of these are those of one device that has everything; `ranks` is the plan over several, if requested.
    """

    model: ModelLayout
    batch: int
    context: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    machine: MachineSummary | None
    parameters: Parameters
    identity: ParameterIdentity
    cache_bytes_per_token: int
    cache_bytes: int
    rolling_cache_bytes: int
    crossover: int | None
    phases: tuple[PhasePlan, ...]
    fits: tuple[Fit, ...] = ()
    warnings: tuple[Warned, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: RanksPlan | None = None

    def __getitem__(self, phase: str) -> PhasePlan:
        for phase_plan in self.phases:
            if phase_plan.phase == phase:
                return phase_plan
        raise OptionError(f"phase must be one of this plan's, {', '.join(x.phase for x in self.phases)}; got {phase!r}")

    @property
    def sizes(self) -> PhaseSizes:
        """Batch, context and dtypes of every phase."""
        return PhaseSizes(self.batch, self.context, self.dtype, self.cache_dtype)

    @property
    def is_timed(self) -> bool:
        """True if times are predicted: there is a machine, and it has rates in the plan's dtype."""
        return self.phases[0].timing is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-serialisable values, including totals."""
        phases = [
            {
                **dataclasses.asdict(x),
                "flops": {**dataclasses.asdict(x.flops), "total": x.flops.total},
                "total_bytes": x.total_bytes,
                "rolling_total": x.rolling_total,
                "intensity": x.intensity,
                "fused": x.fused.to_dict(),
                "materialised": x.materialised.to_dict(),
            }
            for x in self.phases
        ]
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "model": self.model.to_dict(),
            "dtype": dtype_name(self.dtype),
            "cache_dtype": dtype_name(self.cache_dtype),
            "machine": None if self.machine is None else dataclasses.asdict(self.machine),
            "parameters": {**dataclasses.asdict(self.parameters), "total": self.parameters.total},
            "identity": {**dataclasses.asdict(self.identity), "holds": self.identity.holds},
            "phases": phases,
            "fits": [dataclasses.asdict(fit) for fit in self.fits],
            "warnings": [warning._asdict() for warning in self.warnings],
            "notes": [*self.model.notes, *self.notes],
            "ranks": None if self.ranks is None else self.ranks.to_dict(),
        }


def plan(
    model: ModelLayout | AttentionConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    phases: Iterable[str] | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    beyond: bool = False,
    ranks: Ranks | None = None,
) -> Plan:
    """Count every phase of a model's attention, and predict times if a `machine` is passed.

    Args:
        model: a known model ("llama3.1-8b"), a config or its file, a model's folder or name (see
            `polyhead.costs.read_layout`), or a layout (`polyhead.costs.from_sizes`).
        context: tokens per sequence: of a training step, of a prefill, and of the cache after the decoded token;
            default: 4096, or the model's maximum if smaller.
        dtype: dtype of the layers; default: the model's, or bfloat16, or one the machine has rates in.
        cache_dtype: dtype of the cache; default: the model's, or `dtype`. torch.int8 adds float32 scales.
        phases: any of training, prefill, decode; default: all that the model supports.
        machine: a machine, its name (`polyhead.costs.timing.machine_files.list_machines`) or its file; without rates
            in an explicit `dtype`, memory is compared with its own and no times are predicted.
        beyond: allow a context longer than the model's maximum.
        batch: sequences; of each rank, if FSDP2 has several.
        ranks: devices over which the layers are distributed (`polyhead.costs.Ranks`): adds what a rank stores and the
            bytes that it sends in every collective.

    Returns:
        The plan: one entry per phase, with tables, charts and JSON.

    Raises:
        OptionError: the config cannot be read, or a size is out of range.

    >>> planned = plan("llama3.1-8b", context=8192)
    >>> planned.parameters.total, planned.cache_bytes_per_token, planned.crossover
    (1342177280, 131072, 10240)
    """
    model = model if isinstance(model, ModelLayout) else read_layout(model)
    machine = Machine.load(machine) if isinstance(machine, str | os.PathLike) else machine
    context = min(CONTEXT, model.context or CONTEXT) if context is None else context
    _check_sizes(model, batch, context, beyond)
    dtype, notes = layer_dtype(dtype, model.dtype, machine)
    cache_dtype = cache_dtype or model.cache_dtype or dtype
    selected = _phases(model, phases)
    cached = model.is_causal
    per_token = cache_bytes_per_token(model, cache_dtype) if cached else 0
    windowed = [group.config for group in model.groups if getattr(group.config, "window", None)]
    if any(can_roll(config, cache_dtype) for config in windowed):
        notes.append("cache bytes count all tokens; in windowed layers a rolling cache stores only the window")
    elif windowed:
        notes.append("cache bytes count all tokens; latent and int8 caches cannot roll")
    device = "cuda" if machine is None else machine.device
    notes += dict.fromkeys(doubt for group in model.groups for doubt in memory_caveats(group.config, device=device))
    warnings = (
        warning
        for group in model.groups
        for phase in selected
        for warning in warnings_of(group.config, context=context, batch=batch, phase=phase, machine=machine)
    )
    sizes = PhaseSizes(batch, context, dtype, cache_dtype)
    planned = tuple(plan_phase(model, phase, sizes, machine) for phase in selected)
    over_ranks = None
    if ranks is not None:
        from polyhead.costs.over_ranks import plan_ranks  # imports torch.distributed.tensor, which takes a second

        over_ranks = plan_ranks(model, ranks, selected, sizes, machine)
        notes += over_ranks.notes
    fits = () if machine is None else tuple(_fit(model, x, sizes, machine) for x in planned)
    return Plan(
        model=model,
        batch=batch,
        context=context,
        dtype=dtype,
        cache_dtype=cache_dtype,
        machine=None if machine is None else machine.summary,
        parameters=model.parameters,
        identity=four_squares(model.config),
        cache_bytes_per_token=per_token,
        cache_bytes=batch * context * per_token,
        rolling_cache_bytes=rolling_cache_bytes(model, sizes) if cached else 0,
        crossover=crossover(model),
        phases=planned,
        fits=fits,
        warnings=tuple(dict.fromkeys(warnings)),
        notes=tuple(notes),
        ranks=over_ranks,
    )


def _fit(model: ModelLayout, phase: PhasePlan, sizes: PhaseSizes, machine: Machine) -> Fit:
    def at(**changed: Any) -> Need:
        return need(model, phase.phase, dataclasses.replace(sizes, **changed), machine)

    can_be_int8 = all(describe(group.config).cache_scales is not None for group in model.groups)
    int8 = None
    if phase.fused.cache and sizes.cache_dtype.itemsize > 1 and can_be_int8:
        int8 = at(cache_dtype=torch.int8).bytes
    return Fit(
        phase=phase.phase,
        verdict=phase.verdict(machine.memory_bytes),
        needed_bytes=phase.needed,
        rolling_bytes=phase.needed - phase.fused.cache + phase.rolling_cache,
        machine_bytes=machine.memory_bytes,
        max_batch=largest_fitting(lambda batch: at(batch=batch), machine),
        max_context=largest_fitting(lambda context: at(context=context), machine, sizes.context),
        int8_bytes=int8,
    )


def layer_dtype(
    requested: torch.dtype | None, default: torch.dtype | None = None, machine: Machine | None = None
) -> tuple[torch.dtype, list[str]]:
    """Return the dtype to plan layers in, and notes if it differs from the model's.

    A requested dtype is used or refused; if the machine has no rates in it, a note says that times are not predicted.
    Otherwise it is `default` (the model's), or bfloat16, replaced by one that the machine has rates in where necessary.
    """
    if requested is not None:
        if requested not in COMPUTED:
            *others, last = map(dtype_name, COMPUTED)
            computed = f"{', '.join(others)} or {last}"
            raise DtypeError(
                f"dtype must be {computed}, got {dtype_name(requested)}; "
                "set a smaller dtype for the cache alone with --cache-dtype (cache_dtype=...)"
            )
        if machine is None or requested in machine.dtypes:
            return requested, []
        return requested, [f"{_lacking(machine, requested)}: memory is planned, times are not predicted"]
    dtype, notes = default or torch.bfloat16, []
    if dtype not in COMPUTED:
        notes.append(f"layers cannot compute in {dtype_name(dtype)}: planned in bfloat16 instead")
        dtype = torch.bfloat16
    if machine is not None and dtype not in machine.dtypes:
        notes.append(f"{_lacking(machine, dtype)}: planned in {dtype_name(machine.dtypes[0])} instead")
        dtype = machine.dtypes[0]
    return dtype, notes


def _lacking(machine: Machine, dtype: torch.dtype) -> str:
    lacks = "was not calibrated" if machine.kind == "measured" else "has no rate"
    return f"{machine.name} {lacks} in {dtype_name(dtype)}"


def cache_bytes_per_token(model: ModelLayout, dtype: torch.dtype) -> int:
    """Return the cache bytes of one token, summed over all layers."""
    return sum(group.layers * describe(group.config).cache_bytes_per_token(dtype) for group in model.groups)


def crossover(model: ModelLayout) -> int | None:
    """Return the shortest context at which scores and values cost more FLOPs than projections in a forward pass."""

    def overtakes(tokens: int) -> bool:
        quadratic = linear = 0
        for group in model.groups:
            flops = estimate_cost(group.config, Workload.forward(tokens)).forward
            quadratic += group.layers * (flops.scores + flops.values)
            linear += group.layers * (flops.projection + flops.mixing + flops.output)
        return quadratic > linear

    found = 1 + bisect.bisect_left(range(1, _LONGEST + 1), True, key=overtakes)
    return found if found <= _LONGEST else None


def _phases(model: ModelLayout, requested: Iterable[str] | None) -> tuple[Phase, ...]:
    supported = PHASES if model.is_causal else tuple(phase for phase in PHASES if phase != "decode")
    if requested is None:
        return supported
    phases = parse_phases(requested)
    if "decode" in phases and "decode" not in supported:
        raise OptionError(f"decode needs causal layers, got {model.name}, whose attention is bidirectional")
    return phases


def _check_sizes(model: ModelLayout, batch: int, context: int, beyond: bool) -> None:
    check_sizes(batch=batch, context=context)
    if model.context is not None and context > model.context and not beyond:
        raise OptionError(
            f"context must be at most {model.context:,} tokens for {model.name}, got {context:,}; "
            "use a shorter one, or allow it with --beyond (beyond=True)"
        )

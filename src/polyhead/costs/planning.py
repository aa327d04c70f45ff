"""A whole plan: what the attention of a model costs in each phase, counted, and timed where a machine was measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyhead.costs.cost import estimate_cost
from polyhead.costs.layout_warnings import Warned, warnings_of
from polyhead.costs.layouts.model import ModelLayout, dtype_name
from polyhead.costs.memory import MemoryEstimate, memory_doubts
from polyhead.costs.parameters import Identity, Parameters, count_parameters, four_squares
from polyhead.costs.phases import PhasePlan, can_roll, is_causal, plan_phase, rolling_cache_bytes
from polyhead.costs.quantities import size
from polyhead.costs.timing.machine import Machine
from polyhead.costs.work import PHASES, Phase
from polyhead.costs.workload import Workload
from polyhead.errors import DtypeError, OptionError

COMPUTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # the dtypes that layers compute in
_LONGEST = 1 << 32  # a crossover beyond it is none


@dataclass(frozen=True)
class Plan:
    """What the attention layers of a model cost; embeddings and feed-forward layers are not in it.

    `crossover` is the shortest context at which scores and values cost more FLOPs than all projections, None where they
    never do (a window). `parameters` and everything else is of all layers; `identity` is of the most common one.
    `cache_bytes` are of every token in every layer, `rolling_cache_bytes` are less where layers have a window and their
    caches roll. `warnings` are those of every kind of layer in every phase.
    """

    model: ModelLayout
    batch: int
    context: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    parameters: Parameters
    identity: Identity
    cache_bytes_per_token: int
    cache_bytes: int
    rolling_cache_bytes: int
    crossover: int | None
    phases: tuple[PhasePlan, ...]
    machine: str | None = None
    warnings: tuple[Warned, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, phase: str) -> PhasePlan:
        for found in self.phases:
            if found.phase == phase:
                return found
        raise OptionError(f"this plan has the phases {', '.join(x.phase for x in self.phases)}; got {phase!r}")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and words, totals among them."""
        phases = [
            {
                **dataclasses.asdict(x),
                "flops": {**dataclasses.asdict(x.flops), "total": x.flops.total},
                "total_bytes": x.total_bytes,
                "rolling_total": x.rolling_total,
                "intensity": x.intensity,
                "fused": _memory(x.fused),
                "materialised": _memory(x.materialised),
            }
            for x in self.phases
        ]
        return {
            "model": self.model.to_dict(),
            "batch": self.batch,
            "context": self.context,
            "dtype": dtype_name(self.dtype),
            "cache_dtype": dtype_name(self.cache_dtype),
            "machine": self.machine,
            "parameters": {**dataclasses.asdict(self.parameters), "total": self.parameters.total},
            "identity": {**dataclasses.asdict(self.identity), "holds": self.identity.holds},
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "cache_bytes": self.cache_bytes,
            "rolling_cache_bytes": self.rolling_cache_bytes,
            "crossover": self.crossover,
            "phases": phases,
            "warnings": [warning._asdict() for warning in self.warnings],
            "notes": [*self.model.notes, *self.notes],
        }


def plan_model(
    model: ModelLayout,
    *,
    context: int,
    batch: int = 1,
    dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    phases: Iterable[str] | None = None,
    machine: Machine | None = None,
    beyond: bool = False,
) -> Plan:
    """Count, and with a `machine` time, every phase of a model's attention.

    Args:
        context: tokens of a sequence: those of a training step, of a prefill, and of a cache with the decoded token.
        dtype: of the layers; what the model says or bfloat16 unless given, or what a machine knows instead.
        cache_dtype: of the cache; what the model says or `dtype` unless given. torch.int8 has scales beside it.
        phases: any of training, prefill, decode; all that there are by default.
        beyond: allow a context longer than the model was made for.

    >>> from polyhead.costs.layouts.reading import read_layout
    >>> plan = plan_model(read_layout("llama3.1-8b"), context=8192)
    >>> plan.parameters.total, plan.cache_bytes_per_token, plan.crossover
    (1342177280, 131072, 10240)
    """
    _check_sizes(model, batch, context, beyond)
    dtype, notes = layer_dtype(dtype, model.dtype, machine)
    cache_dtype = cache_dtype or model.cache_dtype or dtype
    wanted = _phases(model, phases)
    cached = is_causal(model)
    per_token = cache_bytes_per_token(model, cache_dtype) if cached else 0
    parameters = Parameters(0, 0, 0, 0, 0)
    for group in model.groups:
        parameters = parameters + count_parameters(group.config).times(group.layers)
    windowed = [group.config for group in model.groups if getattr(group.config, "window", None)]
    if any(can_roll(config, cache_dtype) for config in windowed):
        notes.append("cache bytes are of all tokens; a rolling cache keeps only those of the window in windowed layers")
    elif windowed:
        notes.append("cache bytes are of all tokens; no rolling cache holds latents or int8 numbers")
    device = "cuda" if machine is None else machine.device
    notes += dict.fromkeys(doubt for group in model.groups for doubt in memory_doubts(group.config, device=device))
    planned = tuple(plan_phase(model, phase, batch, context, dtype, cache_dtype, machine) for phase in wanted)
    if machine is not None:
        notes += [
            f"{phase.phase} takes more memory than {machine.name} has: {size(phase.fused.total)} of "
            f"{size(machine.memory_bytes)}{_rolled(phase)}"
            for phase in planned
            if phase.fused.total > machine.memory_bytes
        ]
    return Plan(
        model=model,
        batch=batch,
        context=context,
        dtype=dtype,
        cache_dtype=cache_dtype,
        parameters=parameters,
        identity=four_squares(model.config),
        cache_bytes_per_token=per_token,
        cache_bytes=batch * context * per_token,
        rolling_cache_bytes=rolling_cache_bytes(model, cache_dtype, batch, context) if cached else 0,
        crossover=crossover(model),
        phases=planned,
        machine=None if machine is None else machine.name,
        warnings=_warnings(model, context, batch, wanted, machine),
        notes=tuple(notes),
    )


def _rolled(phase: PhasePlan) -> str:
    """What is left of it where caches roll, in words; none where nothing does."""
    return "" if phase.rolling_total == phase.fused.total else f"; {size(phase.rolling_total)} with rolling caches"


def layer_dtype(
    requested: torch.dtype | None, said: torch.dtype | None = None, machine: Machine | None = None
) -> tuple[torch.dtype, list[str]]:
    """The dtype that layers are planned in, and notes of why it is another than a model says.

    One that is asked for is taken or refused. Otherwise it is what the model says, or bfloat16, or what the machine was
    calibrated in instead.
    """
    if requested is not None:
        if requested not in COMPUTED:
            raise DtypeError(
                f"layers compute in {_names(COMPUTED)}, got {dtype_name(requested)}; "
                "numbers of a cache may be smaller: name theirs with --cache-dtype (cache_dtype=...)"
            )
        return requested, []
    dtype, notes = said or torch.bfloat16, []
    if dtype not in COMPUTED:
        notes.append(f"no layer computes in {dtype_name(dtype)}: bfloat16 is planned instead")
        dtype = torch.bfloat16
    if machine is not None and dtype not in machine.dtypes:
        known = machine.dtypes[0]
        notes.append(
            f"{machine.name} was not calibrated in {dtype_name(dtype)}: {dtype_name(known)} is planned instead"
        )
        dtype = known
    return dtype, notes


def cache_bytes_per_token(model: ModelLayout, dtype: torch.dtype) -> int:
    """What a token leaves in the caches of all layers."""
    one = Workload.cross(1, 1)
    return sum(
        group.layers * estimate_cost(group.config, one, cache_dtype=dtype).cache_bytes_per_token
        for group in model.groups
    )


def crossover(model: ModelLayout) -> int | None:
    """The shortest context at which scores and values of a forward cost more FLOPs than its projections."""

    def overtakes(tokens: int) -> bool:
        squared = linear = 0
        for group in model.groups:
            flops = estimate_cost(group.config, Workload.forward(tokens)).forward
            squared += group.layers * (flops.scores + flops.values)
            linear += group.layers * (flops.projection + flops.mixing + flops.output)
        return squared > linear

    if not overtakes(_LONGEST):
        return None
    low, high = 0, _LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overtakes(middle) else (middle, high)
    return high


def _warnings(
    model: ModelLayout, context: int, batch: int, phases: Iterable[Phase], machine: Machine | None
) -> tuple[Warned, ...]:
    """Each warning once, however many kinds of layer and phases it is of."""
    found = (
        warnings_of(group.config, context=context, batch=batch, phase=phase, machine=machine)
        for group in model.groups
        for phase in phases
    )
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


def _phases(model: ModelLayout, wanted: Iterable[str] | None) -> tuple[Phase, ...]:
    possible = PHASES if is_causal(model) else tuple(phase for phase in PHASES if phase != "decode")
    if wanted is None:
        return possible
    found = tuple(dict.fromkeys(wanted))
    unknown = [phase for phase in found if phase not in PHASES]
    if unknown or not found:
        raise OptionError(f"a phase is one of {', '.join(PHASES)}; got {', '.join(map(repr, unknown)) or 'none'}")
    if "decode" in found and "decode" not in possible:
        raise OptionError(f"decoding needs layers that look back alone, got {model.name}, whose tokens see later ones")
    return tuple(phase for phase in PHASES if phase in found)


def _check_sizes(model: ModelLayout, batch: int, context: int, beyond: bool) -> None:
    for name, number in (("batch", batch), ("context", context)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise OptionError(f"{name} must be a positive integer, got {number!r}")
    if model.context is not None and context > model.context and not beyond:
        raise OptionError(
            f"{model.name} was made for contexts up to {model.context:,} tokens, got {context:,}; "
            "ask for a shorter one, or allow it with --beyond (beyond=True)"
        )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = (str(dtype_name(dtype)) for dtype in dtypes)
    return f"{', '.join(others)} or {last}"


def _memory(memory: MemoryEstimate) -> dict[str, int]:
    totals = {"weights": memory.weights, "activations": memory.activations, "total": memory.total}
    return {**dataclasses.asdict(memory), **totals}

"""A plan beside its alternatives: other contexts, machines, numbers of heads and of KV heads, and latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyhead.costs.choosing import LATENT_RANKS, Choices, choose, latent_layout
from polyhead.costs.curves import ContextPoint, HeadsPoint, can_have_other_heads, over_context, over_heads
from polyhead.costs.layout_warnings import Warned, warnings_of
from polyhead.costs.layouts.layout_sources import from_sizes
from polyhead.costs.layouts.model_layout import LayerGroup, ModelLayout
from polyhead.costs.options import Budget
from polyhead.costs.phases import PhasePlan, phase_works, plan_phase
from polyhead.costs.planning import Plan, cache_bytes_per_token
from polyhead.costs.timing.machine import Machine, MachineSummary
from polyhead.costs.timing.machine_files import list_machines
from polyhead.costs.timing.predict import predict
from polyhead.costs.work import Work
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.positions.config import RotaryConfig


@dataclass(frozen=True, slots=True)
class MachinePoint:
    """A plan on one machine: every phase at the plan's context, and device seconds by phase at those of the curves.

    Without rates in the plan's dtype, phases have no times and `curves` is empty.
    """

    machine: MachineSummary
    memory_bytes: int
    phases: tuple[PhasePlan, ...]
    curves: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LayoutPoint:
    """The plan with another number of KV heads, or with latents; `kv_heads` is None for latents."""

    name: str
    kv_heads: int | None
    is_planned: bool
    parameters: int
    cache_bytes_per_token: int
    phases: tuple[PhasePlan, ...]
    warnings: tuple[Warned, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plan at other contexts, on other machines and with other layouts.

    `choices` are layouts of the same width with at most the same cache per token.
    """

    contexts: tuple[ContextPoint, ...]
    machines: tuple[MachinePoint, ...]
    layouts: tuple[LayoutPoint, ...]
    heads: tuple[HeadsPoint, ...]
    choices: Choices | None


def compare(plan: Plan, machine: Machine | None = None) -> Comparison:
    """Compare a plan with other contexts, all known machines and other layouts; `machine` is that of the plan.

    Raises:
        OptionError: the times of the plan are those of another machine, or of one where none is given.
    """
    if (None if machine is None else machine.summary) != plan.machine:
        given = "none" if machine is None else machine.name
        planned = "no machine" if plan.machine is None else plan.machine.name
        raise OptionError(f"a plan is compared on its own machine: it is for {planned}, got {given}")
    contexts = over_context(plan, machine)
    machines = {name: Machine.load(name) for name in list_machines()}
    if machine is not None:
        machines[machine.name] = machine  # of a file, or one that hides another of its name
    sizes = [replace(plan.sizes, context=point.context) for point in contexts]
    works = [[phase_works(plan.model, x.phase, each) for each in sizes] for x in plan.phases]
    return Comparison(
        contexts,
        tuple(_on_machine(plan, other, works) for other in machines.values()),
        over_kv_heads(plan, machine),
        over_heads(plan, machine),
        _choices(plan, machine),
    )


def _on_machine(plan: Plan, machine: Machine, works: Sequence[Sequence[Sequence[Work]]]) -> MachinePoint:
    """Return the plan on a machine; `works` are those of each phase at each context."""
    phases = tuple(plan_phase(plan.model, x.phase, plan.sizes, machine) for x in plan.phases)
    curves = tuple(
        tuple(sum(predict(work, machine).device_seconds for work in layers) for layers in by_context)
        for by_context in (works if plan.dtype in machine.dtypes else ())
    )
    return MachinePoint(machine.summary, machine.memory_bytes, phases, curves)


def over_kv_heads(plan: Plan, machine: Machine | None = None) -> tuple[LayoutPoint, ...]:
    """Plan the same heads with every number of KV heads from MHA to MQA that halves it, and latents of `choose`.

    A model with latents is compared with multi-head attention of its heads. Empty for other variants, and for layers
    with different numbers of heads.
    """
    model = _with_kv_heads(plan.model)
    heads = {group.config.layout.num_heads for group in model.groups}  # type: ignore[attr-defined]
    if not can_have_other_heads(model) or len(heads) != 1:
        return ()
    (num_heads,) = heads
    own = {group.config.layout.num_kv_heads for group in model.groups}  # type: ignore[attr-defined]
    planned = own if model is plan.model else set()
    numbers = {num_heads >> shift for shift in range(num_heads.bit_length()) if num_heads % (1 << shift) == 0}
    numbers |= {1} | planned
    points = []
    for kv_heads in sorted(numbers, reverse=True):
        groups = tuple(
            LayerGroup(replace(group.config, num_kv_heads=kv_heads), group.layers)  # type: ignore[call-arg]
            for group in model.groups
        )
        name = "MHA" if kv_heads == num_heads else "MQA" if kv_heads == 1 else f"GQA-{kv_heads}"
        is_planned = planned == {kv_heads}
        points.append(_layout_point(plan, replace(model, groups=groups), name, kv_heads, machine, is_planned))
    if model is not plan.model:
        name = f"MLA-{plan.model.config.layout.kv_lora_rank}"  # type: ignore[attr-defined]
        points.append(_layout_point(plan, plan.model, name, None, machine, True))
    return (*points, *(_layout_point(plan, x, name, None, machine) for name, x in _latents(plan)))


def _with_kv_heads(model: ModelLayout) -> ModelLayout:
    """Return a model with latents as multi-head attention of the same heads with RoPE, any other as it is."""
    config = model.config
    if len(model.groups) > 1 or not isinstance(config, LatentConfig):
        return model
    heads, dim = config.layout.num_heads, config.layout.qk_nope_head_dim
    return from_sizes(config.layout.embed_dim, heads, head_dim=dim, layers=model.layers, rotary=True)


def _latents(plan: Plan) -> list[tuple[str, ModelLayout]]:
    """Return layouts with latents (MLA) of the plan's heads; none for windows, int8 caches, or without RoPE."""
    config, model = plan.model.config, plan.model
    uniform = len(model.groups) == 1 and isinstance(config, MultiHeadConfig)
    if not uniform or not model.is_causal or plan.cache_dtype is torch.int8:
        return []
    assert isinstance(config, MultiHeadConfig)
    if config.window is not None or not isinstance(config.positions, RotaryConfig):
        return []
    layout = config.layout
    sizes = (layout.embed_dim, layout.num_heads, layout.head_dim)
    return [(f"MLA-{rank}", latent_layout(*sizes, rank, model.layers)) for rank in LATENT_RANKS]


def _layout_point(
    plan: Plan, model: ModelLayout, name: str, kv_heads: int | None, machine: Machine | None, is_planned: bool = False
) -> LayoutPoint:
    sizes: dict[str, Any] = {"context": plan.context, "batch": plan.batch, "machine": machine}
    found = dict.fromkeys(warning for x in plan.phases for warning in warnings_of(model.config, phase=x.phase, **sizes))
    return LayoutPoint(
        name,
        kv_heads,
        is_planned,
        model.parameters.total,
        cache_bytes_per_token(model, plan.cache_dtype) if model.is_causal else 0,
        tuple(plan_phase(model, x.phase, plan.sizes, machine) for x in plan.phases),
        tuple(found),
    )


def _choices(plan: Plan, machine: Machine | None) -> Choices | None:
    """Return what `choose` finds at the plan's width, layers and context within its cache; None without a cache."""
    width = plan.model.config.layout.embed_dim  # type: ignore[attr-defined]
    if not plan.cache_bytes_per_token or width % 32:
        return None
    return choose(
        Budget(cache_bytes_per_token=plan.cache_bytes_per_token),
        d_model=width,
        layers=plan.model.layers,
        context=plan.context,
        batch=plan.batch,
        phase="decode",
        dtype=plan.dtype,
        cache_dtype=plan.cache_dtype,
        machine=machine if plan.is_timed else None,
        latents=plan.cache_dtype is not torch.int8,
    )

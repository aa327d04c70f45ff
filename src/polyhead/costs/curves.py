"""How a cost grows: over the length of the context, and over the number of heads at one width of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from polyhead.costs.layouts.model import LayerGroup, ModelLayout
from polyhead.costs.phases import PhasePlan, plan_phase
from polyhead.costs.planning import Plan
from polyhead.costs.timing.machine import Machine
from polyhead.errors import ShapeError
from polyhead.layers.config import MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig

SHORTEST, LONGEST = 128, 131072


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """Every phase of a plan at one length of the context."""

    context: int
    phases: tuple[PhasePlan, ...]


@dataclass(frozen=True, slots=True)
class HeadsPoint:
    """One phase of a plan with another number of heads, all of them together as wide as the model."""

    heads: int
    head_dim: int
    phase: PhasePlan


def over_context(plan: Plan, machine: Machine | None = None) -> tuple[ContextPoint, ...]:
    """From 128 tokens by powers of two to the model's longest context, or to 131,072, or as far as the plan goes."""
    longest = max(plan.context, plan.model.context or LONGEST)
    lengths = {min(SHORTEST, longest), plan.context, longest}
    length = SHORTEST
    while length < longest:
        lengths.add(length)
        length *= 2
    sizes = (plan.dtype, plan.cache_dtype, machine)
    return tuple(
        ContextPoint(context, tuple(plan_phase(plan.model, x.phase, plan.batch, context, *sizes) for x in plan.phases))
        for context in sorted(lengths)
    )


def over_heads(plan: Plan, machine: Machine | None = None, phase: str | None = None) -> tuple[HeadsPoint, ...]:
    """The plan's first phase, or another, over numbers of heads that double and that together are as wide as the model.

    Groups of heads that share keys stay as large as they are: one group is the fewest heads, then two, four and so on,
    as long as they divide the width. Empty where not even one group does, and for other arrangements than multi-head
    attention.
    """
    wanted = plan.phases[0].phase if phase is None else plan[phase].phase
    width = plan.model.config.layout.embed_dim  # type: ignore[attr-defined]
    found = []
    if not can_have_other_heads(plan.model):
        return ()
    heads = math.lcm(*(group.config.layout.group_size for group in plan.model.groups))  # type: ignore[attr-defined]
    # Channels turn in pairs, so there are no rotary heads of an odd width.
    rotary = any(isinstance(group.config.positions, RotaryConfig) for group in plan.model.groups)  # type: ignore[attr-defined]
    while width % heads == 0 and not (rotary and width // heads % 2):
        model = with_heads(plan.model, heads)
        made = plan_phase(model, wanted, plan.batch, plan.context, plan.dtype, plan.cache_dtype, machine)
        found.append(HeadsPoint(heads, width // heads, made))
        heads *= 2
    return tuple(found)


def can_have_other_heads(model: ModelLayout) -> bool:
    return all(type(group.config) is MultiHeadConfig and group.config.key_heads is None for group in model.groups)


def with_heads(model: ModelLayout, heads: int) -> ModelLayout:
    """The same model with so many heads, which together are as wide as it is, in groups as large as they are."""
    groups = []
    for group in model.groups:
        config = group.config
        assert isinstance(config, MultiHeadConfig)
        size, width = config.layout.group_size, config.embed_dim
        if heads < 1 or heads % size or width % heads:
            raise ShapeError(
                f"heads must be a multiple of {size}, which share a KV head, and divide the width {width}; got {heads}"
            )
        shared, dim = heads // size, width // heads
        positions = config.positions
        if isinstance(positions, RotaryConfig):
            positions = replace(positions, rotary_dim=None)
        made = replace(config, num_heads=heads, num_kv_heads=shared, head_dim=dim, value_dim=dim, positions=positions)
        groups.append(LayerGroup(made, group.layers))
    return replace(model, groups=tuple(groups))

"""Cost curves: a plan over context lengths, and over numbers of heads at a fixed d_model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from polyhead.costs.layouts.model_layout import LayerGroup, ModelLayout
from polyhead.costs.phases import PhasePlan, plan_phase
from polyhead.costs.planning import Plan
from polyhead.costs.timing.machine import Machine
from polyhead.errors import ShapeError
from polyhead.layers import MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig

SHORTEST, LONGEST = 128, 131072


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """Every phase of a plan at one context length."""

    context: int
    phases: tuple[PhasePlan, ...]


@dataclass(frozen=True, slots=True)
class HeadsPoint:
    """One phase of a plan with another number of heads, where heads * head_dim is d_model."""

    heads: int
    head_dim: int
    phase: PhasePlan


def over_context(plan: Plan, machine: Machine | None = None) -> tuple[ContextPoint, ...]:
    """Plan powers of two from 128 tokens to the model's maximum context (131,072 if unknown) or the plan's context."""
    longest = max(plan.context, plan.model.context or LONGEST)
    lengths = {min(SHORTEST, longest), plan.context, longest}
    length = SHORTEST
    while length < longest:
        lengths.add(length)
        length *= 2
    sizes = [replace(plan.sizes, context=context) for context in sorted(lengths)]
    return tuple(
        ContextPoint(each.context, tuple(plan_phase(plan.model, x.phase, each, machine) for x in plan.phases))
        for each in sizes
    )


def over_heads(plan: Plan, machine: Machine | None = None) -> tuple[HeadsPoint, ...]:
    """Plan the plan's first phase over doubling numbers of heads with heads * head_dim = d_model.

    The group size of grouped-query attention stays as it is: the series starts at one group and doubles while the
    number of heads divides d_model. Empty if not even one group does, and for variants other than multi-head attention.
    """
    selected = plan.phases[0].phase
    width = plan.model.config.layout.embed_dim  # type: ignore[attr-defined]
    points = []
    if not can_have_other_heads(plan.model):
        return ()
    heads = math.lcm(*(group.config.layout.group_size for group in plan.model.groups))  # type: ignore[attr-defined]
    # RoPE rotates channels in pairs, so head_dim must be even.
    rotary = any(isinstance(group.config.positions, RotaryConfig) for group in plan.model.groups)  # type: ignore[attr-defined]
    while width % heads == 0 and not (rotary and width // heads % 2):
        model = with_heads(plan.model, heads)
        points.append(HeadsPoint(heads, width // heads, plan_phase(model, selected, plan.sizes, machine)))
        heads *= 2
    return tuple(points)


def can_have_other_heads(model: ModelLayout) -> bool:
    return all(type(group.config) is MultiHeadConfig and group.config.key_heads is None for group in model.groups)


def with_heads(model: ModelLayout, heads: int) -> ModelLayout:
    """Return the model with `heads` heads of width d_model / heads and an unchanged group size."""
    groups = []
    for group in model.groups:
        config = group.config
        assert isinstance(config, MultiHeadConfig)
        size, width = config.layout.group_size, config.embed_dim
        if heads < 1 or heads % size or width % heads:
            raise ShapeError(
                f"heads must be a multiple of the group size {size} and divide d_model {width}; got {heads}"
            )
        kv_heads, dim = heads // size, width // heads
        positions = config.positions
        if isinstance(positions, RotaryConfig):
            assert positions.rotary_dim is not None
            rotated = dim * positions.rotary_dim // config.layout.head_dim  # the same share of the channels
            positions = replace(positions, rotary_dim=max(2, rotated + rotated % 2))
        changed = replace(
            config, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, value_dim=dim, positions=positions
        )
        groups.append(LayerGroup(changed, group.layers))
    return replace(model, groups=tuple(groups))

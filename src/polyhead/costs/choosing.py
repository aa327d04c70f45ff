"""Search for head layouts within a budget: the Pareto front over width, heads, head_dim and KV heads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyhead.costs.layout_warnings import Warned, warnings_of
from polyhead.costs.layouts.known_models import KNOWN, known_model
from polyhead.costs.layouts.layout_sources import from_sizes
from polyhead.costs.layouts.model_layout import ModelLayout
from polyhead.costs.options import Budget, Phase, check_choice, parse_phases
from polyhead.costs.phases import PhaseSizes, phase_works
from polyhead.costs.planning import cache_bytes_per_token, layer_dtype
from polyhead.costs.quantities import dtype_name, plural
from polyhead.costs.timing.machine import Machine, MachineSummary
from polyhead.costs.timing.predict import predict
from polyhead.errors import OptionError
from polyhead.layers import AttentionConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.positions.config import RotaryConfig

WIDTHS = (256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
SHARES = (0.5, 1.0, 2.0)  # num_heads * head_dim / d_model, where parameters are limited
LATENT_RANKS = (128, 256, 512)
LATENT_ROPE = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """One layout, the cost of all its layers, and warnings about it.

    `device_seconds` is the predicted time without launch overhead, as under a CUDA graph; `seconds` includes it.
    """

    name: str
    config: AttentionConfig
    layers: int
    parameters: int
    cache_bytes_per_token: int
    cache_dtype: str
    seconds: float | None
    device_seconds: float | None
    warnings: tuple[Warned, ...]

    @property
    def capacity(self) -> tuple[int, int, int, int]:
        """Axes of the Pareto front: d_model, heads, head_dim, and KV heads (or the width of the latent)."""
        layout = self.config.layout  # type: ignore[attr-defined]
        cached = layout.cache_width if isinstance(self.config, LatentConfig) else layout.num_kv_heads
        return layout.embed_dim, layout.num_heads, layout.head_dim, cached

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        warnings = [warning._asdict() for warning in self.warnings]
        return {**values, "config": self.config.to_dict(), "warnings": warnings}


@dataclass(frozen=True, slots=True)
class Choices:
    """Layouts within a budget, and well-known models at the same batch and context for comparison.

    `considered` counts the candidates. `head_dims` were considered; `excluded` has the reason for each that is not in
    `found`. `notes` report dtypes that differ from the requested ones, `machine` what times rest on.
    """

    found: tuple[Choice, ...]
    references: tuple[Choice, ...]
    considered: int
    head_dims: tuple[int, ...]
    excluded: dict[int, str]
    notes: tuple[str, ...] = ()
    machine: MachineSummary | None = None


def choose(
    budget: Budget,
    *,
    d_model: int | None = None,
    layers: int = 1,
    context: int = 4096,
    batch: int = 1,
    phase: str = "decode",
    dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    latents: bool = False,
) -> Choices:
    """Return the layouts within a budget that no other layout dominates (the Pareto front).

    Layouts with fewer warnings come first, then wider ones, and of one width those with less device time, which launch
    overhead does not hide.

    Candidates have a head_dim of 32, 64, 96, 128, 192 or 256 with num_heads * head_dim equal to d_model, every number
    of KV heads that divides num_heads, and with `latents` also latent attention (MLA) of three ranks. Where parameters
    are limited, num_heads * head_dim may also be half or twice d_model, and without `d_model` the usual widths are
    tried. Layers are in bfloat16, or in a dtype that the machine has rates in, unless `dtype` is passed.

    Args:
        budget: limits on parameters, cache bytes per token or time; at least one.
        d_model: width of the model; where parameters are limited it may be left out.
        layers: number of layers.
        context: tokens per sequence.
        batch: sequences.
        phase: phase whose cost is compared: "prefill", "decode" or "training".
        dtype: dtype of weights and activations; bfloat16 by default.
        cache_dtype: dtype of the cache, default `dtype`; torch.int8 is a `QuantizedCache`.
        machine: calibrated machine, its name or its file; without one, no times are predicted.
        latents: also consider latent attention.

    Raises:
        OptionError: the budget has no limit, or no layout is within it.

    >>> choices = choose(Budget(cache_bytes_per_token=4096), d_model=1024, context=2048)
    >>> [choice.name for choice in choices.found if not choice.warnings][:3]
    ['16x64 at 1024', '8x128 at 1024', '4x256 at 1024']
    >>> choices.excluded
    {96: 'd_model 1024 is no multiple of it', 192: 'd_model 1024 is no multiple of it'}
    """
    machine = Machine.load(machine) if isinstance(machine, str | os.PathLike) else machine
    (requested,) = parse_phases([phase])
    check_choice(budget, d_model=d_model, layers=layers, context=context, batch=batch, has_machine=machine is not None)
    if latents and cache_dtype is torch.int8:
        raise OptionError(
            "latent attention has no int8 cache, got latents with cache_dtype int8; drop one of the two (--latents, "
            "--cache-dtype)"
        )
    dtype, notes = layer_dtype(dtype, machine=machine)
    cache_dtype = cache_dtype or dtype
    sizes = PhaseSizes(batch, context, dtype, cache_dtype)
    considered = 0
    within: dict[int, list[Choice]] = {}  # by head_dim
    shares = (1.0,) if budget.parameters is None else SHARES
    max_parameters = None if budget.parameters is None else budget.parameters // layers
    widths = WIDTHS if d_model is None else (d_model,)
    for width in widths:
        for head_dim, model in _candidates(width, shares, max_parameters, layers, latents):
            considered += 1
            choice = _evaluate(model, requested, sizes, machine, budget)
            if choice is not None:
                within.setdefault(head_dim, []).append(choice)
    if not considered:
        raise OptionError(_no_candidates(widths, shares, budget, layers))
    front = _pareto_front([choice for choices in within.values() for choice in choices])
    divisors = {head_dim for width in widths for _, head_dim in _divisions(width, shares)}
    excluded = {}
    for head_dim in HEAD_DIMS:
        if head_dim not in divisors:
            multiple = "is no multiple" if len(shares) == 1 else "and twice that are no multiples"
            excluded[head_dim] = f"d_model {d_model} {multiple} of it"
        elif head_dim not in within:
            excluded[head_dim] = "every layout with it exceeds the budget"
        elif not any(choice in front for choice in within[head_dim]):
            excluded[head_dim] = "other layouts have at least as many heads, as large a head_dim and as many KV heads"
    references, without_int8 = [], []
    for name in KNOWN:
        model = known_model(name)
        has_latents = any(isinstance(group.config, LatentConfig) for group in model.groups)
        lacks_int8 = has_latents and cache_dtype is torch.int8
        choice = _evaluate(model, requested, replace(sizes, cache_dtype=dtype) if lacks_int8 else sizes, machine)
        assert choice is not None
        references.append(choice)
        without_int8 += [name] if lacks_int8 else []
    if without_int8:
        notes.append(f"latent attention has no int8 cache: {', '.join(without_int8)} cached in {dtype_name(dtype)}")
    summary = None if machine is None else machine.summary
    found = tuple(sorted(front, key=_order))
    return Choices(found, tuple(references), considered, HEAD_DIMS, excluded, tuple(notes), summary)


def _order(choice: Choice) -> tuple[float, ...]:
    """Return the sort key of a layout: fewer warnings, then wider, then less device time, then more heads."""
    width, *others = (-x for x in choice.capacity)
    return (len(choice.warnings), width, choice.device_seconds or 0.0, *others)


def _evaluate(
    model: ModelLayout, phase: Phase, sizes: PhaseSizes, machine: Machine | None, budget: Budget | None = None
) -> Choice | None:
    """Return a layout with its costs, or None if it exceeds the budget; cheap limits are checked first."""
    parameters, causal = model.parameters.total, model.is_causal
    if budget and not budget.allows("parameters", parameters):
        return None
    cache = cache_bytes_per_token(model, sizes.cache_dtype) if causal else 0
    if budget and not budget.allows("cache_bytes_per_token", cache):
        return None
    seconds = device_seconds = None
    if machine is not None and (causal or phase != "decode"):
        predictions = [predict(work, machine) for work in phase_works(model, phase, sizes)]
        seconds = sum(x.seconds for x in predictions)
        device_seconds = sum(x.device_seconds for x in predictions)
        # CUDA graphs remove launch overhead; on a CPU the calls are part of the time.
        if budget and not budget.allows("seconds", device_seconds if machine.device == "cuda" else seconds):
            return None
    warnings = warnings_of(model.config, context=sizes.context, batch=sizes.batch, phase=phase, machine=machine)
    costs = (model.layers, parameters, cache, dtype_name(sizes.cache_dtype), seconds, device_seconds)
    return Choice(model.name, model.config, *costs, warnings)


def _candidates(
    width: int, shares: Sequence[float], max_parameters: int | None, layers: int, latents: bool
) -> Iterator[tuple[int, ModelLayout]]:
    """Yield (head_dim, layout) at one width; skip those whose Q and O projections alone exceed `max_parameters`."""
    for heads, head_dim in _divisions(width, shares):
        if max_parameters is not None and 2 * heads * head_dim * width > max_parameters:
            continue
        for kv_heads in (x for x in range(1, heads + 1) if heads % x == 0):
            yield head_dim, from_sizes(width, heads, kv_heads=kv_heads, head_dim=head_dim, layers=layers, rotary=True)
        for rank in LATENT_RANKS if latents else ():
            yield head_dim, latent_layout(width, heads, head_dim, rank, layers)


def latent_layout(width: int, heads: int, head_dim: int, rank: int, layers: int) -> ModelLayout:
    """Return layers of latent attention (MLA) with these heads, RoPE and causal masks."""
    config = LatentConfig(
        width,
        heads,
        kv_lora_rank=rank,
        qk_nope_head_dim=head_dim,
        qk_rope_head_dim=LATENT_ROPE,
        positions=RotaryConfig(interleaved=True),
        causal=True,
        bias=False,
    )
    return ModelLayout.of(config, layers, name=f"{heads}x{head_dim} over a latent of {rank} at {width}")


def _divisions(width: int, shares: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield every (num_heads, head_dim) whose product is one of `shares` times the model's width."""
    for head_dim in HEAD_DIMS:
        for share in shares:
            heads, rest = divmod(share * width, head_dim)
            if heads and not rest:
                yield int(heads), head_dim


def _no_candidates(widths: Sequence[int], shares: Sequence[float], budget: Budget, layers: int) -> str:
    """Return a message that explains why there is no candidate, and what to change."""
    smallest = [
        from_sizes(width, heads, kv_heads=1, head_dim=head_dim, layers=layers, rotary=True)
        for width in widths
        for heads, head_dim in _divisions(width, shares)
    ]
    if not smallest:
        head_dims = f"{', '.join(map(str, HEAD_DIMS[:-1]))} or {HEAD_DIMS[-1]}"
        product = "d_model" if len(shares) == 1 else "d_model, half or twice that"
        return (
            f"no candidate layout: head_dim is {head_dims} and num_heads * head_dim is {product}, got d_model "
            f"{widths[0]}, which no head_dim divides; use a multiple of {HEAD_DIMS[0]}"
        )
    parameters, name = min((model.parameters.total, model.name) for model in smallest)
    return (
        f"no candidate layout: the smallest, {name}, has {parameters:,} parameters in "
        f"{plural(layers, 'layer')}, got a budget of {budget.parameters:,}; raise it, or use fewer layers "
        "or a smaller d_model"
    )


def _pareto_front(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices that no other choice of the same kind dominates in `capacity`."""
    points = {(type(choice.config), choice.capacity) for choice in choices}

    def is_dominated(choice: Choice) -> bool:
        kind, capacity = type(choice.config), choice.capacity
        return any(
            kind is other_kind and capacity != other and all(a >= b for a, b in zip(other, capacity, strict=True))
            for other_kind, other in points
        )

    return [choice for choice in choices if not is_dominated(choice)]

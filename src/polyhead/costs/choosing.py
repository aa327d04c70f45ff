"""Which head layouts a budget allows: those that no other within it outdoes in heads, their width and their keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyhead.costs.layout_warnings import Warned, warnings_of
from polyhead.costs.layouts.known_models import KNOWN, known_model
from polyhead.costs.layouts.model import ModelLayout, dtype_name
from polyhead.costs.parameters import count_parameters
from polyhead.costs.phases import is_causal, plan_phase
from polyhead.costs.planning import cache_bytes_per_token, layer_dtype
from polyhead.costs.timing.machine import Machine
from polyhead.costs.work import PHASES, Phase
from polyhead.errors import OptionError
from polyhead.layers.config import AttentionConfig, MultiHeadConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.positions.config import RotaryConfig

WIDTHS = (256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
SHARES = (0.5, 1.0, 2.0)  # of the model's width that all heads together have, where parameters are limited
LATENT_RANKS = (128, 256, 512)
LATENT_ROPE = 64


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that all attention layers together may cost; None is no limit.

    `seconds` are predicted for the phase that is asked for, and need a machine.
    """

    parameters: int | None = None
    cache_bytes_per_token: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not limit > 0:
                raise OptionError(f"{field.name} of a budget must be positive, got {limit!r}")
        if self.parameters is None and self.cache_bytes_per_token is None and self.seconds is None:
            raise OptionError("a budget limits parameters, cache bytes a token or time, got none of them")


@dataclass(frozen=True, slots=True)
class Choice:
    """One layout with what all its layers cost and what to think twice about."""

    name: str
    config: AttentionConfig
    layers: int
    parameters: int
    cache_bytes_per_token: int
    cache_dtype: str
    seconds: float | None
    warnings: tuple[Warned, ...]

    @property
    def capacity(self) -> tuple[int, int, int, int]:
        """What one would like more of: width, heads, width of a head, and numbers that a key and value have in all."""
        layout = self.config.layout  # type: ignore[attr-defined]
        kept = layout.cache_width if isinstance(self.config, LatentConfig) else layout.num_kv_heads
        return layout.embed_dim, layout.num_heads, layout.head_dim, kept

    def to_dict(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        warned = [warning._asdict() for warning in self.warnings]
        return {**plain, "config": self.config.to_dict(), "warnings": warned}


@dataclass(frozen=True, slots=True)
class Choices:
    """The layouts that a budget allows, and models that people know, at the same batch and context.

    `notes` say where a dtype is another than was to be expected.
    """

    found: tuple[Choice, ...]
    references: tuple[Choice, ...]
    considered: int
    notes: tuple[str, ...] = ()


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
    machine: Machine | None = None,
    latents: bool = False,
) -> Choices:
    """The layouts within a budget of which no other has as much or more of everything.

    Considered are heads of 32 to 256 channels that together are as wide as the model, each number of KV heads that
    divides them, and with `latents` latent heads of three ranks. Where parameters are limited, heads that are half or
    twice as wide are considered too, and without `d_model` the usual widths. Layers are in bfloat16, or in what the
    machine was calibrated in, unless a `dtype` is given.

    >>> choices = choose(Budget(cache_bytes_per_token=4096), d_model=1024, context=2048)
    >>> [choice.name for choice in choices.found if not choice.warnings][:3]
    ['16x64 at 1024', '8x128 at 1024', '4x256 at 1024']
    """
    if phase not in PHASES:
        raise OptionError(f"a phase is one of {', '.join(PHASES)}; got {phase!r}")
    if budget.seconds is not None and machine is None:
        raise OptionError("a budget of time needs a calibrated machine to predict with, got none; name one")
    if d_model is None and budget.parameters is None:
        raise OptionError("without d_model the budget must limit parameters, got neither; give one of them")
    for name, number in (("d_model", d_model), ("layers", layers), ("context", context), ("batch", batch)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise OptionError(f"{name} must be a positive integer, got {number!r}")
    if latents and cache_dtype is torch.int8:
        raise OptionError(
            "latents have no int8 cache, got latents with cache_dtype int8; leave one of the two out (--latents, "
            "--cache-dtype)"
        )
    dtype, notes = layer_dtype(dtype, machine=machine)
    requested = _Request(layers, context, batch, phase, dtype, cache_dtype or dtype, machine)
    considered, within = 0, []
    shares = (1.0,) if budget.parameters is None else SHARES
    most = None if budget.parameters is None else budget.parameters // layers
    widths = WIDTHS if d_model is None else (d_model,)
    for width in widths:
        for name, config in _candidates(width, shares, most, latents):
            considered += 1
            choice = requested.priced(name, config, budget)
            if choice is not None:
                within.append(choice)
    if not considered:
        raise OptionError(_nothing_to_consider(widths, shares, budget, layers))
    found = sorted(_maximal(within), key=lambda choice: (len(choice.warnings), *(-x for x in choice.capacity)))
    references = tuple(requested.reference(name) for name in KNOWN)
    other = [choice.name for choice in references if choice.cache_dtype != dtype_name(requested.cache_dtype)]
    if other:
        notes.append(f"latents have no int8 cache: that of {', '.join(other)} is in {dtype_name(dtype)}")
    return Choices(tuple(found), references, considered, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Request:
    """What every layout is priced for."""

    layers: int
    context: int
    batch: int
    phase: Phase
    dtype: torch.dtype
    cache_dtype: torch.dtype
    machine: Machine | None

    def priced(self, name: str, config: AttentionConfig, budget: Budget) -> Choice | None:
        """The layout with its costs; None where it is beyond the budget. What is cheap to tell is asked first."""
        model = ModelLayout.of(config, self.layers, name=name)
        parameters = self.layers * count_parameters(config).total
        if budget.parameters is not None and parameters > budget.parameters:
            return None
        cache = cache_bytes_per_token(model, self.cache_dtype)
        if budget.cache_bytes_per_token is not None and cache > budget.cache_bytes_per_token:
            return None
        seconds = self._seconds(model, self.cache_dtype)
        if budget.seconds is not None and (seconds is None or seconds > budget.seconds):
            return None
        numbers = str(dtype_name(self.cache_dtype))
        return Choice(name, config, self.layers, parameters, cache, numbers, seconds, self._warnings(config))

    def reference(self, name: str) -> Choice:
        """A model that people know, with the layers that it has; its cache in `dtype` where there is none of int8."""
        model = known_model(name)
        parameters = sum(group.layers * count_parameters(group.config).total for group in model.groups)
        causal = is_causal(model)
        has_latents = any(isinstance(group.config, LatentConfig) for group in model.groups)
        cache_dtype = self.dtype if has_latents and self.cache_dtype is torch.int8 else self.cache_dtype
        cache = cache_bytes_per_token(model, cache_dtype) if causal else 0
        seconds = self._seconds(model, cache_dtype) if causal or self.phase != "decode" else None
        costs = (parameters, cache, str(dtype_name(cache_dtype)), seconds)
        return Choice(name, model.config, model.layers, *costs, self._warnings(model.config))

    def _seconds(self, model: ModelLayout, cache_dtype: torch.dtype) -> float | None:
        if self.machine is None:
            return None
        sizes = (self.batch, self.context, self.dtype, cache_dtype, self.machine)
        timing = plan_phase(model, self.phase, *sizes).timing
        assert timing is not None
        return timing.seconds

    def _warnings(self, config: AttentionConfig) -> tuple[Warned, ...]:
        options: dict[str, Any] = {"context": self.context, "batch": self.batch, "phase": self.phase}
        return warnings_of(config, **options, machine=self.machine)


def _candidates(
    width: int, shares: Sequence[float], most: int | None, latents: bool
) -> Iterator[tuple[str, AttentionConfig]]:
    """Layers at one width; what has more than `most` parameters in queries and output alone is not even made."""
    for heads, head_dim in _divisions(width, shares):
        if most is not None and 2 * heads * head_dim * width > most:
            continue
        for kv_heads in (x for x in range(1, heads + 1) if heads % x == 0):
            yield _heads(width, heads, kv_heads, head_dim)
        for rank in LATENT_RANKS if latents else ():
            yield (
                f"{heads}x{head_dim} over a latent of {rank} at {width}",
                LatentConfig(
                    width,
                    heads,
                    kv_lora_rank=rank,
                    qk_nope_head_dim=head_dim,
                    qk_rope_head_dim=LATENT_ROPE,
                    positions=RotaryConfig(interleaved=True),
                    causal=True,
                    bias=False,
                ),
            )


def _divisions(width: int, shares: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Heads and their width: all that together are such a share of the model's width."""
    for head_dim in HEAD_DIMS:
        for share in shares:
            heads, rest = divmod(share * width, head_dim)
            if heads and not rest:
                yield int(heads), head_dim


def _heads(width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[str, MultiHeadConfig]:
    shared = "" if kv_heads == heads else f"/{kv_heads}"
    config = MultiHeadConfig(
        width, heads, num_kv_heads=kv_heads, head_dim=head_dim, positions=RotaryConfig(), causal=True, bias=False
    )
    return f"{heads}{shared}x{head_dim} at {width}", config


def _nothing_to_consider(widths: Sequence[int], shares: Sequence[float], budget: Budget, layers: int) -> str:
    """Why there is no layout to begin with, and what to change."""
    least = [_heads(width, heads, 1, head_dim) for width in widths for heads, head_dim in _divisions(width, shares)]
    if not least:
        channels = f"{', '.join(map(str, HEAD_DIMS[:-1]))} or {HEAD_DIMS[-1]}"
        wide = "as wide as the model" if len(shares) == 1 else "as wide as the model, half or twice as wide"
        return (
            f"no layout can be considered: heads have {channels} channels and are together {wide}, got d_model "
            f"{widths[0]}, which none of them divides; take a multiple of {HEAD_DIMS[0]}"
        )
    parameters, name = min((layers * count_parameters(config).total, name) for name, config in least)
    return (
        f"no layout can be considered: the smallest, {name}, has {parameters:,} parameters in {layers:,} "
        f"layer{'' if layers == 1 else 's'}, got a budget of {budget.parameters:,}; allow more, or take fewer layers "
        "or a smaller d_model"
    )


def _maximal(choices: Sequence[Choice]) -> list[Choice]:
    """The Pareto front: those that no other of the same kind has as much of everything as, and more of something."""
    offered = {(type(choice.config), choice.capacity) for choice in choices}

    def outdone(choice: Choice) -> bool:
        kind, own = type(choice.config), choice.capacity
        return any(
            kind is other and own != more and all(a >= b for a, b in zip(more, own, strict=True))
            for other, more in offered
        )

    return [choice for choice in choices if not outdone(choice)]

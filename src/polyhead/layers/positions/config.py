"""Configs of position modules; sizes that follow from the layer's heads are left out."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self, TypeVar

import torch

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers.positions.absolute import Learned, Sinusoidal
from polyhead.layers.positions.biases import ALiBi, T5Bias
from polyhead.layers.positions.position_encoding import Positions
from polyhead.layers.positions.quadratic import QuadraticRelative1D, QuadraticRelative2D
from polyhead.layers.positions.rotary import Rotary
from polyhead.layers.positions.rotary_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RotaryScaling,
    YarnScaling,
)
from polyhead.layers.registry import Registry, check_flags

SCALINGS: Registry[RotaryScaling] = Registry("a rotary scaling")
SCALINGS.register("linear")(LinearScaling)
SCALINGS.register("ntk")(NTKScaling)
SCALINGS.register("dynamic_ntk")(DynamicNTKScaling)
SCALINGS.register("yarn")(YarnScaling)
SCALINGS.register("llama3")(Llama3Scaling)


@dataclass(frozen=True)
class PositionsConfig(ABC):
    """Base class of position configs; register a new kind as a dataclass with `@describes`."""

    @abstractmethod
    def build(self, layout: HeadLayout) -> Positions:
        """Build the module for a head layout."""

    @classmethod
    @abstractmethod
    def of(cls, module: Any) -> Self:
        """Return the config of `module`."""

    def num_parameters(self, layout: HeadLayout) -> int:
        """Return the number of learned parameters; 0 for most kinds."""
        return 0

    def fitted(self, layout: HeadLayout) -> PositionsConfig:
        """Return the config with defaults filled in for a layout; raises where the module itself would."""
        check_flags(self)
        with torch.device("meta"):
            module = self.build(layout)
        module.check(layout)
        return type(self).of(module)


POSITIONS: Registry[PositionsConfig] = Registry("a description of positions")
_BY_MODULE: dict[type[Positions], type[PositionsConfig]] = {}
Described = TypeVar("Described", bound=type[PositionsConfig])


def describes(module: type[Positions], kind: str) -> Callable[[Described], Described]:
    """Register a dataclass as the config of `module`, with `kind` as its name in JSON."""

    def decorate(member: Described) -> Described:
        POSITIONS.register(kind)(member)
        _BY_MODULE[module] = member
        return member

    return decorate


def positions_config_of(module: Positions) -> PositionsConfig:
    """Return the config of a position module.

    >>> positions_config_of(ALiBi(8, learnable=True))
    ALiBiConfig(learnable=True)
    """
    member = _BY_MODULE.get(type(module))
    if member is None:
        known = ", ".join(kind.__name__ for kind in _BY_MODULE)
        raise OptionError(
            f"positions_config_of takes one of {known}; got {type(module).__name__}: "
            "register a PositionsConfig for it with polyhead.layers.positions.config.describes"
        )
    return member.of(module)


@describes(Rotary, "rotary")
@dataclass(frozen=True)
class RotaryConfig(PositionsConfig):
    """Config of `Rotary`; `rotary_dim` is head_dim by default."""

    _: KW_ONLY
    base: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: RotaryScaling | None = field(default=None, metadata={"kinds": SCALINGS})

    def build(self, layout: HeadLayout) -> Rotary:
        return Rotary(
            layout.head_dim,
            base=self.base,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            scaling=self.scaling,
        )

    @classmethod
    def of(cls, module: Rotary) -> Self:
        return cls(
            base=module.base, rotary_dim=module.rotary_dim, interleaved=module.interleaved, scaling=module.scaling
        )


@describes(ALiBi, "alibi")
@dataclass(frozen=True)
class ALiBiConfig(PositionsConfig):
    """Config of `ALiBi`, with fixed or learned slopes."""

    learnable: bool = False

    def build(self, layout: HeadLayout) -> ALiBi:
        return ALiBi(layout.num_heads, learnable=self.learnable)

    @classmethod
    def of(cls, module: ALiBi) -> Self:
        return cls(module.weight is not None)

    def num_parameters(self, layout: HeadLayout) -> int:
        return layout.num_heads if self.learnable else 0


@describes(T5Bias, "t5")
@dataclass(frozen=True)
class T5BiasConfig(PositionsConfig):
    """Config of `T5Bias`; each layer built from it has its own table."""

    _: KW_ONLY
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def build(self, layout: HeadLayout) -> T5Bias:
        return T5Bias(layout.num_heads, **dataclasses.asdict(self))

    @classmethod
    def of(cls, module: T5Bias) -> Self:
        return cls(num_buckets=module.num_buckets, max_distance=module.max_distance, bidirectional=module.bidirectional)

    def num_parameters(self, layout: HeadLayout) -> int:
        return self.num_buckets * layout.num_heads


@describes(Sinusoidal, "sinusoidal")
@dataclass(frozen=True)
class SinusoidalConfig(PositionsConfig):
    """Config of `Sinusoidal`."""

    base: float = 10000.0

    def build(self, layout: HeadLayout) -> Sinusoidal:
        return Sinusoidal(layout.embed_dim, base=self.base)

    @classmethod
    def of(cls, module: Sinusoidal) -> Self:
        recipe: Any = module._table.recipe
        return cls(recipe.base)


@describes(Learned, "learned")
@dataclass(frozen=True)
class LearnedConfig(PositionsConfig):
    """Config of `Learned`, with `max_length` positions."""

    max_length: int

    def build(self, layout: HeadLayout) -> Learned:
        return Learned(self.max_length, layout.embed_dim)

    @classmethod
    def of(cls, module: Learned) -> Self:
        return cls(module.max_length)

    def num_parameters(self, layout: HeadLayout) -> int:
        return self.max_length * layout.embed_dim


@describes(QuadraticRelative1D, "quadratic_1d")
@dataclass(frozen=True)
class QuadraticRelative1DConfig(PositionsConfig):
    """Config of `QuadraticRelative1D`; `alpha` and `center_std` are initial values, not learned ones."""

    _: KW_ONLY
    alpha: float = 0.5
    center_std: float = 2.0

    def build(self, layout: HeadLayout) -> QuadraticRelative1D:
        return QuadraticRelative1D(layout.num_heads, alpha=self.alpha, center_std=self.center_std)

    @classmethod
    def of(cls, module: QuadraticRelative1D) -> Self:
        alpha, center_std = module._initial
        return cls(alpha=alpha, center_std=center_std)

    def num_parameters(self, layout: HeadLayout) -> int:
        return 2 * layout.num_heads  # a centre and a width


@describes(QuadraticRelative2D, "quadratic_2d")
@dataclass(frozen=True)
class QuadraticRelative2DConfig(PositionsConfig):
    """Config of `QuadraticRelative2D`; `alpha` and `center_std` are initial values, not learned ones."""

    height: int
    width: int
    _: KW_ONLY
    alpha: float = 0.5
    center_std: float = 2.0

    def build(self, layout: HeadLayout) -> QuadraticRelative2D:
        return QuadraticRelative2D(
            layout.num_heads, self.height, self.width, alpha=self.alpha, center_std=self.center_std
        )

    @classmethod
    def of(cls, module: QuadraticRelative2D) -> Self:
        alpha, center_std = module._initial
        return cls(*module.grid, alpha=alpha, center_std=center_std)

    def num_parameters(self, layout: HeadLayout) -> int:
        return 3 * layout.num_heads  # a centre of two numbers and a width

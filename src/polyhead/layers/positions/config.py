"""Configs of position modules; sizes that follow from the layer's heads are left out."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Self

import torch

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
class PositionsConfig:
    """Base class of position configs, whose fields are the options of the module that they describe.

    Register a new kind as a dataclass with `@POSITIONS.register`.
    """

    module: ClassVar[type[Positions]]  # set by `POSITIONS.register`

    def build(self, layout: HeadLayout) -> Positions:
        """Build the module for a head layout."""
        options = {self.module.size: getattr(layout, self.module.size)}
        return self.module(**options, **{x.name: getattr(self, x.name) for x in dataclasses.fields(self)})

    @classmethod
    def of(cls, module: Any) -> Self:
        """Return the config of `module`."""
        return cls(**{x.name: getattr(module, x.name) for x in dataclasses.fields(cls)})

    def num_parameters(self, layout: HeadLayout) -> int:
        """Return the number of learned parameters; 0 for most kinds."""
        return sum(parameter.numel() for parameter in self._on_meta(layout).parameters())

    def fitted(self, layout: HeadLayout) -> PositionsConfig:
        """Return the config with defaults filled in for a layout; raises where the module itself would."""
        check_flags(self)
        module = self._on_meta(layout)
        module.check(layout)
        return type(self).of(module)

    def _on_meta(self, layout: HeadLayout) -> Positions:
        with torch.device("meta"):
            return self.build(layout)


POSITIONS: Registry[PositionsConfig] = Registry("a description of positions", attribute="module")


def positions_config_of(module: Positions) -> PositionsConfig:
    """Return the config of a position module.

    >>> positions_config_of(ALiBi(8, learnable=True))
    ALiBiConfig(learnable=True)
    """
    return POSITIONS.describe(module)


@POSITIONS.register("rotary", Rotary)
@dataclass(frozen=True)
class RotaryConfig(PositionsConfig):
    """Config of `Rotary`; `rotary_dim` is head_dim by default."""

    _: KW_ONLY
    base: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: RotaryScaling | None = field(default=None, metadata={"kinds": SCALINGS})


@POSITIONS.register("alibi", ALiBi)
@dataclass(frozen=True)
class ALiBiConfig(PositionsConfig):
    """Config of `ALiBi`, with fixed or learned slopes."""

    learnable: bool = False


@POSITIONS.register("t5", T5Bias)
@dataclass(frozen=True)
class T5BiasConfig(PositionsConfig):
    """Config of `T5Bias`; each layer built from it has its own table."""

    _: KW_ONLY
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True


@POSITIONS.register("sinusoidal", Sinusoidal)
@dataclass(frozen=True)
class SinusoidalConfig(PositionsConfig):
    """Config of `Sinusoidal`."""

    base: float = 10000.0


@POSITIONS.register("learned", Learned)
@dataclass(frozen=True)
class LearnedConfig(PositionsConfig):
    """Config of `Learned`, with `max_length` positions."""

    max_length: int


@POSITIONS.register("quadratic_1d", QuadraticRelative1D)
@dataclass(frozen=True)
class QuadraticRelative1DConfig(PositionsConfig):
    """Config of `QuadraticRelative1D`; `alpha` and `center_std` are initial values, not learned ones."""

    _: KW_ONLY
    alpha: float = 0.5
    center_std: float = 2.0

    @classmethod
    def of(cls, module: QuadraticRelative1D) -> Self:
        alpha, center_std = module._initial
        return cls(alpha=alpha, center_std=center_std)


@POSITIONS.register("quadratic_2d", QuadraticRelative2D)
@dataclass(frozen=True)
class QuadraticRelative2DConfig(PositionsConfig):
    """Config of `QuadraticRelative2D`; `alpha` and `center_std` are initial values, not learned ones."""

    height: int
    width: int
    _: KW_ONLY
    alpha: float = 0.5
    center_std: float = 2.0

    @classmethod
    def of(cls, module: QuadraticRelative2D) -> Self:
        alpha, center_std = module._initial
        return cls(*module.grid, alpha=alpha, center_std=center_std)

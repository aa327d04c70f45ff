"""Position modules, applied to the heads (rotary), the logits (biases) or the input (additive).

A layer distinguishes them only by `isinstance(positions, RotatesHeads | BiasesLogits | AddsToInput)`.
"""

from __future__ import annotations

from polyhead.layers.positions.absolute import Learned, Sinusoidal
from polyhead.layers.positions.biases import ALiBi, BiasesByDistance, T5Bias
from polyhead.layers.positions.position_encoding import AddsToInput, BiasesLogits, Positions, RotatesHeads, Rotation
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

__all__ = [
    "ALiBi",
    "AddsToInput",
    "BiasesByDistance",
    "BiasesLogits",
    "DynamicNTKScaling",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "Positions",
    "QuadraticRelative1D",
    "QuadraticRelative2D",
    "Rotary",
    "RotaryScaling",
    "RotatesHeads",
    "Rotation",
    "Sinusoidal",
    "T5Bias",
    "YarnScaling",
]

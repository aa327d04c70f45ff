"""Differential heads."""

from polyhead.layers.variants.differential.config import DifferentialConfig
from polyhead.layers.variants.differential.layer import DifferentialAttention

__all__ = ["DifferentialAttention", "DifferentialConfig"]

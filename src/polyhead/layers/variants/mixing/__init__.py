"""Mixing heads."""

from polyhead.layers.variants.mixing.config import HeadMixConfig
from polyhead.layers.variants.mixing.layer import HeadMix

__all__ = ["HeadMix", "HeadMixConfig"]

"""Grouped heads."""

from polyhead.layers.variants.grouped.config import GroupedHeadsConfig
from polyhead.layers.variants.grouped.layer import GroupedHeads

__all__ = ["GroupedHeads", "GroupedHeadsConfig"]

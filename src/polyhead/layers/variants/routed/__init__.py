"""Routed heads."""

from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.layers.variants.routed.layer import RoutedHeads, RoutedOutput, collect_routings
from polyhead.layers.variants.routed.router import HeadRouter, Routing

__all__ = ["HeadRouter", "RoutedConfig", "RoutedHeads", "RoutedOutput", "Routing", "collect_routings"]

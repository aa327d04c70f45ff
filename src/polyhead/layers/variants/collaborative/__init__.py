"""Collaborative heads."""

from polyhead.layers.variants.collaborative.config import CollaborativeConfig
from polyhead.layers.variants.collaborative.factors import SharedFactors, shared_factors
from polyhead.layers.variants.collaborative.layer import CollaborativeAttention

__all__ = ["CollaborativeAttention", "CollaborativeConfig", "SharedFactors", "shared_factors"]

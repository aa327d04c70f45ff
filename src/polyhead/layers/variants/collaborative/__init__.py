"""Collaborative attention (Cordonnier et al. 2020): half the weights and cache of MHA, equal loss.

All heads share queries and keys, whose channels each head weights. Against multi-head attention of the same width
(2 x 4,096 causal tokens of width 2,048, 16 heads, bfloat16, H200) a layer with 128 shared channels has 8.9M instead of
16.8M parameters and a cache of 4,352 instead of 8,192 bytes per token; the forward takes 0.56 instead of 0.67 ms. Byte
models of equal parameters (11M) end 0.005 bits per byte above multi-head attention over equal tokens, within the noise
of seeds. Figures from docs/variants.md.
"""

from polyhead.layers.variants.collaborative.factors import SharedFactors, shared_factors
from polyhead.layers.variants.collaborative.layer import CollaborativeAttention, CollaborativeConfig

__all__ = ["CollaborativeAttention", "CollaborativeConfig", "SharedFactors", "shared_factors"]

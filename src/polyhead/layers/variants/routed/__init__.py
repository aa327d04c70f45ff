"""Mixture of attention heads (Zhang et al. 2022): 8 of 32 heads in 0.8 times MHA's time, equal loss.

A gate selects a few heads per token, and only those are computed. Against multi-head attention of 16 heads and about
equal parameters (2 x 4,096 causal tokens of width 2,048, bfloat16, H200) a forward with 8 of 32 heads over one KV head
takes 0.53 instead of 0.67 ms, a training step 1.60 instead of 2.30 ms, and the cache is 512 instead of 8,192 bytes per
token. Byte models of 11M parameters end within the noise of seeds of multi-head attention, over equal tokens (0.018
bits per byte above, with 15% less compute) and over equal compute (0.001 above). Figures from docs/variants.md.
"""

from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.layers.variants.routed.layer import RoutedHeads, RoutedOutput, collect_routings
from polyhead.layers.variants.routed.router import HeadRouter, Routing

__all__ = ["HeadRouter", "RoutedConfig", "RoutedHeads", "RoutedOutput", "Routing", "collect_routings"]

"""Attention across heads (defined here): 1.3 times the time of MHA, gain at the edge of the noise.

The heads' outputs are mixed and attend to one another before W_O. Against multi-head attention of the same width
(2 x 4,096 causal tokens of width 2,048, 16 heads, bfloat16, H200) the forward takes 0.85 instead of 0.67 ms and a
training step 2.92 instead of 2.30 ms. Byte models of 11M parameters end 0.045 bits per byte below multi-head attention
over equal tokens and 0.056 over equal compute, at the edge of the noise of seeds. Figures from docs/arrangements.md.
"""

from polyhead.layers.variants.mixing.config import HeadMixConfig
from polyhead.layers.variants.mixing.layer import HeadMix

__all__ = ["HeadMix", "HeadMixConfig"]

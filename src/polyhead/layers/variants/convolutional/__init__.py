"""Attention as a convolution (Cordonnier et al. 2020): 1.9 times the forward of MHA, gain unmeasured.

Each head computes one tap of the kernel, by quadratic relative positions ("On the Relationship between Self-Attention
and Convolutional Layers", ICLR 2020). Against multi-head attention of the same width (2 x 4,096 causal tokens of width
2,048, 16 heads, bfloat16, H200) the forward takes 1.26 instead of 0.67 ms and a training step 6.75 instead of 2.30 ms.
Figures from docs/arrangements.md, which has no training run of this variant.
"""

from polyhead.layers.variants.convolutional.layer import convolutional_heads, set_convolution

__all__ = ["convolutional_heads", "set_convolution"]

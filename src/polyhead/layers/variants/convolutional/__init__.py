"""Convolutional heads."""

from polyhead.layers.variants.convolutional.layer import convolutional_heads, set_convolution

__all__ = ["convolutional_heads", "set_convolution"]

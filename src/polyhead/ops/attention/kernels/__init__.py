"""Triton kernels of `polyhead.ops.attention`; importing this package does not import Triton."""

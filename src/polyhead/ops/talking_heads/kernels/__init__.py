"""Triton kernels of `polyhead.ops.talking_heads`; importing this package does not import Triton."""

"""Triton kernels of `polyhead.ops.decode`; importing this package does not import Triton."""

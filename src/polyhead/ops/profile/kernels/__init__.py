"""Triton kernels of `polyhead.ops.profile`; importing this package does not import Triton."""

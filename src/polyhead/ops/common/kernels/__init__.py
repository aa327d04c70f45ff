"""Triton kernels of every operation; importing this package does not import Triton."""

"""Triton kernels of `polyhead.ops.selected_rows`; importing this package does not import Triton."""

"""Benchmarks of polyhead against other implementations in one run: `python -m benchmarks`."""

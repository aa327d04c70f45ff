"""How fast polyhead is, held against the contenders in one run: `python -m benchmarks`."""

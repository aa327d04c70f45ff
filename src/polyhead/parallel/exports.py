"""Public names of `polyhead.parallel`."""

from polyhead.parallel.workers import Workers, join_workers

__all__ = ["Workers", "join_workers"]

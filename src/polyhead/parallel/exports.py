"""Public names of `polyhead.parallel`."""

__all__: list[str] = []

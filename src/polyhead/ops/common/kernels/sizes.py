"""Sizes of tiles and grids in plain Python: Triton's functions take several microseconds per call."""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`.

    >>> power_of_two(1), power_of_two(64), power_of_two(65)
    (1, 64, 128)
    """
    return 1 << max(number - 1, 0).bit_length()


def blocks_of(number: int, size: int) -> int:
    """Return the number of blocks of `size` that cover `number` elements.

    >>> blocks_of(128, 64), blocks_of(129, 64)
    (2, 3)
    """
    return -(-number // size)


def padded_dim(number: int, smallest: int = 16) -> int:
    """Return the length of a tile's axis that holds `number` elements: a power of two of at least `smallest`.

    >>> padded_dim(5), padded_dim(65), padded_dim(5, 64)
    (16, 128, 64)
    """
    return max(smallest, power_of_two(number))


def tile_dims(dim_key: int, dim_value: int) -> tuple[int, int]:
    """Return the padded channels of tiles of keys and of values.

    A tile of values is as wide as one of keys, up to 64 channels. ptxas 12.8, which Triton 3.6 brings, compiles wrong
    addresses for narrower ones on Hopper GPUs where loads cannot be pipelined, as with strides that are no multiple of
    16: both tiles then share one buffer, with swizzles of different widths.

    >>> tile_dims(64, 64), tile_dims(72, 24), tile_dims(40, 8), tile_dims(8, 24)
    ((64, 64), (128, 64), (64, 64), (16, 32))
    """
    block_key = padded_dim(dim_key)
    return block_key, padded_dim(dim_value, min(block_key, 64))

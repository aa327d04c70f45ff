"""Convolutional heads: a convolution as multi-head attention, one head for each tap of its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from polyhead.errors import OptionError
from polyhead.layers import checks
from polyhead.layers.multi_head.conv_init import (
    SHARPNESS,
    Convolution,
    Outside,
    check_conv_layer,
    outside_of,
    shifts_of,
    write_conv_kernel,
)
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.positions import QuadraticRelative1D, QuadraticRelative2D


def convolutional_heads(
    conv: Convolution,
    *,
    grid: tuple[int, int] | None = None,
    sharpness: float = SHARPNESS,
    outside: Outside | None = None,
    value_dim: int | None = None,
    **options: Any,
) -> MultiHeadAttention:
    """A layer that computes a convolution, and can learn on from there (Cordonnier, Loukas, Jaggi 2020, "On the
    Relationship between Self-Attention and Convolutional Layers", theorem 1).

    Head k looks at the token that tap k of the kernel reads, by its position alone: its logits are

        -sharpness |key position - query position - shift_k|^2,    W_V_k W_O_k = the matrix of tap k

    and the query projection is zero, so that content has no say until it learns one. The error falls as
    exp(-sharpness), with a sink outside as exp(-sharpness / 2).

    Args:
        conv: `Conv1d` of a kernel of K, made of K heads over [batch, length, channels]; or `Conv2d`, of K² heads over
            the cells of a grid row by row, [batch, height * width, channels]. A fresh one makes a fresh layer that
            starts as a convolution. It keeps the size: no stride, and padding for the whole kernel.
        grid: (height, width), for a `Conv2d`.
        sharpness: how little a head sees of the tokens beside its own.
        outside: what stands beyond the border. "nearest", the token at the border: padding_mode="replicate". "sink":
            nothing, by a learned sink of -sharpness / 2 a head: padding_mode="zeros". By the padding mode unless given;
            "nearest" with padding of zeros is equal in the interior alone.
        value_dim: channels of a head's values; the fewer of the convolution's channels by default, and no fewer.
        options: those of `MultiHeadAttention`, but what the convolution decides and what would make it another map: an
            output gate, a causal edge or window, a module that combines heads.

    The layer is as wide as the wider side: it reads the first in_channels channels and writes the first out_channels.
    Its config says init="conv", which builds a fresh one, where a fresh one fits: a square kernel, and values as wide
    as the layer.

    >>> import torch
    >>> conv = nn.Conv1d(6, 6, 3, padding=1, padding_mode="replicate")
    >>> layer, x = convolutional_heads(conv), torch.randn(2, 10, 6)
    >>> layer.layout.num_heads, torch.allclose(layer(x).output, conv(x.mT).mT, atol=1e-5)
    (3, True)
    """
    shifts = shifts_of(conv)
    checks.check_size("value_dim", value_dim)
    outside = outside_of(conv, outside)
    decided = [name for name in ("embed_dim", "num_heads", "positions", "sinks", "init") if name in options]
    if decided:
        raise OptionError(
            f"the convolution decides {', '.join(decided)}, got {decided[0]}={options[decided[0]]!r}; leave it out"
            + (", and say outside='sink' for sinks" if "sinks" in decided else "")
        )
    heads, width = len(shifts), max(conv.in_channels, conv.out_channels)
    given = {name: options[name] for name in ("device", "dtype") if options.get(name) is not None}
    like: dict[str, Any] = {"device": conv.weight.device, "dtype": conv.weight.dtype, **given}
    layer = MultiHeadAttention(
        width,
        heads,
        value_dim=min(conv.in_channels, conv.out_channels) if value_dim is None else value_dim,
        positions=_positions(conv, heads, grid).to(**like),
        sinks=outside == "sink",
        **{"head_dim": max(1, width // heads), **options, **like},
    )
    set_convolution(layer, conv, sharpness=sharpness, outside=outside)
    if layer.layout.value_dim >= width and len(set(conv.kernel_size)) == 1:
        layer.init = "conv"
    return layer


def set_convolution(
    layer: MultiHeadAttention, conv: Convolution, *, sharpness: float = SHARPNESS, outside: Outside | None = None
) -> MultiHeadAttention:
    """Let a layer with quadratic relative positions compute a convolution, in place; see `convolutional_heads`.

    It needs a head for each tap, and heads that nothing masks, gates or combines otherwise. A layer with learned sinks
    has nothing outside, and one without the nearest token; `outside` is to be given where that is not what the
    convolution pads with. A layer that is refused is left as it was.
    """
    check_conv_layer(layer, MultiHeadAttention)
    write_conv_kernel(layer, conv, sharpness, outside)
    return layer


def _positions(
    conv: Convolution, heads: int, grid: tuple[int, int] | None
) -> QuadraticRelative1D | QuadraticRelative2D:
    if isinstance(conv, nn.Conv1d):
        if grid is not None:
            raise OptionError(f"a Conv1d is computed over a line, got grid {grid}; leave it out")
        return QuadraticRelative1D(heads)
    if grid is None:
        raise OptionError("a Conv2d is computed over the cells of a grid, got none; give grid=(height, width)")
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise OptionError(f"grid must be (height, width), got {grid!r}")
    return QuadraticRelative2D(heads, *grid)

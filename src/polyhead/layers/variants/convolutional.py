"""Attention as a convolution (Cordonnier et al. 2020): 1.9 times the forward of MHA, gain unmeasured.

Each head computes one tap of the kernel, by quadratic relative positions ("On the Relationship between Self-Attention
and Convolutional Layers", ICLR 2020). Against multi-head attention of the same width (2 x 4,096 causal tokens of width
2,048, 16 heads, bfloat16, H200) the forward takes 1.26 instead of 0.67 ms and a training step 6.75 instead of 2.30 ms.
Figures from docs/variants.md, which has no training run of this variant.
"""

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
    outside_of,
    set_convolution,
    shifts_of,
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
    """Build a trainable attention layer that computes a convolution.

    Cordonnier, Loukas, Jaggi 2020, "On the Relationship between Self-Attention and Convolutional Layers", theorem 1.
    Head k attends to the token that tap k of the kernel reads, by position only: its logits are

        -sharpness |key position - query position - shift_k|^2,    W_V_k W_O_k = the matrix of tap k

    and the query projection is zero, so that attention depends on content only after training. The error falls as
    exp(-sharpness), with outside="sink" as exp(-sharpness / 2).

    Args:
        conv: `Conv1d` with a kernel of K, computed by K heads over [batch, length, channels]; or `Conv2d`, by K² heads
            over the cells of a grid in row-major order, [batch, height * width, channels]. It must preserve the size:
            stride 1, and padding for the whole kernel.
        grid: (height, width), for a `Conv2d`.
        sharpness: inverse squared width of a head's attention around its tap.
        outside: padding. "nearest" is the token at the border (padding_mode="replicate"); "sink" is zero, by a learned
            sink of -sharpness / 2 per head (padding_mode="zeros"). By default that of the padding mode; "nearest" with
            zero padding is equal in the interior only.
        value_dim: channels of a head's values; by default, and at least, min(in_channels, out_channels).
        options: those of `MultiHeadAttention`, except those that the convolution determines and those that would
            change the result: an output gate, causal, window, combine.

    Returns:
        The layer, with one head per tap.

    The layer's width is max(in_channels, out_channels): it reads the first in_channels channels and writes the first
    out_channels. Its config has init="conv", which builds a fresh convolution, if the kernel is square and values are
    as wide as the layer.

    >>> import torch
    >>> conv = nn.Conv1d(6, 6, 3, padding=1, padding_mode="replicate")
    >>> layer, x = convolutional_heads(conv), torch.randn(2, 10, 6)
    >>> layer.layout.num_heads, torch.allclose(layer(x).output, conv(x.mT).mT, atol=1e-5)
    (3, True)
    """
    shifts = shifts_of(conv)
    checks.check_size("value_dim", value_dim)
    outside = outside_of(conv, outside)
    determined = [name for name in ("embed_dim", "num_heads", "positions", "sinks", "init") if name in options]
    if determined:
        raise OptionError(
            f"the convolution determines {', '.join(determined)}, "
            f"got {determined[0]}={options[determined[0]]!r}; leave it out"
            + (", and pass outside='sink' for sinks" if "sinks" in determined else "")
        )
    heads, width = len(shifts), max(conv.in_channels, conv.out_channels)
    overrides = {name: options[name] for name in ("device", "dtype") if options.get(name) is not None}
    device_and_dtype: dict[str, Any] = {"device": conv.weight.device, "dtype": conv.weight.dtype, **overrides}
    layer = MultiHeadAttention(
        width,
        heads,
        value_dim=min(conv.in_channels, conv.out_channels) if value_dim is None else value_dim,
        positions=_positions(conv, heads, grid).to(**device_and_dtype),
        sinks=outside == "sink",
        **{"head_dim": max(1, width // heads), **options, **device_and_dtype},
    )
    set_convolution(layer, conv, sharpness=sharpness, outside=outside)
    if layer.layout.value_dim >= width and len(set(conv.kernel_size)) == 1:
        layer.init = "conv"
    return layer


def _positions(
    conv: Convolution, heads: int, grid: tuple[int, int] | None
) -> QuadraticRelative1D | QuadraticRelative2D:
    if isinstance(conv, nn.Conv1d):
        if grid is not None:
            raise OptionError(f"a Conv1d takes no grid, got grid {grid}; leave it out")
        return QuadraticRelative1D(heads)
    if grid is None:
        raise OptionError("a Conv2d requires a grid, got none; pass grid=(height, width)")
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise OptionError(f"grid must be (height, width), got {grid!r}")
    return QuadraticRelative2D(heads, *grid)

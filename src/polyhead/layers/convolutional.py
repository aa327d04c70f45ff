"""Convolutional heads: a convolution as multi-head attention, one head for each tap of its kernel."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.layers import checks
from polyhead.layers.multi_head import MultiHeadAttention
from polyhead.layers.positions import QuadraticRelative1D, QuadraticRelative2D

Convolution = nn.Conv1d | nn.Conv2d
Outside = Literal["nearest", "sink"]


def convolutional_heads(
    conv: Convolution,
    *,
    grid: tuple[int, int] | None = None,
    sharpness: float = 32.0,
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
        options: those of `MultiHeadAttention`.

    The layer is as wide as the wider side: it reads the first in_channels channels and writes the first out_channels.

    >>> conv = nn.Conv1d(6, 6, 3, padding=1, padding_mode="replicate")
    >>> layer, x = convolutional_heads(conv), torch.randn(2, 10, 6)
    >>> layer.layout.num_heads, torch.allclose(layer(x).output, conv(x.mT).mT, atol=1e-5)
    (3, True)
    """
    heads = len(_shifts(conv))
    checks.check_size("value_dim", value_dim)
    outside = _outside(conv) if outside is None else outside
    checks.check_one_of("outside", outside, ("nearest", "sink"))
    width = max(conv.in_channels, conv.out_channels)
    positions: QuadraticRelative1D | QuadraticRelative2D
    if isinstance(conv, nn.Conv2d):
        if grid is None:
            raise OptionError("a Conv2d is computed over the cells of a grid, got none; give grid=(height, width)")
        positions = QuadraticRelative2D(heads, *grid)
    else:
        if grid is not None:
            raise OptionError(f"a Conv1d is computed over a line, got grid {grid}; leave it out")
        positions = QuadraticRelative1D(heads)
    like: dict[str, Any] = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    layer = MultiHeadAttention(
        width,
        heads,
        value_dim=min(conv.in_channels, conv.out_channels) if value_dim is None else value_dim,
        positions=positions.to(**like),
        sinks=outside == "sink",
        **{"head_dim": max(1, width // heads), **like, **options},
    )
    return set_convolution(layer, conv, sharpness=sharpness)


@torch.no_grad()
def set_convolution(layer: MultiHeadAttention, conv: Convolution, *, sharpness: float = 32.0) -> MultiHeadAttention:
    """Let a layer with quadratic relative positions compute a convolution, in place; see `convolutional_heads`.

    It needs a head for each tap. Learned sinks, where it has them, become the outside.
    """
    shifts, layout = _shifts(conv), layer.layout
    axes = 2 if isinstance(conv, nn.Conv2d) else 1
    wanted = QuadraticRelative2D if axes == 2 else QuadraticRelative1D
    if not isinstance(layer.positions, wanted):
        raise OptionError(
            f"the heads of a convolution find their tokens by {wanted.__name__}, got {type(layer.positions).__name__}"
        )
    if layout.num_heads != len(shifts) or layout.num_kv_heads != len(shifts):
        raise ShapeError(
            f"a convolution needs a head with its own values for each of its {len(shifts)} taps, got "
            f"{layout.num_heads} heads and {layout.num_kv_heads} of values"
        )
    width = max(conv.in_channels, conv.out_channels)
    if layout.embed_dim != width or layout.value_input_dim != width:
        raise ShapeError(
            f"a convolution of {conv.in_channels} to {conv.out_channels} channels needs a layer {width} wide, "
            f"got {layout.embed_dim}"
        )
    fewer = min(conv.in_channels, conv.out_channels)
    if layout.value_dim < fewer:
        raise ShapeError(
            f"a tap maps {conv.in_channels} to {conv.out_channels} channels, which takes values of at least {fewer} "
            f"channels, got value_dim {layout.value_dim}"
        )
    checks.check_positive("sharpness", sharpness)
    layer.positions.attend_to(shifts, alpha=sharpness)
    nn.init.zeros_(layer.q_proj.weight)  # and not the keys': two zeros would have no gradient
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    nn.init.zeros_(layer.v_proj.weight)
    nn.init.zeros_(layer.out_proj.weight)
    taps = conv.weight.flatten(2).permute(2, 1, 0)  # [taps, in, out], the last axis of a kernel fastest
    for head, tap in zip(layer.heads, taps, strict=True):
        value, output = _factors(tap)
        head.value[: value.shape[0], : value.shape[1]] = value
        head.output[: output.shape[0], : output.shape[1]] = output
    if conv.bias is not None:
        if layer.out_proj.bias is None:
            raise OptionError("a convolution with a bias needs a layer with an output bias, got one without")
        layer.out_proj.bias[: conv.out_channels] = conv.bias
    if layer.sinks is not None:
        layer.sinks.fill_(-sharpness / 2)
    return layer


def _factors(tap: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [in, out] as a product through as many channels as its narrower side has."""
    one = torch.eye(min(tap.shape), dtype=tap.dtype, device=tap.device)
    return (one, tap) if tap.shape[0] <= tap.shape[1] else (tap, one)


def _shifts(conv: Convolution) -> list[tuple[int, ...]]:
    """How far from a token each tap reads, along every axis, in the order in which the kernel lies."""
    if not isinstance(conv, Convolution):
        raise OptionError(f"heads are made of a Conv1d or a Conv2d, got {type(conv).__name__}")
    if conv.groups != 1 or any(x != 1 for x in conv.stride):
        raise OptionError(
            f"heads compute a convolution without stride and of one group, got stride {conv.stride} and groups "
            f"{conv.groups}"
        )
    axes = []
    for axis, (taps, step) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True)):
        reach = step * (taps - 1)
        # PyTorch's "same" puts what is odd of the padding after the tokens.
        before = reach // 2 if conv.padding == "same" else 0 if isinstance(conv.padding, str) else conv.padding[axis]
        if conv.padding != "same" and 2 * before != reach:
            raise OptionError(
                f"heads give as many tokens as they read, so padding must be {reach / 2:g} on either side for a kernel "
                f"of {taps} with dilation {step}, got {conv.padding!r}; or padding='same'"
            )
        axes.append([tap * step - before for tap in range(taps)])
    return list(itertools.product(*axes))


def _outside(conv: Convolution) -> Outside:
    modes: dict[str, Outside] = {"replicate": "nearest", "zeros": "sink"}
    if conv.padding_mode not in modes:
        raise OptionError(f"padding_mode must be 'replicate' or 'zeros', got {conv.padding_mode!r}")
    return modes[conv.padding_mode]

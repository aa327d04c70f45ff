"""Convolutional heads: a convolution as multi-head attention, one head for each tap of its kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyhead.errors import DeviceError, OptionError, ShapeError
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
        options: those of `MultiHeadAttention`, but what the convolution decides and what would make it another map: an
            output gate, a causal edge or window, a module that combines heads.

    The layer is as wide as the wider side: it reads the first in_channels channels and writes the first out_channels.
    Its config says init="conv", which builds a fresh one, where a fresh one fits: a square kernel, and values as wide
    as the layer.

    >>> conv = nn.Conv1d(6, 6, 3, padding=1, padding_mode="replicate")
    >>> layer, x = convolutional_heads(conv), torch.randn(2, 10, 6)
    >>> layer.layout.num_heads, torch.allclose(layer(x).output, conv(x.mT).mT, atol=1e-5)
    (3, True)
    """
    shifts = _shifts(conv)
    checks.check_size("value_dim", value_dim)
    outside = _outside(conv, outside)
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


@torch.no_grad()
def set_convolution(
    layer: MultiHeadAttention, conv: Convolution, *, sharpness: float = 32.0, outside: Outside | None = None
) -> MultiHeadAttention:
    """Let a layer with quadratic relative positions compute a convolution, in place; see `convolutional_heads`.

    It needs a head for each tap, and heads that nothing masks, gates or combines otherwise. A layer with learned sinks
    has nothing outside, and one without the nearest token; `outside` is to be given where that is not what the
    convolution pads with. A layer that is refused is left as it was.
    """
    shifts = _shifts(conv)
    _check_layer(layer)
    _check_fit(layer, conv, shifts, _outside(conv, outside))
    checks.check_positive("sharpness", sharpness)
    assert isinstance(layer.positions, QuadraticRelative1D | QuadraticRelative2D)
    layer.positions.attend_to(shifts, alpha=sharpness)
    nn.init.zeros_(layer.q_proj.weight)  # and not the keys': two zeros would have no gradient
    # A norm of queries keeps zeros, but for what it adds.
    for module in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj, layer.q_norm):
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            nn.init.zeros_(bias)
    nn.init.zeros_(layer.v_proj.weight)
    nn.init.zeros_(layer.out_proj.weight)
    taps = conv.weight.flatten(2).permute(2, 1, 0)  # [taps, in, out], the last axis of a kernel fastest
    for head, tap in zip(layer.heads, taps, strict=True):
        value, output = _factors(tap)
        head.value[: value.shape[0], : value.shape[1]] = value
        head.output[: output.shape[0], : output.shape[1]] = output
    if conv.bias is not None:
        layer.out_proj.bias[: conv.out_channels] = conv.bias
    if layer.sinks is not None:
        layer.sinks.fill_(-sharpness / 2)
    return layer


def reset_to_convolution(layer: MultiHeadAttention) -> None:
    """Draw a layer's parameters as `init="conv"` has it: a fresh convolution, and Glorot-uniform keys."""
    conv = _fresh_convolution(layer)
    nn.init.xavier_uniform_(layer.k_proj.weight)
    set_convolution(layer, conv)


def _fresh_convolution(layer: MultiHeadAttention) -> Convolution:
    """A convolution as PyTorch draws it, as wide as the layer, with a tap for each head.

    It pads with zeros where the layer has sinks, and with the nearest token where it has none.
    """
    _check_layer(layer)
    heads, weight, width = layer.layout.num_heads, layer.out_proj.weight, layer.layout.embed_dim
    options: dict[str, Any] = {
        "padding": "same",
        "padding_mode": "replicate" if layer.sinks is None else "zeros",
        "bias": layer.out_proj.bias is not None,
        "device": weight.device,
        "dtype": weight.dtype,
    }
    conv: Convolution
    if isinstance(layer.positions, QuadraticRelative2D):
        side = math.isqrt(heads)
        if side**2 != heads:
            raise ShapeError(
                f"a fresh convolution over a grid has K * K taps and a head for each, got {heads} heads; "
                f"give {side**2} or {(side + 1) ** 2}"
            )
        conv = nn.Conv2d(width, width, side, **options)
    else:
        conv = nn.Conv1d(width, width, heads, **options)
    _check_fit(layer, conv, _shifts(conv), _outside(conv, None))  # before the keys are drawn
    return conv


def _check_layer(layer: MultiHeadAttention) -> None:
    """Refuse a layer that does more with its heads than a convolution does with its taps."""
    if type(layer) is not MultiHeadAttention:
        raise OptionError(
            "a convolution is a sum of taps, which MultiHeadAttention itself computes and no other arrangement does, "
            f"got {type(layer).__name__}"
        )
    if not isinstance(layer.positions, QuadraticRelative1D | QuadraticRelative2D):
        raise OptionError(
            "the heads of a convolution find their tokens by QuadraticRelative1D or QuadraticRelative2D, got positions "
            f"{None if layer.positions is None else type(layer.positions).__name__}"
        )
    more = {
        "an output gate": layer.gate_proj,
        "a head_gate": layer.head_gate,
        "a module that combines heads": layer.combine,
        "a mask of its own": layer.mask,
    }
    found = [name for name, part in more.items() if part is not None]
    if found:
        raise OptionError(
            f"the heads of a convolution see both sides of a token and are added up as they are, got a layer with "
            f"{', '.join(found)}; leave it out"
        )
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        if type(linear := getattr(layer, name)) is not nn.Linear:
            raise OptionError(
                f"taps are written into the weights of an nn.Linear, got {type(linear).__name__} as {name}"
            )


def _check_fit(layer: MultiHeadAttention, conv: Convolution, shifts: list[tuple[int, ...]], outside: Outside) -> None:
    """Refuse a layer of other sizes than the convolution has."""
    layout, channels = layer.layout, f"{conv.in_channels} to {conv.out_channels} channels"
    wanted = QuadraticRelative2D if isinstance(conv, nn.Conv2d) else QuadraticRelative1D
    if not isinstance(layer.positions, wanted):
        raise OptionError(
            f"the heads of a {type(conv).__name__} find their tokens by {wanted.__name__}, "
            f"got {type(layer.positions).__name__}"
        )
    if layout.num_heads != len(shifts) or layout.num_kv_heads != len(shifts):
        raise ShapeError(
            f"a convolution needs a head with its own values for each of its {len(shifts)} taps, got "
            f"{layout.num_heads} heads and {layout.num_kv_heads} of values"
        )
    width = max(conv.in_channels, conv.out_channels)
    widths = (layout.embed_dim, layout.key_input_dim, layout.value_input_dim)
    if any(x != width for x in widths):
        got = str(widths[0]) if len(set(widths)) == 1 else f"{widths} for queries, keys and values"
        raise ShapeError(f"a convolution of {channels} needs a layer {width} wide, got {got}")
    fewer = min(conv.in_channels, conv.out_channels)
    if layout.value_dim < fewer:
        raise ShapeError(
            f"a tap maps {channels}, which takes values of at least {fewer} channels, got value_dim "
            f"{layout.value_dim}; give value_dim={fewer}"
        )
    if conv.bias is not None and layer.out_proj.bias is None:
        raise OptionError("a convolution with a bias needs a layer with an output bias, got one without")
    if any(map(any, shifts)) and (layer.sinks is not None) != (outside == "sink"):  # one tap never reads outside
        raise OptionError(
            f"outside={outside!r} takes a layer {'with' if outside == 'sink' else 'without'} learned sinks, got one "
            f"{'without' if outside == 'sink' else 'with'}; make it so, or give the other outside"
        )
    if conv.weight.is_meta and not layer.out_proj.weight.is_meta:
        raise DeviceError("a convolution on the meta device has no numbers to write into a layer, got one")


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


def _outside(conv: Convolution, outside: Outside | None) -> Outside:
    """What stands beyond the border: as given, or what the convolution pads with."""
    if outside is not None:
        checks.check_one_of("outside", outside, ("nearest", "sink"))
        return outside
    modes: dict[str, Outside] = {"replicate": "nearest", "zeros": "sink"}
    if conv.padding_mode not in modes:
        raise OptionError(f"padding_mode must be 'replicate' or 'zeros', got {conv.padding_mode!r}")
    return modes[conv.padding_mode]

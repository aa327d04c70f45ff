"""Convolution kernels written into the weights of multi-head attention, one tap per head."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from polyhead.errors import DeviceError, OptionError, ShapeError
from polyhead.layers import checks
from polyhead.layers.positions import QuadraticRelative1D, QuadraticRelative2D

if TYPE_CHECKING:
    from polyhead.layers.multi_head.layer import MultiHeadAttention

Convolution = nn.Conv1d | nn.Conv2d
Outside = Literal["nearest", "sink"]
Layer = Any  # a ProjectedHeads, which imports this module
SHARPNESS = 32.0  # logit gap between a head's key and its neighbours, whose weight is then exp(-32), about 1e-14


@torch.no_grad()
def set_convolution(
    layer: MultiHeadAttention, conv: Convolution, *, sharpness: float = SHARPNESS, outside: Outside | None = None
) -> MultiHeadAttention:
    """Write a convolution into a layer with quadratic relative positions, in place.

    The layer needs one head per tap, and no mask, gate or combine module. A layer with learned sinks has
    outside="sink", one without outside="nearest"; pass `outside` where that differs from the convolution's padding
    mode. A layer that does not fit is left unchanged.

    Args:
        layer: the layer to write into.
        conv: the convolution, of PyTorch.
        sharpness: factor of the squared distance; the larger, the nearer to one tap.
        outside: what a tap reads beyond the border: "nearest" or "sink" (zero).

    Returns:
        `layer`.
    """
    _check_layer(layer)
    shifts = shifts_of(conv)
    _check_fit(layer, conv, shifts, outside_of(conv, outside))
    heads = layer.heads
    checks.check_positive("sharpness", sharpness)
    assert isinstance(layer.positions, QuadraticRelative1D | QuadraticRelative2D)
    layer.positions.attend_to(shifts, alpha=sharpness)
    nn.init.zeros_(layer.q_proj.weight)  # keys stay nonzero: with both zero, neither would receive a gradient
    # A query norm maps zero queries to its bias, which is therefore zeroed too.
    for module in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj, layer.q_norm):
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            nn.init.zeros_(bias)
    nn.init.zeros_(layer.v_proj.weight)
    nn.init.zeros_(layer.out_proj.weight)
    taps = conv.weight.flatten(2).permute(2, 1, 0)  # [taps, in, out], the last axis of a kernel fastest
    for head, tap in zip(heads, taps, strict=True):
        value, output = _factors(tap)
        head.value[: value.shape[0], : value.shape[1]] = value
        head.output[: output.shape[0], : output.shape[1]] = output
    if conv.bias is not None:
        layer.out_proj.bias[: conv.out_channels] = conv.bias
    if layer.sinks is not None:
        layer.sinks.fill_(-sharpness / 2)
    return layer


def init_conv_heads(layer: Layer) -> None:
    """Initialise a layer with `init="conv"`: a freshly initialised convolution and Glorot-uniform keys.

    The convolution has PyTorch's initialisation, the layer's width and one tap per head. It pads with zeros if the
    layer has sinks, otherwise by replication.
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
                f"a convolution over a grid has K * K taps and needs as many heads, got {heads} heads; "
                f"use {side**2} or {(side + 1) ** 2}"
            )
        conv = nn.Conv2d(width, width, side, **options)
    else:
        conv = nn.Conv1d(width, width, heads, **options)
    set_convolution(layer, conv)
    nn.init.xavier_uniform_(layer.k_proj.weight)


def _check_layer(layer: Layer) -> None:
    """Raise if the layer's class or options (positions, gates, masks, combine) do not allow a convolution."""
    if not getattr(layer, "_may_be_plain", False):
        raise OptionError(
            "a convolution can be written into MultiHeadAttention and no other attention variant, "
            f"got {type(layer).__name__}"
        )
    if not isinstance(layer.positions, QuadraticRelative1D | QuadraticRelative2D):
        raise OptionError(
            "convolutional heads require positions QuadraticRelative1D or QuadraticRelative2D, got positions "
            f"{None if layer.positions is None else type(layer.positions).__name__}"
        )
    unsupported_options = {
        "an output gate": layer.gate_proj,
        "a head_gate": layer.head_gate,
        "a combine module": layer.combine,
        "causal or window": layer.mask,
    }
    unsupported = [name for name, part in unsupported_options.items() if part is not None]
    if unsupported:
        raise OptionError(
            f"convolutional heads must be neither masked, gated nor combined, got a layer with "
            f"{', '.join(unsupported)}; leave it out"
        )
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        if type(linear := getattr(layer, name)) is not nn.Linear:
            raise OptionError(
                f"projections of convolutional heads must be nn.Linear, got {type(linear).__name__} as {name}"
            )


def _check_fit(layer: Layer, conv: Convolution, shifts: list[tuple[int, ...]], outside: Outside) -> None:
    """Raise if the layer's sizes do not match the convolution."""
    layout, channels = layer.layout, f"{conv.in_channels} to {conv.out_channels} channels"
    required = QuadraticRelative2D if isinstance(conv, nn.Conv2d) else QuadraticRelative1D
    if not isinstance(layer.positions, required):
        raise OptionError(
            f"the heads of a {type(conv).__name__} require positions {required.__name__}, "
            f"got {type(layer.positions).__name__}"
        )
    if layout.num_heads != len(shifts) or layout.num_kv_heads != len(shifts):
        raise ShapeError(
            f"a convolution needs a head and a KV head for each of its {len(shifts)} taps, got "
            f"{layout.num_heads} heads and {layout.num_kv_heads} KV heads"
        )
    width = max(conv.in_channels, conv.out_channels)
    widths = (layout.embed_dim, layout.key_input_dim, layout.value_input_dim)
    if any(x != width for x in widths):
        got = str(widths[0]) if len(set(widths)) == 1 else f"{widths} for queries, keys and values"
        raise ShapeError(f"a convolution of {channels} needs a layer {width} wide, got {got}")
    min_channels = min(conv.in_channels, conv.out_channels)
    if layout.value_dim < min_channels:
        raise ShapeError(
            f"a tap maps {channels}, which requires value_dim of at least {min_channels}, got "
            f"{layout.value_dim}; use value_dim={min_channels}"
        )
    if conv.bias is not None and layer.out_proj.bias is None:
        raise OptionError("a convolution with a bias needs a layer with an output bias, got one without")
    if any(map(any, shifts)) and (layer.sinks is not None) != (outside == "sink"):  # a 1-tap kernel needs no padding
        raise OptionError(
            f"outside={outside!r} requires a layer {'with' if outside == 'sink' else 'without'} learned sinks, got one "
            f"{'without' if outside == 'sink' else 'with'}; change sinks, or pass the other value of outside"
        )
    if conv.weight.is_meta and not layer.out_proj.weight.is_meta:
        raise DeviceError("the convolution must have data to copy, got one on the meta device")


def _factors(tap: Tensor) -> tuple[Tensor, Tensor]:
    """Factor a matrix [in, out] through min(in, out) channels, one factor being the identity."""
    identity = torch.eye(min(tap.shape), dtype=tap.dtype, device=tap.device)
    return (identity, tap) if tap.shape[0] <= tap.shape[1] else (tap, identity)


def shifts_of(conv: Convolution) -> list[tuple[int, ...]]:
    """Return the offset of each tap from the query along every axis, in the memory order of the kernel."""
    if not isinstance(conv, Convolution):
        raise OptionError(f"convolutional heads take a Conv1d or a Conv2d, got {type(conv).__name__}")
    if conv.groups != 1 or any(x != 1 for x in conv.stride):
        raise OptionError(
            f"convolutional heads require stride 1 and one group, got stride {conv.stride} and groups {conv.groups}"
        )
    axes = []
    for axis, (taps, step) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True)):
        span = step * (taps - 1)
        # PyTorch's "same" puts the extra element of an odd padding at the end.
        before = span // 2 if conv.padding == "same" else 0 if isinstance(conv.padding, str) else conv.padding[axis]
        if conv.padding != "same" and 2 * before != span:
            raise OptionError(
                f"attention preserves the sequence length, so padding must be {span / 2:g} on either side for a kernel "
                f"of {taps} with dilation {step}, got {conv.padding!r}; or use padding='same'"
            )
        axes.append([tap * step - before for tap in range(taps)])
    return list(itertools.product(*axes))


def outside_of(conv: Convolution, outside: Outside | None) -> Outside:
    """Return `outside`, or if None the equivalent of the convolution's padding mode."""
    if outside is not None:
        checks.check_one_of("outside", outside, ("nearest", "sink"))
        return outside
    modes: dict[str, Outside] = {"replicate": "nearest", "zeros": "sink"}
    checks.check_one_of("padding_mode", conv.padding_mode, tuple(modes))
    return modes[conv.padding_mode]

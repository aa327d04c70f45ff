"""The taps of a convolution in the weights of multi-head attention: which layers hold them, and how they lie there."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyhead.errors import DeviceError, OptionError, ShapeError
from polyhead.layers import checks
from polyhead.layers.positions import QuadraticRelative1D, QuadraticRelative2D

Convolution = nn.Conv1d | nn.Conv2d
Outside = Literal["nearest", "sink"]
Layer = Any  # a MultiHeadAttention, which stands on this module
SHARPNESS = 32.0  # by default: exp(-32) is 1e-14


@torch.no_grad()
def write_conv_kernel(layer: Layer, conv: Convolution, sharpness: float, outside: Outside | None) -> None:
    """Let a layer compute a convolution, in place; one that is refused is left as it was."""
    shifts = shifts_of(conv)
    _check_layer(layer)
    _check_fit(layer, conv, shifts, outside_of(conv, outside))
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


def init_conv_heads(layer: Layer) -> None:
    """Draw a layer's parameters as `init="conv"` has it: a fresh convolution, and Glorot-uniform keys."""
    conv = _fresh_convolution(layer)
    nn.init.xavier_uniform_(layer.k_proj.weight)
    write_conv_kernel(layer, conv, SHARPNESS, None)


def _fresh_convolution(layer: Layer) -> Convolution:
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
    _check_fit(layer, conv, shifts_of(conv), outside_of(conv, None))  # before the keys are drawn
    return conv


def check_conv_layer(layer: nn.Module, plain: type[nn.Module]) -> None:
    """Refuse what is not the `plain` layer itself."""
    if type(layer) is not plain:
        raise OptionError(
            f"a convolution is a sum of taps, which {plain.__name__} itself computes and no other arrangement does, "
            f"got {type(layer).__name__}"
        )


def _check_layer(layer: Layer) -> None:
    """Refuse a layer that does more with its heads than a convolution does with its taps."""
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


def _check_fit(layer: Layer, conv: Convolution, shifts: list[tuple[int, ...]], outside: Outside) -> None:
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


def _factors(tap: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [in, out] as a product through as many channels as its narrower side has."""
    one = torch.eye(min(tap.shape), dtype=tap.dtype, device=tap.device)
    return (one, tap) if tap.shape[0] <= tap.shape[1] else (tap, one)


def shifts_of(conv: Convolution) -> list[tuple[int, ...]]:
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
        span = step * (taps - 1)
        # PyTorch's "same" puts what is odd of the padding after the tokens.
        before = span // 2 if conv.padding == "same" else 0 if isinstance(conv.padding, str) else conv.padding[axis]
        if conv.padding != "same" and 2 * before != span:
            raise OptionError(
                f"heads give as many tokens as they read, so padding must be {span / 2:g} on either side for a kernel "
                f"of {taps} with dilation {step}, got {conv.padding!r}; or padding='same'"
            )
        axes.append([tap * step - before for tap in range(taps)])
    return list(itertools.product(*axes))


def outside_of(conv: Convolution, outside: Outside | None) -> Outside:
    """What stands beyond the border: as given, or what the convolution pads with."""
    if outside is not None:
        checks.check_one_of("outside", outside, ("nearest", "sink"))
        return outside
    modes: dict[str, Outside] = {"replicate": "nearest", "zeros": "sink"}
    if conv.padding_mode not in modes:
        raise OptionError(f"padding_mode must be 'replicate' or 'zeros', got {conv.padding_mode!r}")
    return modes[conv.padding_mode]

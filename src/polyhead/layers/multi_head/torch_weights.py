"""Conversion of weights to and from `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers.joint_projection import is_plain_linear
from polyhead.layers.multi_head.separate_heads import SeparateHeads

Layer = TypeVar("Layer", bound=SeparateHeads)

# Options of a layer's constructor that follow from the weights of PyTorch's module.
_DETERMINED = (
    "embed_dim", "num_heads", "num_kv_heads", "key_heads", "head_dim", "value_dim", "key_input_dim", "value_input_dim",
    "bias", "output_bias",
)  # fmt: skip


def from_torch(cls: type[Layer], module: nn.MultiheadAttention, options: dict[str, Any]) -> Layer:
    """Build the equivalent layer of class `cls`, copying the module's weights; `options` take precedence."""
    layer = cls(**_options_of(module, options))
    layer._check_concatenates("a counterpart of torch.nn.MultiheadAttention")
    with torch.no_grad():
        for param, torch_param in _pairs(layer, module):
            param.copy_(torch_param)
    return layer.train(module.training)


def to_torch(layer: SeparateHeads) -> nn.MultiheadAttention:
    """Return an equivalent `torch.nn.MultiheadAttention` (batch first), or raise if there is none."""
    unsupported = [name for name, present in _without_counterpart(layer).items() if present]
    if unsupported:
        raise OptionError(f"torch.nn.MultiheadAttention has no counterpart for {', '.join(unsupported)}")
    layout, weight = layer.layout, layer.out_proj.weight
    module = nn.MultiheadAttention(
        layout.embed_dim,
        layout.num_heads,
        dropout=layer.dropout,
        bias=layer.q_proj.bias is not None,
        kdim=layout.key_input_dim,
        vdim=layout.value_input_dim,
        batch_first=True,
        device=weight.device,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        for param, torch_param in _pairs(layer, module):
            torch_param.copy_(param)
    return module.train(layer.training)


def _options_of(module: nn.MultiheadAttention, options: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments of a layer equivalent to `module`; `options` take precedence."""
    if not isinstance(module, nn.MultiheadAttention):
        raise OptionError(f"from_torch takes a torch.nn.MultiheadAttention, got {type(module).__name__}")
    if module.bias_k is not None or module.add_zero_attn:
        raise OptionError(
            "add_bias_kv and add_zero_attn are not supported; use polyhead.layers.torch_compat for such a module"
        )
    determined = [name for name in _DETERMINED if name in options]
    if determined:
        raise OptionError(
            f"the module determines {', '.join(determined)}, got {determined[0]}={options[determined[0]]!r}; "
            "leave it out"
        )
    weight = module.out_proj.weight
    return {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "key_input_dim": module.kdim,
        "value_input_dim": module.vdim,
        "bias": module.in_proj_bias is not None,
        "dropout": module.dropout,
        "device": weight.device,
        "dtype": weight.dtype,
        **options,
    }


def _without_counterpart(layer: SeparateHeads) -> dict[str, bool]:
    layout = layer.layout
    inputs: dict[str, Any] = {"key_input_dim": layout.key_input_dim, "value_input_dim": layout.value_input_dim}
    divides = layout.embed_dim % layout.num_heads == 0
    return {
        "this head layout": not divides or layout != HeadLayout(layout.embed_dim, layout.num_heads, **inputs),
        "positions": layer.positions is not None,
        "causal or window": layer.mask is not None,
        "qk_norm": layer.q_norm is not None,
        "an output gate": layer.gate_proj is not None,
        "a combine module": layer.combine is not None,
        "softcap": layer.softcap is not None,
        "a scale": layer.scale is not None,
        "sinks": layer.sinks is not None,
        "a head_gate": layer.head_gate is not None,
        "a projection that computes more than its weight and bias, such as an adapter": any(
            not (is_plain_linear(linear) or is_parametrized(linear))
            for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
        ),
        "a bias in only some of the projections": (layer.q_proj.bias is None) != (layer.out_proj.bias is None),
    }


def _pairs(layer: SeparateHeads, module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor]]:
    """Pair each of the layer's parameters with its counterpart, or slice of one, in the module."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    if module._qkv_same_embed_dim:
        weights: Sequence[Tensor] = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    pairs: list[tuple[Tensor, Tensor]] = [
        (linear.weight, weight) for linear, weight in zip(projections, weights, strict=True)
    ]
    if module.in_proj_bias is not None:
        pairs += [(linear.bias, bias) for linear, bias in zip(projections, module.in_proj_bias.chunk(3), strict=True)]
        pairs.append((layer.out_proj.bias, module.out_proj.bias))
    return [*pairs, (layer.out_proj.weight, module.out_proj.weight)]

"""Find the linear layer that reads the head outputs of an attention module, while the model runs."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.layers.base_attention import BaseAttention


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is `torch.nn.Linear` or transformers' Conv1D, whose weight is transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def linear_matrix(module: nn.Module) -> Tensor:
    """Return the weight of a linear layer as [in, out]."""
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    return weight.T if isinstance(module, nn.Linear) else weight


def candidate_projections(model: nn.Module, modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return linear layers that may be the output projection of an attention module, and their paths.

    The output projection of BERT is outside of its attention module, so the module around it is searched as well.

    Args:
        model: the model.
        modules: its attention modules; `torch.nn.MultiheadAttention` does not call its output projection.
    """
    attention = {id(module) for module in modules if not isinstance(module, nn.MultiheadAttention)}
    linears: set[nn.Module] = set()
    for path, module in model.named_modules():
        if id(module) not in attention:
            continue
        around = model.get_submodule(path.rpartition(".")[0])
        if isinstance(module, BaseAttention):  # it would not join its other projections if they had hooks
            reads_single_heads = getattr(module, "combine", None) is None
            around = getattr(module, "out_proj", nn.Identity()) if reads_single_heads else nn.Identity()
        linears |= {linear for linear in around.modules() if is_linear(linear)}
    return {linear: path for path, linear in model.named_modules() if linear in linears}


def wrapper_of(model: nn.Module, name: str, attention: Container[int]) -> nn.Module:
    """Return the module that computes more from the input of a linear layer than this layer does, or the layer itself.

    That is an adapter of PEFT around its `base_layer`, or a module with parameters of its own or with another linear
    layer, as adapters are written by hand, between the attention module and the layer.

    Args:
        model: the model.
        name: path of the linear layer.
        attention: ids of the attention modules: those whose heads the layer reads, not all that may attend.
    """
    linear, (path, _, last) = model.get_submodule(name), name.rpartition(".")
    if last == "base_layer":
        return model.get_submodule(path)
    while path and isinstance(model.get_submodule(path), nn.Sequential | nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    parent = model.get_submodule(path)
    if not path or any(id(x) in attention for x in parent.modules()):
        return linear
    others = [x for x in parent.modules() if is_linear(x) and x is not linear]
    return parent if len(others) or next(parent.parameters(recurse=False), None) is not None else linear


def reads_heads(read: Tensor, heads: Tensor) -> bool:
    """Return whether a tensor is the concatenation of head outputs, up to positive factors; waits for the device.

    Gates and norms between attention and output projection multiply each channel by a number that is not negative, so
    all signs agree; in another order of heads or tokens they do not.

    Args:
        read: input of a linear layer, [..., in_features].
        heads: outputs of all heads, [batch, heads, queries, value_dim].
    """
    by_token = heads.transpose(1, 2)  # [batch, queries, heads, value_dim]
    if read.numel() != by_token.numel() or read.shape[-1] != by_token.shape[2] * by_token.shape[3]:
        return False
    agrees = read.reshape(by_token.shape).sign() * by_token.sign()
    return bool((agrees >= 0).all() & (agrees > 0).any())


def has_plain_weight(linear: nn.Module) -> bool:
    """Return whether the weight of a layer is an ordinary matrix, neither quantised nor sharded.

    Args:
        linear: a linear layer.
    """
    weight: Any = getattr(linear, "weight", None)
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and weight.dtype.itemsize > 1


def output_matrix(linear: nn.Module, wrapper: nn.Module, device: torch.device) -> Tensor | None:
    """Return W_O as [heads * value_dim, embed_dim], with LoRA if there is any; None where it is not known.

    That is the case for quantised and sharded weights, for other adapters than plain LoRA of PEFT, and for layers with
    a forward of their own.

    Args:
        linear: the layer that reads the head outputs.
        wrapper: the layer that wraps it, or the layer itself.
        device: device of the head outputs.
    """
    has_own_forward = isinstance(linear, nn.Linear) and type(linear).forward is not nn.Linear.forward
    if not has_plain_weight(linear) or has_own_forward or linear.weight.device != device:
        return None
    if wrapper is linear:
        return linear_matrix(linear)
    return _with_lora(linear_matrix(linear), wrapper) if getattr(wrapper, "base_layer", None) is linear else None


def _with_lora(matrix: Tensor, wrapper: Any) -> Tensor | None:
    """Return a matrix [in, out] with the active adapters of a LoRA layer of PEFT, without their dropout."""
    if not hasattr(wrapper, "lora_A"):
        return None
    if wrapper.merged or wrapper.disable_adapters:
        return matrix
    for name in wrapper.active_adapters:
        if name not in wrapper.lora_A:
            continue
        if name in getattr(wrapper, "lora_variant", ()) or getattr(wrapper, "use_dora", {}).get(name):
            return None
        down, up = (x[name].weight.detach().T.to(matrix.dtype) for x in (wrapper.lora_A, wrapper.lora_B))
        matrix = matrix + down @ up * wrapper.scaling[name]
    return matrix

"""Rows of W_Q and W_K through which the attention logits of a single head are scaled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers.latent.layer import LatentAttention
from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.projection_formats import NORMS

_SOFTCAPS = ("softcap", "attn_logit_softcapping")


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRows:
    """A projection, and the power of its head's factor by which each of its output channels is scaled."""

    parameters: tuple[tuple[nn.Parameter, int], ...]  # weight and bias, each with the axis of the output channels
    heads: Tensor  # [outputs]: the head that each channel belongs to
    powers: Tensor  # [outputs]: 0 for channels that are not scaled

    def __post_init__(self) -> None:
        device = self.parameters[0][0].device
        for name in ("heads", "powers"):  # a copy to the device in each step would wait for it
            object.__setattr__(self, name, getattr(self, name).to(device))

    def scale(self, factors: Tensor, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Multiply each channel by its power of the factor of its head, [heads]; by 1 it stays bit-identical."""
        for parameter, axis in self.parameters:
            scaled = masters.get(parameter, parameter)
            device = scaled.device
            by_channel = factors.to(device)[self.heads.to(device)].pow(self.powers.to(device))
            # In float32 at least: the factor itself is not rounded to 16 bits.
            by_channel = by_channel.to(torch.promote_types(scaled.dtype, torch.float32))
            scaled.mul_(_as(scaled, by_channel.view([-1 if i == axis else 1 for i in range(scaled.ndim)])))
            if scaled is not parameter:
                parameter.copy_(scaled)


@dataclass(frozen=True, slots=True, eq=False)
class QueryKeyWeights:
    """The weights of one attention layer through which the logits of each head are scaled."""

    site: str  # name under which the layer is observed
    num_heads: int
    rows: tuple[ScaledRows, ...]

    def scale_logits(self, factors: Tensor, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Multiply the logits of each head by its factor, [heads]; `masters` are copies that overwrite parameters."""
        for rows in self.rows:
            rows.scale(factors, masters)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that are scaled."""
        for rows in self.rows:
            yield from (parameter for parameter, _ in rows.parameters)


def find_query_key_weights(model: nn.Module) -> tuple[QueryKeyWeights, ...]:
    """Return the weights of every attention layer; raises if the logits of one cannot be scaled through its weights."""
    layers: dict[str, AttentionLayer | None] = {layer.path: layer for layer in find_layers(model)}
    layers |= {path: None for path, x in model.named_modules() if isinstance(x, LatentAttention)}
    weights, refused = [], {}
    owners = Counter(id(x) for module in model.modules() for x in module._parameters.values() if x is not None)
    for path, layer in layers.items():
        module = model.get_submodule(path)
        site = path or type(module).__name__
        is_latent = hasattr(module, "kv_b_proj")
        if reason := _refusal(module, None if is_latent or isinstance(module, nn.MultiheadAttention) else layer):
            refused[site] = reason
        elif is_latent:
            weights.append(_latent(module, site))
        elif isinstance(module, nn.MultiheadAttention):
            weights.append(_torch(module, site))
        else:
            assert layer is not None
            weights.append(_separate(model, layer))
        names = {id(x): name for name, x in model.named_parameters()}
        own = () if reason else tuple(weights[-1].parameters())
        if any(id(x) not in names for x in own):
            refused[site] = "its weights are computed by a parametrization, and a product with them would be lost"
        elif tied := sorted({names[id(x)] for x in own if owners[id(x)] > 1}):
            refused[site] = f"{', '.join(tied)} is shared with another module"
    if refused:
        site, reason = next(iter(refused.items()))
        others = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise OptionError(
            f"the logits of each head must be a product of its rows of W_Q and W_K, got {site}{others}: {reason}"
        )
    if not weights:
        raise OptionError(
            "QK-clip needs attention layers of polyhead, of transformers or torch.nn.MultiheadAttention, got a model "
            f"without any: {type(model).__name__}"
        )
    return tuple(weights)


def _refusal(module: nn.Module, layer: AttentionLayer | None) -> str:
    """Return why the logits of a layer cannot be scaled through its weights; empty if they can."""
    if getattr(module, "is_head_parallel", False):
        return "its heads are distributed over ranks, and QK-clip scales whole parameters"
    norm = next((name for name in NORMS if getattr(module, name, None) is not None), None)
    if norm is not None:
        return f"its {norm} normalises queries or keys after the projection, which already bounds the logits"
    if any(getattr(module, name, None) is not None for name in _SOFTCAPS):
        return "its soft cap already bounds the logits, and they do not scale with W_Q and W_K"
    if layer is not None and layer.traced is not None:
        return "its projections were found by trace_layers, which does not show whether its logits scale with them"
    return "" if layer is None else "; ".join(layer.refusals)


def _separate(model: nn.Module, layer: AttentionLayer) -> QueryKeyWeights:
    """Scale query and key evenly if each head has a key of its own, otherwise the query alone: others read the key."""
    layout = layer.layout
    assert layout is not None
    heads = layout.num_heads
    has_own_key = [layout.key_head(head) for head in range(heads)] == list(range(layout.num_kv_heads))
    powers = {"query": 0.5, "key": 0.5} if has_own_key else {"query": 1.0}
    rows = []
    for source in layer.sources:
        linear = model.get_submodule(source.path)
        indices = {part: x for part, x in source.rows(layout).items() if part in powers}
        if not indices:
            continue
        axis = linear_axis(linear, outputs=True)
        outputs = linear.get_parameter("weight").shape[axis]
        head_of, power_of = torch.zeros(outputs, dtype=torch.long), torch.zeros(outputs)
        for part, index in indices.items():
            head_of[index] = torch.arange(heads)[:, None]
            power_of[index] = powers[part]
        rows.append(ScaledRows(_with_bias(linear, axis), head_of, power_of))
    return QueryKeyWeights(layer.site, heads, tuple(rows))


def _latent(module: Any, site: str) -> QueryKeyWeights:
    """Scale the parts that a head has for itself; the rotary key is shared, so its query takes the whole factor."""
    sizes = module.layout if isinstance(module, LatentAttention) else module
    nope, rope = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim
    query = module.q_b_proj if module.q_proj is None else module.q_proj
    heads = len(query.weight) // (nope + rope)
    value = len(module.kv_b_proj.weight) // heads - nope
    return QueryKeyWeights(
        site,
        heads,
        (_by_head(query, [0.5] * nope + [1.0] * rope), _by_head(module.kv_b_proj, [0.5] * nope + [0.0] * value)),
    )


def _by_head(linear: nn.Module, powers: list[float]) -> ScaledRows:
    """Return the rows of a linear layer that holds one head after the other, given the powers of one head."""
    parameters = _with_bias(linear, 0)
    heads = len(parameters[0][0]) // len(powers)
    head_of = torch.arange(heads).repeat_interleave(len(powers))
    return ScaledRows(parameters, head_of, torch.tensor(powers).repeat(heads))


def _torch(module: nn.MultiheadAttention, site: str) -> QueryKeyWeights:
    heads, width = module.num_heads, module.embed_dim
    head_of = torch.arange(heads).repeat_interleave(width // heads).repeat(3)
    powers = torch.tensor([0.5, 0.5, 0.0]).repeat_interleave(width)  # query, key, value
    if module.in_proj_weight is not None:
        weights = [(module.in_proj_weight, slice(0, 3 * width))]
    else:
        weights = [(module.q_proj_weight, slice(0, width)), (module.k_proj_weight, slice(width, 2 * width))]
    if module.in_proj_bias is not None:
        weights.append((module.in_proj_bias, slice(0, 3 * width)))
    rows = [ScaledRows(((weight, 0),), head_of[part], powers[part]) for weight, part in weights]
    return QueryKeyWeights(site, heads, tuple(rows))


def _as(parameter: Tensor, factors: Tensor) -> Tensor:
    """Return factors, which every rank has, as a tensor that a sharded parameter can be multiplied by."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return factors
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _with_bias(linear: nn.Module, axis: int) -> tuple[tuple[nn.Parameter, int], ...]:
    weight = (linear.get_parameter("weight"), axis)
    return (weight,) if linear.bias is None else (weight, (linear.get_parameter("bias"), 0))

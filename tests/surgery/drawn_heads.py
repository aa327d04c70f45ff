"""Random heads and inputs, their QK products, and random maps that a key transform allows."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.layers import MultiHeadAttention
from polyhead.surgery import HeadWeights, KeyTransform, find_layers, read_heads
from polyhead.surgery.calibration.layer_moments import InputMoments
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.kv_sharing.symmetries import blocks


def heads_of(num_heads: int = 6, num_kv_heads: int = 6, *, bias: bool = True, width: int = 29) -> HeadWeights:
    layer = MultiHeadAttention(width, num_heads, num_kv_heads=num_kv_heads, head_dim=6, bias=bias).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return read_heads(layer, find_layers(layer)[0])


def inputs_of(width: int = 29) -> InputMoments:
    mixing = torch.randn(width, width, dtype=torch.float64)
    rows = torch.randn(200, width, dtype=torch.float64) @ mixing + 0.5
    moments = OutputMoments.empty(width).update(rows)
    return InputMoments.of(moments, moments, moments)


def root(moments: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(moments)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def products(heads: HeadWeights) -> Tensor:
    """Return the products of queries and keys, biases included: [heads, width + 1, width + 1]."""
    query, key = heads.augmented("query"), heads.augmented("key")
    return query.mT @ key[list(heads.key_heads)]


def written(heads: HeadWeights) -> Tensor:
    return heads.augmented("value")[list(heads.key_heads)].mT @ heads.output


def conditioned(dim: int, seed: int, condition: float = 30.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0] for _ in "ab")
    return left @ torch.diag(torch.logspace(0, 1, dim, base=condition, dtype=torch.float64)) @ right


def allowed_map(transform: KeyTransform, dim: int, seed: int) -> Tensor:
    """Return a random map with every degree of freedom that a transform has."""
    found, drawn = torch.zeros(dim, dim, dtype=torch.float64), conditioned(dim, seed, 5.0)
    for channels, is_pair in blocks(transform, dim):
        at = torch.tensor(channels)
        block = conditioned(len(channels), seed + channels[0], 5.0)
        if is_pair or (channels[0] < transform.rotary_dim):
            along, across = drawn[channels[0], :2]
            block = torch.stack((torch.stack((along, -across)), torch.stack((across, along)))) if is_pair else None
            block = along.sign() * torch.eye(2, dtype=torch.float64) if block is None else block
        if transform.norm == "rms":
            left, _, right = torch.linalg.svd(block)
            block = left @ right
        found[at[:, None], at] = block
    return found

"""Exact symmetries of attention heads: changes of basis of keys and values that change nothing else.

A map T of a KV head's keys is undone by its inverse transpose in every query head that reads it; a map of its values
by the same in their output matrices. Values allow any invertible map. So do keys, if nothing is applied between them
and the logits. Rotary positions allow one rotation and one scale per pair of channels, and any invertible map of the
channels that are not rotated; an RMS norm allows only orthogonal maps among channels of equal norm weight; other norms
allow none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.key_transforms import KeyTransform

# The largest condition number of a map; a larger one would lose precision.
CONDITION = 100.0
_TOLERANCE = 1e-8


def change_key_basis(heads: HeadWeights, maps: Tensor, transform: KeyTransform) -> HeadWeights:
    """Map keys by maps [kv_heads, head_dim, head_dim] and queries by their inverse transpose; logits are unchanged.

    Args:
        heads: weights of a layer.
        maps: an invertible map of each KV head.
        transform: what happens between the key projection and the logits, with which the maps must commute.

    Returns:
        The heads, in the new basis.

    >>> from polyhead.layers import MultiHeadAttention
    >>> from polyhead.surgery import find_layers, read_heads
    >>> layer = MultiHeadAttention(12, 4)
    >>> heads = read_heads(layer, find_layers(layer)[0])
    >>> maps = torch.eye(3).expand(4, 3, 3) * 2
    >>> torch.equal(change_key_basis(heads, maps, KeyTransform()).query, heads.query / 2)
    True
    """
    transform.check(heads.layout)
    maps = _checked(maps, heads.key)
    allowed = allowed_part(maps, transform)
    error = (maps - allowed).norm(dim=(1, 2)) / maps.norm(dim=(1, 2))
    orthogonality = maps.mT @ maps - torch.eye(maps.shape[1], dtype=maps.dtype, device=maps.device)
    if transform.norm == "rms":
        error = torch.maximum(error, orthogonality.norm(dim=(1, 2)))
    if float(error.max()) > _TOLERANCE:
        raise OptionError(
            f"keys with this transform may be mapped by {_describe_maps(transform)}, got a map of KV head "
            f"{int(error.argmax())} with a relative error of {float(error.max()):.1e}"
        )
    inverse_transpose = torch.linalg.inv(maps).mT[list(heads.key_heads)]
    changed = heads.mapped(lambda x: _mapped(maps, x), "key", "key_bias")
    return changed.mapped(lambda x: _mapped(inverse_transpose, x), "query", "query_bias")


def change_value_basis(heads: HeadWeights, maps: Tensor) -> HeadWeights:
    """Map values by maps [kv_heads, value_dim, value_dim], and W_O inversely; the layer's output is unchanged.

    Args:
        heads: weights of a layer.
        maps: an invertible map of each KV head.

    Returns:
        The heads, in the new basis.
    """
    maps = _checked(maps, heads.value)
    inverse_transpose = torch.linalg.inv(maps).mT[list(heads.key_heads)]
    changed = heads.mapped(lambda x: _mapped(maps, x), "value", "value_bias")
    return changed.mapped(lambda x: _mapped(inverse_transpose, x), "output")


def blocks(transform: KeyTransform, dim: int) -> Iterator[tuple[list[int], bool]]:
    """Yield blocks of channels that may be mixed, and whether a block is a rotary pair that may be rotated and scaled.

    A rotary pair with False may only be scaled as a whole: a norm weights its two channels differently.
    """
    classes = transform.classes or (0,) * dim
    for first, second in transform.pairs:
        yield [first, second], classes[first] == classes[second]
    for number in dict.fromkeys(classes[transform.rotary_dim :]):
        yield [channel for channel in range(transform.rotary_dim, dim) if classes[channel] == number], False


def pair_part(maps: Tensor) -> Tensor:
    """Return the rotation-and-scale part of maps [..., 2, 2]."""
    cosine = (maps[..., 0, 0] + maps[..., 1, 1]) / 2
    sine = (maps[..., 1, 0] - maps[..., 0, 1]) / 2
    return torch.stack((torch.stack((cosine, -sine), -1), torch.stack((sine, cosine), -1)), -2)


def allowed_part(maps: Tensor, transform: KeyTransform) -> Tensor:
    """Project maps [..., dim, dim] onto the structure that a transform allows."""
    identity = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device)
    if transform.norm == "layer":
        return identity.expand_as(maps)
    result = torch.zeros_like(maps)
    for channels, is_pair in blocks(transform, maps.shape[-1]):
        index = torch.tensor(channels, device=maps.device)
        block = maps[..., index[:, None], index]
        if is_pair:
            block = pair_part(block)
        elif channels[0] < transform.rotary_dim:
            block = block.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * identity[:2, :2]
        result[..., index[:, None], index] = block
    return result


def _checked(maps: Tensor, weight: Tensor) -> Tensor:
    if maps.shape != (weight.shape[0], weight.shape[1], weight.shape[1]):
        raise ShapeError(
            f"maps must be [{weight.shape[0]} KV heads, {weight.shape[1]}, {weight.shape[1]}], got {list(maps.shape)}"
        )
    maps = maps.to(weight.device, torch.float64)
    worst = float(torch.linalg.cond(maps).nan_to_num(torch.inf).max())
    if not worst <= CONDITION * (1 + _TOLERANCE):
        raise OptionError(f"a map of heads must have a condition number of at most {CONDITION:g}, got {worst:.3g}")
    return maps


def _describe_maps(transform: KeyTransform) -> str:
    if transform.norm == "layer":
        return "the identity alone, since the norm is not an RMS norm"
    if transform.norm == "rms":
        rotary = "; rotary pairs by rotations" if transform.rotary_dim else ""
        return f"orthogonal maps alone, of channels of equal norm weight{rotary}"
    return "one rotation and one scale per rotary pair, and any invertible map of the other channels"


def _mapped(maps: Tensor, x: Tensor) -> Tensor:
    """Return maps times matrices [heads, dim, width] or biases [heads, dim]."""
    columns = x if x.ndim == 3 else x[..., None]
    return (maps @ columns.to(torch.float64)).view(x.shape).to(x.dtype)

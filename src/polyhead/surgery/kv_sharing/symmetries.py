"""The exact symmetries of a layer's heads: maps of keys and values that are undone elsewhere, so that nothing changes.

A map T of a KV head is undone by its inverse transposed in every query head that reads it; a map of a value head by
the same in their output matrices. Values may be mapped by anything invertible. Keys may where nothing stands between
them and the logits; with rotary positions one turn and one scale for each pair of channels, anything invertible for
the channels that do not turn; with an rms norm only turns, and only among channels that the norm weights alike; with
another norm nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.key_transforms import KeyForm

# The largest condition of a map; a worse one would cost digits.
CONDITION = 100.0
_SLACK = 1e-8


def change_key_basis(heads: HeadWeights, maps: Tensor, form: KeyForm) -> HeadWeights:
    """Keys mapped by maps [kv_heads, head_dim, head_dim], and queries so that every logit stays.

    >>> from polyhead.layers import MultiHeadAttention
    >>> from polyhead.surgery import find_layers, read_heads
    >>> layer = MultiHeadAttention(12, 4)
    >>> heads = read_heads(layer, find_layers(layer)[0])
    >>> maps = torch.eye(3).expand(4, 3, 3) * 2
    >>> torch.equal(change_key_basis(heads, maps, KeyForm()).query, heads.query / 2)
    True
    """
    form.check(heads.layout)
    maps = _checked(maps, heads.key)
    allowed = allowed_part(maps, form)
    off = (maps - allowed).norm(dim=(1, 2)) / maps.norm(dim=(1, 2))
    turned = maps.mT @ maps - torch.eye(maps.shape[1], dtype=maps.dtype, device=maps.device)
    if form.norm == "rms":
        off = torch.maximum(off, turned.norm(dim=(1, 2)))
    if float(off.max()) > _SLACK:
        raise OptionError(
            f"keys of this form may be mapped by {_words(form)}, got a map of KV head {int(off.argmax())} that is off "
            f"by {float(off.max()):.1e} of its size"
        )
    back = torch.linalg.inv(maps).mT[list(heads.key_heads)]
    return replace(
        heads,
        key=_mapped(maps, heads.key),
        key_bias=_mapped_bias(maps, heads.key_bias),
        query=_mapped(back, heads.query),
        query_bias=_mapped_bias(back, heads.query_bias),
    )


def change_value_basis(heads: HeadWeights, maps: Tensor) -> HeadWeights:
    """Values mapped by maps [kv_heads, value_dim, value_dim], and output matrices so that what heads write stays."""
    maps = _checked(maps, heads.value)
    back = torch.linalg.inv(maps).mT[list(heads.key_heads)]
    return replace(
        heads,
        value=_mapped(maps, heads.value),
        value_bias=_mapped_bias(maps, heads.value_bias),
        output=_mapped(back, heads.output),
    )


def blocks(form: KeyForm, dim: int) -> Iterator[tuple[list[int], bool]]:
    """The channels that are mapped among themselves, and whether by one turn and one scale of a pair.

    A pair that is none such may only be scaled as a whole: a norm weights its two channels unlike.
    """
    classes = form.classes or (0,) * dim
    for one, two in form.pairs:
        yield [one, two], classes[one] == classes[two]
    for number in dict.fromkeys(classes[form.rotary_dim :]):
        yield [channel for channel in range(form.rotary_dim, dim) if classes[channel] == number], False


def pair_part(maps: Tensor) -> Tensor:
    """The turn and scale in maps [..., 2, 2]."""
    along = (maps[..., 0, 0] + maps[..., 1, 1]) / 2
    across = (maps[..., 1, 0] - maps[..., 0, 1]) / 2
    return torch.stack((torch.stack((along, -across), -1), torch.stack((across, along), -1)), -2)


def allowed_part(maps: Tensor, form: KeyForm) -> Tensor:
    """What of maps [..., dim, dim] has the shape that a form allows; the rest is taken away."""
    identity = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device)
    if form.norm == "layer":
        return identity.expand_as(maps)
    found = torch.zeros_like(maps)
    for channels, is_pair in blocks(form, maps.shape[-1]):
        at = torch.tensor(channels, device=maps.device)
        block = maps[..., at[:, None], at]
        if is_pair:
            block = pair_part(block)
        elif channels[0] < form.rotary_dim:
            block = block.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * identity[:2, :2]
        found[..., at[:, None], at] = block
    return found


def _checked(maps: Tensor, held: Tensor) -> Tensor:
    if maps.shape != (held.shape[0], held.shape[1], held.shape[1]):
        raise ShapeError(
            f"maps must be [{held.shape[0]} KV heads, {held.shape[1]}, {held.shape[1]}], got {list(maps.shape)}"
        )
    maps = maps.to(held.device, torch.float64)
    worst = float(torch.linalg.cond(maps).nan_to_num(torch.inf).max())
    if not worst <= CONDITION * (1 + _SLACK):
        raise OptionError(f"a map of heads must have a condition of at most {CONDITION:g}, got {worst:.3g}")
    return maps


def _words(form: KeyForm) -> str:
    if form.norm == "layer":
        return "nothing at all, since the norm is of all channels together"
    if form.norm == "rms":
        return "turns alone, of channels that the norm weights alike" + (" and positions turn" * bool(form.rotary_dim))
    return "one turn and one scale for each pair that positions turn, and anything among the channels that do not turn"


def _mapped(maps: Tensor, held: Tensor) -> Tensor:
    return (maps @ held.to(torch.float64)).to(held.dtype)


def _mapped_bias(maps: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else _mapped(maps, bias[..., None])[..., 0]

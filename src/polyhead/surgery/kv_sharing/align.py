"""Bringing the heads of a group as near to each other as the exact symmetries let them come; the model stays the same.

Keys are mapped so that they vary as those of the first head of their group do and lie as near to them as a turn brings
them, over the inputs they are made of; values likewise. The maps are limited to what `symmetries` allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.input_moments import InputMoments, with_bias
from polyhead.surgery.calibration.key_transforms import KEY_FORMS, KeyForm
from polyhead.surgery.calibration.moments import MIN_RELATIVE_ENERGY
from polyhead.surgery.edits.head_edits import EDITS, GroupQueries, HeadEdit
from polyhead.surgery.kv_sharing.symmetries import CONDITION, blocks, change_key_basis, change_value_basis, pair_part


@dataclass(frozen=True)
class EditGroups(HeadEdit):
    """A change to groups of KV heads; `form` is what stands between keys and logits, as `find_key_forms` finds it."""

    groups: tuple[tuple[int, ...], ...]
    form: KeyForm = field(default=KeyForm(), metadata={"kinds": KEY_FORMS})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", GroupQueries(self.layer, self.groups).groups)


@EDITS.register("align")
@dataclass(frozen=True)
class AlignHeads(EditGroups):
    """Turn the key and value heads of each group towards its first, and queries and outputs back: nothing changes.

    Without text heads are compared by their weights; `aligned` takes the moments of a text.

    >>> AlignHeads(layer=0, groups=((0, 1), (2, 3))).groups
    ((0, 1), (2, 3))
    """

    def change(self, heads: HeadWeights) -> HeadWeights:
        GroupQueries(self.layer, self.groups).change(heads)  # refuses groups that are not of these heads
        return heads if heads.key.is_meta else aligned(heads, self.groups, self.form)


def aligned(
    heads: HeadWeights, groups: Sequence[Sequence[int]], form: KeyForm, inputs: InputMoments | None = None
) -> HeadWeights:
    """Heads that compute the same, those of a group as near to each other as can be."""
    form.check(heads.layout)
    inputs = InputMoments.white(heads) if inputs is None else inputs
    inputs = inputs.to(heads.key.device)
    keys, values = with_bias(heads.key, heads.key_bias), with_bias(heads.value, heads.value_bias)
    key_maps, value_maps = (
        torch.eye(x.shape[1], dtype=x.dtype, device=x.device).repeat(len(x), 1, 1) for x in (keys, values)
    )
    for first, *others in groups:
        for other in others:
            key_maps[other] = key_map(keys[other], keys[first], inputs.key, form)
            value_maps[other] = key_map(values[other], values[first], inputs.value, KeyForm())
    turned = change_value_basis(change_key_basis(heads, key_maps, form), value_maps)
    moved = {head for _, *others in groups for head in others}
    # What a head gives to W_O is mapped where its values are.
    origins = (None if key in moved else x for key, x in zip(heads.key_heads, heads.origins, strict=True))
    return replace(turned, origins=tuple(origins))


def key_map(rows: Tensor, towards: Tensor, moments: Tensor, form: KeyForm) -> Tensor:
    """The allowed map [dim, dim] that makes one head's rows [dim, width] vary as another's, and the nearest such.

    Least squares alone would shrink what has nothing in common, and the inverse would blow it up elsewhere.
    """
    found = torch.eye(rows.shape[0], dtype=rows.dtype, device=rows.device)
    if form.norm == "layer":
        return found
    own, theirs, cross = (x @ moments @ y.T for x, y in ((rows, rows), (towards, towards), (towards, rows)))
    wanted: dict[tuple[int, ...], Tensor] = {}
    for channels, is_pair in blocks(form, len(found)):
        at = torch.tensor(channels, device=rows.device)
        mine, other, between = (x[at][:, at] for x in (own, theirs, cross))
        turns_pair = channels[0] < form.rotary_dim
        if turns_pair:  # where a norm weights its channels unlike, both change their signs or none
            identity = torch.eye(2, dtype=mine.dtype, device=mine.device)
            between = pair_part(between) if is_pair else between.diagonal().sum() * identity
            mine, other = (x.diagonal().mean() * identity for x in (mine, other))
        if form.norm == "rms":  # a norm takes scales out, so that only turns are left
            wanted[tuple(channels)] = _nearest_orthogonal(between)
        else:
            (root, back), (_, inverse) = _root(other), _root(mine)
            wanted[tuple(channels)] = root @ _nearest_orthogonal(back @ between @ inverse) @ inverse
    largest = max(float(torch.linalg.matrix_norm(block, 2)) for block in wanted.values())
    for place, block in wanted.items():
        at = torch.tensor(place, device=rows.device)
        left, sizes, right = torch.linalg.svd(block)
        if largest == 0:  # nothing to be brought anywhere
            return found
        found[at[:, None], at] = left @ torch.diag(sizes.clamp_min(largest / CONDITION)) @ right
    return found


def _nearest_orthogonal(wanted: Tensor) -> Tensor:
    """The orthogonal matrix nearest to one; none where there is nothing."""
    left, sizes, right = torch.linalg.svd(wanted)
    return left @ right if float(sizes[0]) > 0 else torch.eye(len(wanted), dtype=wanted.dtype, device=wanted.device)


def _root(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root and its inverse, as far as there is one."""
    values, vectors = torch.linalg.eigh(symmetric)
    there = values > MIN_RELATIVE_ENERGY * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    size = torch.where(there, values, 1.0).sqrt() * there
    back = torch.where(there, values, 1.0).rsqrt() * there
    return (vectors * size) @ vectors.T, (vectors * back) @ vectors.T

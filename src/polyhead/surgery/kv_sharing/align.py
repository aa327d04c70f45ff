"""Align the heads of a group by the exact symmetries of attention; the function is unchanged.

Keys are whitened and recoloured to the second moments of the group's first head, then rotated onto it by orthogonal
Procrustes, over the inputs they are computed from; values likewise. The maps are limited to what `symmetries` allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.key_transforms import KEY_TRANSFORMS, KeyTransform
from polyhead.surgery.calibration.layer_moments import InputMoments
from polyhead.surgery.calibration.moments import EIGENVALUE_FLOOR
from polyhead.surgery.edits.head_edits import EDITS, GroupQueries, HeadEdit
from polyhead.surgery.kv_sharing.symmetries import CONDITION, blocks, change_key_basis, change_value_basis, pair_part


@dataclass(frozen=True)
class KVGroupsEdit(HeadEdit):
    """Base of the edits that list groups of KV heads.

    Args:
        groups: KV heads of each group.
        form: key transform of the layer, from `find_key_transforms`.
    """

    groups: tuple[tuple[int, ...], ...]
    form: KeyTransform = field(default=KeyTransform(), metadata={"kinds": KEY_TRANSFORMS})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", GroupQueries(self.layer, self.groups).groups)


@EDITS.register("align")
@dataclass(frozen=True)
class AlignHeads(KVGroupsEdit):
    """Align the KV heads of each group with its first, and compensate in queries and outputs exactly.

    Heads are compared by their weights alone; `aligned` takes the input moments of calibration text.

    >>> AlignHeads(layer=0, groups=((0, 1), (2, 3))).groups
    ((0, 1), (2, 3))
    """

    def change(self, heads: HeadWeights) -> HeadWeights:
        GroupQueries(self.layer, self.groups).change(heads)  # validates the groups
        return heads if heads.key.is_meta else aligned(heads, self.groups, self.form)


def aligned(
    heads: HeadWeights, groups: Sequence[Sequence[int]], transform: KeyTransform, inputs: InputMoments | None = None
) -> HeadWeights:
    """Return equivalent heads, those of a group as near to each other as the symmetries allow.

    Args:
        heads: weights of a layer.
        groups: KV heads of each group.
        transform: what happens between the key projection and the logits, as `find_key_transforms` returns it.
        inputs: moments of the layer's inputs; white inputs by default.
    """
    transform.check(heads.layout)
    inputs = InputMoments.white(heads) if inputs is None else inputs
    inputs = inputs.to(heads.key.device)
    keys, values = heads.augmented("key"), heads.augmented("value")
    key_maps, value_maps = (
        torch.eye(x.shape[1], dtype=x.dtype, device=x.device).repeat(len(x), 1, 1) for x in (keys, values)
    )
    for first, *others in groups:
        for other in others:
            key_maps[other] = key_map(keys[other], keys[first], inputs.key, transform)
            value_maps[other] = key_map(values[other], values[first], inputs.value, KeyTransform())
    mapped = change_value_basis(change_key_basis(heads, key_maps, transform), value_maps)
    changed_keys = {head for _, *others in groups for head in others}
    # The inputs of W_O change with the basis of the values.
    origins = (None if key in changed_keys else x for key, x in zip(heads.key_heads, heads.origins, strict=True))
    return replace(mapped, origins=tuple(origins))


def key_map(rows: Tensor, towards: Tensor, moments: Tensor, transform: KeyTransform) -> Tensor:
    """Return the allowed map [dim, dim] of a head's rows [dim, width] onto another head's.

    With C_s, C_t and C_ts the second and cross moments of both heads' outputs, each allowed block is C_t^½ Q C_s^-½, Q
    the orthogonal Procrustes solution for C_t^-½ C_ts C_s^-½: the outputs get the target's moments and are as near to
    it as such a map can bring them. Plain least squares would shrink uncorrelated directions, and its inverse would
    blow them up elsewhere.
    """
    result = torch.eye(rows.shape[0], dtype=rows.dtype, device=rows.device)
    if transform.norm == "layer":
        return result
    source_moments, target_moments, cross = (
        x @ moments @ y.T for x, y in ((rows, rows), (towards, towards), (towards, rows))
    )
    block_maps: dict[tuple[int, ...], Tensor] = {}
    for channels, is_pair in blocks(transform, len(result)):
        index = torch.tensor(channels, device=rows.device)
        source, target, cross_block = (x[index][:, index] for x in (source_moments, target_moments, cross))
        is_rotary = channels[0] < transform.rotary_dim
        if is_rotary:  # if a norm weights the two channels differently, only a common sign is allowed
            identity = torch.eye(2, dtype=source.dtype, device=source.device)
            cross_block = pair_part(cross_block) if is_pair else cross_block.diagonal().sum() * identity
            source, target = (x.diagonal().mean() * identity for x in (source, target))
        if transform.norm == "rms":  # a norm removes scales, so only rotations remain
            block_maps[tuple(channels)] = _nearest_orthogonal(cross_block)
        else:
            (root, inverse_root), (_, whiten) = _root(target), _root(source)
            block_maps[tuple(channels)] = root @ _nearest_orthogonal(inverse_root @ cross_block @ whiten) @ whiten
    largest = max(float(torch.linalg.matrix_norm(block, 2)) for block in block_maps.values())
    for block_channels, block in block_maps.items():
        index = torch.tensor(block_channels, device=rows.device)
        left, sizes, right = torch.linalg.svd(block)
        if largest == 0:  # all rows are zero
            return result
        result[index[:, None], index] = left @ torch.diag(sizes.clamp_min(largest / CONDITION)) @ right
    return result


def _nearest_orthogonal(matrix: Tensor) -> Tensor:
    """Solve orthogonal Procrustes: the orthogonal matrix nearest to this one; the identity for zero."""
    left, sizes, right = torch.linalg.svd(matrix)
    return left @ right if float(sizes[0]) > 0 else torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _root(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symmetric square root and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(symmetric)
    nonzero = values > EIGENVALUE_FLOOR * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    root = torch.where(nonzero, values, 1.0).sqrt() * nonzero
    inverse_root = torch.where(nonzero, values, 1.0).rsqrt() * nonzero
    return (vectors * root) @ vectors.T, (vectors * inverse_root) @ vectors.T

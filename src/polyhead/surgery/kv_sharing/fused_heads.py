"""Fuse several heads into one in closed form: the head nearest to their QK and OV circuits.

A head attends by its QK circuit and writes by its OV circuit. The fused head has the mean of the former, weighted by
the output energy of each head, and the sum of the latter, both truncated to the rank of one head by a singular value
decomposition in the metric of the inputs (Eckart-Young); under rotary positions one for each pair of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.surgery.adapters.head_weights import HeadWeights, with_row
from polyhead.surgery.calibration.key_transforms import KEY_TRANSFORMS, KeyTransform
from polyhead.surgery.calibration.layer_moments import InputMoments, centred
from polyhead.surgery.calibration.moments import EIGENVALUE_FLOOR
from polyhead.surgery.edits.head_edits import EDITS, MergeHeads, SelectedHeadsEdit


@EDITS.register("fuse")
@dataclass(frozen=True)
class FuseHeads(SelectedHeadsEdit):
    """Fuse heads into one, at the position of the first, as near to all of them as one head can be.

    Unlike `MergeHeads` this does not depend on the bases of the heads: heads with equal QK and OV circuits are fused
    without loss, whatever their factors. Without calibration text they are compared by their weights alone. Each must
    be the only reader of its KV head; heads that read the same KV head are merged by their mean.

    Args:
        form: key transform of the layer, from `find_key_transforms`.

    >>> FuseHeads(layer=5, heads=(2, 0)).heads
    (0, 2)
    """

    form: KeyTransform = field(default=KeyTransform(), metadata={"kinds": KEY_TRANSFORMS})

    def __post_init__(self) -> None:
        super().__post_init__()
        MergeHeads(self.layer, self.heads)  # requires two heads or more

    def change(self, heads: HeadWeights) -> HeadWeights:
        merged = MergeHeads(self.layer, self.heads).change(heads)  # checks heads and their KV heads
        return merged if heads.query.is_meta else fuse(heads, self.heads, self.form)


def fuse(
    heads: HeadWeights, group: Sequence[int], transform: KeyTransform, inputs: InputMoments | None = None
) -> HeadWeights:
    """Return the heads with those of a group fused into the first of them.

    Args:
        heads: weights of a layer.
        group: query heads to fuse.
        transform: what happens between the key projection and the logits, as `find_key_transforms` returns it.
        inputs: moments of the layer's inputs; white inputs by default.
    """
    if transform.norm != "none":
        raise OptionError(
            "fusing needs logits that are products of queries and keys, which a norm of both prevents, got a "
            f"layer with a {transform.norm} norm; merge or prune heads there"
        )
    transform.check(heads.layout)
    inputs = (InputMoments.white(heads) if inputs is None else inputs).to(heads.key.device)
    merged = MergeHeads(0, tuple(group)).change(heads)
    if len({heads.key_heads[head] for head in group}) == 1:  # they share a basis, and perhaps other readers
        return merged
    first, indices, keys = min(group), list(group), [heads.key_heads[head] for head in group]
    query, key = heads.augmented("query")[indices], heads.augmented("key")[keys]
    value, output = heads.augmented("value")[keys], heads.output[indices].to(torch.float64)
    value_moments = inputs.value if heads.output_bias is None else centred(inputs.value)
    weight = torch.einsum("hdi,ij,hej,hdo,heo->h", value, value_moments, value, output, output)
    weight = weight / weight.sum().clamp_min(torch.finfo(torch.float64).tiny)
    new_query, new_key = query.new_zeros(query.shape[1:]), key.new_zeros(key.shape[1:])
    rest = slice(transform.rotary_dim, None)
    if transform.rotary_dim < query.shape[1]:
        weighted = (query[:, rest] * weight[:, None, None]).flatten(0, 1)
        keys_rest, rank = key[:, rest].flatten(0, 1), query.shape[1] - transform.rotary_dim
        new_query[rest], new_key[rest] = _best_product(weighted, inputs.query, keys_rest, centred(inputs.key), rank)
    for i, j in transform.pairs:
        pair = torch.complex(query[:, i], query[:, j]) * weight[:, None], torch.complex(key[:, i], key[:, j])
        factors = _best_product(pair[0].conj(), inputs.query, pair[1], inputs.key, 1)
        new_query[i], new_query[j] = factors[0][0].real, -factors[0][0].imag
        new_key[i], new_key[j] = factors[1][0].real, factors[1][0].imag
    identity = torch.eye(output.shape[2], dtype=torch.float64, device=output.device)
    new_value, new_output = _best_product(
        value.flatten(0, 1), value_moments, output.flatten(0, 1), identity, value.shape[1]
    )
    kv_head = merged.key_heads[first]
    fused = replace(
        merged,
        query=with_row(merged.query, first, new_query[:, :-1]),
        query_bias=None if merged.query_bias is None else with_row(merged.query_bias, first, new_query[:, -1]),
        key=with_row(merged.key, kv_head, new_key[:, :-1]),
        key_bias=None if merged.key_bias is None else with_row(merged.key_bias, kv_head, new_key[:, -1]),
        value=with_row(merged.value, kv_head, new_value[:, :-1]),
        value_bias=None if merged.value_bias is None else with_row(merged.value_bias, kv_head, new_value[:, -1]),
        output=with_row(merged.output, first, new_output),
    )
    if fused.output_bias is None:
        return fused
    mean = inputs.value[:, -1]
    missing = torch.einsum("hdi,i,hdo->o", value, mean, output) - new_output.T @ (new_value @ mean)
    return replace(fused, output_bias=(fused.output_bias.double() + missing).to(fused.output_bias.dtype))


def _best_product(
    left: Tensor, left_moments: Tensor, right: Tensor, right_moments: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Return rank-limited rows of both sides whose product is nearest to leftᵀ right; real or complex.

    The rows are [rank, width]; nearness is in the metrics of the moments.
    """
    (left_root, left_back), (right_root, right_back) = _root(left, left_moments), _root(right, right_moments)
    u, s, vh = torch.linalg.svd(left_root @ right_root.mT)
    size = s[:rank].sqrt()[:, None]
    return size * (u[:, :rank].T @ left_back @ left), size * (vh[:rank] @ right_back @ right)


def _root(rows: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """With X = C^½ rowsᵀ = P R, P orthonormal, return R and the matrix B with B rows = Pᵀ C^-½."""
    energy, vectors = torch.linalg.eigh(rows.conj() @ moments.to(rows.dtype) @ rows.T)
    nonzero = energy > EIGENVALUE_FLOOR * energy[-1].clamp_min(torch.finfo(torch.float64).tiny)
    size = torch.where(nonzero, energy, 1.0).sqrt()
    keep = nonzero.to(size.dtype)
    return (keep * size)[:, None] * vectors.conj().T, (keep / size)[:, None] * vectors.T

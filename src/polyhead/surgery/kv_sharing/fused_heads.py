"""Several heads made one, in closed form: the one head whose logits and whose writing are nearest to theirs.

A head attends by the product of its queries and keys, and writes by that of its values and outputs. The fused head has
the mean of the first, each as heavy as its head writes, and the sum of the second, both cut to the rank of one head
in the metric of the inputs, which is a singular value decomposition; under rotary positions one for each pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.surgery.adapters.head_weights import HeadWeights, with_row
from polyhead.surgery.calibration.input_moments import InputMoments, centred, with_bias
from polyhead.surgery.calibration.key_transforms import KEY_FORMS, KeyForm
from polyhead.surgery.calibration.moments import MIN_RELATIVE_ENERGY
from polyhead.surgery.edits.head_edits import EDITS, EditHeads, MergeHeads


@EDITS.register("fuse")
@dataclass(frozen=True)
class FuseHeads(EditHeads):
    """Make several heads one, at the place of the first, as near to all of them as one head can be.

    Unlike `MergeHeads` it does not depend on the bases that heads are written in: heads that attend alike and write
    alike through other matrices are fused without loss. Without text they are compared by their weights alone. Each
    must be the only reader of its KV head; heads that read one and the same are merged by their mean.

    >>> FuseHeads(layer=5, heads=(2, 0))
    FuseHeads(layer=5, stack=None, heads=(0, 2), form=KeyForm(pairing='none', rotary_dim=0, norm='none', classes=()))
    """

    form: KeyForm = field(default=KeyForm(), metadata={"kinds": KEY_FORMS})

    def __post_init__(self) -> None:
        super().__post_init__()
        MergeHeads(self.layer, self.heads)  # refuses a head alone

    def change(self, heads: HeadWeights) -> HeadWeights:
        merged = MergeHeads(self.layer, self.heads).change(heads)  # refuses heads that are not there, or share keys
        return merged if heads.query.is_meta else fuse(heads, self.heads, self.form)


def fuse(heads: HeadWeights, group: Sequence[int], form: KeyForm, inputs: InputMoments | None = None) -> HeadWeights:
    """The heads with those of a group made one, where the first of them stood."""
    if form.norm != "none":
        raise OptionError(
            "heads are fused by the products of their queries and keys, which norms between them do not keep, got a "
            f"layer with a {form.norm} norm of both; merge or prune heads there"
        )
    form.check(heads.layout)
    inputs = (InputMoments.white(heads) if inputs is None else inputs).to(heads.key.device)
    merged = MergeHeads(0, tuple(group)).change(heads)
    if len({heads.key_heads[head] for head in group}) == 1:  # one basis for all, and perhaps read by others
        return merged
    at, chosen, keys = min(group), list(group), [heads.key_heads[head] for head in group]
    query, key = with_bias(heads.query, heads.query_bias)[chosen], with_bias(heads.key, heads.key_bias)[keys]
    value, output = with_bias(heads.value, heads.value_bias)[keys], heads.output[chosen].to(torch.float64)
    of_values = inputs.value if heads.output_bias is None else centred(inputs.value)
    weight = torch.einsum("hdi,ij,hej,hdo,heo->h", value, of_values, value, output, output)
    weight = weight / weight.sum().clamp_min(torch.finfo(torch.float64).tiny)
    new_query, new_key = query.new_zeros(query.shape[1:]), key.new_zeros(key.shape[1:])
    rest = slice(form.rotary_dim, None)
    if form.rotary_dim < query.shape[1]:
        heavy = (query[:, rest] * weight[:, None, None]).flatten(0, 1)
        light, rank = key[:, rest].flatten(0, 1), query.shape[1] - form.rotary_dim
        new_query[rest], new_key[rest] = _best_product(heavy, inputs.query, light, centred(inputs.key), rank)
    for one, two in form.pairs:
        pair = torch.complex(query[:, one], query[:, two]) * weight[:, None], torch.complex(key[:, one], key[:, two])
        made = _best_product(pair[0].conj(), inputs.query, pair[1], inputs.key, 1)
        new_query[one], new_query[two] = made[0][0].real, -made[0][0].imag
        new_key[one], new_key[two] = made[1][0].real, made[1][0].imag
    identity = torch.eye(output.shape[2], dtype=torch.float64, device=output.device)
    new_value, new_output = _best_product(
        value.flatten(0, 1), of_values, output.flatten(0, 1), identity, value.shape[1]
    )
    kept = merged.key_heads[at]
    found = replace(
        merged,
        query=with_row(merged.query, at, new_query[:, :-1]),
        query_bias=None if merged.query_bias is None else with_row(merged.query_bias, at, new_query[:, -1]),
        key=with_row(merged.key, kept, new_key[:, :-1]),
        key_bias=None if merged.key_bias is None else with_row(merged.key_bias, kept, new_key[:, -1]),
        value=with_row(merged.value, kept, new_value[:, :-1]),
        value_bias=None if merged.value_bias is None else with_row(merged.value_bias, kept, new_value[:, -1]),
        output=with_row(merged.output, at, new_output),
    )
    if found.output_bias is None:
        return found
    mean = inputs.value[:, -1]
    missing = torch.einsum("hdi,i,hdo->o", value, mean, output) - new_output.T @ (new_value @ mean)
    return replace(found, output_bias=(found.output_bias.double() + missing).to(found.output_bias.dtype))


def _best_product(
    left: Tensor, left_moments: Tensor, right: Tensor, right_moments: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Rows [rank, width] of both sides whose product is nearest to leftᵀ right in these metrics; complex ones too."""
    (left_root, left_back), (right_root, right_back) = _root(left, left_moments), _root(right, right_moments)
    turns, sizes, others = torch.linalg.svd(left_root @ right_root.mT)
    size = sizes[:rank].sqrt()[:, None]
    return size * (turns[:, :rank].T @ left_back @ left), size * (others[:rank] @ right_back @ right)


def _root(rows: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """With X = C^½ rowsᵀ = P R, P orthonormal: R, and what makes Pᵀ C^½ of rows again."""
    energy, vectors = torch.linalg.eigh(rows.conj() @ moments.to(rows.dtype) @ rows.T)
    there = energy > MIN_RELATIVE_ENERGY * energy[-1].clamp_min(torch.finfo(torch.float64).tiny)
    size = torch.where(there, energy, 1.0).sqrt()
    kept = there.to(size.dtype)
    return (kept * size)[:, None] * vectors.conj().T, (kept / size)[:, None] * vectors.T

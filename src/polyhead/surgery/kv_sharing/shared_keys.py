"""Share one KV head per group in closed form: the key space that preserves the group's logits best.

With F_g = C^½ K_gᵀ L_g, C the second moments of the inputs and L_g L_gᵀ those of the queries of KV head g, the best
shared keys K' are those for which C^½ K'ᵀ spans the leading left singular vectors of the concatenated F_g. They are
combinations of the existing keys, and the new queries are a linear map of the old ones, so the eigenproblem has the
size of the group's channels, not of the input. Values are shared in the same way, with the output matrices in place of
the queries. With rotary positions keys are shared per pair of rotated channels, with one complex factor per head and
pair; with a norm on the keys they are aligned and averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.surgery.adapters.head_weights import HeadWeights, sum_over_readers
from polyhead.surgery.calibration.key_transforms import KeyTransform
from polyhead.surgery.calibration.layer_moments import InputMoments, centred
from polyhead.surgery.calibration.moments import EIGENVALUE_FLOOR, root
from polyhead.surgery.edits.head_edits import EDITS, GroupQueries
from polyhead.surgery.kv_sharing.align import KVGroupsEdit, aligned


@EDITS.register("share_keys")
@dataclass(frozen=True)
class ShareKeys(KVGroupsEdit):
    """Replace each group of KV heads by one that preserves logits and outputs best, refitting Q and O.

    Query heads are sorted by group, so that a native config can describe groups of one size. This edit uses the
    weights alone, as if inputs were white; `convert_groups` uses the input moments of calibration text, and then solves
    W_O for the layer's original output.

    >>> ShareKeys(layer=0, groups=((0, 2), (1, 3))).groups
    ((0, 2), (1, 3))
    """

    def change(self, heads: HeadWeights) -> HeadWeights:
        pooled = GroupQueries(self.layer, self.groups).change(heads)  # validates the groups
        return sort_by_group(pooled if heads.key.is_meta else share(heads, self.groups, self.form))


def sort_by_group(heads: HeadWeights) -> HeadWeights:
    """Return query heads sorted by the KV head they read."""
    return heads.select(sorted(range(heads.num_heads), key=lambda head: heads.key_heads[head]))


def share(
    heads: HeadWeights, groups: Sequence[Sequence[int]], transform: KeyTransform, inputs: InputMoments | None = None
) -> HeadWeights:
    """Return heads with one KV head per group; query heads keep their order. Inputs are white by default.

    Args:
        heads: weights of a layer.
        groups: KV heads of each group.
        transform: what happens between the key projection and the logits, as `find_key_transforms` returns it.
        inputs: moments of the layer's inputs; white inputs by default.
    """
    transform.check(heads.layout)
    inputs = (InputMoments.white(heads) if inputs is None else inputs).to(heads.key.device)
    if transform.norm != "none":
        heads = _equalise_norms(aligned(heads, groups, transform, inputs), inputs.key)
    group_of = {key: index for index, group in enumerate(groups) for key in group}
    query, key = _shared_keys(heads, groups, transform, inputs)
    value, output = _shared_values(heads, groups, inputs)
    unshared = {group[0] for group in groups if len(group) == 1}
    shared = replace(
        heads.with_augmented(query=query, key=key, value=value),
        output=output.to(heads.output.dtype),
        key_heads=tuple(group_of[key] for key in heads.key_heads),
        origins=tuple(x if key in unshared else None for key, x in zip(heads.key_heads, heads.origins, strict=True)),
    )
    if heads.output_bias is None:
        return shared
    missing = _mean_output(heads, inputs) - _mean_output(shared, inputs)
    return replace(shared, output_bias=(heads.output_bias.double() + missing).to(heads.output_bias.dtype))


def key_factors(heads: HeadWeights, inputs: InputMoments) -> tuple[Tensor, Tensor]:
    """Return keys [kv_heads, dim, width + 1] and the moments of their queries [kv_heads, dim, dim]."""
    query = heads.augmented("query")
    query_moments = query @ inputs.query @ query.mT
    return heads.augmented("key"), sum_over_readers(query_moments, heads.key_heads, len(heads.key))


def value_factors(heads: HeadWeights) -> tuple[Tensor, Tensor]:
    """Return values and the Gram matrices of their output matrices, shaped as in `key_factors`."""
    output = heads.output.to(torch.float64)
    output_grams = sum_over_readers(output @ output.mT, heads.key_heads, len(heads.key))
    return heads.augmented("value"), output_grams


def value_moments(heads: HeadWeights, inputs: InputMoments) -> Tensor:
    """Return the moments by which values are compared: centred if an output bias absorbs the mean."""
    return inputs.value if heads.output_bias is None else centred(inputs.value)


def _shared_keys(
    heads: HeadWeights, groups: Sequence[Sequence[int]], transform: KeyTransform, inputs: InputMoments
) -> tuple[Tensor, Tensor]:
    query = heads.augmented("query")
    keys, query_moments = key_factors(heads, inputs)
    shared = keys.new_zeros(len(groups), *keys.shape[1:])
    if transform.norm != "none":
        for index, group in enumerate(groups):
            shared[index] = keys[list(group)].mean(0)
        return query, shared
    first, second = transform.halves
    for index, group in enumerate(groups):
        indices = list(group)
        readers = [head for head, key in enumerate(heads.key_heads) if key in group]
        member = [indices.index(heads.key_heads[head]) for head in readers]
        if len(indices) == 1:
            shared[index] = keys[indices[0]]
            continue
        rest = slice(transform.rotary_dim, None)
        if transform.rotary_dim < keys.shape[1]:  # the softmax is invariant to a constant over keys
            rows, maps = shared_rows(keys[indices, rest], query_moments[indices, rest, rest], centred(inputs.key))
            shared[index, rest] = rows
            query[readers, rest] = maps[member] @ query[readers, rest]
        if transform.rotary_dim:
            pairs = torch.complex(keys[indices][:, first], keys[indices][:, second])
            sizes = query_moments[indices].diagonal(dim1=1, dim2=2)
            rows, factors = _shared_pairs(pairs, sizes[:, first] + sizes[:, second], inputs.key)
            shared[index, first], shared[index, second] = rows.real, rows.imag
            rotated = torch.complex(query[readers][:, first], query[readers][:, second]) * factors[member][..., None]
            for channels, part in ((first, rotated.real), (second, rotated.imag)):
                query[torch.tensor(readers)[:, None], torch.tensor(channels)] = part
    return query, shared


def _shared_values(heads: HeadWeights, groups: Sequence[Sequence[int]], inputs: InputMoments) -> tuple[Tensor, Tensor]:
    values, output_grams = value_factors(heads)
    output, moments = heads.output.to(torch.float64, copy=True), value_moments(heads, inputs)
    shared = values.new_zeros(len(groups), *values.shape[1:])
    for index, group in enumerate(groups):
        indices = list(group)
        if len(indices) == 1:
            shared[index] = values[indices[0]]
            continue
        readers = [head for head, key in enumerate(heads.key_heads) if key in group]
        shared[index], maps = shared_rows(values[indices], output_grams[indices], moments)
        output[readers] = maps[[indices.index(heads.key_heads[head]) for head in readers]] @ output[readers]
    return shared, output


def shared_rows(rows: Tensor, weights: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows K' [dim, width] that best replace the rows K_h of all heads, and a map M_h for each head.

    Rows are those of a key or value projection of inputs x, and y is what a head multiplies K_h x with: a query, or a
    column of W_O. With M_h y in place of y, (M_h y) · (K' x) is nearest to y · (K_h x).

    Args:
        rows: K_h, [heads, dim, width].
        weights: second moments of y, [heads, dim, dim].
        moments: second moments of x, [width, width].
    """
    heads, dim, _ = rows.shape
    roots = root(weights)
    stacked = (roots.mT @ rows).flatten(0, 1)
    energy, vectors = torch.linalg.eigh(stacked @ moments @ stacked.T)
    energy, vectors = energy[-dim:].flip(0), vectors[:, -dim:].flip(1)
    nonzero = energy > EIGENVALUE_FLOOR * energy[0].clamp_min(torch.finfo(torch.float64).tiny)
    # Both factors of the product get the same scale, which limits rounding errors.
    size = torch.where(nonzero, energy, 1.0).pow(-0.5)
    balance = torch.where(nonzero, energy / heads, 0.0).pow(0.25)
    shared = (balance * size)[:, None] * (vectors.T @ stacked)
    gram = shared @ moments @ shared.T
    maps = torch.linalg.pinv(gram, hermitian=True) @ shared @ moments @ rows.mT
    return shared, maps


def _shared_pairs(pairs: Tensor, weights: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return shared complex rows [pairs, width], and the complex factors that multiply queries [heads, pairs].

    As `shared_rows`, for each rotary pair of channels as one complex number: only a complex factor commutes with the
    rotation. `pairs` are complex keys [heads, pairs, width], `weights` the mean squared magnitudes of their queries
    [heads, pairs].
    """
    by_pair = pairs.transpose(0, 1)  # [pairs, heads, width]
    moments = moments.to(pairs.dtype)
    products = by_pair.conj() @ moments @ by_pair.mT
    roots = weights.T.clamp_min(0).sqrt()
    energy, vectors = torch.linalg.eigh(roots[:, :, None] * products * roots[:, None, :])
    leading = vectors[..., -1] * roots  # coefficient of each head in the shared row
    rows = (leading[:, None] @ by_pair)[:, 0]
    norms = torch.einsum("pi,ij,pj->p", rows.conj(), moments, rows).real
    cross = torch.einsum("pi,ij,phj->ph", rows.conj(), moments, by_pair)
    tiny = torch.finfo(torch.float64).tiny
    factors = cross / norms.clamp_min(tiny)[:, None]
    # Queries and keys share the scale of each pair equally.
    balance = (energy[:, -1].clamp_min(tiny) / pairs.shape[0]).pow(0.25) / norms.clamp_min(tiny).sqrt()
    balance = torch.where(norms > tiny, balance, 1.0)
    return rows * balance[:, None], (factors.conj() / balance[:, None]).T


def _equalise_norms(heads: HeadWeights, moments: Tensor) -> HeadWeights:
    """Scale the keys of all heads to one RMS norm, so that their mean weights each equally; the key norm undoes it."""
    keys = heads.augmented("key")
    sizes = torch.einsum("hdi,ij,hdj->h", keys, moments, keys).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    scale = (sizes.mean() / sizes).to(heads.key.dtype)
    bias = None if heads.key_bias is None else heads.key_bias * scale[:, None]
    return replace(heads, key=heads.key * scale[:, None, None], key_bias=bias)


def _mean_output(heads: HeadWeights, inputs: InputMoments) -> Tensor:
    """Return the sum of all heads' outputs for the mean value input, without the output bias."""
    means = heads.augmented("value") @ inputs.value[:, -1]
    return torch.einsum("hd,hde->e", means[list(heads.key_heads)], heads.output.to(torch.float64))

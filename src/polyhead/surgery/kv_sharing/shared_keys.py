"""Several KV heads made one, in closed form: the space that serves the logits of a whole group best, queries refitted.

With F_g = C^½ K_gᵀ L_g, C the moments of the inputs and L_g L_gᵀ what the queries of KV head g weigh its channels by,
the best shared keys are the leading left singular vectors of all F_g side by side. They are combinations of the keys
that are there, and the queries' new coordinates are a map of the old ones, so that all is solved in the channels of the
group. Values are shared in the same way, weighed by the output matrices. Under rotary positions keys are shared pair
by pair, one complex number for each head; under a norm they are aligned and averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.surgery.adapters.head_weights import HeadWeights, sum_over_readers
from polyhead.surgery.calibration.input_moments import InputMoments, centred, with_bias
from polyhead.surgery.calibration.key_transforms import KeyForm
from polyhead.surgery.calibration.moments import MIN_RELATIVE_ENERGY, root
from polyhead.surgery.edits.head_edits import EDITS, GroupQueries
from polyhead.surgery.kv_sharing.align import EditGroups, aligned


@EDITS.register("share_keys")
@dataclass(frozen=True)
class ShareKeys(EditGroups):
    """Make each group of KV heads one that serves all its queries as well as can be; queries and outputs are refitted.

    Query heads are put into the order of the groups, so that groups of one size are what a config can say. Without text
    heads are compared by their weights alone; `convert_groups` takes a text, and solves W_O for what the layer wrote.

    >>> ShareKeys(layer=0, groups=((0, 2), (1, 3))).groups
    ((0, 2), (1, 3))
    """

    def change(self, heads: HeadWeights) -> HeadWeights:
        pooled = GroupQueries(self.layer, self.groups).change(heads)  # refuses groups that are not of these heads
        shared = pooled if heads.key.is_meta else share(heads, self.groups, self.form)
        return sort_by_group(shared)


def sort_by_group(heads: HeadWeights) -> HeadWeights:
    """Query heads in the order of the KV heads they read."""
    return heads.select(sorted(range(heads.num_heads), key=lambda head: heads.key_heads[head]))


def share(
    heads: HeadWeights, groups: Sequence[Sequence[int]], form: KeyForm, inputs: InputMoments | None = None
) -> HeadWeights:
    """The heads with one key and value head for each group; query heads keep their places."""
    form.check(heads.layout)
    inputs = (InputMoments.white(heads) if inputs is None else inputs).to(heads.key.device)
    if form.norm != "none":
        heads = _equalise_norms(aligned(heads, groups, form, inputs), inputs.key)
    place = {key: index for index, group in enumerate(groups) for key in group}
    query, key = _shared_keys(heads, groups, form, inputs)
    value, output = _shared_values(heads, groups, inputs)
    alone = {group[0] for group in groups if len(group) == 1}
    shared = replace(
        heads,
        query=query[..., :-1].to(heads.query.dtype),
        query_bias=None if heads.query_bias is None else query[..., -1].to(heads.query.dtype),
        key=key[..., :-1].to(heads.key.dtype),
        key_bias=None if heads.key_bias is None else key[..., -1].to(heads.key.dtype),
        value=value[..., :-1].to(heads.value.dtype),
        value_bias=None if heads.value_bias is None else value[..., -1].to(heads.value.dtype),
        output=output.to(heads.output.dtype),
        key_heads=tuple(place[key] for key in heads.key_heads),
        origins=tuple(x if key in alone else None for key, x in zip(heads.key_heads, heads.origins, strict=True)),
    )
    if heads.output_bias is None:
        return shared
    missing = _mean_output(heads, inputs) - _mean_output(shared, inputs)
    return replace(shared, output_bias=(heads.output_bias.double() + missing).to(heads.output_bias.dtype))


def key_factors(heads: HeadWeights, inputs: InputMoments) -> tuple[Tensor, Tensor]:
    """Keys [kv_heads, dim, width + 1], and what their queries weigh the channels by, [kv_heads, dim, dim]."""
    query = with_bias(heads.query, heads.query_bias)
    weighing = query @ inputs.query @ query.mT
    return with_bias(heads.key, heads.key_bias), sum_over_readers(weighing, heads.key_heads, len(heads.key))


def value_factors(heads: HeadWeights) -> tuple[Tensor, Tensor]:
    """Values and what output matrices weigh their channels by, as `key_factors`."""
    output = heads.output.to(torch.float64)
    weighing = sum_over_readers(output @ output.mT, heads.key_heads, len(heads.key))
    return with_bias(heads.value, heads.value_bias), weighing


def value_moments(heads: HeadWeights, inputs: InputMoments) -> Tensor:
    """The moments that values are compared by: about the mean where an output bias can take it."""
    return inputs.value if heads.output_bias is None else centred(inputs.value)


def _shared_keys(
    heads: HeadWeights, groups: Sequence[Sequence[int]], form: KeyForm, inputs: InputMoments
) -> tuple[Tensor, Tensor]:
    query = with_bias(heads.query, heads.query_bias)
    keys, weighing = key_factors(heads, inputs)
    made = keys.new_zeros(len(groups), *keys.shape[1:])
    if form.norm != "none":
        for index, group in enumerate(groups):
            made[index] = keys[list(group)].mean(0)
        return query, made
    first, second = form.halves
    for index, group in enumerate(groups):
        chosen = list(group)
        readers = [head for head, key in enumerate(heads.key_heads) if key in group]
        own = [chosen.index(heads.key_heads[head]) for head in readers]
        if len(chosen) == 1:
            made[index] = keys[chosen[0]]
            continue
        rest = slice(form.rotary_dim, None)
        if form.rotary_dim < keys.shape[1]:  # what is the same for every key changes no softmax
            rows, maps = shared_rows(keys[chosen, rest], weighing[chosen, rest, rest], centred(inputs.key))
            made[index, rest] = rows
            query[readers, rest] = maps[own] @ query[readers, rest]
        if form.rotary_dim:
            pairs = torch.complex(keys[chosen][:, first], keys[chosen][:, second])
            sizes = weighing[chosen].diagonal(dim1=1, dim2=2)
            rows, factors = _shared_pairs(pairs, sizes[:, first] + sizes[:, second], inputs.key)
            made[index, first], made[index, second] = rows.real, rows.imag
            turned = torch.complex(query[readers][:, first], query[readers][:, second]) * factors[own][..., None]
            for channels, part in ((first, turned.real), (second, turned.imag)):
                query[torch.tensor(readers)[:, None], torch.tensor(channels)] = part
    return query, made


def _shared_values(heads: HeadWeights, groups: Sequence[Sequence[int]], inputs: InputMoments) -> tuple[Tensor, Tensor]:
    values, weighing = value_factors(heads)
    output, moments = heads.output.to(torch.float64, copy=True), value_moments(heads, inputs)
    made = values.new_zeros(len(groups), *values.shape[1:])
    for index, group in enumerate(groups):
        chosen = list(group)
        if len(chosen) == 1:
            made[index] = values[chosen[0]]
            continue
        readers = [head for head, key in enumerate(heads.key_heads) if key in group]
        made[index], maps = shared_rows(values[chosen], weighing[chosen], moments)
        output[readers] = maps[[chosen.index(heads.key_heads[head]) for head in readers]] @ output[readers]
    return made, output


def shared_rows(rows: Tensor, weighing: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [dim, width] that serve all the given ones [heads, dim, width] best, and maps of what is multiplied by them.

    What a head multiplied its own rows by, y, becomes maps[head] @ y: y · (K x) is nearest to (map y) · (K' x).
    """
    heads, dim, _ = rows.shape
    roots = root(weighing)
    stacked = (roots.mT @ rows).flatten(0, 1)
    energy, vectors = torch.linalg.eigh(stacked @ moments @ stacked.T)
    energy, vectors = energy[-dim:].flip(0), vectors[:, -dim:].flip(1)
    there = energy > MIN_RELATIVE_ENERGY * energy[0].clamp_min(torch.finfo(torch.float64).tiny)
    # Both sides of the product get the same size, so that neither is hard to round.
    size = torch.where(there, energy, 1.0).pow(-0.5)
    balance = torch.where(there, energy / heads, 0.0).pow(0.25)
    found = (balance * size)[:, None] * (vectors.T @ stacked)
    own = found @ moments @ found.T
    maps = torch.linalg.pinv(own, hermitian=True) @ found @ moments @ rows.mT
    return found, maps


def _shared_pairs(pairs: Tensor, weights: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Complex rows [pairs, width] for given ones [heads, pairs, width], and a factor of the queries [heads, pairs]."""
    by_pair = pairs.transpose(0, 1)  # [pairs, heads, width]
    moments = moments.to(pairs.dtype)
    products = by_pair.conj() @ moments @ by_pair.mT
    roots = weights.T.clamp_min(0).sqrt()
    energy, vectors = torch.linalg.eigh(roots[:, :, None] * products * roots[:, None, :])
    leading = vectors[..., -1] * roots  # of each head in the shared row
    rows = (leading[:, None] @ by_pair)[:, 0]
    own = torch.einsum("pi,ij,pj->p", rows.conj(), moments, rows).real
    cross = torch.einsum("pi,ij,phj->ph", rows.conj(), moments, by_pair)
    tiny = torch.finfo(torch.float64).tiny
    factors = cross / own.clamp_min(tiny)[:, None]
    # Queries and keys share what each pair weighs.
    balance = (energy[:, -1].clamp_min(tiny) / pairs.shape[0]).pow(0.25) / own.clamp_min(tiny).sqrt()
    balance = torch.where(own > tiny, balance, 1.0)
    return rows * balance[:, None], (factors.conj() / balance[:, None]).T


def _equalise_norms(heads: HeadWeights, moments: Tensor) -> HeadWeights:
    """Keys of one mean length: a norm makes them so, and a mean of keys weighs each alike then."""
    keys = with_bias(heads.key, heads.key_bias)
    sizes = torch.einsum("hdi,ij,hdj->h", keys, moments, keys).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    scale = (sizes.mean() / sizes).to(heads.key.dtype)
    bias = None if heads.key_bias is None else heads.key_bias * scale[:, None]
    return replace(heads, key=heads.key * scale[:, None, None], key_bias=bias)


def _mean_output(heads: HeadWeights, inputs: InputMoments) -> Tensor:
    """What the heads write in the mean, as if each attended to the mean of its inputs."""
    means = with_bias(heads.value, heads.value_bias) @ inputs.value[:, -1]
    return torch.einsum("hd,hde->e", means[list(heads.key_heads)], heads.output.to(torch.float64))

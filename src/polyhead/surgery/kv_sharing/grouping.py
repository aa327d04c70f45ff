"""Group similar KV heads into groups of one size with the least loss from sharing.

The loss of a group is the energy of the logits that its shared keys discard, as a share of the layer's, plus the same
for its shared values: the sums of the discarded eigenvalues. It does not depend on the bases of the heads, so it needs
no alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.key_transforms import KeyTransform
from polyhead.surgery.calibration.layer_moments import InputMoments, centred
from polyhead.surgery.calibration.moments import root
from polyhead.surgery.kv_sharing.shared_keys import key_factors, value_factors, value_moments

Groups = tuple[tuple[int, ...], ...]
_ROUNDS = 20  # of swaps; each lowers the loss, and a few suffice


def neighbours(num_heads: int, count: int) -> Groups:
    """Return groups of one size of consecutive heads.

    >>> neighbours(6, 2)
    ((0, 1, 2), (3, 4, 5))
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or num_heads % count:
        raise OptionError(
            f"the number of KV heads must divide {num_heads}, so that groups have one size, got {count!r}"
        )
    size = num_heads // count
    return tuple(tuple(range(start, start + size)) for start in range(0, num_heads, size))


def similar_groups(
    heads: HeadWeights, count: int, transform: KeyTransform, inputs: InputMoments | None = None
) -> Groups:
    """Return groups of one size of similar heads: greedy groups or neighbours, improved by swaps."""
    total = heads.key.shape[0]
    start = neighbours(total, count)
    if count in (1, total):
        return start
    loss = group_loss(heads, transform, InputMoments.white(heads) if inputs is None else inputs)
    costs: dict[tuple[int, ...], float] = {}

    def cost(group: Sequence[int]) -> float:
        key = tuple(sorted(group))
        if key not in costs:
            costs[key] = loss(key)
        return costs[key]

    greedy = _greedy_groups(total, count, cost)
    starts = [[list(group) for group in groups] for groups in (start, greedy)]
    best = min((_swap_heads(groups, cost) for groups in starts), key=lambda groups: sum(map(cost, groups)))
    return tuple(sorted(tuple(sorted(group)) for group in best))


def group_loss(heads: HeadWeights, transform: KeyTransform, inputs: InputMoments) -> Callable[[Sequence[int]], float]:
    """Return a function of a group: the relative loss of logits and values if its KV heads become one."""
    inputs = inputs.to(heads.key.device)
    keys, query_moments = key_factors(heads, inputs)
    key_grams = []
    rotary_dim, rest = transform.rotary_dim, slice(transform.rotary_dim, None)
    if rotary_dim < keys.shape[1]:
        key_grams.append(_gram(keys[:, rest], query_moments[:, rest, rest], centred(inputs.key)))
    values, output_moments = value_factors(heads)
    value_gram = _gram(values, output_moments, value_moments(heads, inputs))
    pair_grams = _pair_grams(keys, query_moments, transform, inputs.key) if rotary_dim else None
    logit_energy = sum(_energy(x) for x in key_grams)
    logit_energy += 0.0 if pair_grams is None else float(pair_grams.diagonal(dim1=1, dim2=2).real.sum())
    value_energy = _energy(value_gram)

    def loss(group: Sequence[int]) -> float:
        indices = list(group)
        discarded = sum(_discarded_energy(gram, indices) for gram in key_grams)
        if pair_grams is not None:
            discarded += float(torch.linalg.eigvalsh(pair_grams[:, indices][:, :, indices])[:, :-1].sum())
        return discarded / max(logit_energy, 1e-300) + _discarded_energy(value_gram, indices) / max(
            value_energy, 1e-300
        )

    return loss


def _gram(rows: Tensor, weights: Tensor, moments: Tensor) -> Tensor:
    """Return [heads, dim, heads, dim], weighted inner products of the heads' channels."""
    weighed = root(weights).mT @ rows
    heads, dim, _ = weighed.shape
    flat = weighed.flatten(0, 1)
    return (flat @ moments @ flat.T).view(heads, dim, heads, dim).cpu()


def _pair_grams(keys: Tensor, weights: Tensor, transform: KeyTransform, moments: Tensor) -> Tensor:
    """Return the weighted inner products of rotary pairs, [pairs, heads, heads], complex."""
    first, second = transform.halves
    rows = torch.complex(keys[:, first], keys[:, second]).transpose(0, 1)
    sizes = weights.diagonal(dim1=1, dim2=2)
    roots = (sizes[:, first] + sizes[:, second]).T.clamp_min(0).sqrt()
    products = rows.conj() @ moments.to(rows.dtype) @ rows.mT
    return (roots[:, :, None] * products * roots[:, None, :]).cpu()


def _energy(gram: Tensor) -> float:
    return float(torch.einsum("hdhd->", gram))


def _discarded_energy(gram: Tensor, group: list[int]) -> float:
    dim = gram.shape[1]
    size = len(group) * dim
    block = gram[group][:, :, group].reshape(size, size)
    return float(torch.linalg.eigvalsh(block)[:-dim].clamp_min(0).sum())


def _greedy_groups(total: int, count: int, cost: Callable[[Sequence[int]], float]) -> Groups:
    """Build each group from the first head left, adding the most similar ones."""
    remaining, groups = list(range(total)), []
    while remaining:
        group = [remaining.pop(0)]
        while len(group) < total // count:
            best = min(remaining, key=lambda head: cost([*group, head]))
            remaining.remove(best)
            group.append(best)
        groups.append(tuple(group))
    return tuple(groups)


def _swap_heads(groups: list[list[int]], cost: Callable[[Sequence[int]], float]) -> list[list[int]]:
    """Swap pairs of heads between groups while that lowers the loss."""
    for _ in range(_ROUNDS):
        improved = False
        for first, second in combinations(range(len(groups)), 2):
            for i in range(len(groups[first])):
                for j in range(len(groups[second])):
                    a, b = list(groups[first]), list(groups[second])
                    a[i], b[j] = b[j], a[i]
                    if cost(a) + cost(b) < cost(groups[first]) + cost(groups[second]) - 1e-12:
                        groups[first], groups[second] = a, b
                        improved = True
        if not improved:
            break
    return groups

"""Which KV heads are made one: groups of one size that lose least in the spaces they would share.

What a group loses is what its shared keys leave of the logits' energy, as a share of the layer's, and the same of its
shared values: the eigenvalues that there is no channel for. Aligned heads are judged so by construction, since spaces
do not change with the bases they are written in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.input_moments import InputMoments, centred
from polyhead.surgery.calibration.key_transforms import KeyForm
from polyhead.surgery.calibration.moments import root
from polyhead.surgery.kv_sharing.shared_keys import key_factors, value_factors, value_moments

Groups = tuple[tuple[int, ...], ...]
_ROUNDS = 20  # of exchanges; each one lowers the loss, and a few suffice


def neighbours(num_heads: int, count: int) -> Groups:
    """Groups of one size in the order of the heads.

    >>> neighbours(6, 2)
    ((0, 1, 2), (3, 4, 5))
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or num_heads % count:
        raise OptionError(
            f"KV heads are made fewer in groups of one size, so that their number divides {num_heads}, got {count!r}"
        )
    size = num_heads // count
    return tuple(tuple(range(start, start + size)) for start in range(0, num_heads, size))


def similar_groups(heads: HeadWeights, count: int, form: KeyForm, inputs: InputMoments | None = None) -> Groups:
    """Groups of one size whose heads are alike: begun with the likest, then heads are exchanged while it helps."""
    total = heads.key.shape[0]
    start = neighbours(total, count)
    if count in (1, total):
        return start
    loss = group_loss(heads, form, InputMoments.white(heads) if inputs is None else inputs)
    known: dict[tuple[int, ...], float] = {}

    def cost(group: Sequence[int]) -> float:
        key = tuple(sorted(group))
        if key not in known:
            known[key] = loss(key)
        return known[key]

    begun = _greedy_groups(total, count, cost)
    starts = [[list(group) for group in groups] for groups in (start, begun)]
    found = min((_swap_heads(groups, cost) for groups in starts), key=lambda groups: sum(map(cost, groups)))
    return tuple(sorted(tuple(sorted(group)) for group in found))


def group_loss(heads: HeadWeights, form: KeyForm, inputs: InputMoments) -> Callable[[Sequence[int]], float]:
    """What is lost of logits and of values when these KV heads become one, each as a share of the layer's."""
    inputs = inputs.to(heads.key.device)
    keys, weighing = key_factors(heads, inputs)
    parts = []
    turned, rest = form.rotary_dim, slice(form.rotary_dim, None)
    if turned < keys.shape[1]:
        parts.append(_gram(keys[:, rest], weighing[:, rest, rest], centred(inputs.key)))
    values, writing = value_factors(heads)
    of_values = _gram(values, writing, value_moments(heads, inputs))
    pairs = _pair_grams(keys, weighing, form, inputs.key) if turned else None
    logits = sum(_energy(x) for x in parts)
    logits += 0.0 if pairs is None else float(pairs.diagonal(dim1=1, dim2=2).real.sum())
    written = _energy(of_values)

    def loss(group: Sequence[int]) -> float:
        chosen = list(group)
        lost = sum(_discarded_energy(gram, chosen) for gram in parts)
        if pairs is not None:
            lost += float(torch.linalg.eigvalsh(pairs[:, chosen][:, :, chosen])[:, :-1].sum())
        return lost / max(logits, 1e-300) + _discarded_energy(of_values, chosen) / max(written, 1e-300)

    return loss


def _gram(rows: Tensor, weighing: Tensor, moments: Tensor) -> Tensor:
    """[heads, dim, heads, dim]: products of what each head's channels give, as heavy as they weigh."""
    weighed = root(weighing).mT @ rows
    heads, dim, _ = weighed.shape
    flat = weighed.flatten(0, 1)
    return (flat @ moments @ flat.T).view(heads, dim, heads, dim).cpu()


def _pair_grams(keys: Tensor, weighing: Tensor, form: KeyForm, moments: Tensor) -> Tensor:
    """[pairs, heads, heads], complex."""
    first, second = form.halves
    rows = torch.complex(keys[:, first], keys[:, second]).transpose(0, 1)
    sizes = weighing.diagonal(dim1=1, dim2=2)
    roots = (sizes[:, first] + sizes[:, second]).T.clamp_min(0).sqrt()
    products = rows.conj() @ moments.to(rows.dtype) @ rows.mT
    return (roots[:, :, None] * products * roots[:, None, :]).cpu()


def _energy(gram: Tensor) -> float:
    return float(torch.einsum("hdhd->", gram))


def _discarded_energy(gram: Tensor, group: list[int]) -> float:
    dim = gram.shape[1]
    size = len(group) * dim
    chosen = gram[group][:, :, group].reshape(size, size)
    return float(torch.linalg.eigvalsh(chosen)[:-dim].clamp_min(0).sum())


def _greedy_groups(total: int, count: int, cost: Callable[[Sequence[int]], float]) -> Groups:
    """Each group begins with the head that is left first and takes the likest to it."""
    left, groups = list(range(total)), []
    while left:
        group = [left.pop(0)]
        while len(group) < total // count:
            best = min(left, key=lambda head: cost([*group, head]))
            left.remove(best)
            group.append(best)
        groups.append(tuple(group))
    return tuple(groups)


def _swap_heads(groups: list[list[int]], cost: Callable[[Sequence[int]], float]) -> list[list[int]]:
    """Exchange two heads of two groups as long as that makes the loss less."""
    for _ in range(_ROUNDS):
        changed = False
        for one, other in combinations(range(len(groups)), 2):
            for i in range(len(groups[one])):
                for j in range(len(groups[other])):
                    a, b = list(groups[one]), list(groups[other])
                    a[i], b[j] = b[j], a[i]
                    if cost(a) + cost(b) < cost(groups[one]) + cost(groups[other]) - 1e-12:
                        groups[one], groups[other] = a, b
                        changed = True
        if not changed:
            break
    return groups

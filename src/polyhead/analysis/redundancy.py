"""Which heads say the same thing: groups in which every pair is more alike than chance and layout explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError

QUANTILE = 0.999


@dataclass(frozen=True, slots=True)
class Redundancy:
    """Groups of heads, the threshold they were found by, and what a model without any redundancy shows."""

    groups: tuple[tuple[int, ...], ...]  # each of two heads or more, by their rows in the matrix of similarities
    threshold: float
    null: float  # the largest similarity but one in a thousand where there is nothing in common

    def __str__(self) -> str:
        found = ", ".join("{" + ", ".join(map(str, group)) + "}" for group in self.groups) or "none"
        return f"groups {found} (similarity at least {self.threshold:.2f}; without redundancy at most {self.null:.2f})"


def redundancy(similarity: Tensor, null: Tensor | Sequence[Tensor]) -> Redundancy:
    """The groups of heads that duplicate each other, judged by a null.

    Args:
        similarity: [heads, heads], 1 for the same and less for others, such as `relations.cosine`. NaN, of a head that
            writes nothing, belongs to no group.
        null: the same of one or several models in which no head has to do with another: random weights of the same
            layout on the same text. What they show is due to the layout, the text and the number of tokens.

    The threshold lies halfway between the null and 1: a pair in a group is closer to being the same than to being
    unrelated. Groups are complete: each pair of a group reaches the threshold, not only neighbours in a chain.

    >>> alike = torch.tensor([[1.0, 0.97, 0.1], [0.97, 1.0, 0.2], [0.1, 0.2, 1.0]])
    >>> print(redundancy(alike, torch.eye(3) * 0.7 + 0.3))
    groups {0, 1} (similarity at least 0.65; without redundancy at most 0.30)
    """
    most = max(_largest(one) for one in ([null] if isinstance(null, Tensor) else null))
    if not most < 1:
        raise OptionError(
            f"the null must be of heads that are not the same, got a similarity of {most:g} in it; "
            "take random weights with another seed for each head"
        )
    threshold = (1 + max(most, 0.0)) / 2
    return Redundancy(complete_groups(similarity, threshold), threshold, most)


def complete_groups(similarity: Tensor, threshold: float) -> tuple[tuple[int, ...], ...]:
    """Join the two closest groups as long as all pairs between them reach the threshold; singles are left out."""
    _check_square(similarity)
    values = similarity.detach().to("cpu", torch.float64)
    values = torch.where(values.isnan(), -torch.inf, values)
    values = torch.minimum(values, values.T)
    values.fill_diagonal_(-torch.inf)
    members: dict[int, list[int]] = {head: [head] for head in range(len(values))}
    while len(members) > 1:
        place = int(values.argmax())
        one, other = sorted(divmod(place, len(values)))
        if not values[one, other] >= threshold:
            break
        # The likeness of two groups is that of their least alike pair.
        values[one] = torch.minimum(values[one], values[other])
        values[:, one] = values[one]
        values[other], values[:, other] = -torch.inf, -torch.inf
        values[one, one] = -torch.inf
        members[one] += members.pop(other)
    groups = [tuple(sorted(group)) for group in members.values() if len(group) > 1]
    return tuple(sorted(groups))


def _largest(null: Tensor) -> float:
    _check_square(null)
    apart = null.detach().to(torch.float64)[~torch.eye(len(null), dtype=torch.bool, device=null.device)]
    apart = apart[~apart.isnan()]
    if not apart.numel():
        raise OptionError(f"the null needs pairs of heads, got a matrix of {len(null)} heads that has none")
    return float(apart.quantile(QUANTILE))


def _check_square(similarity: Tensor) -> None:
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1]:
        raise ShapeError(f"similarities must be [heads, heads], got shape {list(similarity.shape)}")

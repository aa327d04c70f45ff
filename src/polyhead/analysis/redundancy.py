"""Redundancy groups: heads whose outputs are pairwise more similar than chance and layout explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError

QUANTILE = 0.999  # of the similarities of unrelated heads, against which redundancy is tested


@dataclass(frozen=True, slots=True)
class Redundancy:
    """Groups of redundant heads, the similarity threshold, and the null from which it was derived."""

    groups: tuple[tuple[int, ...], ...]  # two heads or more each, by their rows of the similarity matrix
    threshold: float
    null: float  # 99.9% quantile of the similarity of unrelated heads

    def __str__(self) -> str:
        groups = ", ".join("{" + ", ".join(map(str, group)) + "}" for group in self.groups) or "none"
        null = f"{QUANTILE:.1%} of unrelated pairs at most {self.null:.2f}"
        return f"groups {groups} (similarity at least {self.threshold:.2f}; {null})"


def redundancy(similarity: Tensor, null: Tensor | Sequence[Tensor]) -> Redundancy:
    """Return the groups of redundant heads, relative to a null.

    Args:
        similarity: [heads, heads], 1 for identical heads, such as `relations.cosine`. A head with NaN, whose output is
            0, is in no group.
        null: similarity matrices of one or several models with unrelated heads: random weights of the same layout on
            the same text. Their similarity is due to the layout, the text and the number of tokens.

    The threshold is halfway between the null and 1: a pair in a group is closer to identical than to unrelated. Groups
    are complete-linkage clusters: every pair of a group reaches the threshold.

    >>> alike = torch.tensor([[1.0, 0.97, 0.1], [0.97, 1.0, 0.2], [0.1, 0.2, 1.0]])
    >>> print(redundancy(alike, torch.eye(3) * 0.7 + 0.3))
    groups {0, 1} (similarity at least 0.65; 99.9% of unrelated pairs at most 0.30)
    """
    null_quantile = max(_upper_quantile(matrix) for matrix in ([null] if isinstance(null, Tensor) else null))
    if not null_quantile < 1:
        raise OptionError(
            f"the null must be of unrelated heads, got a similarity of {null_quantile:g}; "
            "use random weights with another seed for each head"
        )
    threshold = (1 + max(null_quantile, 0.0)) / 2
    return Redundancy(complete_groups(similarity, threshold), threshold, null_quantile)


def complete_groups(similarity: Tensor, threshold: float) -> tuple[tuple[int, ...], ...]:
    """Return the complete-linkage clusters of two heads or more, in which all pairs reach the threshold."""
    _check_square(similarity)
    values = similarity.detach().to("cpu", torch.float64)
    values = torch.where(values.isnan(), -torch.inf, values)
    values = torch.minimum(values, values.T)
    values.fill_diagonal_(-torch.inf)
    members: dict[int, list[int]] = {head: [head] for head in range(len(values))}
    while len(members) > 1:
        flat_index = int(values.argmax())
        one, other = sorted(divmod(flat_index, len(values)))
        if not values[one, other] >= threshold:
            break
        # Complete linkage: the similarity of two groups is that of their least similar pair.
        values[one] = torch.minimum(values[one], values[other])
        values[:, one] = values[one]
        values[other], values[:, other] = -torch.inf, -torch.inf
        values[one, one] = -torch.inf
        members[one] += members.pop(other)
    groups = [tuple(sorted(group)) for group in members.values() if len(group) > 1]
    return tuple(sorted(groups))


def _upper_quantile(null: Tensor) -> float:
    _check_square(null)
    off_diagonal = null.detach().to(torch.float64)[~torch.eye(len(null), dtype=torch.bool, device=null.device)]
    off_diagonal = off_diagonal[~off_diagonal.isnan()]
    if not off_diagonal.numel():
        raise OptionError(f"the null needs pairs of heads, got a matrix of {len(null)} heads without any")
    return float(off_diagonal.quantile(QUANTILE))


def _check_square(similarity: Tensor) -> None:
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1]:
        raise ShapeError(f"similarities must be [heads, heads], got shape {list(similarity.shape)}")

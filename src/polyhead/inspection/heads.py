"""Head identifiers, and groups and pairs of similar heads."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.geometry import HeadId
from polyhead.observation import AttentionSite

Head = tuple[AttentionSite, int]


def named(head: Head) -> str:
    """Return the name of a head, e.g. L2H7; callers prefix the stack where a model has several.

    >>> named((AttentionSite("encoder.layer.2.attention.self", "self", "encoder.layer.*.attention.self", 2, 12), 7))
    'L2H7'
    """
    return str(HeadId(head[0].layer, head[1]))


@dataclass(frozen=True, slots=True)
class Group:
    """Heads of one layer whose outputs are pairwise similar."""

    heads: tuple[Head, ...]
    least: float  # cosine of the least similar pair


@dataclass(frozen=True, slots=True)
class Pair:
    """Two heads of different layers with similar outputs."""

    one: Head
    other: Head
    guess: float  # cosine under a random projection, by which the pair was selected
    cosine: float  # of their contributions to the residual stream, over the sample of tokens


@dataclass(frozen=True, slots=True)
class RedundancyThreshold:
    """Cosine threshold from which heads count as redundant, and the null it is derived from."""

    threshold: float
    null: float  # the cosine that random weights reach

"""Head identifiers, redundant heads, and pairs of similar heads."""

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
class RedundantHead:
    """A head of whose output the other heads of its layer predict most linearly, on held-out tokens."""

    head: Head
    share: float  # predicted by all other heads of the layer together
    other: Head  # the head that predicts most on its own
    share_of_other: float  # predicted by that head alone
    cosine: float  # of the outputs of the two; negative if they write opposite directions


@dataclass(frozen=True, slots=True)
class Pair:
    """Two heads of different layers with similar or opposite outputs."""

    one: Head
    other: Head
    guess: float  # cosine under a random projection, by which the pair was selected
    cosine: float  # of their contributions to the residual stream, over the sample of tokens

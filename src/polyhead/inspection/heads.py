"""Head identifiers, redundant heads, and pairs of similar heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polyhead.geometry import HeadId
from polyhead.observation import AttentionSite

Head = tuple[AttentionSite, int]


def stack_of(site: AttentionSite) -> str:
    """Return the name of the layer stack of a site, e.g. "encoder"."""
    return site.stack.partition(".")[0]


def has_stacks(sites: Iterable[AttentionSite]) -> bool:
    """Return True if the sites are of several stacks or kinds, so that layer and number do not identify a head."""
    return len({(site.stack, site.kind) for site in sites}) > 1


def named(head: Head, *, stacked: bool = False) -> str:
    """Return the name of a head, e.g. L2H7, with its stack if `stacked`: "decoder cross-attention, L2H7".

    >>> named((AttentionSite("encoder.layer.2.attention.self", "self", "encoder.layer.*.attention.self", 2, 12), 7))
    'L2H7'
    """
    site, number = head
    return f"{f'{stack_of(site)} {site.kind}-attention, ' if stacked else ''}{HeadId(site.layer, number)}"


@dataclass(frozen=True, slots=True)
class RedundantHead:
    """A head whose contribution to the residual stream is mostly a linear function of other heads' outputs.

    Shares are R² on held-out tokens (`polyhead.analysis.redundancy`).
    """

    head: Head
    share: float  # predicted linearly by all other heads of the layer together
    other: Head  # the head that predicts most on its own
    share_of_other: float  # predicted by that head alone
    cosine: float  # of the outputs of the two; negative if they write opposite directions


@dataclass(frozen=True, slots=True)
class Pair:
    """Two heads of different layers with similar or opposite outputs."""

    one: Head
    other: Head
    estimate: float  # cosine under a random projection, by which the pair was selected
    cosine: float  # of their contributions to the residual stream, over the sample of tokens

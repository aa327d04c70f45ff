"""`Inspection`: everything that is known of the heads of a model after one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyhead.analysis.roles import HeadRoles
from polyhead.inspection.settings import Settings
from polyhead.observatory import AttentionSite, HeadProfile

Head = tuple[AttentionSite, int]


def named(head: Head) -> str:
    """As people write it: layer and number; the stack goes before it where a model has several.

    >>> named((AttentionSite("encoder.layer.2.attention.self", "self", "encoder.layer.*.attention.self", 2, 12), 7))
    '2.7'
    """
    return f"{head[0].layer}.{head[1]}"


@dataclass(frozen=True, slots=True)
class Group:
    """Heads of one layer of which each two say nearly the same."""

    heads: tuple[Head, ...]
    least: float  # the cosine of the two that are least alike


@dataclass(frozen=True, slots=True)
class Pair:
    """Two heads of different layers that are alike."""

    one: Head
    other: Head
    guess: float  # the cosine by a random projection, by which they were picked
    cosine: float  # that of their contributions, over the sample of tokens


@dataclass(frozen=True, slots=True)
class Likeness:
    """From which cosine on heads count as the same, and why."""

    threshold: float
    null: float  # what random weights show


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """What every head does, which say the same, which matter; the table has one row a head."""

    settings: Settings
    facts: Mapping[str, Any]  # where it came from: model, tokens, documents, versions, time
    table: HeadProfile
    roles: tuple[HeadRoles, ...] = ()
    likeness: Likeness | None = None
    groups: tuple[Group, ...] = ()
    pairs: tuple[Pair, ...] = ()
    relations: Mapping[AttentionSite, Mapping[str, Tensor]] = field(default_factory=dict)  # [heads, heads] each
    findings: tuple[str, ...] = ()

    def roles_of(self, site: AttentionSite, head: int) -> HeadRoles | None:
        return next((x for x in self.roles if x.site == site and x.head == head), None)

"""`Inspection`: everything that is known of the heads of a model after one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from polyhead.analysis.roles import HeadRoles
from polyhead.inspection.examples import Example
from polyhead.inspection.looks import SiteLooks
from polyhead.inspection.settings import Settings
from polyhead.inspection.top_keys import TopKey
from polyhead.observatory import AttentionSite, HeadProfile

Head = tuple[AttentionSite, int]
FindingKind = Literal["role", "alike", "matters", "resting", "wide", "extreme"]


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


@dataclass(frozen=True, slots=True)
class Finding:
    """One telling thing: what kind it is, which heads show it, and the numbers; `str(finding)` says it in English."""

    kind: FindingKind
    heads: tuple[Head, ...]
    column: str | None  # of the table, that it is read off
    values: Mapping[str, float | str | bool]
    stacked: bool = False  # whether a head's place needs its stack, as in an encoder and a decoder

    def __str__(self) -> str:
        from polyhead.inspection.wording import words_of

        return words_of(self)


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
    findings: tuple[Finding, ...] = ()
    looks: Mapping[AttentionSite, SiteLooks] = field(default_factory=dict)  # where heads look, as pictures
    examples: tuple[Example, ...] = ()  # short pieces of the text with every weight
    top_keys: Mapping[AttentionSite, tuple[tuple[TopKey, ...], ...]] = field(default_factory=dict)  # of each head
    spectra: Mapping[AttentionSite, Mapping[str, Tensor]] = field(default_factory=dict)  # qk, ov [heads, head_dim]

    def roles_of(self, site: AttentionSite, head: int) -> HeadRoles | None:
        return next((x for x in self.roles if x.site == site and x.head == head), None)

    def _repr_html_(self) -> str:
        from polyhead.inspection.notebook import inspection_html

        return inspection_html(self)

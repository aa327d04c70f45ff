"""Heads by their place, and which of them are alike."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.observation import AttentionSite

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

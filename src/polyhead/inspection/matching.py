"""Matching of the heads of two inspections by the original heads of the unedited model.

Edits renumber heads, so numbers alone do not identify them. A remaining head is identified by its number in the
unedited model, a merged head by all the heads it was merged from. A layer without that record counts as unedited, which
is an error where it contradicts the other inspection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from polyhead.errors import OptionError
from polyhead.geometry import HeadOrigins
from polyhead.inspection.heads import Head, has_stacks, named
from polyhead.inspection.result import Inspection
from polyhead.observation import AttentionSite

# Facts of a run that must agree for two runs to be of the same model.
SIZES = {"model_type": "model type", "hidden_size": "hidden size", "num_hidden_layers": "number of layers"}
# removed: by an edit of the other model; merged: by an edit of either model; new: added by an edit of this model;
# padding: a zero head of a padded model; not read: the other inspection does not cover this head or its layer.
UnmatchedReason = Literal["removed", "merged", "new", "not read", "padding"]


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A head that the other inspection does not have, and why."""

    head: Head
    reason: UnmatchedReason
    merged_into: Head | None = None  # in the other inspection
    stacked: bool = False  # name the stack of the head, because the model has several

    def __str__(self) -> str:
        into = "" if self.merged_into is None else f" into {named(self.merged_into)}"
        site, number = self.head
        name = named(self.head) if self.reason in ("new", "padding") else site.original_name(number)
        stack = named(self.head, stacked=self.stacked).removesuffix(named(self.head))
        return f"{stack}{name} {self.reason}{into}"


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs of matched heads, and the heads that only one inspection has."""

    pairs: tuple[tuple[Head, Head], ...]
    only_before: tuple[Unmatched, ...]
    only_after: tuple[Unmatched, ...]


def match_heads(before: Inspection, after: Inspection) -> Matching:
    """Match the heads of two inspections.

    Raises an OptionError if the models differ, have no layer in common, or if the identity of heads is not known.
    """
    _check_sizes(before, after)
    heads_before, heads_after = _heads(before), _heads(after)
    both = [place for place in heads_before if place in heads_after]
    if not both:
        raise OptionError(
            "two inspections must have heads in common to be compared, got none: A has the layers "
            f"{_some(heads_before)}, B has {_some(heads_after)}"
        )
    pairs: list[tuple[Head, Head]] = []
    only: tuple[list[Unmatched], list[Unmatched]] = ([], [])
    known = "edited" in before.facts, "edited" in after.facts  # whether the run recorded the identity of heads
    for place in both:
        one, other = _origins(heads_before[place][0], heads_after[place][0], known)
        same = one == other
        candidates = {_key(other, head, same): (heads_after[place][0], head) for head in heads_after[place][1]}
        for head in heads_before[place][1]:
            if (match := candidates.pop(_key(one, head, same), None)) is not None:
                pairs.append(((heads_before[place][0], head), match))
            else:
                only[0].append(_unmatched((heads_before[place][0], head), one, other, heads_after[place]))
        only[1].extend(_unmatched(head, other, one, heads_before[place]) for head in candidates.values())
    for own, others, unmatched in ((heads_before, heads_after, only[0]), (heads_after, heads_before, only[1])):
        for place, (site, heads) in own.items():
            if place not in others:
                unmatched.extend(Unmatched((site, head), "not read") for head in heads)
    stacked = has_stacks((*before.table.sites, *after.table.sites))
    return Matching(tuple(pairs), *(tuple(replace(x, stacked=stacked) for x in heads) for heads in only))


_Place = tuple[str, str]
_Heads = Mapping[_Place, tuple[AttentionSite, list[int]]]


def _heads(inspection: Inspection) -> _Heads:
    heads: dict[_Place, tuple[AttentionSite, list[int]]] = {}
    for site, head in zip(inspection.table.sites, inspection.table.heads, strict=True):
        heads.setdefault((site.name, site.kind), (site, []))[1].append(head)
    return heads


def _origins(before: AttentionSite, after: AttentionSite, known: tuple[bool, bool]) -> tuple[HeadOrigins, HeadOrigins]:
    """Return the origins of a layer's heads in both; raise an OptionError if the layers have no common original."""
    one, other = (site.origins or HeadOrigins.unedited(site.num_heads) for site in (before, after))
    why = ""
    if one.total != other.total:
        why = f"the unedited layer had {one.total} heads in A and {other.total} in B"
    elif not all(known) and one != other and len(one.heads) == len(other.heads):
        why = f"{'B' if known[0] else 'A'} was saved by a version that did not record the identity of heads"
    if why:
        hint = "" if all(known) else "; inspect the models again if one is an edited version of the other"
        raise OptionError(f"heads can be compared if their identity is known, got {before.name!r}, where {why}{hint}")
    return one, other


def _key(origins: HeadOrigins, head: int, same: bool) -> object:
    """Return the key that identifies a head: its number if both layers have the same edits, else its original heads."""
    made_of = origins.heads[head]
    # New heads and zero padding heads of different edits never match.
    return head if same else (made_of if made_of and made_of[0] >= 0 else (head, id(origins)))


def _unmatched(
    head: Head, own: HeadOrigins, others: HeadOrigins, other_heads: tuple[AttentionSite, list[int]]
) -> Unmatched:
    made_of = own.heads[head[1]]
    if not made_of:
        return Unmatched(head, "padding")
    if made_of[0] < 0 and len(made_of) == 1:
        return Unmatched(head, "new")
    site, observed = other_heads
    merged = next((x for x in observed if len(others.heads[x]) > 1 and set(others.heads[x]) & set(made_of)), None)
    if merged is not None:
        return Unmatched(head, "merged", (site, merged))
    if len(made_of) > 1:
        return Unmatched(head, "merged")
    return Unmatched(head, "removed" if made_of[0] in others.removed else "not read")


def _check_sizes(before: Inspection, after: Inspection) -> None:
    for name, words in SIZES.items():
        one, other = before.facts.get(name), after.facts.get(name)
        if one is not None and other is not None and one != other:
            raise OptionError(
                "inspections can be compared if they are of one model (before and after edits or training, or on two "
                f"texts), got two whose {words} differs: {one} in A ({before.facts['model']}), {other} in B "
                f"({after.facts['model']})"
            )


def _some(heads: _Heads) -> str:
    names = [name for name, _ in heads]
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")

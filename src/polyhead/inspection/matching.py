"""Which head of one inspection is which of another: by the heads of the model that both were made of.

Edits renumber heads, so that a number alone says nothing across them. A head that was kept is known by its number in
the unedited model, a merged head by all those that it is made of. Where that is not on record, nothing is matched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from polyhead.errors import OptionError
from polyhead.geometry import HeadOrigins
from polyhead.inspection.heads import Head, named
from polyhead.inspection.identity import original_name
from polyhead.inspection.result import Inspection
from polyhead.observation import AttentionSite

# Of the facts of a run: what all heads of a model have in common.
SIZES = {"model_type": "model type", "hidden_size": "hidden size", "num_hidden_layers": "number of layers"}
Reason = Literal["removed", "merged", "new", "not read", "padding"]


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A head that the other inspection does not have, and why."""

    head: Head
    reason: Reason
    merged_into: Head | None = None  # in the other inspection

    def __str__(self) -> str:
        into = "" if self.merged_into is None else f" into {named(self.merged_into)}"
        name = named(self.head) if self.reason in ("new", "padding") else original_name(self.head)
        return f"{name} {self.reason}{into}"


@dataclass(frozen=True, slots=True)
class Matching:
    """Pairs of one and the same head, and the heads that only one of both has."""

    pairs: tuple[tuple[Head, Head], ...]
    only_before: tuple[Unmatched, ...]
    only_after: tuple[Unmatched, ...]


def match_heads(before: Inspection, after: Inspection) -> Matching:
    """Match the heads of two inspections; refused where nothing says which head is which."""
    _check_sizes(before, after)
    mine, theirs = _heads(before), _heads(after)
    both = [place for place in mine if place in theirs]
    if not both:
        raise OptionError(
            "two inspections are compared head by head, got none that both models have: A has the layers "
            f"{_some(mine)}, B has {_some(theirs)}"
        )
    pairs: list[tuple[Head, Head]] = []
    only: tuple[list[Unmatched], list[Unmatched]] = ([], [])
    for place in both:
        one, other = _origins(before, after, place)
        same = one == other
        known = {_key(other, head, same): (theirs[place][0], head) for head in theirs[place][1]}
        for head in mine[place][1]:
            if (twin := known.pop(_key(one, head, same), None)) is not None:
                pairs.append(((mine[place][0], head), twin))
            else:
                only[0].append(_unmatched((mine[place][0], head), one, other, theirs[place]))
        only[1].extend(_unmatched(head, other, one, mine[place]) for head in known.values())
    for found, others, unmatched in ((mine, theirs, only[0]), (theirs, mine, only[1])):
        for place, (site, heads) in found.items():
            if place not in others:
                unmatched.extend(Unmatched((site, head), "not read") for head in heads)
    return Matching(tuple(pairs), tuple(only[0]), tuple(only[1]))


_Place = tuple[str, str]
_Heads = Mapping[_Place, tuple[AttentionSite, list[int]]]


def _heads(inspection: Inspection) -> _Heads:
    found: dict[_Place, tuple[AttentionSite, list[int]]] = {}
    for site, head in zip(inspection.table.sites, inspection.table.heads, strict=True):
        found.setdefault((site.name, site.kind), (site, []))[1].append(head)
    return found


def _origins(before: Inspection, after: Inspection, place: _Place) -> tuple[HeadOrigins, HeadOrigins]:
    """The origins of a layer's heads in both; refused where the two were not made of one."""
    (one, known), (other, other_known) = (_of_site(inspection, place) for inspection in (before, after))
    why = ""
    if one.total != other.total:
        why = f"the unedited layer had {one.total} heads in A and {other.total} in B"
    elif not (known and other_known) and one != other and len(one.heads) == len(other.heads):
        why = f"{'B' if known else 'A'} was saved before runs kept the identity of heads, and may be edited or not"
    if why:
        hint = "" if known and other_known else "; inspect the models again if one was made of the other"
        raise OptionError(
            f"heads are compared that are one and the same in both models, got {place[0]!r}, where {why}{hint}"
        )
    return one, other


def _of_site(inspection: Inspection, place: _Place) -> tuple[HeadOrigins, bool]:
    """The origins of a layer, and whether the run would say so if there were others."""
    sites = inspection.table.sites
    site = next(site for site in sites if (site.name, site.kind) == place)
    return site.origins or HeadOrigins.unedited(site.num_heads), "edited" in inspection.facts


def _key(origins: HeadOrigins, head: int, same: bool) -> object:
    """What a head is known by: of two layers after one edit its number, of others the original heads it is made of."""
    made_of = origins.heads[head]
    # New heads of two edits have nothing in common, and neither have zeros.
    return head if same else (made_of if made_of and made_of[0] >= 0 else (head, id(origins)))


def _unmatched(head: Head, own: HeadOrigins, others: HeadOrigins, there: tuple[AttentionSite, list[int]]) -> Unmatched:
    made_of = own.heads[head[1]]
    if not made_of:
        return Unmatched(head, "padding")
    if made_of[0] < 0 and len(made_of) == 1:
        return Unmatched(head, "new")
    site, read = there
    joint = next((x for x in read if len(others.heads[x]) > 1 and set(others.heads[x]) & set(made_of)), None)
    if joint is not None:
        return Unmatched(head, "merged", (site, joint))
    if len(made_of) > 1:
        return Unmatched(head, "merged")
    return Unmatched(head, "removed" if made_of[0] in others.removed else "not read")


def _check_sizes(before: Inspection, after: Inspection) -> None:
    for name, words in SIZES.items():
        one, other = before.facts.get(name), after.facts.get(name)
        if one is not None and other is not None and one != other:
            raise OptionError(
                "heads are compared of one model, before and after edits, training or on two texts, got two whose "
                f"{words} differs: {one} in A ({before.facts['model']}), {other} in B ({after.facts['model']})"
            )


def _some(found: _Heads) -> str:
    names = [name for name, _ in found]
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")

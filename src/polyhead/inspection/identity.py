"""Descriptions of heads of edited models: their original heads, and the heads that edits removed, merged or added."""

from __future__ import annotations

from collections.abc import Iterable

from polyhead.geometry import HeadId
from polyhead.inspection.heads import Head, has_stacks, named
from polyhead.inspection.vocabulary import Text
from polyhead.observation import AttentionSite


def originally(head: Head) -> Text | None:
    """Return a description of a head's origin; None if it has the same number as in the unedited model.

    >>> from polyhead.geometry import HeadOrigins
    >>> site = AttentionSite("layer.0", "self", "layer.*", 0, 3, HeadOrigins(((0,), (2,), (1, 3)), total=4))
    >>> originally((site, 0)), originally((site, 1)).en, originally((site, 2)).en
    (None, 'originally L0H2', 'merged from L0H1+L0H3')
    """
    site, number = head
    if site.origins is None or site.origins.heads[number] == (number,):
        return None
    made_of, name = site.origins.heads[number], site.original_name(number)
    if not made_of:
        return Text("zero padding head", "仅占位的零头")
    if made_of == made_of[:1] and made_of[0] < 0:
        return Text("new", "新头")
    return (
        Text(f"originally {name}", f"原为 {name}")
        if len(made_of) == 1
        else Text(f"merged from {name}", f"由 {name} 合并")
    )


def edits_of(sites: Iterable[AttentionSite]) -> Text | None:
    """Return the removed, merged and added heads by their original numbers; None if no layer was edited."""
    edited = [site for site in dict.fromkeys(sites) if site.origins is not None]
    several = has_stacks(edited)
    parts: dict[str, list[str]] = {"removed": [], "merged": [], "new": [], "zeros": []}
    moved = 0
    for site in edited:
        origins, stack = site.origins, f"{site.stack} " if several else ""
        assert origins is not None
        parts["removed"] += [f"{stack}{HeadId(site.layer, head)}" for head in origins.removed]
        for number, made_of in enumerate(origins.heads):
            if len(made_of) > 1:
                parts["merged"].append(f"{stack}{site.original_name(number)}")
            elif not made_of or made_of[0] < 0:
                parts["new" if made_of else "zeros"].append(f"{stack}{named((site, number))}")
            else:
                moved += made_of != (number,)
    words = {
        "removed": Text("removed {heads}", "去除 {heads}"),
        "merged": Text("merged {heads}", "合并 {heads}"),
        "new": Text("new {heads}", "新增 {heads}"),
        "zeros": Text("zero padding heads {heads}", "仅占位的零头 {heads}"),
    }
    phrases = [words[name].format(heads=", ".join(heads)) for name, heads in parts.items() if heads]
    if moved:
        subject = f"{moved} {'head has' if moved == 1 else 'heads have'}"
        phrases.append(Text(f"{subject} a different number than in the original", f"{moved} 个头的编号与原模型不同"))
    return Text("; ".join(x.en for x in phrases), "；".join(x.zh for x in phrases)) if phrases else None

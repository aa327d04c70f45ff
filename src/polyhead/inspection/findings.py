"""The most telling things about a model's heads, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from polyhead.analysis.roles import HeadRoles, RoleScore
from polyhead.inspection.result import Head, Inspection, named

MOST = 3
# Which roles are worth telling first: a head that works with content says more of a model than one that rests.
TELLING = (
    "induction",
    "duplicate-token",
    "same-meaning",
    "previous",
    "next",
    "positional",
    "long-range",
    "rare-token",
    "local",
    "self",
    "delimiter",
    "sink",
    "broad",
    "copy",
    "anti-copy",
)


def findings(inspection: Inspection, most: int = MOST) -> tuple[str, ...]:
    """One of each kind: what the clearest head does, which say the same, which matters most; then what is common."""
    kinds = [
        _clearest(inspection),
        _alike(inspection),
        _matters(inspection),
        _common(inspection),
        _extremes(inspection),
    ]
    found: list[str] = []
    while len(found) < most:
        before = len(found)
        for kind in kinds:
            text = next(kind, None)
            if text is not None and len(found) < most:
                found.append(text)
        if len(found) == before:
            break
    return tuple(found)


def place_of(inspection: Inspection, head: Head) -> str:
    """`layer 2 head 7`, with the stack where a model has several."""
    site, number = head
    where = "" if _is_one_stack(inspection) else f"{site.stack.partition('.')[0]} {site.kind}-attention, "
    return f"{where}layer {site.layer} head {number}"


def _is_one_stack(inspection: Inspection) -> bool:
    return len({(site.stack, site.kind) for site in inspection.table.sites}) == 1


def _clearest(inspection: Inspection) -> Iterator[str]:
    scored: list[tuple[int, float, HeadRoles, RoleScore]] = []
    for head in inspection.roles:
        for score in head.scores:
            if score.holds:
                scored.append((TELLING.index(score.role), -score.score, head, score))
    told = set()
    for _, _, head, score in sorted(scored, key=lambda x: x[:2]):
        if score.role not in told:
            told.add(score.role)
            yield f"{place_of(inspection, (head.site, head.head))} {score.evidence}: {_article(score.role)} head"


def _article(role: str) -> str:
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"


def _alike(inspection: Inspection) -> Iterator[str]:
    groups = [(group.least, group.heads, "") for group in inspection.groups]
    threshold = math.inf if inspection.likeness is None else inspection.likeness.threshold
    groups += [
        (pair.cosine, (pair.one, pair.other), ", in different layers")
        for pair in inspection.pairs
        if pair.cosine >= threshold
    ]
    for cosine, heads, where in sorted(groups, key=lambda x: -x[0]):
        places = [named(head) if _is_one_stack(inspection) else place_of(inspection, head) for head in heads]
        names = ", ".join(places[:-1]) + f" and {places[-1]}"
        null = "" if inspection.likeness is None else f"; random weights reach {inspection.likeness.null:.2f}"
        yield f"heads {names} say the same thing{where}, cosine {cosine:.2f}{null}"


def _matters(inspection: Inspection) -> Iterator[str]:
    table = inspection.table
    turned = inspection.facts.get("loss") == "representation"
    told = {
        "ablation": "taking out {} turns a text's vector the most: 1 - cosine {:.2g}"
        if turned
        else "taking out {} costs the most: {:.3g} nats a token",
        "gradient": "the loss hangs most on {}: its slope is {:.3g}",
    }
    for measure, words in told.items():
        if measure not in table.columns:
            continue
        values = table[measure]
        order = values.nan_to_num(nan=-math.inf).argsort(descending=True)
        if len(order) < 2 or not bool(values[order[0]].isfinite()):
            continue
        head = (table.sites[int(order[0])], table.heads[int(order[0])])
        most, middle = float(values[order[0]]), float(values[values.isfinite()].median())
        times = f", {most / middle:.0f} times the middle head" if middle > 0 else ""
        yield f"{words.format(place_of(inspection, head), most)}{times}"


def _common(inspection: Inspection) -> Iterator[str]:
    table = inspection.table
    if "sink_mass" in table.columns:
        resting = int((table["sink_mass"] > 0.5).sum())
        if resting:
            yield f"{resting} of {len(table)} heads put over half of their attention on the first token"
    if "entropy_share" in table.columns:
        wide = int((table["entropy_share"] > 0.9).sum())
        if wide:
            yield f"{wide} of {len(table)} heads look nearly everywhere alike (over 90% of the largest entropy)"


def _extremes(inspection: Inspection) -> Iterator[str]:
    """What can be said of any model: its sharpest, its furthest and its loudest head."""
    for column, said in (
        ("confidence", "is the sharpest: {:.0%} of its attention on one token"),
        ("reach", "looks furthest: {:.0f} tokens away on average"),
        ("contribution_share", "writes the most: {:.0%} of what its layer's heads write"),
    ):
        table = inspection.table
        if column in table.columns and bool(table[column].isfinite().any()):
            values = table[column].nan_to_num(nan=-math.inf)
            best = int(values.argmax())
            head = (table.sites[best], table.heads[best])
            yield f"{place_of(inspection, head)} {said.format(float(values[best]))}"

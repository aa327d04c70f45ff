"""Grid of layers and heads for the terminal, coloured by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyhead.inspection.vocabulary import role_of

if TYPE_CHECKING:
    from rich.text import Text

    from polyhead.inspection import Inspection
    from polyhead.observation import AttentionSite

# Style per role, in the order of `vocabulary.ROLE_ORDER`: a head is drawn with its first role.
STYLES = {
    "induction": "bold white on magenta",
    "pronoun": "bold black on bright_green",
    "agreement": "bold black on green3",
    "duplicate-token": "bold white on dark_magenta",
    "same-meaning": "bold black on bright_magenta",
    "previous": "bold white on blue",
    "next": "bold black on bright_cyan",
    "self": "bold black on cyan",
    "positional": "bold white on dark_blue",
    "long-range": "bold black on bright_blue",
    "rare-token": "bold black on bright_yellow",
    "local": "black on green",
    "delimiter": "black on yellow",
    "sink": "black on grey62",
    "broad": "black on grey82",
    # What a head does to the logit of the token it attends to.
    "copy": "black on bright_red",
    "anti-copy": "white on red",
}
NONE = ("··", "grey50")


def picture(inspection: Inspection) -> Iterator[Text]:
    """Yield a grid per stack, with a row per layer and a cell per head; redundant heads are underlined."""
    from rich.text import Text

    roles = {(x.site, x.head): x.roles for x in inspection.roles}
    redundant = {redundant_head.head for redundant_head in inspection.redundant}  # (site, index) pairs
    stacks: dict[tuple[str, str], list[AttentionSite]] = {}
    for site in dict.fromkeys(inspection.table.sites):
        stacks.setdefault((site.stack, site.kind), []).append(site)
    for (stack, kind), sites in stacks.items():
        heads = max(site.num_heads for site in sites)
        drawn = Text()
        if len(stacks) > 1:
            drawn.append(f"{stack}, {kind}-attention\n", "bold")
        drawn.append("layer  head " + " ".join(f"{head:>2}" for head in range(heads)) + "\n", "dim")
        for index, site in enumerate(sites):
            drawn.append(f"{site.layer:>5}       ", "dim")
            for head in range(site.num_heads):
                letters, style = _cell(roles.get((site, head), frozenset()))
                drawn.append(letters, f"{style} underline" if (site, head) in redundant else style)
                drawn.append(" " if head + 1 < site.num_heads else "")
            drawn.append("\n" if index + 1 < len(sites) else "")
        yield drawn


def legend(inspection: Inspection) -> Text:
    """Return the roles that occur, with their counts."""
    from rich.text import Text

    counts = Counter(role for x in inspection.roles for role in x.roles)
    drawn = Text()
    for role, style in STYLES.items():
        if counts[role]:
            drawn.append(role_of(role).letters, style)
            drawn.append(f" {role} {counts[role]}  ")
    none = sum(not x.roles for x in inspection.roles)
    drawn.append(NONE[0], NONE[1])
    drawn.append(f" no role {none}")
    if len(inspection.redundant):
        drawn.append("  ")
        drawn.append("··", "underline")
        drawn.append(f" redundant within its layer {len(inspection.redundant)}")
    return drawn


def _cell(roles: frozenset[str]) -> tuple[str, str]:
    return next(((role_of(role).letters, style) for role, style in STYLES.items() if role in roles), NONE)

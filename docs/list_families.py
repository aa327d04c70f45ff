"""Write the list of model families of the installed transformers into docs/huggingface.md.

python docs/list_families.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import transformers

from polyhead.integrations.huggingface import Family, families

PAGE = Path(__file__).parent / "huggingface.md"
START, END = "<!-- families: written by docs/list_families.py -->", "<!-- families end -->"


def render(found: tuple[Family, ...], version: str) -> str:
    """Return the lists as Markdown, one paragraph per group."""
    groups = (
        (
            "Every attention class uses the interface",
            [family.name for family in found if family.uses_interface and not family.own],
        ),
        (
            "Some attention classes use it; those in parentheses compute attention by themselves",
            [f"{family.name} ({', '.join(family.own)})" for family in found if family.uses_interface and family.own],
        ),
        (
            "No attention class uses it: a softmax by hand, or code that needs an adapter",
            [family.name for family in found if not family.uses_interface and family.own],
        ),
        (
            "No attention class: built from other families' models, or without attention",
            [family.name for family in found if not family.uses_interface and not family.own],
        ),
    )
    lines = [f"transformers {version}, {len(found)} families."]
    for title, names in groups:
        text = f"**{title}** ({len(names)}): {', '.join(names)}."
        lines += ["", *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines)


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    listed = render(families(), transformers.__version__)
    PAGE.write_text(f"{before}{START}\n\n{listed}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

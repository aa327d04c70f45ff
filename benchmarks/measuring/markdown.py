"""Tables in Markdown, and the pages that they are written into."""

from __future__ import annotations

import re
from collections.abc import Sequence


def markdown_table(header: Sequence[str], *rows: Sequence[str]) -> list[str]:
    """Return the lines of a table.

    >>> markdown_table(("name", "time"), ("ours", "2 ms"))
    ['| name | time |', '|---|---|', '| ours | 2 ms |']
    """
    first, *others = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return [first, "|---" * len(header) + "|", *others]


def filled(page: str, name: str, content: str) -> str:
    """Return a page with `content` between its marks `<!-- name: begin -->` and `<!-- name: end -->`."""
    marks = re.compile(rf"(<!-- *{name}: *begin *-->).*?(<!-- *{name}: *end *-->)", re.DOTALL)
    if len(marks.findall(page)) != 1:
        raise ValueError(f"a page needs the marks {name}: begin and {name}: end exactly once")
    return marks.sub(lambda match: f"{match[1]}\n\n{content}{match[2]}", page)

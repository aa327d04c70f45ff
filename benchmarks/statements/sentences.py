"""Every sentence that `polyhead inspect --html` prints about a model: the terminal's lines, and those of the page."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from polyhead.cli.inspect_results import show
from polyhead.inspection import Inspection
from polyhead.inspection.heads import named
from polyhead.inspection.vocabulary import column_of, role_of
from polyhead.inspection.wording import Finding
from polyhead.report.payload import page_of

TOP_KEYS = 3
WIDTH = 1000


@dataclass(frozen=True, eq=False)
class Statement:
    """A sentence and where it is printed; a finding has its heads as well."""

    place: str  # terminal, findings, head, similar, importance, columns
    sentence: str
    finding: Finding | None = None
    values: Any = None  # of a column: the values of all heads


def statements_of(found: Inspection, findings: tuple[Finding, ...]) -> list[Statement]:
    """Return the sentences about the model; the page has more findings than the terminal, which are passed here."""
    listed = [Statement("terminal", line) for line in _terminal(found)]
    listed += [Statement("findings", str(finding), finding) for finding in findings]
    page = page_of(found)
    names = [[named((site, head)) for head in range(site.num_heads)] for site in dict.fromkeys(found.table.sites)]

    def name(head: list[int]) -> str:
        return names[head[0]][head[1]]

    listed += [Statement("head", sentence) for head in page["heads"] for sentence in _of_head(head, name)]
    listed += [Statement("similar", sentence) for sentence in _similar(page, name)]
    listed += [Statement("importance", sentence) for sentence in _important(found, page)]
    for column in found.table.columns:
        about = column_of(column, found.facts.get("loss")).about.en
        listed.append(Statement("columns", f"{column}: {about}", values=found.table[column]))
    return listed


def _terminal(found: Inspection) -> Iterator[str]:
    """Yield the lines of the terminal without the grid, the findings and commands, which claim nothing else."""
    written = io.StringIO()
    show(found, Console(file=written, width=WIDTH, highlight=False))
    text, _, _ = written.getvalue().partition("Main findings")
    for line in text.splitlines():
        is_grid = line.startswith("layer  head") or line[:5].strip().isdigit()
        is_advice = line.startswith(("To remove", "A head with a small gradient"))
        if line.strip() and not is_grid and not is_advice:
            yield line.strip()


def _of_head(head: dict[str, Any], name: Any) -> Iterator[str]:
    own = name([head["site"], head["head"]])
    roles = [score for score in head["roles"] if score["holds"]]
    for score in roles:
        yield f"{own} {score['evidence']['en']}: {role_of(score['role']).label.en}"
    if not roles:
        yield f"{own}: None of the roles is supported by the evidence for this head."
    if keys := [f"{key['text']!r} {key['share']:.1%}" for key in head["top_keys"][:TOP_KEYS]]:
        yield f"{own}: Tokens that receive the most attention from this head, over the whole text: {', '.join(keys)}"
    if other := next(iter(head["similar"]), None):
        where = "other layer" if other["across"] else "same layer"
        yield f"{own}: Most similar or opposite output: {name(other['head'])} {other['cosine']:.2f} ({where})"


def _similar(page: dict[str, Any], name: Any) -> Iterator[str]:
    for x in page["redundant"]:
        alone = f"{x['alone']:.1%} by {name(x['other'])} alone, cosine {x['cosine']:.2f}"
        yield f"Redundant: {name(x['head'])} {x['share']:.1%}; {alone}"
    for x in page["pairs"]:
        yield f"Across layers: {name(x['one'])} and {name(x['other'])}, cosine {x['cosine']:.2f}"


def _important(found: Inspection, page: dict[str, Any]) -> Iterator[str]:
    if page["importance"] is not None:
        column = page["importance"]["column"]
        row = int(found.table[column].nan_to_num(nan=-1e300).argmax())
        yield f"{named((found.table.sites[row], found.table.heads[row]))} ranks first on this text. ({column})"

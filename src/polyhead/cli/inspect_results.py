"""Summary of an inspection for the terminal: its inputs, the grid of heads, importance and findings."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyhead.cli.report import write
from polyhead.cli.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.analysis.languages import Language
    from polyhead.inspection import Inspection

TOP_KEYS = 5  # most attended tokens shown per head
LEAST = 4  # least important heads shown


def report_inspection(
    inspection: Inspection, folder: Path | None, html: Path | None, language: Language, console: Console, *, table: bool
) -> None:
    """Print an inspection and its files, and write its page; exit as after Ctrl-C if it was interrupted."""
    show(inspection, console, table=table)
    if folder is not None:
        files = "heads.parquet, inspection.json, relations.safetensors, pictures.safetensors"
        console.print(f"\nSaved to {folder}: {files}", markup=False)
    if html is not None:
        typer.echo(f"\n{write(html, inspection, language)}")
    if inspection.facts["interrupted"]:
        raise typer.Exit(130)


def show(inspection: Inspection, console: Console, *, table: bool = False) -> None:
    """Print the summary of an inspection: its inputs, the grid of heads, and the findings."""
    from polyhead.cli.heads_picture import legend, picture
    from polyhead.costs.quantities import plural
    from polyhead.inspection.identity import edits_of
    from polyhead.inspection.vocabulary import column_of
    from polyhead.inspection.wording import loss_in_words
    from polyhead.workflows.evaluating import FEW

    facts = inspection.facts
    console.print(
        f"{facts['model']}\n{facts['tokens']:,} tokens of {plural(facts['documents'], 'document')}, in contexts of "
        f"up to {facts['context']}; {len(inspection.table)} heads; {facts['seconds']:.0f} s",
        markup=False,
    )
    edits = edits_of(inspection.table.sites)
    if edits is not None:
        say(console, f"Edited, in head numbers of the original: {edits.en}")
    if facts.get("materialised"):
        from polyhead.observation.intercepted_calls import MATERIALISED

        console.print(MATERIALISED.capitalize(), style="yellow", markup=False)
    if facts["interrupted"] and not facts.get("read"):
        console.print("Interrupted: results cover only the text read so far.", style="yellow")
    if facts["unknown"] > 0.05:
        console.print(
            f"{facts['unknown']:.0%} of the tokens are unknown tokens, which the heads cannot distinguish.",
            style="yellow",
        )
    if facts["intervals_over"] == "contexts" and 1 < facts["contexts"] < FEW:
        say(
            console,
            f"Intervals and standard errors are over fewer than {FEW} contexts, too few to be reliable; for "
            "more, use a longer --text (read up to --tokens) or a smaller --context",
            "yellow",
        )
    for reason in facts["left_out"]:
        console.print(f"Skipped: {reason}", style="yellow", markup=False)
    if table:
        names = [name for name in inspection.table.names if bool(inspection.table[name].any())]
        shown = replace(inspection.table, names=tuple(names))
        say(console, shown.to_text(console.width if console.is_terminal else None))
        if zero := [name for name in inspection.table.names if name not in names]:
            console.print(f"0 for every head: {', '.join(zero)}", style="dim", markup=False)
        for name in names:
            column = column_of(name, facts.get("loss"))
            label, unit = column.label.en, column.unit.en
            line = label if label.startswith(name.replace("_", " ")) else f"{name}: {label}"
            line += f" ({unit})" if unit and unit not in label else ""
            say(console, line, "dim")
        _show_top_keys(inspection, console)
    for drawn in picture(inspection):
        console.print()
        console.print(drawn)
    console.print(legend(inspection))
    for line in _redundant(inspection):
        say(console, line, "dim")
    if facts.get("importance_tokens") is not None:
        methods = [name for name in ("ablation", "gradient") if name in inspection.table.names]
        measured = loss_in_words(facts["loss"], facts["importance_tokens"]).en
        console.print(f"Importance by {' and '.join(methods)}: {measured}.", style="dim")
        for line in _least_important(inspection, methods[0]):
            say(console, line, "dim")
    if len(inspection.findings):
        console.print("\n[bold]Main findings[/bold]")
        for finding in inspection.findings:
            line = textwrap.fill(str(finding), console.width, initial_indent="  • ", subsequent_indent="    ")
            say(console, line)


def _redundant(inspection: Inspection) -> Iterator[str]:
    """Yield the redundant heads with the command that removes the first, or that there are none."""
    from polyhead.analysis.redundancy import PREDICTABLE, THRESHOLD
    from polyhead.inspection.heads import has_stacks
    from polyhead.inspection.wording import place_of

    table = inspection.table
    shares = table.columns.get(PREDICTABLE)
    if shares is None or not bool(shares.isfinite().any()):
        return
    stacked = has_stacks(table.sites)
    if not len(inspection.redundant):
        best = int(shares.nan_to_num(nan=-math.inf).argmax())
        place = place_of((table.sites[best], table.heads[best]), stacked=stacked)
        yield (
            f"No redundant heads: the other heads of a layer predict less than {THRESHOLD:.0%} of each head's output "
            f"linearly, on held-out tokens (at most {float(shares[best]):z.0%}, of {place})."
        )
        return
    shown = [f"{place_of(x.head, stacked=stacked)} {x.share:.0%}" for x in inspection.redundant[:LEAST]]
    are, their = ("is", "its") if len(shown) == 1 else ("are", "their")
    yield (
        f"{len(inspection.redundant)} of {len(table)} heads {are} redundant: the other heads of {their} layer predict "
        f"at least {THRESHOLD:.0%} of {their} output linearly, on held-out tokens: {', '.join(shown)}"
        f"{' and others' if len(inspection.redundant) > LEAST else ''}."
    )
    if not stacked:
        site, head = inspection.redundant[0].head
        command = f"polyhead prune {_model_of(inspection)} --heads L{site.layer}H{head} --form uneven --output FOLDER"
        yield f"To remove the first and compensate with the other heads: {command}"


def _least_important(inspection: Inspection, measure: str) -> Iterator[str]:
    """Yield the least important heads with their standard errors, and the command that removes them."""
    from polyhead.inspection.findings import least_important
    from polyhead.inspection.heads import has_stacks
    from polyhead.inspection.wording import place_of

    table = inspection.table
    values, errors = table[measure], table[f"{measure}_error"]
    rows, among = least_important(inspection, measure, LEAST)
    known = bool(errors[rows].isfinite().all())  # not over a single document
    stacked = has_stacks(table.sites)
    shown = [
        f"{place_of((table.sites[row], table.heads[row]), stacked=stacked)} {float(values[row]):.2g}"
        + (f" ± {float(errors[row]):.1g}" if known else "")
        for row in rows
    ]
    yield f"Least important by {measure}: {', '.join(shown)}{'; ± is the standard error' if known else ''}."
    if among is None:
        yield "Without standard errors, which need two contexts, this order may be chance."
    elif among > len(rows):
        others = among - len(rows)
        last = place_of((table.sites[rows[-1]], table.heads[rows[-1]]), stacked=stacked)
        do = "head does" if others == 1 else "heads do"
        yield f"{others} other {do} not differ significantly from the last of these, {last}."
    if stacked:  # a command cannot name their heads
        return
    if measure == "gradient":
        command = f"polyhead inspect {_model_of(inspection)} --importance ablation"
        yield f"A head with a small gradient may still be needed; before you remove one: {command}"
        return
    heads = ",".join(f"L{table.sites[row].layer}H{table.heads[row]}" for row in rows)
    yield f"To remove them: polyhead prune {_model_of(inspection)} --heads {heads} --form uneven --output FOLDER"


def _model_of(inspection: Inspection) -> str:
    """Return the model as an argument of a command."""
    return shlex.quote(str(inspection.facts.get("name") or inspection.settings.model or "MODEL"))


def _show_top_keys(inspection: Inspection, console: Console) -> None:
    from polyhead.inspection.wording import place_of

    if not len(inspection.top_keys):
        return
    console.print("\nMost attended tokens of each head, with their share of its attention")
    width = max(
        len(place_of((site, number))) for site, heads in inspection.top_keys.items() for number in range(len(heads))
    )
    stack = None
    for site, heads in inspection.top_keys.items():
        if site.stack != stack:
            stack = site.stack
            console.print(stack, markup=False)
        for number, keys in enumerate(heads):
            tokens = "  ".join(f"{_printable(key.text)} {key.share:.0%}" for key in keys[:TOP_KEYS])
            say(console, f"{place_of((site, number)):>{width}}: {tokens}")


def _printable(text: str) -> str:
    """Escape control characters, which could move the cursor of a terminal."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)

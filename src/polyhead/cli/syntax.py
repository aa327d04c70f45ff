"""`polyhead syntax`: which grammatical relation each head knows, by a treebank."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.edit_options import ResumeIn
from polyhead.cli.options import check_device
from polyhead.cli.progress import errors_told

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.analysis.alignment import Aligned
    from polyhead.analysis.shares import Shares
    from polyhead.analysis.syntax import SyntaxTable
    from polyhead.observation import Observations
    from polyhead.sources import LoadedModel

KEPT = "observations.safetensors"  # in the folder of --resume
MOST_INSIDE = 3  # heads that are shown for the word, the phrase and the sentence


def syntax(
    model: Annotated[
        str | None,
        typer.Argument(
            help="minilm (the default), smollm2, a model's folder, a .gguf file or a name on the hub.",
            metavar="MODEL",
        ),
    ] = None,
    treebank: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Sentences with their grammar, in the CoNLL-U format (.conllu or .conllu.gz)."
        ),
    ] = None,
    sentences: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Read the first N sentences; all by default.")
    ] = None,
    together: Annotated[
        int, typer.Option(metavar="N", min=1, help="Let the model read N sentences in a row as one text.")
    ] = 1,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that the model reads at once, padding included.")
    ] = 2048,
    minimum: Annotated[
        int, typer.Option(metavar="N", min=1, help="Leave out a relation with fewer words than this in either half.")
    ] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split into two halves.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda or cuda:1.")] = "cpu",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table to a .json or .parquet file as well.")
    ] = None,
    resume: ResumeIn = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickled weights, which can run code; only if you trust them.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that comes with a model; only if you trust it.")
    ] = False,
) -> None:
    """Which grammatical relation does each head know?

    For every dependency relation of a treebank and both directions, the head that most often looks from one word at
    the other, beside the best fixed offset ("the word before"), which knows no grammar. Half of the texts choose the
    head and the offset; the numbers are of the other half, so that being the best of many flatters neither. A word's
    tokens are one; its attention to itself and to special tokens is left out. Treebanks in many languages are free at
    universaldependencies.org.

    Below it stand the heads that keep most of their attention inside the word, the phrase (a word with all that
    depends on it) and, with --together, the sentence, beside what even attention would leave there.

    With --resume DIR what was read is kept; a run that was stopped goes on when the same command is given again.
    """
    from rich.console import Console

    from polyhead.analysis.shares import inner_shares
    from polyhead.analysis.syntax import syntax_table
    from polyhead.observation.run_folder import held

    if treebank is None:
        raise typer.BadParameter(
            "a treebank is needed: a file in the CoNLL-U format, such as those of universaldependencies.org",
            param_hint="--treebank",
        )
    console = Console(stderr=True, highlight=False)
    with errors_told("syntax", resume), ExitStack() as stack:
        _check_output(output)
        check_device(device)
        if resume is not None:
            stack.enter_context(held(resume))
        loaded, aligned = _prepared(model, treebank, sentences, together, device, allow_pickle, trust_remote_code)
        console.print(f"{loaded}\n{aligned}")
        observations = _watched(loaded, aligned, batch, console, resume)
        table, shares = syntax_table(observations, minimum=minimum, seed=seed), inner_shares(observations)
        if output is not None:
            table.save(
                output,
                model=loaded.name,
                treebank=treebank.name,
                sentences=aligned.sentences,
                words=aligned.words,
                shares=list(shares.rows()),
            )
    _show(table)
    _show_shares(shares)
    if output is not None:
        typer.echo(f"written to {output}")


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    from polyhead.observation.run_folder import check_file

    if output.suffix not in (".json", ".parquet"):
        raise typer.BadParameter(f"the file must end in .json or .parquet, got {output.name!r}", param_hint="--output")
    check_file(output, "--output")


def _prepared(
    model: str | None,
    treebank: Path,
    sentences: int | None,
    together: int,
    device: str,
    allow_pickle: bool,
    trust_remote_code: bool,
) -> tuple[LoadedModel, Aligned]:
    from polyhead.analysis.alignment import align
    from polyhead.errors import OptionError
    from polyhead.sources import load_model
    from polyhead.sources.treebank import read_treebank

    read = list(read_treebank(treebank, sentences))  # a fault in the file is told before a model is loaded
    loaded = load_model(model, device=device, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    aligned = align(read, loaded.tokenizer, together=together, longest=loaded.trained_context)
    if len(aligned) < 2:
        raise OptionError(
            f"one half of the texts chooses and the other judges, so there must be two at least, got {len(aligned)} "
            f"of {len(read)} sentences ({aligned})"
        )
    return loaded, aligned


def _watched(loaded: LoadedModel, aligned: Aligned, batch: int, console: Console, resume: Path | None) -> Observations:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from polyhead.analysis.alignment import watch
    from polyhead.observation.word_attention import WordAttention
    from polyhead.version import VERSION

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading", total=len(aligned))
        return watch(
            loaded,
            aligned.contexts,
            [WordAttention(aligned.maps)],
            batch_tokens=batch,
            progress=lambda read: progress.advance(task, read),
            kept=None if resume is None else resume / KEPT,
            origin={
                "words": aligned.digest,
                "device": str(next(loaded.model.parameters()).device),
                "polyhead": VERSION,
            },
        )


def _show(table: SyntaxTable) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    header, body = table.cells()
    drawn = Table(box=None, pad_edge=False)
    for index, name in enumerate(header):
        drawn.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for cells, entry in zip(body, table.entries, strict=True):
        drawn.add_row(*cells, style={"better": "green", "worse": "dim"}.get(entry.verdict, ""))
    _wide(console).print(drawn)
    console.print(f"\n{table.notes()}", soft_wrap=not console.is_terminal)


def _show_shares(shares: Shares) -> None:
    from rich.console import Console
    from rich.table import Table

    from polyhead.observation.word_attention import CIRCLES

    console = Console(highlight=False)
    drawn = Table(box=None, pad_edge=False)
    for index, name in enumerate(("inside the", "words", "head", "share", "95%", "even attention")):
        drawn.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for circle in CIRCLES:
        for entry in shares.of(circle)[:MOST_INSIDE]:
            interval = "-" if math.isnan(entry.low) else f"{entry.low:.3f}-{entry.high:.3f}"
            moved = entry.original_head != str(entry.head)
            place = f"{entry.layer}.{entry.head}" + (f" (originally {entry.original_head})" if moved else "")
            drawn.add_row(circle, str(entry.words), place, f"{entry.share:.3f}", interval, f"{entry.expected:.3f}")
    console.print(f"\nThe {MOST_INSIDE} heads that keep most of their attention inside:")
    _wide(console).print(drawn)


def _wide(console: Console) -> Console:
    """Files and pipes have no width of their own; a wrapped table there is no table."""
    from rich.console import Console

    return console if console.is_terminal else Console(width=120, highlight=False)

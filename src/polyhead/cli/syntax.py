"""`polyhead syntax`: match heads to dependency relations of a treebank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.edit_options import ResumeIn
from polyhead.cli.errors import resumable
from polyhead.cli.options import AllowPickle, ReadModel, TrustRemoteCode, check_device
from polyhead.cli.progress_bars import ProgressBars
from polyhead.cli.terminal import plain_table, wide_console
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from polyhead.analysis.shares import Shares
    from polyhead.analysis.syntax_table import SyntaxTable

TOP_HEADS = 3  # number of heads listed for each of word, phrase and sentence


def syntax(
    model: ReadModel = None,
    treebank: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Treebank in CoNLL-U format, .conllu or .conllu.gz (required).")
    ] = None,
    sentences: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Read only the first N sentences. [default: all]")
    ] = None,
    together: Annotated[int, typer.Option(metavar="N", min=1, help="Join N consecutive sentences into one text.")] = 1,
    batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of tokens per batch, padding included.")
    ] = 2048,
    minimum: Annotated[
        int, typer.Option(metavar="N", min=1, help="Skip relations with fewer than N words in either half.")
    ] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split into two halves.")] = 0,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1, ...")] = "cpu",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the table to a .json or .parquet file.")
    ] = None,
    resume: ResumeIn = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Find the dependency relation that each head tracks.

    For every relation of a treebank and both directions, reports the head whose attention from one word most often
    peaks at the other, next to the best fixed offset ("the word before") as a baseline. One half of the texts selects
    head and offset, the other half evaluates them, so that neither benefits from selection. The tokens of a word are
    combined; attention to the word itself and to special tokens is ignored. Treebanks for many languages are available
    at universaldependencies.org.

    Also lists the heads with the largest share of attention to other tokens inside the word, the phrase (a word with
    its dependents) and, with --together, the sentence, above what attention at the same distances would have; they are
    selected and evaluated on the same halves.

    With --resume DIR progress is saved; repeat the same command to continue an interrupted run.
    """
    from polyhead.sources.model_source import find_source
    from polyhead.sources.treebank import read_treebank

    if treebank is None:
        raise OptionError("--treebank is required: a file in CoNLL-U format, e.g. from universaldependencies.org")
    with resumable(resume):
        _check_output(output)
        next(read_treebank(treebank, 1), None)  # raises if it is no treebank
        find_source(model)

        import polyhead
        from polyhead.workflows.model_loading import load_model

        check_device(device)
        with ProgressBars() as progress:
            result = polyhead.syntax(
                lambda: load_model(
                    model, device=device, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code
                ),
                treebank,
                sentences=sentences,
                together=together,
                batch_tokens=batch,
                minimum=minimum,
                seed=seed,
                resume=resume,
                progress=progress,
            )
        if output is not None:
            result.save(output)
    typer.echo(f"{result.loaded}\n{result.aligned}", err=True)
    _show(result.table)
    _show_shares(result.shares, result.table.texts)
    if output is not None:
        typer.echo(f"saved to {output}")


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    from polyhead.files import check_pyarrow
    from polyhead.observation.run_folder import check_file

    if output.suffix not in (".json", ".parquet"):
        raise OptionError(f"--output must end in .json or .parquet, got {output.name!r}")
    check_file(output, "--output")
    if output.suffix == ".parquet":
        check_pyarrow(output)


def _show(table: SyntaxTable) -> None:
    from rich.text import Text

    console = wide_console()
    header, body = table.cells()
    drawn = plain_table(header[:2], header[2:], no_wrap=True)
    for cells, entry in zip(body, table.entries, strict=True):
        drawn.add_row(*map(Text, cells), style={"better": "green", "worse": "dim"}.get(entry.verdict, ""))
    console.print(drawn)
    console.print(f"\n{table.notes()}", soft_wrap=not console.is_terminal)


def _show_shares(shares: Shares, texts: tuple[int, int]) -> None:
    from polyhead.analysis.syntax_table import FEW_WORDS
    from polyhead.geometry import name_with_origin
    from polyhead.observation.word_attention import SPANS

    console = wide_console()
    columns = ["words", "head", "share", "95%", "same distances", "to others"]
    drawn = plain_table(["inside the"], columns, no_wrap=True)
    spans = [span for span in SPANS if shares.of(span)]
    for span in spans:
        for entry in shares.of(span)[:TOP_HEADS]:
            interval = "-" if math.isnan(entry.low) else f"{entry.low:.3f}-{entry.high:.3f}"
            place = name_with_origin(entry.layer, entry.head, entry.original_head)
            share, expected, to_others = (f"{x:.3f}" for x in (entry.share, entry.expected, entry.to_others))
            drawn.add_row(span, str(entry.words), place, share, interval, expected, to_others)
    if not spans:
        return
    halves = f"on {texts[0]:,} texts, evaluated on {texts[1]:,} held-out texts"
    title = f"The {TOP_HEADS} heads whose attention to other tokens exceeds its distances most {halves}:"
    console.print(f"\n{title}", soft_wrap=not console.is_terminal)
    console.print(drawn)
    if few := [span for span in spans if shares.of(span)[0].words < FEW_WORDS]:
        console.print(f"Unreliable: {', '.join(few)}, with fewer than {FEW_WORDS} words.")

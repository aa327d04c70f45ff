"""`polyhead report`: write a saved run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.options import Language, optional, page_language
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from polyhead.analysis.languages import Language as LanguageCode
    from polyhead.inspection import Inspection

NAME = "polyhead-report.html"


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run folder written by `polyhead inspect --save`, or by `polyhead.training.RunDirectory`; or "
            "tiny-run, the packaged training run.",
        ),
    ],
    output: Annotated[
        Path | None,
        optional(
            f"Output file. [default: {NAME} in the run's folder; of tiny-run, in the current one]",
            "--output",
            "-o",
            metavar="FILE",
        ),
    ] = None,
    lang: Language = "en",
    syntax: Annotated[
        Path | None, optional("Include the results of `polyhead syntax --output` for the same model.", metavar="FILE")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a saved run as one self-contained HTML page.

    Shows a grid of layers and heads coloured by any statistic or role, a card for each head, redundancy, importance,
    and the findings in plain words. Of a training run, it shows every statistic over the steps: a panel for each layer,
    a line for each head. The page needs no network and no server.
    """
    from polyhead.inspection.run_files import check_saved, is_training_run
    from polyhead.sources.packaged import run_folder

    language = check_page(output, lang, "--output")
    folder = run_folder(run)
    page = output or (run / NAME if folder == run else Path(NAME))
    if is_training_run(folder):
        from polyhead.report.training_page import write_training_page
        from polyhead.training import load_run

        if syntax is not None:
            raise OptionError("--syntax is for the page of an inspection, got a training run")
        name = folder.resolve().name
        written = write_training_page(page, load_run(folder), name, language=language)
    else:
        check_saved(run)

        from polyhead.inspection import load_inspection

        written = write(page, load_inspection(run), language, syntax)
    typer.echo(str(written))
    if show:
        typer.launch(written.as_uri())


def check_page(path: Path | None, lang: str, option: str = "--html") -> LanguageCode:
    """Check the output file of an option before any expensive work, and return the language of its page."""
    from polyhead.observation.run_folder import check_file
    from polyhead.report.page import Assets, check_place

    if path is not None:
        check_file(path, option)
        check_place(path)
        Assets.load()
    return page_language(lang)


def write(path: Path, inspection: Inspection, language: LanguageCode, syntax: Path | None = None) -> Path:
    """Write the page of an inspection and return its path."""
    from polyhead.report import write_page
    from polyhead.report.syntax_results import Syntax

    table = None if syntax is None else Syntax.load(syntax)
    return write_page(path, inspection, language=language, syntax=table)

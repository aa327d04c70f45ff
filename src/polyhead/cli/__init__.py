"""Command line `polyhead COMMAND`: one module per command; heavy imports happen inside commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from polyhead.cli import (
    calibrate,
    choose,
    compare,
    convert,
    inspect,
    merge,
    merge_runs,
    plan,
    prune,
    report,
    shrink,
    syntax,
    undo,
    view,
)
from polyhead.cli.errors import CommandGroup, end_on_sigterm

app = typer.Typer(
    name="polyhead",
    cls=CommandGroup,
    help="Run, inspect and edit multi-head attention, one head at a time.",
    rich_markup_mode="markdown",  # joins the lines of a docstring's paragraph
    add_completion=False,
    pretty_exceptions_enable=False,  # a plain traceback can be pasted into a bug report
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect")(inspect.inspect)
app.command("report")(report.report)
app.command("view")(view.view)
app.command("compare")(compare.compare)
app.command("merge-runs")(merge_runs.merge_runs)
app.command("plan")(plan.plan)
app.command("plan calibrate")(calibrate.calibrate)
app.command("choose")(choose.choose)
app.command("syntax")(syntax.syntax)
app.command("prune")(prune.prune)
app.command("merge")(merge.merge)
app.command("convert")(convert.convert)
app.command("shrink")(shrink.shrink)
app.command("undo")(undo.undo)


def _show_version(requested: bool) -> None:
    if requested:
        from polyhead import __version__

        typer.echo(f"polyhead {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run, inspect and edit multi-head attention, one head at a time."""


def main() -> None:
    """Run the command line; characters that the terminal cannot encode are escaped instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    end_on_sigterm()
    app(prog_name="polyhead")

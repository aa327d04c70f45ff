"""`polyhead undo`: the model that an edited one was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.edit_options import Replace, check_output
from polyhead.cli.edited_model import show_saved
from polyhead.cli.progress import errors_told, working


def undo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An edited model that polyhead wrote, in any form.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where to write the original: a new folder."),
    ],
    replace: Replace = False,
) -> None:
    """Give back the model that an edited one was made of, bit for bit.

    All edits since the original are taken back. The numbers are checked before and after; a model that was trained
    since is refused.
    """
    from rich.console import Console

    from polyhead import load
    from polyhead.errors import OptionError
    from polyhead.surgery import SideFiles, load_record, save
    from polyhead.surgery import undo as take_back

    console = Console(highlight=False)
    with errors_told("undo"):
        check_output(output, None, preview=False, replace=replace, source=folder)
        if not folder.is_dir():
            raise OptionError(f"an edited model is in a folder, got {folder}, which is none")
        record = load_record(folder)
        if record is None:
            raise OptionError(f"edits are undone by the record that was saved with them, got {folder} without one")
        with working("Load the model"):
            model = load(folder)
        take_back(model, record)
        with working("Write the model"):
            saved = save(model, output, tokenizer=SideFiles(folder), replace=replace)
        show_saved(saved, console)
        console.print(f"Its fingerprint is {record.before}, that of the original", markup=False)

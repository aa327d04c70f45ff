"""`polyhead undo`: restore the original of an edited model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.edit_options import Replace, check_output
from polyhead.cli.edited_model import show_saved
from polyhead.cli.progress import errors_told, working


def undo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of an edited model saved by polyhead.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Write the original model to this new folder."),
    ],
    replace: Replace = False,
) -> None:
    """Restore the original of an edited model, bit for bit.

    Reverts all edits since the original. Fingerprints of the weights are checked before and after; a model that was
    trained in between is refused.
    """
    from rich.console import Console

    from polyhead import load
    from polyhead.errors import OptionError
    from polyhead.surgery import SideFiles, load_record, save
    from polyhead.surgery import undo as revert

    console = Console(highlight=False)
    with errors_told("undo"):
        check_output(output, None, preview=False, replace=replace, source=folder)
        if not folder.is_dir():
            raise OptionError(f"FOLDER must be an existing folder, got {folder}")
        record = load_record(folder)
        if record is None:
            raise OptionError(f"undo needs the record saved with an edited model, got {folder} without one")
        with working("Load the model"):
            model = load(folder)
        revert(model, record)
        with working("Write the model"):
            saved = save(model, output, tokenizer=SideFiles(folder), replace=replace)
        show_saved(saved, console)
        console.print(f"Fingerprint {record.before}, same as the original", markup=False)

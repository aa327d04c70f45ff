"""`polyhead undo`: restore the original of an edited model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.edit_options import Replace, check_output
from polyhead.cli.edit_results import show_saved
from polyhead.cli.progress_bars import ProgressBars


def undo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of an edited model saved by polyhead.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Write the original model to this new folder.")
    ],
    replace: Replace = False,
) -> None:
    """Restore the original of an edited model, bit for bit.

    Reverts all edits since the original. Fingerprints of the weights are checked before and after; a model that was
    trained in between is refused.
    """
    from rich.console import Console

    from polyhead.progress import Progress
    from polyhead.surgery.storage.folders import check_edited

    console = Console(highlight=False)
    check_output(output, None, preview=False, replace=replace, source=folder)
    check_edited(folder.expanduser())

    import polyhead

    with ProgressBars() as progress:
        restored = polyhead.undo(folder, progress=progress)
        progress(Progress("Write the model"))
        saved = restored.save(output, replace=replace)
    show_saved(saved, console)
    console.print(f"Fingerprint {restored.record.before}, same as the original", markup=False)

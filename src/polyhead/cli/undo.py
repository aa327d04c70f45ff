"""`polyhead undo`: restore the original of an edited model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.edit_options import Replace, SavedForm, check_output
from polyhead.cli.edit_results import show_saved
from polyhead.cli.progress_bars import ProgressBars
from polyhead.cli.terminal import say, wide_console

GENERATION = "generation_config.json"


def undo(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder of an edited model saved by polyhead, with FOLDER.undo beside it."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Write the original model to this new folder.")
    ],
    form: SavedForm = "uniform",
    replace: Replace = False,
) -> None:
    """Restore the original of an edited model, bit for bit.

    Reverts all edits since the original. Fingerprints of the weights are checked before and after; a model that was
    trained in between is refused. Only an original that was itself an edited model may need another --form.
    """
    from polyhead.progress import Progress
    from polyhead.surgery.storage.undo_folder import check_edited

    console = wide_console()
    check_output(output, form, preview=False, replace=replace, source=folder)
    check_edited(folder.expanduser())

    import polyhead

    with ProgressBars() as progress:
        restored = polyhead.undo(folder, progress=progress)
        progress(Progress("Write the model"))
        saved = restored.save(output, form=form, replace=replace)  # type: ignore[arg-type]  # checked above
    show_saved(saved, console)
    dtypes = " and ".join(sorted({str(x.dtype).removeprefix("torch.") for x in restored.model.parameters()}))
    say(
        console,
        f"Fingerprint {restored.record.before}, that of the model before its edits, in {dtypes}: every parameter and "
        "buffer is the original's, bit for bit",
    )
    names = sorted(file.name for file in saved.folder.iterdir())
    written = [x for x in names if x.endswith((".safetensors", ".index.json")) or x in ("config.json", GENERATION)]
    say(
        console,
        f"Written anew, so that their bytes may differ from the original's: {', '.join(written)}; the other files are "
        f"those of {folder}",
    )

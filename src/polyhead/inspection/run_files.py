"""Names of the files of a saved inspection."""

from __future__ import annotations

from pathlib import Path

from polyhead.errors import OptionError

OBSERVATIONS = "observations.safetensors"  # collector states, from which a run is resumed
TABLE = "heads.parquet"
REST = "inspection.json"
MATRICES = "relations.safetensors"
PICTURES = "pictures.safetensors"  # maps, offsets, spectra, weights of the examples, effects of documents
STEPS = "steps"  # folder with the steps of a training run, as `polyhead.training.RunDirectory` writes them
FILES = (OBSERVATIONS, TABLE, REST, MATRICES, PICTURES)


def is_training_run(folder: Path) -> bool:
    """Return whether a folder has steps of training, and no inspection."""
    return (folder / STEPS).is_dir() and not (folder / REST).exists()


def check_saved(folder: Path) -> None:
    """Raise if a folder contains no finished inspection."""
    if not (folder / REST).exists():
        found = ""
        if (folder / OBSERVATIONS).exists():
            found = ", whose run is not finished; continue it with --resume"
        elif (folder / STEPS).is_dir():
            found = (
                ", which is a training run; `polyhead view` and `polyhead report` show it, `polyhead compare` takes "
                f"{folder}@STEP"
            )
        elif not folder.exists():
            found = ", which does not exist; tiny-run is the packaged training run"
        raise OptionError(f"an inspection is a folder that `polyhead inspect --save` wrote, got {folder}{found}")

"""Names of the files of a saved inspection, and checks of the folder they are in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from polyhead.errors import OptionError
from polyhead.observation.run_folder import check_folder

OBSERVATIONS = "observations.safetensors"  # collector states, from which a run is resumed
TABLE = "heads.parquet"
INSPECTION = "inspection.json"  # written last: what the other files do not contain
MATRICES = "relations.safetensors"
PICTURES = "pictures.safetensors"  # maps, offsets, spectra, weights of the examples, effects of documents
SHARDS = "shards"  # folder with the observations of each worker, until they are merged
STEPS = "steps"  # folder with the steps of a training run, as `polyhead.training.RunDirectory` writes them
FILES = (OBSERVATIONS, TABLE, INSPECTION, MATRICES, PICTURES)


def is_training_run(folder: Path) -> bool:
    """Return whether a folder has steps of training, and no inspection."""
    return (folder / STEPS).is_dir() and not (folder / INSPECTION).exists()


def check_saved(folder: Path) -> None:
    """Raise if a folder contains no finished inspection."""
    if not (folder / INSPECTION).exists():
        problem = ""
        if (folder / OBSERVATIONS).exists() or (folder / SHARDS).is_dir():
            problem = (
                ", whose run is not finished; continue it with --resume or, if it is of --shard, merge all shards with "
                "`polyhead merge-runs`"
            )
        elif (folder / STEPS).is_dir():
            problem = (
                ", which is a training run; `polyhead view` and `polyhead report` show it, `polyhead compare` takes "
                f"{folder}@STEP"
            )
        elif not folder.exists():
            problem = ", which does not exist; tiny-run is the packaged training run"
        raise OptionError(f"an inspection is a folder that `polyhead inspect --save` wrote, got {folder}{problem}")


def check_new_run(folder: Path, option: str) -> None:
    """Raise if a folder contains a run or a file of one, or cannot be written."""
    if any((folder / name).exists() for name in (OBSERVATIONS, INSPECTION, SHARDS)):
        continued = f"--resume {folder}" if option.startswith("--") else "resume=True"
        raise OptionError(
            f"{option} must be a new run, got {folder}, which contains a run already; continue it with "
            f"{continued}, or choose another folder"
        )
    existing = [name for name in FILES if (folder / name).exists()]
    if existing:
        raise OptionError(f"{option} must not contain {existing[0]}, got {folder}; choose another folder")
    check_folder(folder, option)


def check_shards(folders: Sequence[Path]) -> None:
    """Raise if a folder contains no observations of a shard."""
    for folder in folders:
        if not (folder / OBSERVATIONS).exists():
            raise OptionError(
                f"a shard is a folder that `polyhead inspect --shard I/N --save DIR` wrote, got {folder} without "
                f"{OBSERVATIONS}"
            )


def shard_folder(folder: Path, rank: int, world: int) -> Path:
    """Return the folder in which a worker saves its shard of a run."""
    return folder / SHARDS / f"{rank + 1}-of-{world}"


def worker_count(folder: Path) -> int | None:
    """Return the number of workers whose shards a run contains; None without shards."""
    names = [re.fullmatch(r"(\d+)-of-(\d+)", path.name) for path in sorted(folder.glob(f"{SHARDS}/*"))]
    return next((int(name[2]) for name in names if name), None)

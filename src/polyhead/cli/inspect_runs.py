"""Settings and folders of `polyhead inspect`: new, resumed, of a shard, and of the workers of torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polyhead.cli.options import check_positive, check_text, part_of
from polyhead.cli.terminal import say
from polyhead.errors import OptionError
from polyhead.inspection.run_files import OBSERVATIONS, TABLE, check_new_run, worker_count
from polyhead.sources.shards import WHOLE, Shard

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.inspection import Settings
    from polyhead.parallel.workers import Workers
    from polyhead.workflows.sharded_inspecting import ShardReading


def requested_shard(shard: str | None, save: Path | None, workers: Workers | None) -> Shard | None:
    """Parse --shard; raise where its part of the text could not be merged later."""
    if shard is None:
        return None
    if workers is not None:
        raise OptionError(f"torchrun divides the text among its processes, got --shard {shard} as well; omit one")
    part = Shard(*part_of(shard))
    if save is None:
        raise OptionError(f"--shard needs --save DIR, a folder for `polyhead merge-runs`, got --shard {shard} alone")
    return None if part == WHOLE else part


def check_ray_options(address: str | None, count: int | None, shard: str | None, workers: Workers | None) -> None:
    """Raise if options of Ray cannot be combined with others, or if Ray is missing."""
    check_positive("--ray-workers", count)
    if address is None:
        if count is not None:
            raise OptionError(f"--ray-workers needs --ray, got --ray-workers {count} alone")
        return
    other = "torchrun" if workers is not None else None if shard is None else f"--shard {shard}"
    if other is not None:
        raise OptionError(f"--ray divides the text among workers of its own, got {other} as well; omit one")

    from polyhead.parallel.ray_workers import check_ray

    check_ray()


def resumed_settings(folder: Path, workers: Workers | None, *, by_ray: bool = False) -> tuple[Settings, Shard | None]:
    """Return the settings of a saved run, and its shard if it is of one."""
    from polyhead.inspection.settings import Settings

    path = folder / OBSERVATIONS
    if workers is not None:
        from polyhead.workflows.sharded_inspecting import saved_settings

        own = saved_settings(folder)
        # A rank that was killed before its first write has none.
        saved = [x for x in workers.gather("the saved settings", own and own.to_dict()) if x is not None]
        if not saved:
            raise OptionError(f"--resume must be the folder of a saved run, got {folder} without one")
        return Settings.from_dict(saved[0]), None
    if not path.exists():
        count = worker_count(folder)
        if count is not None and by_ray:
            from polyhead.workflows.sharded_inspecting import saved_settings

            if (settings := saved_settings(folder)) is not None:
                return settings, None
        elif count is not None:
            raise OptionError(
                f"{folder} is the run of several workers, got one process; continue it with: polyhead inspect --resume "
                f"{folder} --ray ADDRESS, or torchrun --nproc-per-node {count} -m polyhead inspect --resume {folder}"
            )
        raise OptionError(f"--resume must be the folder of a saved run, got {folder} without {OBSERVATIONS}")

    from polyhead.inspection.text_pass import shard_of
    from polyhead.observation.saving import read_facts

    facts = read_facts(path)
    shard = shard_of(path, facts)
    if shard != WHOLE and by_ray:
        raise OptionError(f"the run of a --shard is resumed by one process, got {folder}; omit --ray")
    return Settings.from_dict(facts["settings"]), None if shard == WHOLE else shard


def check_inputs(settings: Settings, *, save: Path | None, folder: Path | None, divided: bool) -> None:
    """Raise if there is no such model or text, or if a new run cannot be written; before anything is loaded."""
    from polyhead.files import check_pyarrow
    from polyhead.observation.run_folder import check_folder
    from polyhead.sources.model_source import find_source
    from polyhead.sources.texts import STANDARD_INPUT

    find_source(settings.model)
    check_text(settings.text, settings.field)
    if divided and settings.text == STANDARD_INPUT:
        raise OptionError("a text that several processes read must be a file or a folder, got - for standard input")
    if save is not None:
        check_new_run(save, "--save")
    if folder is not None:
        check_folder(folder, "--save" if save is not None else "--resume")
        check_pyarrow(folder / TABLE)


def show_shard(reading: ShardReading, folder: Path, console: Console) -> None:
    """Print how much of a shard was read, and the next command."""
    of = f"{reading.tokens:,} of its {reading.total:,} tokens; the text has {reading.of_text:,}"
    say(console, f"Shard {reading.shard}: read {of}")
    say(console, f"Saved to {folder}: {OBSERVATIONS}")
    if reading.complete:
        command = f"polyhead merge-runs RUN... --output FOLDER, with the folders of all {reading.shard.count} shards"
        say(console, f"To merge it with the others: {command}")
    else:
        say(console, f"To continue: polyhead inspect --resume {folder}")

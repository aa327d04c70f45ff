"""Inspections of a text that several processes read: shards that are merged later, and workers of `torchrun`.

A shard is every N-th batch of the text, and the batches are those of one process. Every process reads and cuts the
whole text, since collectors are configured by its token counts. Merged observations therefore equal those of one
process, except for the order of floating-point sums. The probes, which take a bounded part of the text, run once on the
merged observations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from polyhead.errors import DeviceError, OptionError
from polyhead.files import check_pyarrow
from polyhead.inspection.inspection_files import save_inspection
from polyhead.inspection.result import Inspection
from polyhead.inspection.run_files import OBSERVATIONS, SHARDS, TABLE, check_new_run, shard_folder, worker_count
from polyhead.inspection.running import InspectionRun
from polyhead.inspection.settings import Settings
from polyhead.inspection.shard_files import checked_shards
from polyhead.inspection.text_pass import SAVE_SECONDS, STEP, TextRead, shard_of, versions
from polyhead.observation import read_facts
from polyhead.observation.reducing import reduce_observations
from polyhead.parallel.workers import Workers
from polyhead.progress import Progress, ProgressCallback, ignore_progress
from polyhead.sources import LoadedModel, Shard
from polyhead.sources.shards import WHOLE
from polyhead.sources.text_contexts import Text
from polyhead.workflows.inspecting import check_run_folder, load_settings_model, locked


@dataclass(frozen=True, slots=True)
class ShardReading:
    """A shard of a text, and how much of it was read."""

    shard: Shard
    tokens: int  # that were read
    total: int  # in the shard
    of_text: int  # in the whole text
    complete: bool  # False after an interrupt


def inspect_shard(
    settings: Settings,
    shard: Shard,
    folder: str | os.PathLike[str],
    *,
    loaded: LoadedModel | None = None,
    text: Text = None,
    resume: bool = False,
    progress: ProgressCallback = ignore_progress,
    save_seconds: float = SAVE_SECONDS,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> ShardReading:
    """Read one shard of a text into a folder; `merge_runs` makes an inspection of the folders of all shards.

    Args:
        settings: settings of the inspection, the same for every shard.
        shard: the part to read, `Shard(2, 16)` for the third of 16.
        folder: folder for the observations of the shard; one for each.
        loaded: a model that is already loaded; default: the settings' model.
        text: documents in memory; default: the settings' text.
        resume: continue from the data in `folder`.
        progress: called with the progress of each step.
        save_seconds: time between two writes to the folder.
        allow_pickle: read weights from pickles, which can run code.
        trust_remote_code: run code that comes with the model.

    Returns:
        The number of tokens that were read; complete, unless there was an interrupt.

    Raises:
        OptionError: a setting is out of range, or the text is too short.
    """
    folder = Path(folder)
    check_run_folder(folder, resume)
    with locked(folder):
        loaded = loaded or load_settings_model(settings, progress, allow_pickle, trust_remote_code)
        run = InspectionRun.of(settings, loaded, text=text, progress=progress)
        read = run.text_pass.run(shard, folder=folder, resume=resume, report=progress, save_seconds=save_seconds)
    total = run.reader.batches(shard=shard).tokens
    return ShardReading(shard, read.tokens, total, run.reader.text.tokens, read.complete)


def merge_runs(
    folders: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    loaded: LoadedModel | None = None,
    text: Text = None,
    progress: ProgressCallback = ignore_progress,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Inspection:
    """Merge the shards of a text into one run, equal to that of one process: counts exactly, values but for rounding.

    The model is loaded for the steps after the text: roles on repeated words, random weights, importance.

    Args:
        folders: folders of all shards, in any order.
        output: new folder of the run.
        loaded: a model that is already loaded; default: that of the shards.
        text: documents in memory; default: the text of the shards.
        progress: called with the progress of each step.
        allow_pickle: read weights from pickles, which can run code.
        trust_remote_code: run code that comes with the model.

    Returns:
        The inspection, which is also saved.

    Raises:
        OptionError: a shard is missing, incomplete or there twice, or shards differ in settings, model, text or
            versions.
    """
    output = Path(output)
    shards = checked_shards([Path(folder) for folder in folders])
    check_new_run(output, "--output")
    check_pyarrow(output / TABLE)
    settings = Settings.from_dict(shards[0][1]["settings"])
    with locked(output):
        loaded = loaded or load_settings_model(settings, progress, allow_pickle, trust_remote_code)
        run = InspectionRun.of(settings, loaded, text=text, progress=progress)
        for name, value in run.text_pass.origin.items():
            if shards[0][1][name] != value:
                raise OptionError(
                    f"shards are merged with the {name} that they were read with, got another {name}: "
                    f"{settings.model if name == 'model' else settings.text} has changed since"
                )
        for name, version in versions().items():
            if (before := shards[0][1]["versions"].get(name)) != version:
                raise OptionError(f"shards are merged by the version of {name} that read them, {before}, got {version}")
        read: TextRead | None = None
        for number, (path, facts) in enumerate(shards):
            progress(Progress("merge the shards", number, len(shards), "shards"))
            part = run.text_pass.loaded_from(path, facts)
            read = part if read is None else read.merge(part)
        assert read is not None
        check_whole(read, run.reader.text.tokens)
        run.text_pass.keep(output, read)
        found = run.finish(read)
        save_inspection(output, found)
    return found


def inspect_with_workers(
    settings: Settings,
    workers: Workers,
    *,
    loaded: LoadedModel | None = None,
    text: Text = None,
    folder: Path | None = None,
    resume: bool = False,
    progress: ProgressCallback = ignore_progress,
    save_seconds: float = SAVE_SECONDS,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Inspection | None:
    """Inspect with all ranks, each of which reads a shard; returns the result on rank 0 and None on the others.

    Called by every rank with the same arguments. In `folder`, each rank saves its shard to a folder of its own, from
    which a run of the same number of ranks is resumed; these are removed once the merged observations are saved.

    Args:
        workers: the ranks, of which this process is one.
        settings, loaded, text, folder, resume, progress, save_seconds, allow_pickle, trust_remote_code: as in
            `inspect_shard`; the folder is that of the run.

    Raises:
        CommunicationError: a rank disagrees, failed, or has not reported within the time limit; on every rank.
    """
    workers.agree("the settings", {**settings.to_dict(), "resume": resume, "number of ranks": workers.world})
    shard = Shard(workers.rank, workers.world)
    own = None if folder is None else shard_folder(folder, workers.rank, workers.world)
    _choose_device(settings.device, workers)
    with ExitStack() as stack:
        merged = False
        if folder is not None and own is not None:
            if workers.is_first:
                check_pyarrow(folder / TABLE)
                stack.enter_context(locked(folder))
            merged = workers.gather("the folder of the run", workers.is_first and is_merged(folder, resume))[0]
            if not merged:
                _check_count(folder, workers.world)
            stack.enter_context(_locked_shard(own))
        loaded = loaded or load_settings_model(settings, progress, allow_pickle, trust_remote_code)
        run = InspectionRun.of(settings, loaded, text=text, progress=progress)
        workers.agree("the model and the text", {**run.text_pass.origin, **versions()})
        read: TextRead | None = None
        if merged:
            read = run.text_pass.run(folder=folder, resume=True) if workers.is_first else None
        else:
            report = _SharedProgress(workers, run.reader.text.tokens, progress)
            part = run.text_pass.run(shard, folder=own, resume=resume, report=report, save_seconds=save_seconds)
            if not part.complete:
                raise KeyboardInterrupt
            read = _reduced(run, part, workers, report)
            if folder is not None and read is not None:
                run.text_pass.keep(folder, read)
        workers.gather("the merged observations")
        if own is not None:
            (own / OBSERVATIONS).unlink(missing_ok=True)
        if read is None:
            return None
        found = run.finish(read)
        if folder is not None:
            save_inspection(folder, found)
        return found


def saved_settings(folder: Path) -> Settings | None:
    """Return the settings of a run that workers saved, from any file of it; None if there is none."""
    paths = [folder / OBSERVATIONS, *sorted(folder.glob(f"{SHARDS}/*/{OBSERVATIONS}"))]
    found = next((path for path in paths if path.exists()), None)
    return None if found is None else Settings.from_dict(read_facts(found)["settings"])


@dataclass(slots=True)
class _SharedProgress:
    """Progress callback of the pass over a shard: records it for the other ranks, and shows that of all on rank 0."""

    workers: Workers
    total: int
    show: ProgressCallback

    def __call__(self, now: Progress) -> None:
        self.workers.report(now.done)
        self.waiting()

    def waiting(self) -> None:
        if self.workers.is_first:
            self.show(Progress(STEP, self.workers.done(), self.total, "tokens"))


def _reduced(run: InspectionRun, part: TextRead, workers: Workers, report: _SharedProgress) -> TextRead | None:
    """Return what all ranks read, on rank 0."""
    own = {"batches": part.batches, "digest": part.digest, "tokens": part.tokens}
    parts = workers.gather("the end of the text", own, waiting=report.waiting)
    report.waiting()
    merged = reduce_observations(part.observations, run.text_pass.collectors, workers)
    if merged is None:
        return None
    last = max(parts, key=lambda part: part["batches"])
    whole = TextRead(merged, last["batches"], last["digest"], sum(part["tokens"] for part in parts), complete=True)
    check_whole(whole, run.reader.text.tokens)
    return whole


def check_whole(read: TextRead, tokens: int) -> None:
    """Raise unless merged shards have all tokens of the text."""
    if read.tokens != tokens:
        raise OptionError(
            f"merged shards must have all {tokens} tokens of the text, got {read.tokens}; read them again"
        )


def _choose_device(device: str, workers: Workers) -> None:
    """Give each rank a GPU of its own, if the device is `cuda` without an index."""
    chosen = torch.device(device)
    if chosen.type != "cuda" or chosen.index is not None:
        return
    if workers.local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"each rank needs a GPU of its own, got local rank {workers.local_rank} for {torch.cuda.device_count()} "
            "GPUs; start fewer processes per node, or pass --device"
        )
    torch.cuda.set_device(workers.local_rank)


# ---- folders


@contextmanager
def _locked_shard(folder: Path) -> Iterator[None]:
    try:
        with locked(folder):
            yield
    finally:
        with suppress(OSError):  # shards of other ranks are left
            folder.parent.rmdir()


def is_merged(folder: Path, resume: bool) -> bool:
    """Return whether the observations of all workers were merged before; raise for a run of one process."""
    path = folder / OBSERVATIONS
    if not resume or not path.exists():
        return False
    facts = read_facts(path)
    if shard_of(path, facts) != WHOLE:
        raise OptionError(f"the run of a --shard is resumed by one process, got {folder}; omit torchrun or --ray")
    if not facts.get("complete"):
        raise OptionError(f"a run of one process is resumed by one process, got {folder}; omit torchrun or --ray")
    return True


def _check_count(folder: Path, world: int) -> None:
    count = worker_count(folder)
    if count is not None and count != world:
        raise OptionError(
            f"a run must be resumed by as many workers as it was started with, {count}, got {world} for {folder}"
        )

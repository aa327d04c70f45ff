"""Inspections on a Ray cluster: actors read shards of the text, and a tree of tasks merges their observations.

The actors use the batches of a single process, so that the result is the same. Ray Data would form other batches, with
other padding and other rounding, and collectors need the token counts of the whole text. Every batch counts once: the
driver only accepts complete shards, and if a worker is killed, another reads its shard again.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from polyhead.errors import CommunicationError, OptionError
from polyhead.files import check_pyarrow
from polyhead.inspection.inspection_files import save_inspection
from polyhead.inspection.result import Inspection
from polyhead.inspection.run_files import OBSERVATIONS, SHARDS, TABLE, shard_folder, worker_count
from polyhead.inspection.running import InspectionRun
from polyhead.inspection.settings import Settings
from polyhead.inspection.text_pass import STEP, TextRead, versions, write_read
from polyhead.observation.saving import on_cpu
from polyhead.parallel.ray_workers import RayActor, RayCluster, RayWorkers
from polyhead.parallel.worker_rules import SECONDS, check_same
from polyhead.progress import Progress, ProgressCallback, ignore_progress
from polyhead.sources import Shard
from polyhead.sources.shards import WHOLE
from polyhead.sources.text_contexts import Text
from polyhead.workflows.inspecting import load_settings_model, locked
from polyhead.workflows.sharded_inspecting import check_whole, is_merged

SHARDS_PER_WORKER = 4  # several: little is read again after a failure, and a slow worker gets fewer shards


class ShardReader(RayActor):
    """An actor with the model and the text of a run.

    Args:
        settings: settings of the inspection.
        text: documents in memory, or None.
        folder: working folder of the driver, for relative paths.
        deterministic: use only deterministic kernels.
        permissions: keywords of `load_settings_model`.
    """

    def __init__(
        self, settings: Settings, text: Text, folder: str, deterministic: bool, permissions: dict[str, bool]
    ) -> None:
        self.settings, self.text, self.permissions = settings, text, permissions
        self.latest: Progress | None = None
        if os.path.isdir(folder):
            os.chdir(folder)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch requires it for matrix products
            torch.use_deterministic_algorithms(True)

    def start(self) -> dict[str, Any]:
        loaded = load_settings_model(self.settings, self._report, **self.permissions)
        self.run = InspectionRun.of(self.settings, loaded, text=self.text, progress=self._report)
        return {**self.run.text_pass.origin, **versions(), "tokens": self.run.reader.text.tokens}

    def progress(self) -> Progress | None:
        return self.latest

    def _report(self, now: Progress) -> None:
        self.latest = now

    def read(self, shard: Shard, saved: bytes | None) -> TextRead:
        """Return the observations of a shard; `saved` is the file of an earlier run of it, which is continued."""
        with tempfile.TemporaryDirectory(prefix="polyhead-shard.") as scratch:
            folder = None if saved is None else Path(scratch)
            if folder is not None and saved is not None:
                (folder / OBSERVATIONS).write_bytes(saved)
            text_pass = self.run.text_pass
            read = text_pass.run(shard, folder=folder, resume=True, report=self._report, save_seconds=math.inf)
        if not read.complete:
            raise CommunicationError(f"a shard must be read to its end, got an interrupt in {shard}")
        return replace(read, observations=on_cpu(read.observations, text_pass.collectors))

    def finish(self, read: TextRead) -> Inspection:
        return self.run.finish(read)


def inspect_with_ray(
    settings: Settings,
    cluster: RayCluster,
    *,
    workers: int | None = None,
    text: Text = None,
    folder: Path | None = None,
    resume: bool = False,
    progress: ProgressCallback = ignore_progress,
    seconds: float = SECONDS,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Inspection:
    """Inspect on a Ray cluster; counts equal those of one process exactly, other values up to rounding.

    Every worker loads the model and reads the text, whose paths must exist on every node. Each finished shard is saved
    in `folder`, on the machine of the driver; a run can be resumed from there with any number of workers.

    Args:
        settings: settings of the inspection; with the device "cuda" each worker has a GPU of its own.
        cluster: the cluster, as `join_cluster` yields it.
        workers: number of workers; default: the GPUs of the cluster, or its CPUs.
        text: documents in memory; default: the settings' text.
        folder: folder of the run.
        resume: continue from the data in `folder`.
        progress: called with the progress of each step.
        seconds: maximum time between two finished batches of a worker.
        allow_pickle: read weights from pickles, which can run code.
        trust_remote_code: run code that comes with the model.

    Raises:
        CommunicationError: workers disagree, one raised an error, hangs, or was killed three times by one shard.
    """
    if settings.device not in ("cpu", "cuda"):
        raise OptionError(f"Ray chooses the device of a worker, got {settings.device}; pass cuda or cpu")
    gpus = int(settings.device == "cuda")
    num_workers = workers if workers is not None else (cluster.gpus if gpus else cluster.cpus)
    if num_workers < 1:
        raise OptionError(
            f"a worker needs {'a GPU' if gpus else 'a CPU'}, got a cluster without; if it starts nodes on demand, pass "
            "the number of workers"
        )
    ray = import_module("ray")
    with ExitStack() as stack:
        merged, num_shards = False, SHARDS_PER_WORKER * num_workers
        if folder is not None:
            check_pyarrow(folder / TABLE)
            stack.enter_context(locked(folder))
            merged = is_merged(folder, resume)
            num_shards = worker_count(folder) or num_shards
        permissions = {"allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
        arguments = (settings, text, os.getcwd(), torch.are_deterministic_algorithms_enabled(), permissions)
        pool = stack.enter_context(RayWorkers(ShardReader, arguments, num_workers, gpus, seconds))
        shards = [WHOLE] if merged else [Shard(i, num_shards) for i in range(num_shards)]
        shards_by_name = {f"shard {shard}": shard for shard in shards}
        resumed = folder if resume else None
        report = _TextProgress(pool, progress)
        reads: dict[str, Any] = {}
        tasks = [(name, _read_arguments(shard, resumed)) for name, shard in shards_by_name.items()]
        for name, read in pool.run("read", tasks, report=report):
            assert pool.facts is not None
            if not report.done:
                mine, theirs = versions(), {name: pool.facts[name] for name in versions()}
                check_same(mine, theirs, "the driver", "the workers", "process")
            report.done += read.tokens
            if folder is not None and not merged:
                shard = shards_by_name[name]
                write_read(_observations_file(folder, shard), read, settings, _origin(pool), shard)
            # A copy that this process owns: that of the worker would be lost with its node.
            reads[name] = ray.put(read)
            del read
        root = _merge_as_tree([reads[name] for name in shards_by_name], seconds)
        assert pool.facts is not None
        check_whole(whole := ray.get(root), pool.facts["tokens"])
        if folder is not None:
            write_read(folder / OBSERVATIONS, whole, settings, _origin(pool), WHOLE)
            _remove_shards(folder)
        ((_, inspection),) = pool.run("finish", [("the result", lambda: (root,))], report=report.steps, limited=False)
        if folder is not None:
            save_inspection(folder, inspection)
        return inspection


class _TextProgress:
    """Progress of all workers together in the pass over the text, and of the worker that runs the steps after it."""

    def __init__(self, pool: RayWorkers, show: ProgressCallback) -> None:
        self.pool, self.show, self.done = pool, show, 0

    def __call__(self) -> None:
        if self.pool.facts is None:
            self.show(Progress("load the model"))
        else:
            running = sum(now.done for now in self.pool.progress() if now is not None and now.step == STEP)
            self.show(Progress(STEP, self.done + running, self.pool.facts["tokens"], "tokens"))

    def steps(self) -> None:
        for now in self.pool.progress():
            if now is not None and now.step != STEP:
                self.show(now)


def _read_arguments(shard: Shard, folder: Path | None) -> Callable[[], tuple[Any, ...]]:
    """Return a function that reads the arguments of `ShardReader.read`; `folder` is that of a run to be resumed."""

    def arguments() -> tuple[Shard, bytes | None]:
        path = None if folder is None else _observations_file(folder, shard)
        return shard, path.read_bytes() if path is not None and path.exists() else None

    return arguments


def _observations_file(folder: Path, shard: Shard) -> Path:
    return (folder if shard == WHOLE else shard_folder(folder, shard.index, shard.count)) / OBSERVATIONS


def _origin(pool: RayWorkers) -> dict[str, str]:
    assert pool.facts is not None
    return {name: pool.facts[name] for name in ("model", "text")}


def _merge_as_tree(reads: list[Any], seconds: float) -> Any:
    """Merge shards pairwise, always in the same order; returns the reference to the result.

    The tasks need no CPU slot, since the workers occupy those of the cluster; Ray repeats one that is killed.
    """
    ray = import_module("ray")
    merge = ray.remote(num_cpus=0)(TextRead.merge)
    while len(reads) > 1:
        pairs = [reads[start : start + 2] for start in range(0, len(reads), 2)]
        reads = [merge.remote(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    done, _ = ray.wait(reads, timeout=seconds)
    if not done:
        raise CommunicationError(f"the shards must be merged within {seconds:g} s, got no result; the cluster hangs")
    return reads[0]


def _remove_shards(folder: Path) -> None:
    for path in folder.glob(f"{SHARDS}/*/{OBSERVATIONS}"):
        path.unlink()
        with suppress(OSError):  # it contains other files, which remain
            path.parent.rmdir()
    with suppress(OSError):
        (folder / SHARDS).rmdir()

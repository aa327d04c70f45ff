"""A run on a Ray cluster is that of one process, also if a worker is killed; `make test-cluster` starts a local one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyhead.errors import CommunicationError, OptionError
from polyhead.inspection import Inspection, load_inspection
from polyhead.inspection.run_files import OBSERVATIONS, SHARDS
from polyhead.inspection.text_pass import STEP, TextRead
from polyhead.progress import Progress
from polyhead.sources import Shard
from polyhead.workflows import ray_inspecting
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.ray_inspecting import ShardReader, inspect_with_ray
from tests.inspection.small_models import model_folder, text_folder
from tests.workflows.merged_runs import assert_same_inspection, assert_same_observations, settings_of

pytest.importorskip("ray", reason="needs Ray: `make test-cluster` runs them")
WORKERS = 4


class Killed(ShardReader):
    """The first worker that has read a batch of the third shard is killed; a file in the working folder records it."""

    def read(self, shard: Shard, saved: bytes | None) -> TextRead:
        self.of_shard = shard.index
        return super().read(shard, saved)

    def _report(self, now: Progress) -> None:
        super()._report(now)
        if now.step == STEP and now.done and self.of_shard == 2:
            try:
                os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


class Failing(ShardReader):
    def read(self, shard: Shard, saved: bytes | None) -> TextRead:
        if shard.index == 5:
            raise OptionError("the heads must be counted, got none")
        return super().read(shard, saved)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    model_folder(folder / "bert", "bert")
    text_folder(folder / "text")
    return folder


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    inspect_model(settings_of(place / "bert", place / "text"), folder=folder)
    return folder


@pytest.fixture
def inspected(cluster, place, tmp_path, monkeypatch) -> Callable[..., Inspection]:
    """Inspect by actors of a class, in a working folder of the test."""
    monkeypatch.chdir(tmp_path)

    def inspect(reader: type[ShardReader] = ShardReader, shards: int = 4, **options: Any) -> Inspection:
        monkeypatch.setattr(ray_inspecting, "ShardReader", reader)
        monkeypatch.setattr(ray_inspecting, "SHARDS_PER_WORKER", shards)
        settings = settings_of(place / "bert", place / "text")
        return inspect_with_ray(settings, cluster, **{"workers": WORKERS, "seconds": 120.0, **options})

    return inspect


def test_the_shard_of_a_killed_worker_is_read_again_and_counts_once(inspected, whole, tmp_path):
    shown: list[Progress] = []
    inspected(Killed, shards=1, folder=tmp_path / "run", progress=shown.append)
    assert (tmp_path / "killed").exists()
    assert_same_observations(tmp_path / "run", whole)
    assert_same_inspection(load_inspection(tmp_path / "run"), load_inspection(whole))
    assert not (tmp_path / "run" / SHARDS).exists()
    read = [now for now in shown if now.step == STEP]
    assert read[-1].done == read[-1].total == load_inspection(whole).facts["tokens"]


def test_a_stopped_run_continues_with_other_workers_and_reads_no_finished_shard_again(inspected, whole, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(CommunicationError, match=r"worker \d of 2 \(process \d+ on .*\): the heads must be counted"):
        inspected(Failing, shards=8, folder=run, workers=2)
    saved = {path.parent.name: path.stat().st_mtime_ns for path in run.glob(f"{SHARDS}/*/{OBSERVATIONS}")}
    assert saved
    assert "6-of-16" not in saved
    (run / SHARDS / "6-of-16").mkdir()  # as if it was killed before its first write
    shown: list[Progress] = []
    inspected(folder=run, resume=True, workers=1, progress=shown.append)
    assert_same_observations(run, whole)
    assert_same_inspection(load_inspection(run), load_inspection(whole))


def test_a_cluster_without_the_devices_is_refused(cluster, place):
    settings = replace(settings_of(place / "bert", place / "text"), device="cuda")
    with pytest.raises(OptionError, match="a worker needs a GPU, got a cluster without"):
        inspect_with_ray(settings, cluster)
    with pytest.raises(OptionError, match="Ray chooses the device of a worker, got cuda:1; pass cuda or cpu"):
        inspect_with_ray(replace(settings, device="cuda:1"), cluster)

"""Tasks of Ray actors end once each, whoever is killed, and an error names the worker; none waits without a limit."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyhead.errors import CommunicationError, OptionError
from polyhead.parallel import ray_workers
from polyhead.parallel.ray_workers import RayCluster, RayWorkers, join_cluster
from tests.cluster.actors import Squares

pytest.importorskip("ray", reason="needs Ray: `make test-cluster` runs them")


def squares(folder: Path, *names: str, fault: str = "", count: int = 2, gpus: int = 0, seconds: float = 120.0):
    """Run the tasks, and return results by name, those of further tasks with numbers for names included."""
    tasks = [(name, lambda name=name, number=number: (name, number)) for number, name in enumerate(names)]
    with RayWorkers(Squares, (folder, fault), count, gpus, seconds) as workers:
        found = list(workers.run("square", tasks))
        assert len(found) == len(names)
        assert workers.progress() == []
    return dict(found)


def runs(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text().split()) for path in folder.iterdir()}


def test_the_task_of_a_killed_worker_is_run_by_another_and_ends_once(cluster, tmp_path):
    names = ["a", "killed", "b", "c", "d", "e"]
    assert squares(tmp_path, *names) == {name: number**2 for number, name in enumerate(names)}
    assert runs(tmp_path) == {**dict.fromkeys(names, 1), "killed": 2}
    assert len(set((tmp_path / "killed").read_text().split())) == 2  # processes


def test_a_task_that_kills_each_worker_ends_the_run(cluster, tmp_path):
    with pytest.raises(
        CommunicationError, match=r"^mortal is tried 3 times, got a worker that ended each time.*of 2 \(.*\): "
    ):
        squares(tmp_path, "a", "mortal", "b")
    assert runs(tmp_path)["mortal"] == 3


def test_a_worker_that_never_starts_ends_the_run(cluster, tmp_path):
    with pytest.raises(CommunicationError, match=r"^its start is tried 3 times, got a worker that ended each time"):
        squares(tmp_path, "a", fault="mortal", count=1)


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("fails", "", r"worker \d of 2 \(process \d+ on \S+\): a square must be large, got a small one$"),
        ("ends", "", r"worker \d of 2 \(process \d+ on \S+\): it ended with ZeroDivisionError: by zero$"),
        ("a", "fails", r"worker \d of 2 \(process \d+ on \S+\): there must be a number, got none$"),
        (
            "a",
            "differs",
            r"every worker must have the same version, got \d+ on worker \d of 2 \(.*\) and \d+ on worker",
        ),
    ],
)
def test_an_error_names_the_worker_and_is_not_tried_again(cluster, tmp_path, name, fault, words):
    with pytest.raises(CommunicationError, match=words):
        squares(tmp_path, name, *["slow", "slow", "slow"], fault=fault)
    assert runs(tmp_path).get(name, 1) == 1


def test_a_worker_that_hangs_is_named_and_a_slow_one_is_waited_for(cluster, tmp_path, monkeypatch):
    """The slow task takes 12 s, which are 12 minutes once a task runs, and reports."""

    def clock() -> float:
        begun = (tmp_path / "slow").exists()
        return time.monotonic() + (60 * (time.time() - (tmp_path / "slow").stat().st_ctime) if begun else 0.0)

    monkeypatch.setattr(ray_workers, "time", SimpleNamespace(monotonic=clock))
    words = r"report within 600 s, got no report of worker 1 of 1 \(process .*\) in hangs; it hangs"
    with pytest.raises(CommunicationError, match=words):
        squares(tmp_path, "slow", "hangs", count=1, seconds=600.0)
    assert runs(tmp_path) == {"slow": 1, "hangs": 1}


def test_devices_that_the_cluster_lacks_are_not_waited_for(cluster, tmp_path):
    words = (
        "a worker must start within 2 s, got none of 1, each of which needs 1 GPU; the cluster has 4 CPUs and 0 GPUs"
    )
    with pytest.raises(CommunicationError, match=words):
        squares(tmp_path, "a", count=1, gpus=1, seconds=2.0)
    assert cluster == RayCluster(4, 0)
    assert cluster.device == "cpu"


def test_workers_that_cannot_be_are_refused(cluster, tmp_path):
    with pytest.raises(OptionError, match="at least one worker, got 0"):
        squares(tmp_path, count=0)
    with pytest.raises(OptionError, match=r"positive number of seconds, up to 1e\+09, got nan"):
        squares(tmp_path, seconds=float("nan"))


def test_a_cluster_that_is_joined_already_is_kept(cluster):
    import ray

    with join_cluster("nowhere:1") as again:
        assert again == cluster
    assert ray.is_initialized()

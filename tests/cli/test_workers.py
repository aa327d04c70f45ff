"""`torchrun -m polyhead inspect` and `polyhead merge-runs`: the text is read by several processes."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from typer.testing import CliRunner

from polyhead.cli import app, main
from polyhead.inspection import load_inspection
from polyhead.inspection.run_files import OBSERVATIONS, SHARDS
from polyhead.inspection.text_pass import TextPass
from polyhead.observation import read_facts
from polyhead.parallel.workers import Workers
from tests.forked import Forked
from tests.inspection.small_models import model_folder, text_folder
from tests.workflows.merged_runs import assert_same_inspection, assert_same_observations

pytest.importorskip("pyarrow")
OPTIONS = ["--context", 48, "--batch", 100, "--tokens", 700, "--importance", "none", "--no-chance", "--device", "cpu"]


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def torchrun(*arguments: object) -> tuple[int | None, str, str]:
    """Run `polyhead` in two forks of the launcher of `torchrun --standalone`: exit code, stdout and stderr."""

    def rank() -> None:
        try:
            main()
        except SystemExit as end:
            assert end.code in (None, 0), end.code  # noqa: PT017 - the launcher ends with this rank's exit code

    def launch() -> None:
        sys.argv = ["polyhead", *map(str, arguments)]
        # A rendezvous of its own on a free port, so that several tests can run at once.
        rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(uuid.uuid4())}
        elastic_launch(LaunchConfig(1, 1, 2, **rendezvous, max_restarts=0, start_method="fork"), rank)()
        raise SystemExit(0)

    command = Forked(arguments, launch)
    out, said = command.end()
    return command.returncode, out, said


def launched(store: dist.TCPStore, arguments: Sequence[object], rank: int, before: Callable[[], object]) -> Forked:
    """Start `polyhead` in a fork that has the variables of `torchrun`, as one of two ranks."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def prepare() -> None:
        os.environ.update(variables)
        before()

    return Forked(arguments, prepare)


@pytest.fixture
def store() -> dist.TCPStore:
    """The store of the launcher, on a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def die_after_two_saves() -> None:
    keep, saved = TextPass.keep, []

    def keep_and_die(*arguments: object) -> None:
        keep(*arguments)  # type: ignore[arg-type]
        saved.append(arguments)
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    TextPass.keep = keep_and_die  # type: ignore[method-assign,assignment]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    model_folder(folder / "bert", "bert")
    text_folder(folder / "text")
    invoke("inspect", folder / "bert", "--text", folder / "text", *OPTIONS, "--save", folder / "whole")
    return folder


def test_the_shard_of_a_killed_process_is_redone_and_the_result_is_that_of_one(place, tmp_path, store):
    run, command = tmp_path / "run", ["inspect", place / "bert", "--text", place / "text", *OPTIONS]
    command += ["--save", run, "--save-seconds", 0]
    first, killed = (
        launched(store, command, rank, before) for rank, before in enumerate((lambda: None, die_after_two_saves))
    )
    killed.end()
    first.end(signal.SIGTERM)  # as torchrun does when a process has ended
    assert killed.returncode == -signal.SIGKILL
    assert first.returncode != 0
    assert not (run / OBSERVATIONS).exists()
    facts = read_facts(run / SHARDS / "2-of-2" / OBSERVATIONS)
    assert (facts["batches"], facts["complete"]) == (4, False)  # of index 1 and 3
    said = invoke("inspect", "--resume", run, code=2).stderr
    assert "is the run of several workers, got one process; continue it with: " in said
    assert f"or torchrun --nproc-per-node 2 -m polyhead inspect --resume {run}" in said
    said = invoke("report", run, code=2).stderr
    assert "whose run is not finished; continue it with --resume" in said
    code, shown, said = torchrun("inspect", "--resume", run)
    assert code == 0, said
    assert shown.count("Main findings") == 1  # of the first rank alone
    assert f"Saved to {run}: heads.parquet" in shown
    assert_same_observations(run, place / "whole")
    assert_same_inspection(load_inspection(run), load_inspection(place / "whole"))
    assert sorted(x.name for x in run.iterdir()) == sorted(x.name for x in (place / "whole").iterdir())


def test_processes_that_disagree_end_with_the_same_error(place, tmp_path, store):
    command = ["inspect", place / "bert", "--text", place / "text", *OPTIONS, "--save", tmp_path / "run"]
    ranks = [
        launched(store, [*command, *more], rank, lambda: None) for rank, more in enumerate(([], ["--tokens", 600]))
    ]
    words = "polyhead inspect: every rank must have the same tokens, got 700 on rank 0 and 600 on rank 1 of 2"
    for rank in ranks:
        printed, said = rank.end()
        assert rank.returncode != 0
        assert [line for line in said.splitlines() if line.startswith("polyhead inspect: ")] == [words]
        assert printed == ""
    assert not (tmp_path / "run").exists()


def test_shards_are_merged_into_a_run_that_is_read_as_any_other(place, tmp_path):
    for number in (1, 2):
        command = ["inspect", place / "bert", "--text", place / "text", *OPTIONS, "--shard", f"{number}/2"]
        shown = invoke(*command, "--save", tmp_path / str(number)).stdout
        assert f"Shard {number}/2: read " in shown
        assert "polyhead merge-runs RUN... --output FOLDER, with the folders of all 2 shards" in shown
    said = invoke("report", tmp_path / "1", code=2).stderr
    assert "merge all shards with `polyhead merge-runs`" in said
    again = invoke("inspect", "--resume", tmp_path / "1").stdout  # complete, and of the same shard
    assert "Shard 1/2: read " in again
    page = tmp_path / "page.html"
    shown = invoke("merge-runs", tmp_path / "2", tmp_path / "1", "--output", tmp_path / "run", "--html", page).stdout
    assert "Main findings" in shown
    assert page.exists()
    assert_same_observations(tmp_path / "run", place / "whole")
    assert "0 of 8 common heads changed" in invoke("compare", place / "whole", tmp_path / "run").stdout
    said = invoke("merge-runs", tmp_path / "2", "--output", tmp_path / "other", code=2).stderr
    assert "merge-runs needs all 2 shards, got no shard 1/2" in said
    said = invoke("merge-runs", tmp_path / "1", tmp_path / "2", "--output", tmp_path / "run", code=2).stderr
    assert "--output must be a new run" in said


def test_ray_is_an_extra_that_is_missed_before_the_model_is_loaded(place, monkeypatch):
    monkeypatch.setattr("polyhead.parallel.ray_workers.find_spec", lambda name: None)
    said = invoke("inspect", place / "text", "--text", place / "text", "--ray", "local", code=2).stderr
    assert said == (
        "polyhead inspect: --ray needs Ray, which is not installed; install it with: pip install 'polyhead[ray]'\n"
    )


def test_a_restart_does_not_overwrite_a_finished_run(place, monkeypatch):
    """The first attempt refused the folder, and torchrun --max-restarts repeats the command."""

    @contextmanager
    def restarted(*_: object) -> Iterator[Workers]:
        yield Workers(dist.HashStore(), 0, 1, restarts=1)

    monkeypatch.setattr("polyhead.cli.workers.joined_workers", restarted)
    before = (place / "whole" / "inspection.json").read_bytes()
    command = ["inspect", place / "bert", "--text", place / "text", *OPTIONS, "--table", "--save", place / "whole"]
    assert "contains a run already" in invoke(*command, code=2).stderr
    assert (place / "whole" / "inspection.json").read_bytes() == before

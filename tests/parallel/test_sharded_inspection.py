"""Ranks that read a text together have the result of one process, also after one of them failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polyhead.errors import CommunicationError
from polyhead.inspection import load_inspection
from polyhead.inspection.run_files import OBSERVATIONS, SHARDS
from polyhead.inspection.text_pass import TextPass
from polyhead.observation import read_facts
from polyhead.parallel.workers import Workers
from polyhead.progress import Progress
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.sharded_inspecting import inspect_with_workers
from tests.inspection.small_models import model_folder, text_folder
from tests.ranks import Failure, Ranks
from tests.workflows.merged_runs import assert_same_inspection, assert_same_observations, settings_of

pytest.importorskip("pyarrow")
WORLD = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    model_folder(folder / "bert", "bert")
    text_folder(folder / "text")
    return folder


def workers_of(store: Path) -> Workers:
    rank, world = dist.get_rank(), dist.get_world_size()
    return Workers(dist.FileStore(str(store), world), rank, world, 120.0)


def inspected(place: Path, run: Path, attempt: str, resume: bool = False, fails: int = -1) -> list[Progress] | None:
    """Inspect as a rank; the rank `fails` raises after it saved two batches. Returns the progress that was shown."""
    workers, shown, keep, saved = workers_of(run.with_suffix(f".{attempt}")), [], TextPass.keep, []

    def fail(*arguments: object) -> None:
        keep(*arguments)  # type: ignore[arg-type]
        saved.append(arguments)
        if len(saved) == 2:
            raise RuntimeError("out of luck")

    settings = settings_of(place / "bert", place / "text")
    try:
        if workers.rank == fails:
            TextPass.keep = fail  # type: ignore[method-assign,assignment]
        with workers.sharing_failures():
            found = inspect_with_workers(
                settings, workers, folder=run, resume=resume, progress=shown.append, save_seconds=0.0
            )
    finally:
        TextPass.keep = keep  # type: ignore[method-assign]
        workers.leave()
    assert (found is None) == (workers.rank > 0)
    return shown


def inspected_alone(place: Path, folder: Path) -> None:
    inspect_model(settings_of(place / "bert", place / "text"), folder=folder)


@pytest.fixture(scope="module")
def whole(place, ranks, tmp_path_factory) -> Path:
    """The run of one process, with the numbers of threads of the others, on which rounding depends."""
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(inspected_alone, place, folder, world=1)
    return folder


def test_the_merged_run_of_all_ranks_is_that_of_one_process(ranks: Ranks, place: Path, whole: Path, tmp_path: Path):
    run = tmp_path / "run"
    first, *_ = ranks.run(inspected, place, run, "first", world=WORLD, seconds=180)
    read = [now for now in first if now.step == "read the text"]
    assert all(now.total == read[-1].done for now in read)  # of all ranks together
    assert_same_observations(run, whole)
    assert_same_inspection(load_inspection(run), load_inspection(whole))
    assert not (run / SHARDS).exists()
    # Resumed after the observations were merged, the ranks read nothing again.
    before = (run / OBSERVATIONS).stat().st_mtime_ns, (run / OBSERVATIONS).read_bytes()
    (run / "inspection.json").unlink()
    again, *_ = ranks.run(inspected, place, run, "again", True, world=WORLD, seconds=180)
    assert not [now for now in again if now.step == "read the text"]
    assert before[1] == (run / OBSERVATIONS).read_bytes()
    assert_same_inspection(load_inspection(run), load_inspection(whole))


def test_the_shard_of_a_failed_rank_continues_and_the_result_is_the_same(
    ranks: Ranks, place: Path, whole: Path, tmp_path: Path
):
    run = tmp_path / "run"
    failed = ranks.outcomes(inspected, place, run, "first", False, 1, world=WORLD, seconds=180)
    assert all(isinstance(outcome, Failure) for outcome in failed)
    assert [outcome.error for outcome in failed] == ["CommunicationError", "RuntimeError", "CommunicationError"]
    words = "rank 1 of 3: it ended with RuntimeError: out of luck"
    assert {outcome.message for outcome in failed[::2]} == {words}
    facts = read_facts(run / SHARDS / "2-of-3" / OBSERVATIONS)
    assert facts["batches"] == 1 + 3 + 1  # the first two batches of the shard are those of index 1 and 4
    assert not facts["complete"]
    refused = ranks.outcomes(inspected, place, run, "two", True, world=2, seconds=180)
    assert {outcome.error for outcome in refused} == {"CommunicationError"}
    assert all("as many workers as it was started with, 3, got 2" in outcome.message for outcome in refused)
    ranks.run(inspected, place, run, "again", True, world=WORLD, seconds=180)
    assert_same_observations(run, whole)
    assert_same_inspection(load_inspection(run), load_inspection(whole))
    assert not (run / SHARDS).exists()


def exchanged(store: Path) -> dict[str, torch.Tensor]:
    """Send tensors of several shapes and dtypes from rank 1 to rank 0, and return what arrives."""
    workers = workers_of(store)
    tensors = {
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.zeros(0, 3, dtype=torch.int64),
        "mask": torch.tensor([[True, False], [False, True]]).T,
        "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    }
    workers.connect()
    if workers.rank == 1:
        workers.send(0, {"name": "state"}, tensors)
        return tensors
    header, received = workers.receive(1)
    assert header == {"name": "state"}
    return received


def test_tensors_arrive_bit_for_bit(ranks: Ranks, tmp_path: Path):
    received, sent = ranks.run(exchanged, tmp_path / "store", world=2, seconds=180)
    assert received.keys() == sent.keys()
    for name, x in sent.items():
        assert (received[name].shape, received[name].dtype) == (x.shape, x.dtype)
        assert torch.equal(received[name], x)


def silent(store: Path) -> str:
    """Rank 0 waits for a message that rank 1 never sends."""
    workers = workers_of(store)
    workers.connect()
    if workers.rank == 0:
        with pytest.raises(CommunicationError) as error:
            workers.receive(1)
        return str(error.value)
    return ""


def test_a_message_that_does_not_arrive_names_its_sender(ranks: Ranks, tmp_path: Path):
    message, _ = ranks.outcomes(silent, tmp_path / "store", world=2, collective_seconds=1)
    assert message.startswith("rank 1 of 2 must send data to rank 0 within 120 s, got:")

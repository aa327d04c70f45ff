"""Workers agree or raise the same error, and none waits for another without a limit; ranks are threads here."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from polyhead.errors import CommunicationError, OptionError
from polyhead.parallel.worker_rules import is_worker
from polyhead.parallel.workers import Workers, join_workers

WORLD = 3


def outcomes(function: Callable[[Workers], Any], seconds: float = 30.0) -> list[Any]:
    """Return the result, or the exception, of the function on each rank."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        workers = Workers(store, rank, WORLD, seconds)
        try:
            with workers.sharing_failures():
                return function(workers)
        except Exception as error:  # noqa: BLE001 - the outcome of the rank
            return error
        finally:
            workers.leave()

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, range(WORLD)))


def messages(found: list[Any]) -> set[str]:
    assert all(isinstance(x, CommunicationError) for x in found), found
    return {str(x) for x in found}


def test_values_of_all_ranks_are_gathered_in_order():
    assert (
        outcomes(lambda workers: workers.gather("ranks", {"rank": workers.rank}))
        == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * WORLD
    )


def test_the_values_of_an_earlier_step_of_the_same_name_are_not_read_again():
    def twice(workers: Workers) -> list[list[int]]:
        found = []
        for task in range(2):
            time.sleep(0.2 * (workers.rank == 1))
            found.append(workers.gather("ranks", 10 * task + workers.rank))
        return found

    assert outcomes(twice) == [[[0, 1, 2], [10, 11, 12]]] * WORLD


def test_a_store_that_does_not_answer_or_is_gone_is_an_error_of_the_rank(monkeypatch):
    """As that of a process that is stopped, or on a machine that was disconnected; and that of one that was killed."""
    store = dist.HashStore()
    frozen = threading.Event()
    workers = Workers(store, 1, 2, 0.3)
    monkeypatch.setattr(workers._store, "_store", SimpleNamespace(set=lambda *_: frozen.wait(30), add=frozen.wait))
    began = time.monotonic()
    with pytest.raises(
        CommunicationError, match=r"must reach the store .* got: DistNetworkError: no answer within 0.3 s"
    ):
        workers.report(1)
    with pytest.raises(CommunicationError, match="did not answer before"):
        workers.report(2)
    workers.leave()
    assert time.monotonic() - began < 10
    frozen.set()

    def gone(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    workers = Workers(store, 1, 2, 5.0)
    monkeypatch.setattr(workers._store, "_store", SimpleNamespace(check=gone, add=gone))
    with pytest.raises(CommunicationError, match=r"rank 1 of 2 must reach the store .*: Connection reset"):
        workers.receive(0)  # there is no group either, and the store cannot say whose failure that is
    workers.leave()


def test_ranks_that_disagree_raise_the_same_error_that_names_rank_and_value():
    def disagree(workers: Workers) -> None:
        workers.agree("the settings", {"seed": 0, "tokens": 200 if workers.rank == 2 else 100})

    assert messages(outcomes(disagree)) == {
        "every rank must have the same tokens, got 100 on rank 0 and 200 on rank 2 of 3"
    }
    assert outcomes(lambda workers: workers.agree("the settings", {"tokens": 100})) == [None] * WORLD


def test_an_error_of_one_rank_is_that_of_all_with_its_rank():
    def fail(workers: Workers) -> None:
        if workers.rank == 1:
            raise OptionError("the text must exist, got none")
        workers.gather("the text")

    assert messages(outcomes(fail)) == {"rank 1 of 3: the text must exist, got none"}


def test_an_unexpected_error_stops_the_others_and_stays_what_it_is():
    def fail(workers: Workers) -> None:
        if workers.rank == 0:
            raise ZeroDivisionError("by zero")
        while True:
            workers.report(1)  # in the middle of its own work
            time.sleep(0.01)

    first, *others = outcomes(fail)
    assert isinstance(first, ZeroDivisionError)
    assert messages(others) == {"rank 0 of 3: it ended with ZeroDivisionError: by zero"}


def test_of_errors_at_once_all_ranks_raise_the_first():
    together = threading.Barrier(WORLD)

    def fail(workers: Workers) -> None:
        together.wait()
        raise OptionError("nothing fits")

    assert len(messages(outcomes(fail))) == 1


def test_a_rank_that_does_not_arrive_is_named_after_the_limit():
    def wait(workers: Workers) -> None:
        stop = time.monotonic() + 30
        while workers.rank == 2 and time.monotonic() < stop:
            workers.check()  # raises once another rank has failed
            time.sleep(0.01)
        workers.gather("the end of the text")

    (message,) = messages(outcomes(wait, seconds=0.3))
    assert "report within 0.3 s, got no report of rank 2 of 3 before the step 'the end of the text'; it" in message


def test_a_slow_rank_is_waited_for_as_long_as_it_reports():
    def read(workers: Workers) -> int:
        shown: list[int] = []
        for done in range(1, 1 + 12 * (workers.rank == 1)):
            workers.report(done)
            time.sleep(0.1)
        workers.gather("the end of the text", waiting=lambda: shown.append(workers.done()))
        assert workers.rank == 1 or shown == sorted(shown)
        return workers.done()

    assert outcomes(read, seconds=0.6) == [12] * WORLD


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, True),
    ],
)
def test_a_process_is_a_worker_if_a_launcher_says_so(environment, expected):
    assert is_worker(environment) is expected


def test_a_launcher_that_sets_no_numbers_and_a_rank_that_does_not_exist_are_refused():
    variables = {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with pytest.raises(OptionError, match="RANK, which torchrun sets, must be an integer, got 'x'"):
        is_worker(variables)
    with pytest.raises(OptionError, match="from 0 to 1, got 2 of 2"):
        Workers(dist.HashStore(), 2, 2)
    for seconds in (0.0, math.nan, math.inf, 1e15):
        with pytest.raises(
            OptionError, match=f"positive number of seconds, up to 1e.09, got {seconds:g}".replace("+", ".")
        ):
            Workers(dist.HashStore(), 0, 2, seconds)
        with pytest.raises(OptionError, match="positive number of seconds"), join_workers(seconds, variables):
            pass

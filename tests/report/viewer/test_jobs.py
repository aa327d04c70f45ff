"""One computation at a time: who goes first, who is called off, and what the worker outlives."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from polyhead.report.viewer import jobs as jobs_module
from polyhead.report.viewer.failures import Failure, Refused, failure_of
from polyhead.report.viewer.jobs import BACKGROUND, INTERACTIVE, Jobs


@pytest.fixture
def jobs():
    made = Jobs(4)
    yield made
    made.close()
    assert not made._thread.is_alive()


def run(coroutine):
    """In a thread of its own: a browser that other tests drive may have left a loop running in this one."""

    async def limited():
        return await asyncio.wait_for(coroutine, 30)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, limited()).result()


async def all_of(job):
    return [message async for message in job.messages()]


class Gate:
    """Work that waits for a word before each of its messages."""

    def __init__(self, count=1):
        self.begun, self.go, self.count, self.closed = threading.Event(), threading.Semaphore(0), count, False

    def __call__(self, job):
        try:
            for number in range(self.count):
                self.begun.set()
                assert self.go.acquire(timeout=20)
                yield {"number": number}
        finally:
            self.closed = True


def test_messages_arrive_in_order(jobs):
    async def scenario():
        return await all_of(jobs.submit(lambda job: ({"number": x} for x in range(20))))

    assert run(scenario()) == [{"number": x} for x in range(20)]


def test_small_computations_go_between_the_parts_of_a_long_one(jobs):
    order = []

    def work(name, parts):
        def parts_of(job):
            for part in range(parts):
                order.append((name, part))
                yield {"part": part}

        return parts_of

    async def scenario():
        gate = Gate()
        first = jobs.submit(gate)
        gate.begun.wait(10)
        long = jobs.submit(work("long", 3), urgency=BACKGROUND)
        small = [jobs.submit(work(name, 1), urgency=INTERACTIVE) for name in ("one", "two")]
        gate.go.release()
        await asyncio.gather(*(all_of(x) for x in (first, long, *small)))

    run(scenario())
    assert [name for name, _ in order] == ["one", "two", "long", "long", "long"]


def test_a_newer_turn_calls_off_the_older_ones_of_its_lane_alone(jobs):
    async def scenario():
        gate = Gate(3)
        running = jobs.submit(gate, client="page", lane="tile", turn=1)
        gate.begun.wait(10)
        waiting = jobs.submit(Gate(), client="page", lane="tile", turn=1)
        elsewhere = jobs.submit(lambda job: iter([{"fine": 1}]), client="page", lane="heads", turn=1)
        other = jobs.submit(lambda job: iter([{"fine": 2}]), client="another page", lane="tile", turn=1)
        newest = jobs.submit(lambda job: iter([{"fine": 3}]), client="page", lane="tile", turn=2)
        with pytest.raises(Refused, match="replaced by a newer one"):
            jobs.submit(Gate(), client="page", lane="tile", turn=1)
        gate.go.release()
        return gate, [await all_of(x) for x in (running, waiting, elsewhere, other, newest)]

    gate, found = run(scenario())
    assert [[x.status for x in messages] for messages in found[:2]] == [[409], [409]]
    assert found[2:] == [[{"fine": 1}], [{"fine": 2}], [{"fine": 3}]]
    assert gate.closed


def test_questions_of_one_turn_live_side_by_side(jobs):
    async def scenario():
        made = [
            jobs.submit(lambda job, number=x: iter([{"number": number}]), client="page", lane="tile", turn=5)
            for x in range(6)
        ]
        return [await all_of(job) for job in made]

    assert run(scenario()) == [[{"number": x}] for x in range(6)]


def test_what_a_client_calls_off_ends(jobs):
    async def scenario():
        gate = Gate(2)
        job = jobs.submit(gate, client="page", lane="picture")
        gate.begun.wait(10)
        assert jobs.cancel("page", "tile") == 0
        assert jobs.cancel("page") == 1
        gate.go.release()
        return gate, await all_of(job)

    gate, (failure,) = run(scenario())
    assert failure.status == 409
    assert gate.closed


def test_there_are_so_many_places_and_no_more(jobs):
    held = [jobs.place() for _ in range(4)]
    for place in held:
        place.__enter__()
    with pytest.raises(Refused, match="accepts 4 requests at a time") as caught, jobs.place():
        pass
    assert caught.value.failure.status == 429
    held[0].__exit__(None, None, None)
    with jobs.place():
        pass


def test_what_nobody_reads_is_not_computed(jobs):
    produced = []

    def work(job):
        for number in range(1000):
            produced.append(number)
            yield {"number": number}

    async def scenario():
        unread = jobs.submit(work)
        # Those that come after it are served; by then it has stopped.
        for _ in range(3):
            await all_of(jobs.submit(lambda job: iter([{}]), urgency=BACKGROUND))
        count = len(produced)
        messages = await all_of(unread)
        return count, messages

    count, messages = run(scenario())
    assert count == jobs_module.UNREAD_MESSAGES
    assert len(messages) == 1000


def test_a_client_that_never_reads_is_given_up(jobs, monkeypatch):
    monkeypatch.setattr(jobs_module, "UNREAD_SECONDS", 0.0)
    closed = threading.Event()

    def work(job):
        try:
            while True:
                yield {"more": 1}
        finally:
            closed.set()

    async def scenario():
        jobs.submit(work)
        await asyncio.to_thread(closed.wait, 20)

    run(scenario())
    assert closed.is_set()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
    ],
)
def test_a_computation_that_runs_out_of_memory_ends_and_the_next_begins(error):
    let_go = []
    jobs = Jobs(4, on_memory=lambda: let_go.append(1))

    def fail(job):
        yield {"begun": True}
        raise error

    async def scenario():
        first = await all_of(jobs.submit(fail))
        return first, await all_of(jobs.submit(lambda job: iter([{"fine": 1}])))

    first, second = run(scenario())
    jobs.close()
    assert first[0] == {"begun": True}
    assert (first[1].status, first[1].kind) == (507, "out-of-memory")
    assert "use a shorter text" in first[1].message
    assert let_go == [1]
    assert second == [{"fine": 1}]


def test_a_computation_that_fails_is_logged_and_tells_no_secrets(jobs, log):
    def fail(job):
        raise KeyError("somebody/private")
        yield

    async def scenario():
        return await all_of(jobs.submit(fail)), await all_of(jobs.submit(lambda job: iter([{"fine": 1}])))

    (failure,), second = run(scenario())
    assert failure == Failure(500, "failed", "The computation failed with KeyError; see the terminal of the viewer.")
    assert "private" in log.getvalue()
    assert second == [{"fine": 1}]


def test_an_error_of_ours_is_told_in_its_own_words():
    from polyhead.errors import OptionError

    assert failure_of(OptionError("a port is a number, got x")) == Failure(422, "invalid", "a port is a number, got x")


def test_closing_calls_off_everything():
    jobs = Jobs(4)

    async def scenario():
        gate = Gate(5)
        running, waiting = jobs.submit(gate), jobs.submit(Gate())
        gate.begun.wait(10)
        closing = asyncio.create_task(asyncio.to_thread(jobs.close))
        while not jobs._closed:
            await asyncio.sleep(0.001)
        gate.go.release()
        await closing
        found = [await all_of(x) for x in (running, waiting)]
        with pytest.raises(Refused, match="shutting down"):
            jobs.submit(Gate())
        return found

    found = run(scenario())
    assert [x[-1].status for x in found] == [503, 503]
    with pytest.raises(Refused, match="shutting down"), jobs.place():
        pass
    assert not jobs._thread.is_alive()

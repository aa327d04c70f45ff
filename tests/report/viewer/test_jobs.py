"""Job queue: priorities, cancellation, and errors that the worker survives."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from polyhead.report.viewer import jobs as jobs_module
from polyhead.report.viewer.failures import RequestError, request_error
from polyhead.report.viewer.jobs import BACKGROUND, INTERACTIVE, Jobs


@pytest.fixture
def jobs():
    made = Jobs(4)
    yield made
    made.close()
    assert not made._thread.is_alive()


def run(coroutine):
    """Run in a new thread: the browser of other tests may have left an event loop running in this one."""

    async def limited():
        return await asyncio.wait_for(coroutine, 30)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, limited()).result()


async def all_of(job):
    return [message async for message in job.messages()]


class Gate:
    """A computation that waits for `go` before each message."""

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


def test_interactive_jobs_run_between_the_parts_of_a_background_job(jobs):
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
        long = jobs.submit(work("long", 3), priority=BACKGROUND)
        small = [jobs.submit(work(name, 1), priority=INTERACTIVE) for name in ("one", "two")]
        gate.go.release()
        await asyncio.gather(*(all_of(x) for x in (first, long, *small)))

    run(scenario())
    assert [name for name, _ in order] == ["one", "two", "long", "long", "long"]


def test_cancelled_job_ends_and_closes_its_computation(jobs):
    async def scenario():
        gate = Gate(2)
        job = jobs.submit(gate)
        gate.begun.wait(10)
        job.cancel()
        gate.go.release()
        return gate, await all_of(job)

    gate, (error,) = run(scenario())
    assert (error.status, error.kind) == (409, "cancelled")
    assert gate.closed


def test_number_of_open_requests_is_limited(jobs):
    held = [jobs.slot() for _ in range(4)]
    for slot in held:
        slot.__enter__()
    with pytest.raises(RequestError, match="accepts 4 requests at a time") as caught, jobs.slot():
        pass
    assert caught.value.status == 429
    held[0].__exit__(None, None, None)
    with jobs.slot():
        pass


def test_unread_job_is_suspended(jobs):
    produced = []

    def work(job):
        for number in range(1000):
            produced.append(number)
            yield {"number": number}

    async def scenario():
        unread = jobs.submit(work)
        # Later jobs are served; by then it is suspended.
        for _ in range(3):
            await all_of(jobs.submit(lambda job: iter([{}]), priority=BACKGROUND))
        count = len(produced)
        messages = await all_of(unread)
        return count, messages

    count, messages = run(scenario())
    assert count == jobs_module.UNREAD_MESSAGES
    assert len(messages) == 1000


def test_job_of_a_client_that_never_reads_is_cancelled(jobs, monkeypatch):
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
def test_out_of_memory_ends_one_job_only(error):
    let_go = []
    jobs = Jobs(4, on_out_of_memory=lambda: let_go.append(1))

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


def test_error_of_a_job_is_logged_and_not_disclosed(jobs, log):
    def fail(job):
        raise KeyError("secret/path")
        yield

    async def scenario():
        return await all_of(jobs.submit(fail)), await all_of(jobs.submit(lambda job: iter([{"fine": 1}])))

    (error,), second = run(scenario())
    assert (error.status, error.kind) == (500, "failed")
    assert error.message == "The computation failed with KeyError; see the terminal of the viewer."
    assert "secret/path" in log.getvalue()
    assert second == [{"fine": 1}]


def test_own_errors_keep_their_message():
    from polyhead.errors import OptionError

    error = request_error(OptionError("a port is a number, got x"))
    assert (error.status, error.kind, error.message) == (422, "invalid", "a port is a number, got x")


def test_closing_cancels_all_jobs():
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
        with pytest.raises(RequestError, match="shutting down"):
            jobs.submit(Gate())
        return found

    found = run(scenario())
    assert [x[-1].status for x in found] == [503, 503]
    with pytest.raises(RequestError, match="shutting down"), jobs.slot():
        pass
    assert not jobs._thread.is_alive()

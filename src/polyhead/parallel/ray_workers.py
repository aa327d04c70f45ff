"""`RayWorkers`: actors of a Ray cluster that run tasks; the task of a worker that is killed is run by another one.

A task is run as a whole by one worker, and its result arrives once. An error that a task raises ends all of them, since
it would be raised again; the end of a process or of a node does not.
"""

from __future__ import annotations

import abc
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

from polyhead.errors import CommunicationError, OptionError, PolyheadError
from polyhead.files import in_one_line
from polyhead.parallel.worker_rules import SECONDS, check_same, check_seconds

ATTEMPTS = 3  # of a task whose worker is killed
_POLL_SECONDS = 1.0  # between two questions for the progress of a worker
_PLACE_SECONDS = 10.0  # maximum wait for the place of a worker that has answered already


def check_ray() -> None:
    """Raise if Ray is not installed; imports nothing."""
    found = find_spec("ray")
    if found is None or found.origin is None:  # a folder of this name is no package
        raise OptionError("--ray needs Ray, which is not installed; install it with: pip install 'polyhead[ray]'")


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Current resources of a Ray cluster; more nodes may join it."""

    cpus: int
    gpus: int

    @property
    def device(self) -> str:
        """Device of workers that request none."""
        return "cuda" if self.gpus else "cpu"


@contextmanager
def join_cluster(address: str = "auto", cpus: int | None = None) -> Iterator[RayCluster]:
    """Connect to a Ray cluster, or stay connected; a context manager.

    Args:
        address: "auto" for the cluster of `RAY_ADDRESS` or of this machine, "local" to start one on this machine, or
            the address of one.
        cpus: CPU slots of a cluster that is started; default: the number of CPUs.

    Yields:
        The cluster.

    Raises:
        CommunicationError: the cluster cannot be reached.
    """
    check_ray()
    ray = import_module("ray")
    connected = ray.is_initialized()
    if not connected:
        options: dict[str, Any] = {"address": address, "logging_level": "ERROR", "log_to_driver": False}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options |= {"num_cpus": cpus, "include_dashboard": False}
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise CommunicationError(
                f"--ray must be the address of a Ray cluster, auto or local, got {address}: {in_one_line(error)}"
            ) from error
    try:
        resources = ray.cluster_resources()
        yield RayCluster(int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))
    finally:
        if not connected:
            ray.shutdown()


class RayActor(abc.ABC):
    """Base class of actors of `RayWorkers`."""

    @abc.abstractmethod
    def start(self) -> dict[str, Any]:
        """Prepare for tasks; the values, by name, must be equal on all workers."""

    @abc.abstractmethod
    def progress(self) -> Any:
        """Return a value that changes while a task is run."""

    def place(self) -> str:
        """Return where the worker runs, for errors."""
        return f"process {os.getpid()} on {socket.gethostname()}"


@dataclass(eq=False, slots=True)
class _Task:
    name: str
    method: str
    arguments: Callable[[], tuple[Any, ...]]  # called when the task is sent, as they may be large
    limited: bool = True  # whether it must report within the time limit
    attempts: int = 0


@dataclass(eq=False, slots=True)
class _Worker:
    number: int
    actor: Any
    place: Any  # reference
    task: _Task
    result: Any  # reference; None if the worker is idle
    since: float  # time of the latest progress
    is_ready: bool = False
    attempts: int = 0  # to start
    progress: Any = None
    question: Any = None  # reference to its progress
    question_time: float = 0.0


@dataclass(eq=False)
class RayWorkers:
    """Actors of one class, each with a GPU or a CPU of its own, within a cluster that this process has joined.

    A context manager that starts them, and kills them at its end.

    Args:
        actor: their class, whose module can be imported on every node.
        arguments: arguments of the class.
        count: number of workers.
        gpus: GPUs of each; without, each has a CPU.
        seconds: maximum time without progress.
    """

    actor: type[RayActor]
    arguments: tuple[Any, ...]
    count: int
    gpus: int = 0
    seconds: float = SECONDS
    facts: Mapping[str, Any] | None = field(default=None, init=False)  # that `start` returned; None before
    _first: str = field(default="", init=False)  # worker that returned them
    _workers: list[_Worker] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError(f"Ray needs at least one worker, got {self.count}")
        check_seconds(self.seconds)
        self._ray = import_module("ray")

    def __enter__(self) -> Self:
        self._workers = [self._started(number) for number in range(self.count)]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            self._ray.kill(worker.actor)

    def _started(self, number: int, attempts: int = 0) -> _Worker:
        # Two threads, so that a worker reports its progress while it runs a task.
        options = {"num_cpus": 1, "num_gpus": self.gpus, "max_concurrency": 2, "max_restarts": 0}
        actor = self._ray.remote(self.actor).options(**options).remote(*self.arguments)
        task = _Task("its start", "start", tuple)
        place, start = actor.place.remote(), actor.start.remote()
        return _Worker(number, actor, place, task, start, time.monotonic(), attempts=attempts)

    def run(
        self,
        method: str,
        tasks: Iterable[tuple[str, Callable[[], tuple[Any, ...]]]],
        *,
        report: Callable[[], object] = lambda: None,
        limited: bool = True,
    ) -> Iterator[tuple[str, Any]]:
        """Yield the name and the result of each task, in the order in which they end.

        Args:
            method: method of the actors that runs a task.
            tasks: name of each task, and a function that returns its arguments.
            report: called repeatedly.
            limited: whether a worker must report progress within the time limit.

        Raises:
            CommunicationError: a task raised an error, its worker was killed three times, or it reports no progress.
        """
        waiting = deque(_Task(name, method, arguments, limited) for name, arguments in tasks)
        left = len(waiting)
        while left:
            for worker in self._workers:
                if waiting and worker.is_ready and worker.result is None:
                    self._begin(worker, waiting.popleft())
            for worker in self._ended():
                try:
                    result = self._ray.get(worker.result)
                except self._ray.exceptions.RayError as error:
                    if (task := self._lost(worker, error)) is not None:
                        waiting.appendleft(task)
                    continue
                worker.result, worker.question = None, None
                if worker.is_ready:
                    left -= 1
                    yield worker.task.name, result
                else:
                    self._agree(worker, result)
            self._check_progress()
            report()

    def progress(self) -> list[Any]:
        """Return the progress of each running task."""
        return [worker.progress for worker in self._workers if worker.is_ready and worker.result is not None]

    def _begin(self, worker: _Worker, task: _Task) -> None:
        worker.task, worker.progress, worker.since = task, None, time.monotonic()
        worker.result = getattr(worker.actor, task.method).remote(*task.arguments())

    def _ended(self) -> list[_Worker]:
        """Return the workers whose task has ended, and note the progress of the others; waits for a short time."""
        busy = [worker for worker in self._workers if worker.result is not None]
        for worker in busy:
            if worker.question is None and time.monotonic() - worker.question_time > _POLL_SECONDS:
                worker.question, worker.question_time = worker.actor.progress.remote(), time.monotonic()
        waited = [x for worker in busy for x in (worker.result, worker.question) if x is not None]
        done, _ = self._ray.wait(waited, num_returns=1, timeout=_POLL_SECONDS)
        for worker in busy:
            if worker.question in done:
                try:
                    now = self._ray.get(worker.question)
                except self._ray.exceptions.RayError:
                    now = worker.progress  # the same error ends its task
                if now != worker.progress:
                    worker.progress, worker.since = now, time.monotonic()
                worker.question = None
        return [worker for worker in busy if worker.result in done]

    def _lost(self, worker: _Worker, error: Exception) -> _Task | None:
        """Replace a worker that was killed, and return its task; raise what the task raised."""
        cause = getattr(error, "cause", None)
        if isinstance(error, self._ray.exceptions.RayTaskError):
            said = str(cause) if isinstance(cause, PolyheadError) else f"it ended with {in_one_line(cause or error)}"
            raise CommunicationError(f"{self._name(worker, _PLACE_SECONDS)}: {said}") from error
        task, attempts = worker.task, (worker.task.attempts if worker.is_ready else worker.attempts) + 1
        if attempts >= ATTEMPTS:
            raise CommunicationError(
                f"{task.name} is tried {ATTEMPTS} times, got a worker that ended each time, the last one "
                f"{self._name(worker)}: {in_one_line(error)}"
            ) from error
        task.attempts = attempts
        self._ray.kill(worker.actor)  # it may be unreachable only
        self._workers[self._workers.index(worker)] = self._started(worker.number, 0 if worker.is_ready else attempts)
        return task if worker.is_ready else None

    def _agree(self, worker: _Worker, facts: Mapping[str, Any]) -> None:
        if self.facts is None:
            self.facts, self._first = facts, self._name(worker, _PLACE_SECONDS)
        check_same(self.facts, facts, self._first, self._name(worker, _PLACE_SECONDS), "worker")
        worker.is_ready = True

    def _check_progress(self) -> None:
        now = time.monotonic()
        if all(not worker.is_ready and now - worker.since > self.seconds for worker in self._workers):
            needs = f"{self.gpus} GPU" if self.gpus else "a CPU"
            raise CommunicationError(
                f"a worker must start within {self.seconds:g} s, got none of {self.count}, each of which needs {needs}"
                f"; the cluster has {_described(self._ray.cluster_resources())}, and "
                f"{_described(self._ray.available_resources())} free"
            )
        for worker in self._workers:
            is_running = worker.is_ready and worker.result is not None and worker.task.limited
            if is_running and now - worker.since > self.seconds:
                raise CommunicationError(
                    f"every worker must report within {self.seconds:g} s, got no report of {self._name(worker)} in "
                    f"{worker.task.name}; it hangs, or needs a longer --worker-timeout"
                )

    def _name(self, worker: _Worker, seconds: float = 0.0) -> str:
        """Return the number of a worker and, if it is known within so many seconds, its process and node."""
        name = f"worker {worker.number + 1} of {self.count}"
        try:
            return f"{name} ({self._ray.get(worker.place, timeout=seconds)})"
        except (self._ray.exceptions.RayError, TimeoutError):  # it has not started
            return name


def _described(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"

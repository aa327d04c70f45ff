"""`Workers`: processes that share one task, such as the ranks that `torchrun` starts.

Small values, progress and failures go through the store of `torch.distributed`, which every rank can read at any time;
tensors are sent between two ranks by gloo. No rank waits for another without a limit: a rank that fails records its
error, at which all others stop, and one that has not reported for too long is named by those that wait for it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from polyhead.errors import CommunicationError, OptionError, PolyheadError
from polyhead.files import in_one_line
from polyhead.parallel.timed_store import TimedStore
from polyhead.parallel.worker_rules import SECONDS, check_same, check_seconds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_SECONDS = 0.05  # between two reads of the store
_LEAVE_SECONDS = 10.0  # for which a rank that failed waits at most, so that the others can read its error
_MESSAGE_BYTES = 1 << 28  # sent at a time
_joined = itertools.count()  # number of times that this process has joined workers


@dataclass(eq=False)
class Workers:
    """The processes of a task, seen from one of them; for several tasks if all ranks run them in the same order.

    Args:
        store: a store that all ranks share, for these workers alone.
        rank: index of this process.
        world: number of processes.
        seconds: maximum time without a report of a rank that others wait for.
        local_rank: index of this process on its machine.
        restarts: number of times that the launcher has restarted the processes.
    """

    store: Store
    rank: int
    world: int
    seconds: float = SECONDS
    local_rank: int = 0
    restarts: int = 0
    _connected: bool = field(default=False, init=False)
    _failed: bool = field(default=False, init=False)
    _gathered: int = field(default=0, init=False)  # number of values

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise OptionError(f"a rank must be from 0 to {self.world - 1}, got {self.rank} of {self.world}")
        check_seconds(self.seconds)
        self._store = TimedStore(self.store, self.seconds)

    @property
    def is_first(self) -> bool:
        """True for the rank that prints and writes the result."""
        return self.rank == 0

    # ---- values

    def gather(self, name: str, value: Any = None, *, waiting: Callable[[], object] | None = None) -> list[Any]:
        """Return the values of all ranks, by rank; waits for those that have not arrived.

        Args:
            name: name of the step, the same on every rank; printed if a rank does not arrive.
            value: value of this rank, of JSON types.
            waiting: called repeatedly while this rank waits.

        Raises:
            CommunicationError: another rank failed, or has not reported within the time limit.
        """
        # Numbered, so that a step of the next task does not read the values of this one.
        keys = [f"value/{self._gathered}/{name}/{rank}" for rank in range(self.world)]
        self._gathered += 1
        reports, latest = [b""] * self.world, [time.monotonic()] * self.world
        with self._using_store():
            self._store.set(keys[self.rank], json.dumps(value))
            while not self._store.check(keys):
                self.check()
                for rank, key in enumerate(keys):
                    report = self._report_of(rank)
                    if report != reports[rank] or self._store.check([key]):
                        reports[rank], latest[rank] = report, time.monotonic()
                late = [rank for rank in range(self.world) if time.monotonic() - latest[rank] > self.seconds]
                if late:
                    raise self._late(late, name)
                if waiting is not None:
                    waiting()
                time.sleep(_POLL_SECONDS)
            return [json.loads(self._store.get(key)) for key in keys]

    def _late(self, late: Sequence[int], name: str) -> CommunicationError:
        ranks = ", ".join(map(str, late))
        return CommunicationError(
            f"every rank must report within {self.seconds:g} s, got no report of rank {ranks} of {self.world} before "
            f"the step '{name}'; it was killed, hangs, or needs a longer --worker-timeout"
        )

    def agree(self, step: str, values: Mapping[str, Any]) -> None:
        """Raise the same error on every rank unless all have the same values.

        Args:
            step: name for `gather`.
            values: values of JSON types, by the name that an error uses.
        """
        everyone = self.gather(step, dict(values))
        for rank, of_rank in enumerate(everyone):
            check_same(everyone[0], of_rank, "rank 0", f"rank {rank} of {self.world}", "rank")

    # ---- progress and failures

    def report(self, done: int) -> None:
        """Record the progress of this rank, and raise if another one failed.

        Args:
            done: number that grows, such as tokens.
        """
        with self._using_store():
            self._store.set(f"progress/{self.rank}", str(done))
            self.check()

    def done(self) -> int:
        """Return the progress of all ranks together."""
        with self._using_store():
            return sum(int(self._report_of(rank) or 0) for rank in range(self.world))

    def _report_of(self, rank: int) -> bytes:
        key = f"progress/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    def check(self) -> None:
        """Raise if a rank has failed."""
        if self._store.check(["failure"]):
            raise CommunicationError(self._store.get("failure").decode())

    @contextmanager
    def sharing_failures(self) -> Iterator[None]:
        """Return a context that records an exception of this rank, at which all others stop; it then names the rank."""
        try:
            yield
        except PolyheadError as error:
            self._failed = True
            own = str(error) if isinstance(error, CommunicationError) else f"rank {self.rank} of {self.world}: {error}"
            raise CommunicationError(self._record(own)) from error
        except BaseException as error:
            self._failed = isinstance(error, Exception)  # and not interrupted or terminated, as all ranks will be
            self._record(f"rank {self.rank} of {self.world}: it ended with {in_one_line(error)}")
            raise

    def _record(self, message: str) -> str:
        """Record a failure, and return the first one of all ranks; this one if the store is gone."""
        message = " ".join(message.splitlines())
        with suppress(dist.DistError):
            message = self._store.compare_set("failure", "", message).decode()
        return message

    @contextmanager
    def _using_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:  # the process that holds the store has ended
            raise CommunicationError(
                f"rank {self.rank} of {self.world} must reach the store of the workers, which their launcher or rank 0 "
                f"holds, got: {in_one_line(error)}"
            ) from error

    def leave(self) -> None:
        """Disconnect; after a failure, once all ranks have seen it, as a launcher ends all when the first exits."""
        with suppress(dist.DistError):  # the store may be gone
            left, stop = self._store.add("left", 1), time.monotonic() + _LEAVE_SECONDS
            while self._failed and left < self.world and time.monotonic() < stop:
                time.sleep(_POLL_SECONDS)
                left = self._store.add("left", 0)
        self._store.close()
        if self._connected:
            dist.destroy_process_group()
            self._connected = False

    # ---- tensors

    def connect(self) -> None:
        """Form the process group that sends tensors, once every rank is there; keep one that exists already."""
        self.gather("connect")
        if not dist.is_initialized():
            with self._exchanging("connect to", None):
                self._store.call(
                    dist.init_process_group,
                    "gloo",
                    store=dist.PrefixStore("group", self.store),  # type: ignore[attr-defined]
                    rank=self.rank,
                    world_size=self.world,
                    timeout=timedelta(seconds=self.seconds),
                )
            self._connected = True

    def send(self, to: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Send named tensors to a rank that receives them.

        Args:
            to: the rank.
            header: anything of JSON types.
            tensors: tensors by name, of any devices.
        """
        described = {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()}
        head = json.dumps({"header": dict(header), "tensors": described}).encode()
        with self._exchanging("receive data of", to):
            dist.send(torch.tensor([len(head)]), to)
            dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), to)
            for x in tensors.values():
                for part in _as_bytes(x.detach().cpu()).split(_MESSAGE_BYTES):
                    dist.send(part, to)

    def receive(self, sender: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the header and the tensors, on the CPU, that a rank sends.

        Args:
            sender: the rank.
        """
        size = torch.zeros(1, dtype=torch.int64)
        with self._exchanging("send data to", sender):
            dist.recv(size, sender)
            head = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(head, sender)
            message = json.loads(head.numpy().tobytes())
            tensors = {}
            for name, (shape, dtype) in message["tensors"].items():
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                for part in _as_bytes(tensors[name]).split(_MESSAGE_BYTES):
                    dist.recv(part, sender)
        return message["header"], tensors

    @contextmanager
    def _exchanging(self, action: str, other: int | None) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            with self._using_store():
                self.check()  # the failure of another rank is the cause
            who = "every rank" if other is None else f"rank {other} of {self.world}"
            raise CommunicationError(
                f"{who} must {action} rank {self.rank} within {self.seconds:g} s, got: {in_one_line(error)}"
            ) from error


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


@contextmanager
def join_workers(seconds: float = SECONDS, environment: Mapping[str, str] = os.environ) -> Iterator[Workers]:
    """Join the processes that `torchrun` started, by the variables that it sets; a context manager.

    Args:
        seconds: time limit of `Workers`.
        environment: the variables.

    Yields:
        The workers, of which this process is one.

    Raises:
        CommunicationError: the store of the launcher cannot be reached.
    """
    check_seconds(seconds)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=timedelta(seconds=seconds))))
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {rank} of {world} must reach MASTER_ADDR:MASTER_PORT, {address}, within {seconds:g} s, got: "
            f"{in_one_line(error)}"
        ) from error
    # The store may be that of the launcher, and contain the values of workers that this process has been before.
    prefix = f"polyhead/{environment.get('TORCHELASTIC_RUN_ID', '')}/{restarts}/{next(_joined)}"
    local_rank = int(environment.get("LOCAL_RANK", 0))
    own_store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    workers = Workers(own_store, rank, world, seconds, local_rank, int(restarts))
    try:
        yield workers
    finally:
        workers.leave()

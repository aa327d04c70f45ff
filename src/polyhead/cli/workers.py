"""Commands that `torchrun` starts as several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polyhead.cli.errors import one_line
from polyhead.parallel.worker_rules import is_worker

if TYPE_CHECKING:
    from polyhead.parallel.workers import Workers


@contextmanager
def joined_workers(command: str, seconds: float) -> Iterator[Workers | None]:
    """Join the workers of `torchrun`; None for a process on its own.

    An error of one rank is printed on every rank before the first of them ends, at which torchrun ends the others.

    Args:
        command: the command, for errors.
        seconds: time limit of a rank that does not report.
    """
    if not is_worker():
        yield None
        return
    from polyhead.parallel.workers import join_workers

    with join_workers(seconds) as workers, one_line(lambda: command, ()), workers.sharing_failures():
        yield workers

"""Compilation of our kernels in parallel processes before anything is timed, into Triton's cache on disk.

A kernel takes seconds to compile and a calibration needs a dozen. A task that fails here fails again, and is reported,
in the measurement itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import TypeGuard

import torch

from polyhead.costs.calibration.calls import layer_call, timed_calls
from polyhead.costs.calibration.timing import undisturbed
from polyhead.costs.measuring.machine_facts import usable_cores
from polyhead.costs.timing.limits import route
from polyhead.costs.work import AttentionCore, Piece, Work
from polyhead.costs.workload import Workload
from polyhead.layers import MultiHeadConfig

MAX_WORKERS = 12
MAX_SECONDS = 45.0
MAX_BYTES = 1 << 30  # of one piece, since a dozen processes share the memory of one GPU
MIN_TASKS = 2  # fewer are compiled sooner on demand than in a process that has to start first

Task = tuple[Callable[..., None], tuple[object, ...]]


def compile_ahead(tasks: Sequence[Task], device: torch.device) -> int:
    """Run the tasks in other processes, wait for them, and return the number of successful ones."""
    workers = min(len(tasks), MAX_WORKERS, max(usable_cores() - 2, 1))
    if device.type != "cuda" or len(tasks) < MIN_TASKS or workers < MIN_TASKS:
        return 0
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    with _without_missing_script():
        futures = [pool.submit(function, *arguments) for function, arguments in tasks]
    done, _ = wait(futures, MAX_SECONDS)
    pool.shutdown(wait=len(done) == len(futures), cancel_futures=True)
    return sum(future.exception() is None for future in done)


@contextlib.contextmanager
def _without_missing_script() -> Iterator[None]:
    """Hide the file of the main program if it does not exist (a piped program): a new process would try to run it."""
    program = sys.modules["__main__"]
    file = getattr(program, "__file__", None)
    if file is None or Path(file).exists():
        yield
        return
    del program.__file__
    try:
        yield
    finally:
        program.__file__ = file


def piece_tasks(pieces: Iterable[Piece]) -> list[Task]:
    """Return a task for each of our kernels among the pieces; it runs the smaller ones, whatever their sizes."""
    by_kernel: dict[tuple[object, ...], list[AttentionCore]] = {}
    for piece in pieces:
        if _is_ours(piece):
            kernel = (piece.direction, piece.head_dim, piece.heads // piece.kv_heads, piece.dtype)
            by_kernel.setdefault(kernel, []).append(piece)
    tasks: list[Task] = []
    for group in by_kernel.values():
        smallest = min(group, key=lambda piece: piece.bytes)
        tasks.append((run_pieces, (tuple(x for x in group if x is smallest or x.bytes <= MAX_BYTES),)))
    return tasks


def layer_tasks(config: MultiHeadConfig, workload: Workload, work: Work, dtype: torch.dtype) -> list[Task]:
    """Return a task that runs a layer if our kernels serve it, else none."""
    return [(run_layer, (config, workload, dtype))] if any(map(_is_ours, work.pieces)) else []


def _is_ours(piece: Piece) -> TypeGuard[AttentionCore]:
    """Return True if our kernels serve a piece on a GPU; PyTorch's need no compilation."""
    return isinstance(piece, AttentionCore) and (piece.direction == "decode" or route(piece, "cuda") == "tiled")


def run_pieces(pieces: Sequence[AttentionCore]) -> None:
    device = torch.device("cuda")
    with undisturbed():
        for piece in pieces:
            timed_calls(piece, device, copies=1)[0]()
        torch.cuda.synchronize(device)


def run_layer(config: MultiHeadConfig, work: Workload, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    with undisturbed():
        layer_call(config, work, device=device, dtype=dtype)()
        torch.cuda.synchronize(device)

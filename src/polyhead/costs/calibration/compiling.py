"""Kernels of ours compiled side by side before anything is timed, into the cache that Triton keeps on disk.

One kernel takes seconds to compile and a calibration meets a dozen, so a few processes share them. Whatever fails here
is met again, and told, by the measurement itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path

import torch

from polyhead.costs.calibration.calls import calls_of
from polyhead.costs.calibration.layers import layer_call
from polyhead.costs.calibration.timing import undisturbed
from polyhead.costs.measuring.machine_facts import usable_cores
from polyhead.costs.timing.limits import route
from polyhead.costs.work import AttentionCore, Piece
from polyhead.costs.workload import Workload
from polyhead.layers import MultiHeadConfig

MOST_WORKERS = 12
MOST_SECONDS = 45.0
MOST_BYTES = 1 << 30  # of one piece, where a dozen processes share the memory of one GPU
FEWEST_TASKS = 2  # fewer are compiled sooner by who meets them than by a process that has to start first

Task = tuple[Callable[..., None], tuple[object, ...]]


def compile_ahead(tasks: Sequence[Task], device: torch.device) -> int:
    """Run the tasks in other processes and wait for them; how many went well."""
    workers = min(len(tasks), MOST_WORKERS, max(usable_cores() - 2, 1))
    if device.type != "cuda" or len(tasks) < FEWEST_TASKS or workers < FEWEST_TASKS:
        return 0
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    with _without_a_script():
        futures = [pool.submit(function, *arguments) for function, arguments in tasks]
    done, _ = wait(futures, MOST_SECONDS)
    pool.shutdown(wait=len(done) == len(futures), cancel_futures=True)
    return sum(future.exception() is None for future in done)


@contextlib.contextmanager
def _without_a_script() -> Iterator[None]:
    """A process begins with the file of the program that starts it; a program that was piped in names one in vain."""
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
    """A task for each kernel of ours among them, with its smaller pieces: it is not compiled for their sizes."""
    found: dict[tuple[object, ...], list[AttentionCore]] = {}
    for piece in pieces:
        if isinstance(piece, AttentionCore) and is_ours(piece):
            kernel = (piece.direction, piece.head_dim, piece.heads // piece.kv_heads, piece.dtype)
            found.setdefault(kernel, []).append(piece)
    tasks: list[Task] = []
    for group in found.values():
        smallest = min(group, key=lambda piece: piece.bytes)
        tasks.append((run_pieces, (tuple(x for x in group if x is smallest or x.bytes <= MOST_BYTES),)))
    return tasks


def layer_task(config: MultiHeadConfig, work: Workload, dtype: torch.dtype) -> Task:
    return run_layer, (config, work, dtype)


def is_ours(piece: AttentionCore) -> bool:
    """Return True if our kernels serve it on a GPU; PyTorch's need no compilation."""
    return piece.direction == "decode" or route(piece, "cuda") == "tiled"


def run_pieces(pieces: Sequence[AttentionCore]) -> None:
    device = torch.device("cuda")
    with undisturbed():
        for piece in pieces:
            calls_of(piece, device, copies=1)[0]()
        torch.cuda.synchronize(device)


def run_layer(config: MultiHeadConfig, work: Workload, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    with undisturbed():
        layer_call(config, work, device=device, dtype=dtype)()
        torch.cuda.synchronize(device)

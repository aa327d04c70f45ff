"""Calibration of a machine: a short set of products, copies, attention kernels and small layers, timed and kept."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from polyhead.costs.calibration.calls import calls_of
from polyhead.costs.calibration.compiling import Task, compile_ahead, is_ours, layer_task, piece_tasks
from polyhead.costs.calibration.host import Host, SmallLayer, small_layers
from polyhead.costs.calibration.places import ALWAYS, CPU, GPU, Grid, Group, brief_group, groups
from polyhead.costs.calibration.timing import device_seconds, undisturbed
from polyhead.costs.measuring import machine_facts as described
from polyhead.costs.measuring.runner import is_out_of_memory
from polyhead.costs.timing.limits import route
from polyhead.costs.timing.machine import HostCost, Machine, Route, Sample
from polyhead.costs.timing.predict import predict_piece
from polyhead.costs.work import AttentionCore, Device, Piece, Product
from polyhead.errors import OptionError
from polyhead.progress import Progress, ProgressCallback, ignore_progress

__all__ = ["calibrate", "planned"]

SECONDS = {"cuda": 46.0, "cpu": 150.0}
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32,)}  # measured unless given
EVERY = 2  # groups after which the host is visited again
WARM_SECONDS = 0.5
CROWDED = 32 << 30  # bytes kept back by the allocator after which they are given back


def calibrate(
    device: torch.device | str | None = None,
    *,
    name: str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    grid: Grid | None = None,
    seconds: float | None = None,
    keep: Path | None = None,
    commit: str | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Machine:
    """Measure a device: about a minute and a half on an H200, two or three minutes on two slow cores.

    Args:
        device: the GPU if there is one, the CPU otherwise.
        name: what the machine is to be called; made from what it calls itself by default.
        dtypes: the first is measured in full, others briefly. By default bfloat16, float16 and float32 on a GPU and
            float32 on a CPU.
        grid: the sizes, for the first dtype.
        seconds: for the pieces of work, compiling and small layers apart. What does not fit is left out, all but the
            largest and smallest of each group, and the prediction goes over what there is.
        keep: a file that holds what is known so far, written again after every group.
        commit: what is measured, for a copy of the source without its repository.
        progress: called before each measurement.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cuda", "cpu"):
        raise OptionError(f"a CUDA device or the CPU can be calibrated, got {device}")
    dtypes = DTYPES[device.type] if dtypes is None else dtypes
    todo, small = planned(device, dtypes, grid), list(small_layers(device))
    visits = 1 + -(-len(todo) // EVERY)
    report = _Report(progress, visits * len(small) + sum(len(group.pieces) for group in todo))
    began = time.perf_counter()
    with undisturbed():
        report("compiling")
        tasks = _tasks(todo, small, dtypes[0])
        ready = {"compiled_ahead": compile_ahead(tasks, device), "to_compile": len(tasks)}
        _warm_up(device)
        host = Host(small, device, dtypes[0])
        samples: list[Sample] = []

        def known() -> Machine:
            facts = {**_facts(device, commit), **(ready if device.type == "cuda" else {})}
            facts |= {"seconds": round(time.perf_counter() - began, 1)}
            sizes = _processors(device), _memory(device), host.launch_seconds
            return Machine(name or _name(device), _kind(device), *sizes, tuple(samples), host.costs, facts)

        left = SECONDS[device.type] if seconds is None else seconds
        for number, group in enumerate(todo):
            if number % EVERY == 0:
                host.visit(report.step)
            started = time.perf_counter()
            until = started + _part(left, todo[number:])
            for i, piece in enumerate(group.pieces):
                if i < ALWAYS or time.perf_counter() < until:
                    report(_words(piece))
                    found = _sample(piece, device)
                    samples += [] if found is None else [found]
                report.done += 1
            left -= time.perf_counter() - started
            if keep is not None:
                known().save(keep)
        host.visit(report.step)
        machine = known()
    machine = machine if device.type == "cuda" else _without_work(machine, small, dtypes[0])
    if keep is not None:
        machine.save(keep)
    return machine


def planned(device: torch.device, dtypes: Sequence[torch.dtype], grid: Grid | None = None) -> list[Group]:
    """All that a calibration of this device times, in its order."""
    usual, kind = (GPU if device.type == "cuda" else CPU), _kind(device)
    return groups(grid or usual, dtypes[0], kind) + [brief_group(dtype, kind) for dtype in dtypes[1:]]


@dataclass
class _Report:
    """Progress callback of a calibration."""

    progress: ProgressCallback
    total: int
    done: int = 0

    def __call__(self, what: str) -> None:
        self.progress(Progress("calibrate", self.done, self.total, "measurements", what))

    def step(self, what: str) -> None:
        """The next of several that nothing leaves out."""
        self(what)
        self.done += 1


def _part(seconds: float, groups: Sequence[Group]) -> float:
    """The first group's share of the remaining seconds; unused time is left to those after it."""
    return max(seconds, 0.0) * groups[0].share / sum(group.share for group in groups)


def _tasks(todo: Sequence[Group], small: Iterable[SmallLayer], dtype: torch.dtype) -> list[Task]:
    tasks = piece_tasks(piece for group in todo for piece in group.pieces)
    for layer in small:
        cores = [piece for piece in layer.counted(dtype).pieces if isinstance(piece, AttentionCore)]
        tasks += [layer_task(layer.config, layer.work, dtype)] if any(map(is_ours, cores)) else []
    return tasks


def _sample(piece: Piece, device: torch.device) -> Sample | None:
    """None where there is no memory for it, or where what was timed is the call and not the kernel."""
    is_backward = isinstance(piece, AttentionCore) and piece.direction == "backward"
    try:
        seconds = device_seconds(calls_of(piece, device), device, graphs=not is_backward)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        seconds = None
    if device.type == "cuda":
        gc.collect(0)
        if torch.cuda.memory_reserved(device) > CROWDED:
            torch.cuda.empty_cache()
    return None if seconds is None else Sample(piece, seconds, _served(piece, device))


def _served(piece: Piece, device: torch.device) -> Route:
    return route(piece, _kind(device)) if isinstance(piece, AttentionCore) else "plain"


def _kind(device: torch.device) -> Device:
    return "cuda" if device.type == "cuda" else "cpu"


def _warm_up(device: torch.device) -> None:
    """A GPU that was idle runs slowly at first."""
    if device.type != "cuda":
        return
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize(device)


def _without_work(found: Machine, small: Iterable[SmallLayer], dtype: torch.dtype) -> Machine:
    """On a CPU a small layer's call and its work take turns; what was computed is taken off."""
    costs: list[HostCost] = []
    for layer, cost in zip(small, found.host, strict=True):
        computed = sum(predict_piece(piece, found).seconds for piece in layer.counted(dtype).pieces)
        costs.append(dataclasses.replace(cost, seconds=max(cost.seconds - computed, 0.0)))
    return dataclasses.replace(found, host=tuple(costs))


def _facts(device: torch.device, commit: str | None) -> dict[str, object]:
    return {"processor": _processor(device), **described.describe(device, commit)}


def _processor(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else described.cpu_model()


def _name(device: torch.device) -> str:
    processor = _processor(device)
    if device.type == "cpu":
        processor = f"{processor} {_processors(device)} cores"
    return re.sub(r"[^a-z0-9]+", "-", processor.lower()).strip("-")


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return min(described.usable_cores(), torch.get_num_threads())


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _words(piece: Piece) -> str:
    if isinstance(piece, Product):
        return f"product {piece.rows} x {piece.inner} x {piece.columns}"
    if isinstance(piece, AttentionCore):
        return f"{piece.direction} {piece.batch} x {piece.heads}/{piece.kv_heads} x {piece.keys} x {piece.head_dim}"
    return f"copy of {piece.bytes >> 10} KiB"

"""Calibration of a machine: products, copies, attention kernels and small layers are timed in a few minutes."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import time
from collections.abc import Iterable, Sequence

import torch

from polyhead.costs.calibration.calls import timed_calls
from polyhead.costs.calibration.compiling import compile_ahead, layer_tasks, piece_tasks
from polyhead.costs.calibration.host import Host, SmallLayer, small_layers
from polyhead.costs.calibration.timed_pieces import ALWAYS, CPU, GPU, Grid, Group, brief_group, groups
from polyhead.costs.calibration.timing import device_seconds, undisturbed
from polyhead.costs.measuring import machine_facts
from polyhead.costs.timing.limits import route
from polyhead.costs.timing.machine import HostCost, Machine, Sample
from polyhead.costs.timing.predict import predict_piece
from polyhead.costs.work import AttentionCore, Device, Piece, Product
from polyhead.errors import OptionError
from polyhead.out_of_memory import is_out_of_memory
from polyhead.progress import Progress, ProgressCallback, ignore_progress

__all__ = ["calibrate", "planned"]

SECONDS = {"cuda": 46.0, "cpu": 150.0}
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32,)}  # measured unless given
EVERY = 2  # groups after which the host is timed again
WARM_SECONDS = 0.5
CROWDED = 32 << 30  # bytes reserved by the allocator above which its cache is emptied


def calibrate(
    device: torch.device | str | None = None,
    *,
    name: str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    grid: Grid | None = None,
    seconds: float | None = None,
    keep: str | os.PathLike[str] | None = None,
    commit: str | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Machine:
    """Measure a device: about a minute and a half on an H200, two or three minutes on two slow cores.

    Args:
        device: default: the GPU if there is one, else the CPU.
        name: name of the machine; default: made from that of its processor.
        dtypes: the first is measured in full, others briefly; default: bfloat16, float16 and float32 on a GPU, float32
            on a CPU.
        grid: the sizes, for the first dtype.
        seconds: time for the pieces of work, without compilation and small layers. Pieces that do not fit are skipped,
            except the largest and the smallest of each group.
        keep: file to which the machine is saved after every group.
        commit: commit that is measured, for a copy of the source without its repository.
        progress: called before each measurement.

    Returns:
        The machine, whose `save` writes it to a file that `plan(machine=...)` reads.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cuda", "cpu"):
        raise OptionError(f"a CUDA device or the CPU can be calibrated, got {device}")
    dtypes = DTYPES[device.type] if dtypes is None else dtypes
    todo, small = planned(device, dtypes, grid), list(small_layers(device))
    visits = 1 + -(-len(todo) // EVERY)
    done, total = 0, visits * len(small) + sum(len(group.pieces) for group in todo)

    def report(detail: str) -> None:
        progress(Progress("calibrate", done, total, "measurements", detail))

    def report_step(detail: str) -> None:
        nonlocal done
        report(detail)
        done += 1

    began = time.perf_counter()
    with undisturbed():
        report("compiling")
        tasks = piece_tasks(piece for group in todo for piece in group.pieces)
        for layer in small:
            tasks += layer_tasks(layer.config, layer.workload, layer.work(dtypes[0]), dtypes[0])
        ready = {"compiled_ahead": compile_ahead(tasks, device), "to_compile": len(tasks)}
        _warm_up(device)
        host = Host(small, device, dtypes[0])
        samples: list[Sample] = []

        def known() -> Machine:
            facts = {"processor": _processor(device), **machine_facts.describe(device, commit)}
            facts |= ready if device.type == "cuda" else {}
            facts |= {"seconds": round(time.perf_counter() - began, 1)}
            sizes = _processors(device), _memory(device), host.launch_seconds
            return Machine(name or _name(device), _kind(device), *sizes, tuple(samples), host.costs, facts)

        left = SECONDS[device.type] if seconds is None else seconds
        for number, group in enumerate(todo):
            if number % EVERY == 0:
                host.visit(report_step)
            started = time.perf_counter()
            until = started + _part(left, todo[number:])
            for i, piece in enumerate(group.pieces):
                if i < ALWAYS or time.perf_counter() < until:
                    report(_words(piece))
                    sample = _sample(piece, device)
                    samples += [] if sample is None else [sample]
                done += 1
            left -= time.perf_counter() - started
            if keep is not None:
                known().save(keep)
        host.visit(report_step)
        machine = known()
    machine = machine if device.type == "cuda" else _without_work(machine, small, dtypes[0])
    if keep is not None:
        machine.save(keep)
    return machine


def planned(device: torch.device, dtypes: Sequence[torch.dtype], grid: Grid | None = None) -> list[Group]:
    """Return all groups of pieces that a calibration of this device times, in order.

    Args:
        device: device to be calibrated.
        dtypes: dtypes of matrix products and attention.
        grid: sizes of the pieces; those of `calibrate` by default.
    """
    usual, kind = (GPU if device.type == "cuda" else CPU), _kind(device)
    return groups(grid or usual, dtypes[0], kind) + [brief_group(dtype, kind) for dtype in dtypes[1:]]


def _part(seconds: float, groups: Sequence[Group]) -> float:
    """Return the first group's share of the remaining seconds; unused time is left to those after it."""
    return max(seconds, 0.0) * groups[0].share / sum(group.share for group in groups)


def _sample(piece: Piece, device: torch.device) -> Sample | None:
    """Time a piece; None if memory does not suffice, or if the host took as long as the kernel."""
    is_backward = isinstance(piece, AttentionCore) and piece.direction == "backward"
    try:
        seconds = device_seconds(timed_calls(piece, device), device, graphs=not is_backward)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        seconds = None
    if device.type == "cuda":
        gc.collect(0)
        if torch.cuda.memory_reserved(device) > CROWDED:
            torch.cuda.empty_cache()
    if seconds is None:
        return None
    return Sample(piece, seconds, route(piece, _kind(device)) if isinstance(piece, AttentionCore) else "plain")


def _kind(device: torch.device) -> Device:
    return "cuda" if device.type == "cuda" else "cpu"


def _warm_up(device: torch.device) -> None:
    """Run products for a while: a GPU that was idle runs slowly at first."""
    if device.type != "cuda":
        return
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize(device)


def _without_work(machine: Machine, small: Iterable[SmallLayer], dtype: torch.dtype) -> Machine:
    """Subtract the predicted work of the small layers: on a CPU it runs in sequence with the call."""
    costs: list[HostCost] = []
    for layer, cost in zip(small, machine.host, strict=True):
        computed = sum(predict_piece(piece, machine).seconds for piece in layer.work(dtype).pieces)
        costs.append(dataclasses.replace(cost, seconds=max(cost.seconds - computed, 0.0)))
    return dataclasses.replace(machine, host=tuple(costs))


def _processor(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine_facts.cpu_model()


def _name(device: torch.device) -> str:
    processor = _processor(device)
    if device.type == "cpu":
        processor = f"{processor} {_processors(device)} cores"
    return re.sub(r"[^a-z0-9]+", "-", processor.lower()).strip("-")


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return min(machine_facts.usable_cores(), torch.get_num_threads())


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

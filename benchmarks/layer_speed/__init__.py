"""Whole layers against other implementations: each figure of benchmarks/RESULTS.md, measured on the machine at hand."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from benchmarks.layer_speed import decode, layer, masked, overhead
from benchmarks.layer_speed.contenders import Shape
from benchmarks.measuring.cases import Case, Run, Step
from polyhead.costs.measuring import machine_facts
from polyhead.costs.measuring.runner import ALTERNATIONS

SHAPES = {
    "cpu": ("2x10x512x8", "8x128x768x12", "2x1024x768x12", "1x4096x512x8"),
    "cuda": ("32x512x768x12", "8x2048x1024x16", "2x8192x2048x16", "1x32768x4096x32"),
}
BENCHES: Mapping[str, Callable[[Run, Shape], Iterator[Case]]] = {
    "layer": layer.layer,
    "causal": layer.causal,
    "padded": layer.padded,
    "guard": masked.guard,
    "decode": decode.decode,
    "overhead": overhead.overhead,
}
PARTS = tuple(BENCHES)
QUICK_ALTERNATIONS = 5


def plan(
    only: Sequence[str], shapes: Sequence[Shape] | None, *, device: torch.device, quick: bool, seed: int
) -> list[Step]:
    """Return the steps of every part at every shape; the overhead has small shapes of its own."""
    run = Run.on(device, seed=seed, quick=quick, alternations=QUICK_ALTERNATIONS if quick else ALTERNATIONS)
    places = shapes or [Shape.parse(text) for text in SHAPES[device.type]]
    return [
        Step(part, str(shape), run, functools.partial(BENCHES[part], run, shape))
        for part in only
        for shape in (places if part != "overhead" else places[:1])
    ]


def file_name(device: torch.device, *, quick: bool, part: bool) -> str:
    """Return the name of a machine's file; that of a quick or a partial run is another."""
    words = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{machine_facts.cpu_model()} {machine_facts.usable_cores()} cores"
    )
    name = f"{device.type}-" + re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return name + "-quick" * quick + "-partial" * part + ".json"

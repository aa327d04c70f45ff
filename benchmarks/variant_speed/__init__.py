"""Cost of attention variants: each figure of benchmarks/RESULTS.md, measured on the machine at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.measuring.cases import Case, Run, Step, masked_name
from benchmarks.variant_speed import floors, latent, routed, talking
from polyhead.errors import OptionError

PARTS = ("routed", "rows", "talking", "latent", "floors")
_SECONDS, _QUICK_SECONDS = 1.5, 0.5  # of one place, warming up apart


def plan(only: Sequence[str] = PARTS, *, quick: bool = False, seed: int = 0, gpu: torch.device | None) -> list[Step]:
    """Return the steps of a run in the order of `PARTS`; none without a GPU, whose kernels they time."""
    if unknown := [name for name in only if name not in PARTS]:
        raise OptionError(f"a part is one of {', '.join(PARTS)}; got {', '.join(unknown)}")
    if gpu is None:
        return []
    run = Run.on(gpu, seed=seed, quick=quick, seconds=_QUICK_SECONDS if quick else _SECONDS)
    steps = []
    for part in PARTS:
        if part in only:
            steps += [Step(part, place, run, cases) for place, cases in _places(part, run, quick)]
    return steps


def _places(part: str, run: Run, quick: bool) -> Iterator[tuple[str, Callable[[], Iterator[Case]]]]:
    if part == "routed":
        for causal in (False, True):
            layer = routed.Place(tokens=1024, width=1024) if quick else routed.Place()
            yield masked_name(layer, causal), functools.partial(routed.layers, run, layer, causal)
    elif part == "rows":
        for causal in (False, True):
            place = routed.Place(tokens=1024) if quick else routed.Place()
            yield masked_name(place, causal), functools.partial(routed.chosen_rows, run, place, causal)
    elif part == "talking":
        for tokens in (2048,) if quick else (2048, 4096, 8192):
            yield f"{tokens} tokens", functools.partial(talking.talking, run, tokens)
    elif part == "latent":
        for heads in (16, 128):
            cache = latent.Place(heads, batch=4, tokens=4096) if quick else latent.Place(heads)
            yield str(cache), functools.partial(latent.one_token, run, cache)
    else:
        for name in floors.VARIANTS:
            yield name, functools.partial(floors.layer, run, name, quick=quick)

"""Cost of the distributed paths in a group of one rank, over the same calls without a group.

With one rank nothing is sent, so that what is left is the work around the collectives: splitting, merging, comparing
arguments, DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import polyhead
from benchmarks.measuring.agreement import Disagreement
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, Step
from polyhead.layers.positions import Rotary
from polyhead.layers.transformer import LanguageModel
from polyhead.parallel import HeadParallel, context_attention, head_parallel_plan

ALONE = "without a group"
TENSOR = "polyhead, HeadParallel"
WHOLE = "polyhead, head_parallel_plan"  # PyTorch's own styles for the feed-forward networks as well
METHODS: dict[str, tuple[Any, bool]] = {
    f"polyhead, {method}{'' if check else ', unchecked'}": (method, check)
    for method in ("all_gather", "ring")
    for check in (True, False)
}
STATISTICS = ("entropy", "max_logit", "mean_distance")
PARTS = ("tensor", "context")
BOUND = 1.03
QUICK: dict[str, Any] = {"seconds": 1.0}
DIM = "ranks"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Width, layers, heads, batch, tokens; and batch, heads, tokens, head_dim.
MODELS = {"cuda": ((2048, 4, 16, 2, 2048), (2048, 4, 16, 1, 8192)), "cpu": ((32, 1, 2, 1, 16),)}
CALLS = {"cuda": ((1, 16, 4096, 128), (1, 16, 32768, 128)), "cpu": ((1, 2, 16, 8),)}
VOCABULARY = 1000


def plan(
    only: Sequence[str] = PARTS, *, quick: bool = False, seed: int = 0, gpu: torch.device | None = None
) -> list[Step]:
    """Return the steps of a run: in bfloat16 on a GPU, or else small ones on the CPU, without bounds."""
    run = Run.on(gpu, seed=seed, quick=quick, **(QUICK if quick else {}))
    places: dict[str, tuple[Any, Any]] = {"tensor": (MODELS, tensor), "context": (CALLS, context)}
    steps = []
    for part in PARTS:
        sizes, measure = places[part]
        for size in sizes[run.device.type][: 1 if quick else None] if part in only else ():
            place = "x".join(map(str, size))
            steps.append(
                Step(
                    part, place, run, functools.partial(_in_a_group, functools.partial(measure, run, size), run.device)
                )
            )
    return steps


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Return a context with a process group of this process alone: NCCL on a GPU, gloo on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _in_a_group(cases: Callable[[], Iterator[Case]], device: torch.device) -> Iterator[Case]:
    with one_rank(device):
        yield from cases()


def tensor(run: Run, size: tuple[int, ...]) -> Iterator[Case]:
    """Yield forward and backward of a language model whose layers are distributed by `head_parallel_plan`."""
    width, layers, heads, batch, tokens = size
    torch.manual_seed(run.seed)
    with torch.device(run.device):
        alone = LanguageModel(VOCABULARY, width, heads, layers, positions=Rotary(width // heads)).to(run.dtype)
    generator = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(VOCABULARY, (batch, tokens), generator=generator).to(run.device)
    mesh = init_device_mesh(run.device.type, (1,), mesh_dim_names=(DIM,))
    found, expected = Entrants(), _step(alone, ids)()
    found.enter(ALONE, lambda: _step(alone, ids))
    plans: dict[str, Any] = {TENSOR: {"blocks.*.attention": HeadParallel()}, WHOLE: head_parallel_plan(alone)}
    for name, styles in plans.items():
        split = parallelize_module(deepcopy(alone), mesh, styles)
        found.enter(name, functools.partial(_step, split, ids), functools.partial(_check_tensors, name, expected))
    bound = BOUND if run.device.type == "cuda" else None
    place = f"{layers} layers, {heads} heads of {width // heads}, {batch} x {tokens} tokens"
    yield found.case("forward + backward", place, [Pair(TENSOR, ALONE, bound), Pair(WHOLE, ALONE)])


def _step(model: nn.Module, ids: Tensor) -> Callable[[], list[Tensor]]:
    def call() -> list[Tensor]:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    return call


def context(run: Run, size: tuple[int, ...]) -> Iterator[Case]:
    """Yield context-parallel attention with statistics, without and with the backward."""
    leaves = [run.inputs(*size, salt=salt).requires_grad_() for salt in range(3)]
    upstream, bound = run.inputs(*size, salt=3), BOUND if run.device.type == "cuda" else None
    options: dict[str, Any] = {"mask": polyhead.Mask.causal(), "statistics": STATISTICS}
    calls = {ALONE: functools.partial(polyhead.attention, **options)} | {
        name: functools.partial(context_attention, method=method, check=check, **options)
        for name, (method, check) in METHODS.items()
    }
    for bench, build in (("forward", _forward), ("forward + backward", _backward)):
        found, expected = Entrants(), build(calls[ALONE], leaves, upstream)()
        for name, call in calls.items():
            found.enter(
                name,
                functools.partial(build, call, leaves, upstream),
                functools.partial(_check_tensors, name, expected),
            )
        yield found.case(bench, "x".join(map(str, size)), [Pair(name, ALONE, bound) for name in METHODS])


def _forward(
    call: Callable[..., polyhead.AttentionOutput], leaves: list[Tensor], _: Tensor
) -> Callable[[], list[Tensor]]:
    def forward() -> list[Tensor]:
        with torch.no_grad():
            return _tensors(call(*leaves))

    return forward


def _backward(
    call: Callable[..., polyhead.AttentionOutput], leaves: list[Tensor], upstream: Tensor
) -> Callable[[], list[Tensor]]:
    def step() -> list[Tensor]:
        found = _tensors(call(*leaves))
        return [*found, *torch.autograd.grad(found[0], leaves, upstream)]

    return step


def _tensors(result: polyhead.AttentionOutput) -> list[Tensor]:
    assert result.statistics is not None
    return [result.output, *(getattr(result.statistics, name) for name in STATISTICS)]


def _check_tensors(name: str, expected: list[Tensor], found: list[Tensor]) -> None:
    """Raise unless the results are those without a group, up to the order of sums."""
    for one, other in zip(found, expected, strict=True):
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        error = (
            whole.detach().double() - other.detach().double()
        ).abs().max() / other.detach().double().abs().max().clamp_min(1e-30)
        if not error <= TOLERANCE[other.dtype]:
            raise Disagreement(f"{name} differs by {float(error):.1e} of the largest value")

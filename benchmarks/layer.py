"""Whole layers against each other: forward and training step, plain, causal and padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import agreement
from benchmarks.contenders import (
    CONTENDERS,
    FLOOR,
    FUSED_QKV,
    OURS,
    PLAIN,
    THREE_LINEAR,
    TORCH,
    Setting,
    Shape,
    Unavailable,
    Weights,
)
from benchmarks.results import Row
from benchmarks.runner import ALTERNATIONS, OUT_OF_MEMORY, Timings, alternate, is_out_of_memory

FLOOR_BOUND = 1.05
TORCH_BOUND = 1.0
WITHOUT_GUESTS = (OURS, TORCH, FUSED_QKV, THREE_LINEAR)


@dataclass(frozen=True)
class Run:
    """What one run of the benchmarks is made with."""

    device: torch.device
    dtype: torch.dtype
    alternations: int = ALTERNATIONS
    seed: int = 0

    def inputs(self, *size: int, salt: int = 0) -> Tensor:
        """Random numbers, never zeros: some processors are faster on zeros."""
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(*size, generator=generator).to(self.device, self.dtype)

    def time(self, calls: dict[str, Callable[[], object]], absent: dict[str, str] | None = None) -> Timings:
        return alternate(
            calls, device=self.device, alternations=self.alternations, seed=self.seed, absent=absent
        )  # fmt: skip


def layer(run: Run, shape: Shape) -> Iterator[Row]:
    """Self-attention without a mask, every contender; this is what the bounds are about."""
    yield from _rows("layer", run, shape, PLAIN, tuple(CONTENDERS), bounded=True)


def causal(run: Run, shape: Shape) -> Iterator[Row]:
    """The same with a causal mask, held to the same bounds."""
    yield from _rows("causal", run, shape, Setting(causal=True), WITHOUT_GUESTS, bounded=True)


def padded(run: Run, shape: Shape) -> Iterator[Row]:
    """A right-padded batch. The others trust the padding to be finite; ours does not, so there is no bound here."""
    yield from _rows("padded", run, shape, Setting(lengths=padding(run, shape)), WITHOUT_GUESTS, bounded=False)


def padding(run: Run, shape: Shape) -> Tensor:
    """Lengths from half of the tokens to all of them, [batch]; the first sequence is full if there are several."""
    generator = torch.Generator().manual_seed(run.seed)
    lengths = torch.randint((shape.tokens + 1) // 2, shape.tokens + 1, (shape.batch,), generator=generator)
    if shape.batch > 1:
        lengths[0] = shape.tokens
    return lengths.to(run.device)


def _rows(
    bench: str, run: Run, shape: Shape, setting: Setting, names: tuple[str, ...], *, bounded: bool
) -> Iterator[Row]:
    weights = Weights.random(shape, device=run.device, dtype=run.dtype, seed=run.seed)
    x = run.inputs(shape.batch, shape.tokens, shape.embed_dim, salt=1)
    modules, absent, errors = _checked(run, x, weights, setting, names)
    upstream = run.inputs(*x.shape, salt=2)
    for mode in ("forward", "forward + backward"):
        step = _forward if mode == "forward" else _training_step
        calls = {name: step(module, x, upstream) for name, module in modules.items()}
        for module in modules.values():
            module.train(mode != "forward")
        timings = run.time(calls, absent)
        floor = timings.fastest(*FLOOR)
        yield Row.of(
            f"{bench}, {mode}",
            str(shape),
            run.dtype,
            timings,
            [
                timings.compare(OURS, floor, FLOOR_BOUND if bounded else None),
                timings.compare(OURS, TORCH, TORCH_BOUND if bounded else None),
                *(timings.compare(OURS, name) for name in names if name not in (OURS, TORCH, floor)),
            ],
            notes={"floor": floor, "largest_error": errors},
        )
        for module in modules.values():
            module.zero_grad(set_to_none=True)


def _checked(
    run: Run, x: Tensor, weights: Weights, setting: Setting, names: tuple[str, ...]
) -> tuple[dict[str, nn.Module], dict[str, str], dict[str, float]]:
    """The contenders that exist here and compute the same function; one that computes another raises."""
    modules, absent, errors = {}, {}, {}
    for name in names:
        build = CONTENDERS[name]
        try:
            module = build(weights, setting)
        except Unavailable as missing:
            absent[name] = str(missing)
            continue
        # A layer may take one path in eval and another in training, and run out of memory on one alone.
        found = [_output_error(name, module.train(training), run, x, weights, setting) for training in (False, True)]
        fitting = [error for error in found if error is not None]
        if not fitting:
            absent[name] = OUT_OF_MEMORY
            continue
        agreement.check_gradients(name, build, x, weights, setting, run.seed)
        modules[name], errors[name] = module, max(fitting)
    return modules, absent, errors


def _output_error(
    name: str, module: nn.Module, run: Run, x: Tensor, weights: Weights, setting: Setting
) -> float | None:
    """The largest error of the output; None where there is not enough memory for it."""
    try:
        return agreement.check_output(name, module, x, weights, setting, run.seed).error
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _forward(module: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            module(x)

    return call


def _training_step(module: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], object]:
    leaf = x.detach().clone().requires_grad_()
    parameters = [leaf, *module.parameters()]

    def call() -> None:
        for parameter in parameters:
            parameter.grad = None
        module(leaf).backward(upstream)

    return call

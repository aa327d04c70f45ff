"""Whole layers against each other: forward and training step, plain, causal and padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    TRUSTING,
    Setting,
    Shape,
    Unavailable,
    Weights,
)
from benchmarks.measuring.results import Row
from polyhead.costs.measuring.runner import OUT_OF_MEMORY, Run, is_out_of_memory

FLOOR_BOUND = 1.05
TORCH_BOUND = 1.0
WITHOUT_GUESTS = (OURS, TORCH, FUSED_QKV, THREE_LINEAR)
MASKED = (*WITHOUT_GUESTS, TRUSTING)


def layer(run: Run, shape: Shape) -> Iterator[Row]:
    """Self-attention without a mask, every contender; this is what the bounds are about."""
    names = tuple(name for name in CONTENDERS if name != TRUSTING)  # without a mask there is nothing to guard
    yield from _rows("layer", run, shape, PLAIN, names, bounded=OURS)


def causal(run: Run, shape: Shape) -> Iterator[Row]:
    """The same with a causal mask. The others trust their input to be finite, so ours is held to the bounds where it
    trusts it too; what the guard against NaN costs stands beside it."""
    yield from _rows("causal", run, shape, Setting(causal=True), MASKED, bounded=TRUSTING)


def padded(run: Run, shape: Shape) -> Iterator[Row]:
    """A right-padded batch, in the same way."""
    yield from _rows("padded", run, shape, Setting(lengths=padding(run, shape)), MASKED, bounded=TRUSTING)


def padding(run: Run, shape: Shape) -> Tensor:
    """Lengths from half of the tokens to all of them, [batch]; the first sequence is full if there are several."""
    generator = torch.Generator().manual_seed(run.seed)
    lengths = torch.randint((shape.tokens + 1) // 2, shape.tokens + 1, (shape.batch,), generator=generator)
    if shape.batch > 1:
        lengths[0] = shape.tokens
    return lengths.to(run.device)


def _rows(
    bench: str, run: Run, shape: Shape, setting: Setting, names: tuple[str, ...], *, bounded: str
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
        told = {floor, TORCH} if bounded == OURS else set()
        yield Row.of(
            f"{bench}, {mode}",
            str(shape),
            run.dtype,
            timings,
            [
                timings.compare(bounded, floor, FLOOR_BOUND),
                timings.compare(bounded, TORCH, TORCH_BOUND),
                *(timings.compare(OURS, name) for name in names if name != OURS and name not in told),
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

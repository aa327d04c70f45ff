"""Calls of layers as they are timed: forward alone, or forward and backward with gradients of input and parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks.measuring.agreement import hold
from benchmarks.measuring.cases import Case, Entrants, Pair, Run
from polyhead.costs.measuring.gpu import TIMES_L2, replayed

FORWARD, TRAINING = "forward", "forward + backward"
WITH_PYTHON = ", with its Python"  # of a call that is no CUDA graph
CHECKED_TOKENS = 256  # of which the formula is computed in float64

Call = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Return a context with another default dtype of new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def caches_beyond(l2: int, cache: int) -> int:
    """Return how many KV caches of `cache` bytes to read in turn so that none is still in an L2 of `l2` bytes."""
    return max(2, -(-TIMES_L2 * l2 // cache))


def without_gradients(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    return forward


def with_backward(call: Callable[[], Tensor], leaves: Sequence[Tensor], upstream: Tensor) -> Callable[[], Tensor]:
    """Return the call followed by its backward, which leaves the gradients of `leaves` in them."""

    def both() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        output = call()
        output.backward(upstream)
        return output.detach()

    return both


def step(
    call: Call, x: Tensor, upstream: Tensor, parameters: list[nn.Parameter], training: bool
) -> Callable[[], Tensor]:
    """Return the timed function of `call` and its output."""
    if not training:
        return without_gradients(lambda: call(x))
    leaf = x.detach().clone().requires_grad_()
    return with_backward(lambda: call(leaf), (leaf, *parameters), upstream)


def on_its_own(build: Callable[[], Callable[[], Tensor]], device: torch.device) -> Callable[[], Callable[[], Tensor]]:
    """Return the call as a CUDA graph on a GPU, which excludes the time of its Python."""
    if device.type != "cuda":
        return build

    def graphed() -> Callable[[], Tensor]:
        replay = replayed([build()], device)
        return lambda: replay()[0]

    return graphed


def layer_cases(
    bench: str,
    place: str,
    run: Run,
    x: Tensor,
    contenders: Mapping[str, tuple[nn.Module, Call]],
    check: Callable[[str, nn.Module, Call, Tensor], object],
    pairs: Callable[[str, bool], Sequence[Pair]],
) -> Iterator[Case]:
    """Yield forward and training of layers, each as CUDA graphs on a GPU and with the Python of the calls.

    Args:
        bench, place: name of the cases, without their mode, and their shape.
        run: settings of the run.
        x: input of all contenders.
        contenders: by name a layer, whose parameters get gradients, and the function that is timed.
        check: called with each contender and its output before it is timed.
        pairs: returns the comparisons of a mode, with graphs or without.
    """
    upstream = run.inputs(*x.shape, salt=2)
    for mode, graphed in itertools.product((FORWARD, TRAINING), (True, False)):
        found = Entrants()
        for name, (layer, call) in contenders.items():
            build: Callable[[], Callable[[], Tensor]] = functools.partial(
                step, call, x, upstream, list(layer.parameters()), mode == TRAINING
            )
            build = on_its_own(build, run.device) if graphed else build
            found.enter(name, build, functools.partial(check, name, layer, call))
        yield found.case(f"{bench}, {mode}" + ("" if graphed else WITH_PYTHON), place, pairs(mode, graphed))
        for layer, _ in contenders.values():
            layer.zero_grad(set_to_none=True)


def drawn(layer: nn.Module, run: Run) -> nn.Module:
    """Return the layer on the device and in the dtype of a run, with weights that depend on neither."""
    generator = torch.Generator().manual_seed(run.seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            size = parameter.shape[-1] if parameter.ndim < 3 else parameter.shape[-2]
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * (size**-0.5 if parameter.ndim > 1 else 0.1))
    return layer.to(run.device, run.dtype)


def check(
    name: str, layer: nn.Module, call: Callable[[nn.Module, Tensor, str | None], Tensor], found: Call, x: Tensor
) -> None:
    """Check `found` against the layer's formula in float64 on the first tokens of the first sequence.

    `call(layer, x, backend)` is the layer's own forward.
    """
    short = x[:1, :CHECKED_TOKENS]
    with torch.no_grad():
        exact = call(copy.deepcopy(layer).double(), short.double(), "reference")
        plain = call(layer, short, "reference")
        hold(f"{name}: the output", found(short), exact, plain)

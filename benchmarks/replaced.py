"""Latency of our calls with default arguments, Python included, over that of the calls that they replace.

The bounds are those of docs/performance: never slower than the call replaced. On a GPU that is PyTorch's function on
cuDNN, a layer written by hand around it, or the model that nobody observes; on a CPU PyTorch's function.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyhead
from benchmarks import inspection_speed
from benchmarks.layer_speed import agreement
from benchmarks.layer_speed import contenders as layer_contenders
from benchmarks.layer_speed.contenders import FUSED_QKV, PLAIN, TORCH, Polyhead, Weights
from benchmarks.measuring.calls import drawn, without_gradients
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, Step, masked_name
from benchmarks.measuring.verdicts import Figure
from benchmarks.statistics_speed import contenders, decode
from benchmarks.statistics_speed.attention import enter_ours, enter_profile, enter_sdpa, enter_step
from benchmarks.statistics_speed.contenders import CUDNN, PENALTY, PROFILE, WITH, TrainingStep
from benchmarks.statistics_speed.exact import GRADIENT_TOKENS, Exact, Found
from benchmarks.statistics_speed.places import DECODE_STATISTICS, ROW_STATISTICS, Shape
from benchmarks.statistics_speed.problem import Problem
from benchmarks.variant_speed.routed import DENSE, check_routed
from polyhead.layers.variants import RoutedHeads
from polyhead.ops.profile import BlockMap

OURS = "polyhead"
PYTORCH = "scaled_dot_product_attention"
SHORT = Shape.parse("2x8x128x64")  # of which the Python takes longer than the kernels
Both = tuple[float, float]  # bounds without a mask and with a causal one

# Upper bounds of our time over that of the replaced call, by shape.
ATTENTION: dict[str, Mapping[str, Both]] = {
    "cuda": {
        "4x16x4096x128": (1.03, 1.03),
        "3x20/4x3333x96": (1.08, 1.08),
        "16x12x512x64": (1.15, 1.15),
        "1x32/8x32768x128": (0.95, 0.90),
    },
    "cpu": {"2x8x10x64": (1.1, 1.1), "1x8x1024x64": (1.1, 1.1)},
}
STATISTICS: dict[str, Mapping[str, float]] = {
    "cuda": {
        "4x16x4096x128": 1.05,
        "1x16x16384x128": 0.98,
        "1x32/8x32768x128": 0.98,
        "4x32x4096x64": 1.12,
        "1x8x8192x256": 1.10,
        "16x12x512x64": 1.5,
    },
    "cpu": {"1x8x4096x64": 1.3},
}
TRAINING = {"4x16x4096x128": (1.03, 1.25), "2x24x5000x128": (None, 1.35)}  # with statistics; through the entropy
PROFILES = {"4x16x4096x128": 0.75, "1x16x16384x64": 0.85}
DENSE_MASKS = {"4x16x4096x128": (1.0, 1.0), "1x16x16384x128": (1.0, 1.0)}  # forward; forward + backward
DECODE = {"1x32/8x32768x128": 1.05, "16x32/8x8192x128": 1.05, "16x32/1x32768x128": 1.05}
LAYERS: dict[str, Mapping[str, tuple[float, float | None]]] = {  # plain; with statistics
    "cuda": {"32x512x768x12": (1.02, 1.3)},
    "cpu": {"2x1024x768x12": (1.02, None)},
}
ROUTED: Mapping[tuple[int, int, int, int, int], Both] = {  # batch, tokens, width, heads, top_k
    (1, 8192, 4096, 32, 8): (0.50, 0.60),
    (2, 4096, 2048, 16, 4): (0.80, 0.80),
}
OBSERVED = {(32, 64, 4096): 1.08, (16, 128, 4096): 1.08, (32, 64, 131072): 0.97, (16, 128, 131072): 0.97}
MICROSECONDS = {"attention": 3.0, "attention, causal": 3.0, "statistics": 20.0, "forward + backward": 40.0}
PARTS = ("attention", "statistics", "training", "dense", "profile", "decode", "layer", "routed", "observe", "host")
ON_A_CPU = ("attention", "statistics", "layer")
SECONDS, QUICK_SECONDS = 1.5, 0.3


def plan(only: tuple[str, ...] | list[str], *, quick: bool, seed: int, device: torch.device) -> list[Step]:
    """Return the steps of a run; on a CPU those of ON_A_CPU, for a quick look the first shape of each part."""
    run = Run.on(device, seed=seed, quick=quick, seconds=QUICK_SECONDS if quick else SECONDS)
    parts = [part for part in PARTS if part in only and (device.type == "cuda" or part in ON_A_CPU)]
    steps = []
    for part in parts:
        places = list(_places(part, device.type))
        for place, build in places[: 1 if quick else None]:
            steps.append(Step(part, place, run, functools.partial(build, run)))
    return steps


def _places(part: str, kind: str) -> Iterator[tuple[str, Callable[[Run], Iterator[Case]]]]:
    """Yield each place of a part by name, with the function that builds its cases."""
    if part == "attention":
        for text, bounds in ATTENTION[kind].items():
            for causal, bound in zip((False, True), bounds, strict=True):
                yield masked_name(text, causal), functools.partial(attention, text=text, causal=causal, bound=bound)
    elif part in MASKED:
        build, bounds_of = MASKED[part]
        for text, bound in bounds_of(kind).items():
            for causal in (False, True):
                yield masked_name(text, causal), functools.partial(build, text=text, causal=causal, bound=bound)
    elif part == "dense":
        for text, of_dense in DENSE_MASKS.items():
            yield text, functools.partial(dense, text=text, bounds=of_dense)
    elif part == "decode":
        for text, bound in DECODE.items():
            yield text, functools.partial(one_token, text=text, bound=bound)
    elif part == "layer":
        for text, of_layer in LAYERS[kind].items():
            yield text, functools.partial(layer, text=text, bounds=of_layer)
    elif part == "routed":
        for sizes, bounds in ROUTED.items():
            for causal, bound in zip((False, True), bounds, strict=True):
                text = masked_name("x".join(map(str, sizes)), causal)
                yield text, functools.partial(routed, sizes=sizes, causal=causal, bound=bound)
    elif part == "observe":
        for (heads, head_dim, tokens), bound in OBSERVED.items():
            names = (inspection_speed.PLAIN, inspection_speed.ROWS)
            place = inspection_speed.Place(heads, head_dim, tokens, bound, contenders=names)
            yield str(place), functools.partial(inspection_speed.measure, place=place)
    else:
        yield str(SHORT), host


def attention(run: Run, *, text: str, causal: bool, bound: float) -> Iterator[Case]:
    """Yield `attention(query, key, value, mask=...)` without any other argument."""
    found, problem = Entrants(), Problem.draw(run, Shape.parse(text), causal=causal)
    exact = Exact(problem, seed=run.seed)
    found.enter(OURS, lambda: contenders.ours(problem), lambda result: exact.check(OURS, Found(result.output)))
    yield found.case(masked_name("attention", causal), text, [Pair(OURS, _baseline(found, exact), bound)])


def statistics(run: Run, *, text: str, causal: bool, bound: float) -> Iterator[Case]:
    """Yield the output with entropy, max logit and mean distance of every row, against the output alone."""
    found, problem = Entrants(), Problem.draw(run, Shape.parse(text), causal=causal)
    exact = Exact(problem, seed=run.seed)
    ways: dict[str, dict[str, Any]] = {WITH: {"finite": True}, contenders.GUARDED: {}}
    for name, options in ways.items():
        build = functools.partial(contenders.ours, problem, statistics=ROW_STATISTICS, **options)
        enter_ours(found, exact, name, build)
    baseline = _baseline(found, exact)
    yield found.case(
        masked_name("statistics", causal), text, [Pair(WITH, baseline, bound), Pair(contenders.GUARDED, baseline)]
    )


def training(run: Run, *, text: str, causal: bool, bound: tuple[float | None, float]) -> Iterator[Case]:
    """Yield forward + backward with statistics, without and with a gradient through the entropy."""
    problem = Problem.draw(run, Shape.parse(text), causal=causal)
    step, short = TrainingStep(problem, seed=run.seed), TrainingStep(problem.shortened(GRADIENT_TOKENS), seed=run.seed)
    builds: dict[str, Callable[[TrainingStep], Callable[[], tuple[Tensor, ...]]]] = {
        WITH: lambda step: step.ours(backend="auto"),
        PENALTY: lambda step: step.ours(penalty=True, backend="auto"),
        CUDNN: lambda step: step.sdpa(CUDNN),
    }
    found = Entrants()
    for name, build in builds.items():
        enter_step(found, name, build, step, short)
    with_statistics, through_entropy = bound
    pairs = [Pair(WITH, CUDNN, with_statistics), Pair(PENALTY, CUDNN, through_entropy)]
    yield found.case(masked_name("forward + backward", causal), text, pairs)


def dense(run: Run, *, text: str, bounds: Both) -> Iterator[Case]:
    """Yield statistics under a causal mask that is a tensor, as in code that torch.compile traces."""
    problem = Problem.draw(run, Shape.parse(text), causal=True)
    step, short = TrainingStep(problem, seed=run.seed), TrainingStep(problem.shortened(GRADIENT_TOKENS), seed=run.seed)
    exact, found = Exact(problem, seed=run.seed), Entrants()
    enter_ours(found, exact, WITH, functools.partial(_dense_ours, problem))
    found.enter(PYTORCH, functools.partial(_dense_pytorch, problem), lambda output: exact.check(PYTORCH, Found(output)))
    forward, backward = bounds
    yield found.case("dense causal mask", text, [Pair(WITH, PYTORCH, forward)])
    found = Entrants()
    for name, build in ((WITH, _dense_ours), (PYTORCH, _dense_pytorch)):
        enter_step(found, name, functools.partial(_dense_step, build), step, short)
    yield found.case("dense causal mask, forward + backward", text, [Pair(WITH, PYTORCH, backward)])


def _dense_ours(problem: Problem, leaves: tuple[Tensor, ...] | None = None) -> Callable[[], Any]:
    mask = polyhead.Mask.dense(_lower_triangle(problem))
    inputs = (problem.query, problem.key, problem.value) if leaves is None else leaves
    return lambda: polyhead.attention(*inputs, mask=mask, statistics=ROW_STATISTICS, finite=True)


def _dense_pytorch(problem: Problem, leaves: tuple[Tensor, ...] | None = None) -> Callable[[], Tensor]:
    mask, grouped = _lower_triangle(problem), problem.shape.group > 1
    query, key, value = (problem.query, problem.key, problem.value) if leaves is None else leaves
    return lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def _dense_step(build: Callable[..., Any], step: TrainingStep) -> Callable[[], tuple[Tensor, ...]]:
    forward = build(step.problem, step.leaves)

    def call() -> tuple[Tensor, ...]:
        result = forward()
        output = result if isinstance(result, Tensor) else result.output
        return torch.autograd.grad(output, step.leaves, step.upstream)

    return call


def _lower_triangle(problem: Problem) -> Tensor:
    tokens = problem.shape.tokens
    return torch.ones((tokens, tokens), dtype=torch.bool, device=problem.query.device).tril()


def profiles(run: Run, *, text: str, causal: bool, bound: float) -> Iterator[Case]:
    """Yield column sums and a block map of 64 x 64, given the log-sum-exp, against the whole forward."""
    found, problem = Entrants(), Problem.draw(run, Shape.parse(text), causal=causal)
    enter_profile(found, problem, BlockMap(block=(64, 64)))
    yield found.case(masked_name("profile", causal), text, [Pair(PROFILE, _baseline(found, Exact(problem)), bound)])


# Parts with one bound for both masks: what builds a case, and the bounds by shape on a kind of device.
MASKED: Mapping[str, tuple[Callable[..., Iterator[Case]], Callable[[str], Mapping[str, Any]]]] = {
    "statistics": (statistics, lambda kind: STATISTICS[kind]),
    "training": (training, lambda kind: TRAINING),
    "profile": (profiles, lambda kind: PROFILES),
}


def one_token(run: Run, *, text: str, bound: float) -> Iterator[Case]:
    """Yield one query with statistics by `attention`, as replays of a CUDA graph."""

    def ours(problem: Problem) -> Callable[[], Found]:
        call = contenders.ours(problem, statistics=DECODE_STATISTICS, logsumexp=True, finite=True)
        return lambda: Found.of(call())

    yield from decode.one_token(run, Shape.parse(text), ours=ours, bound=bound)


def layer(run: Run, *, text: str, bounds: tuple[float, float | None]) -> Iterator[Case]:
    """Yield the layer, plain and with statistics, against a layer written by hand around PyTorch's function."""
    shape = layer_contenders.Shape.parse(text)
    weights = Weights.random(shape, device=run.device, dtype=run.dtype, seed=run.seed)
    x = run.inputs(shape.batch, shape.tokens, shape.embed_dim, salt=1)
    modules: dict[str, nn.Module] = {
        OURS: Polyhead(weights, PLAIN),
        FUSED_QKV: layer_contenders.FusedQKV(weights, PLAIN),
        TORCH: layer_contenders.TorchLayer(weights, PLAIN),
        WITH: _WithStatistics(weights, PLAIN),
    }
    found = Entrants()
    for name, module in modules.items():
        build = functools.partial(without_gradients, functools.partial(module.eval(), x))
        check = functools.partial(_check_layer, name, x, weights, run.seed)
        found.enter(name, build, check)
    plain, with_statistics = bounds
    pairs = [Pair(OURS, FUSED_QKV, plain), Pair(WITH, FUSED_QKV, with_statistics), Pair(TORCH, FUSED_QKV)]
    yield found.case("layer", shape, pairs)


class _WithStatistics(Polyhead):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, statistics=ROW_STATISTICS).output


def routed(run: Run, *, sizes: tuple[int, ...], causal: bool, bound: float) -> Iterator[Case]:
    """Yield some of the heads for each token, against all of them with one KV head; eager forward."""
    batch, tokens, width, heads, top_k = sizes
    options: dict[str, Any] = {"head_dim": width // heads, "causal": causal, "bias": False}
    x = run.inputs(batch, tokens, width, salt=1)
    ours = f"{OURS}, {top_k} of {heads} heads"
    modules = {
        ours: drawn(RoutedHeads(width, heads, top_k=top_k, **options), run),
        DENSE: drawn(polyhead.MultiHeadAttention(width, heads, num_kv_heads=1, **options), run),
    }
    found = Entrants()
    for name, module in modules.items():
        build = functools.partial(without_gradients, functools.partial(_output, module, x))
        found.enter(name, build, _checked(name, module, x))
    yield found.case(masked_name("routed", causal), "x".join(map(str, sizes)), [Pair(ours, DENSE, bound)])


def host(run: Run) -> Iterator[Case]:
    """Yield the time of Python beyond that of PyTorch's function, in microseconds, for calls with short kernels."""
    plain, masked = (Problem.draw(run, SHORT, causal=causal) for causal in (False, True))
    step = TrainingStep(plain, seed=run.seed)
    ours: dict[str, Callable[[], object]] = {
        "attention": contenders.ours(plain),
        "attention, causal": contenders.ours(masked),
        "statistics": contenders.ours(plain, statistics=ROW_STATISTICS, finite=True),
        "forward + backward": step.ours(backend="auto"),
    }
    theirs: dict[str, Callable[[], object]] = {
        "attention": contenders.pytorch(plain),
        "attention, causal": contenders.pytorch(masked),
        "statistics": contenders.pytorch(plain),
        "forward + backward": step.sdpa(None),
    }
    figures = [
        Figure(f"{name}, beyond PyTorch's", host_microseconds(call, theirs[name], run.device), "us", MICROSECONDS[name])
        for name, call in ours.items()
    ]
    yield Case("host", str(SHORT), {}, figures=lambda timings: figures)


def host_microseconds(
    ours: Callable[[], object], theirs: Callable[[], object], device: torch.device, *, calls: int = 50, rounds: int = 15
) -> float:
    """Return the median over rounds of the host's time for ours less that for theirs, in microseconds per call."""
    differences = []
    for _ in range(rounds):
        taken = []
        for call in (ours, theirs):
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            for _ in range(calls):
                call()
            taken.append(time.perf_counter() - began)  # kernels may still run
        differences.append((taken[0] - taken[1]) / calls * 1e6)
    return sorted(differences)[rounds // 2]


def _baseline(found: Entrants, exact: Exact) -> str:
    """Enter the call that ours replaces, and return its name."""
    if exact.problem.query.is_cuda:
        enter_sdpa(found, exact, CUDNN)
        return CUDNN
    found.enter(PYTORCH, lambda: contenders.pytorch(exact.problem), lambda output: exact.check(PYTORCH, Found(output)))
    return PYTORCH


def _check_layer(name: str, x: Tensor, weights: Weights, seed: int, output: Tensor) -> None:
    agreement.check_output(name, output, x, weights, PLAIN, seed)


def _checked(name: str, module: nn.Module, x: Tensor) -> Callable[[object], None]:
    return lambda _: check_routed(name, module, x)


def _output(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = module(x).output
    return output

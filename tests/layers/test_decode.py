"""A layer's step over any cache reads it where it lies, and gives what the formula gives over plain keys and values."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead import KVCache, Mask, MultiHeadAttention, attention
from polyhead.layers import base_attention
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, QuantizedCache, RollingCache
from polyhead.layers.positions import ALiBi, Positions, Rotary, T5Bias
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.visibility import resolve
from polyhead.ops.decode.api import cached_reasons
from polyhead.ops.decode.fused import MOST_QUERIES, CacheArguments
from tests.error_budget import Compared, assert_draws_within_error_budget, output_in_orders, plain_formula
from tests.ops.decode.test_split_keys import assert_close
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory
from tests.two_dtypes import in_two_dtypes
from tests.waiting import waiting_is_an_error

BATCH, HEAD_DIM, VALUE_DIM, PROMPT = 2, 16, 24, 37
STEPS = (1, 3)

# Triton compiles anew where 16 divides a stride. It does in the first two, which are read by the same kernels: an even
# number of slots times VALUE_DIM.
CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 54}),
    "quantized": (QuantizedCache, {"capacity": 53}),
    "paged": (PagedCache, {"num_pages": 23, "page_size": 7}),
    "rolling": (RollingCache, {"window": 19, "sinks": 2}),
    "rolling that goes back": (RollingCache, {"window": 19, "sinks": 2, "rollback": 5}),
}


@dataclass(frozen=True)
class Case:
    """What is asked of the layer, and of its step."""

    heads: tuple[int, int] = (4, 2)  # of queries, of keys and values
    options: dict[str, Any] = field(default_factory=dict)
    positions: Callable[[int], Positions] | None = None
    mask: Mask | None = None
    lengths: tuple[tuple[int, ...], ...] | None = None  # of the prompt, then of each step
    statistics: bool | tuple[str, ...] = False
    gate: bool = False


CASES = {
    "plain": Case(heads=(3, 3)),
    "grouped": Case(heads=(6, 2)),
    "one KV head": Case(heads=(5, 1), statistics=("entropy", "max_logit")),
    "no causal edge": Case(options={"causal": False}, statistics=("visible_keys", "next_mass")),
    "window": Case(options={"window": 11}, statistics=("visible_keys", "mean_distance")),
    "window with kept keys": Case(mask=Mask.window(11, sinks=2), statistics=("sink_mass", "self_mass")),
    "ragged": Case(lengths=((PROMPT, 23), (1, 1), (1, 3)), statistics=("mean_distance", "sink_mass", "visible_keys")),
    "a sequence that waits": Case(lengths=((PROMPT, 23), (0, 1), (3, 0))),
    "softcap": Case(options={"softcap": 3.0}),
    "sinks": Case(options={"sinks": True}, statistics=("learned_sink_mass", "entropy")),
    "ALiBi": Case(positions=ALiBi, statistics=("entropy",)),
    "T5": Case(positions=lambda heads: T5Bias(heads, num_buckets=8, max_distance=11, bidirectional=False)),
    "rotary, a scale, norms and gates": Case(
        positions=lambda heads: Rotary(HEAD_DIM),
        options={"scale": 0.7, "qk_norm": "rms", "output_gate": "head"},
        gate=True,
    ),
    "statistics": Case(statistics=True),
    "everything": Case(
        options={"sinks": True, "softcap": 4.0, "window": 13},
        positions=ALiBi,
        lengths=((PROMPT, 23), (1, 1), (2, 3)),
        statistics=True,
    ),
}


def make(case: Case, dtype: torch.dtype, device: str) -> MultiHeadAttention:
    """A layer whose output projection hands the heads on as they are, so that nothing else rounds."""
    heads, kv_heads = case.heads
    torch.manual_seed(7)
    layer = MultiHeadAttention(
        heads * VALUE_DIM,
        heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        value_dim=VALUE_DIM,
        output_bias=False,
        positions=None if case.positions is None else case.positions(heads),
        **{"causal": True, **case.options},
    )
    with torch.no_grad():
        if layer.sinks is not None:
            layer.sinks.normal_()
        if isinstance(layer.positions, T5Bias):
            layer.positions.weight.normal_()
        layer.out_proj.weight.copy_(torch.eye(heads * VALUE_DIM))
    return layer.to(device, dtype).eval()


def new_cache(kind: str, layer: MultiHeadAttention, batch: int = BATCH) -> KVCache:
    """An empty cache, with NaN wherever it holds no token."""
    build, options = CACHES[kind]
    weight = layer.q_proj.weight
    cache = build.for_layout(layer.layout, batch_size=batch, dtype=weight.dtype, device=weight.device, **options)
    memory = (cache.pool.keys, cache.pool.values) if isinstance(cache, PagedCache) else cache._buffers  # type: ignore[attr-defined]
    for buffer in memory:
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    return cache


class Recorded:
    """What the layer hands to `attention`, and how often it decodes instead."""

    def __init__(self) -> None:
        self.arguments: tuple[Tensor, Tensor, Tensor] | None = None
        self.options: dict[str, Any] = {}
        self.decoded = 0

    def attend(self, *tensors: Tensor, **options: Any) -> AttentionOutput:
        self.arguments, self.options = tensors, options  # type: ignore[assignment]
        return attention(*tensors, **options)

    def decode(self, *arguments: Any, **options: Any) -> AttentionOutput:
        self.decoded += 1
        with poisoned_memory():
            return cached_attention(*arguments, **options)

    def __enter__(self) -> Recorded:
        self._patches = [
            mock.patch.object(base_attention, "attention", self.attend),
            mock.patch.object(base_attention, "cached_attention", self.decode),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()


cached_attention = base_attention.cached_attention


def check(kind: str, case: Case, dtype: torch.dtype, device: str, backend: str = "auto") -> None:
    layer = make(case, dtype, device)
    cache = new_cache(kind, layer)
    lengths = case.lengths or (None,) * (1 + len(STEPS))
    generator = torch.Generator().manual_seed(3)
    name = f"{kind}, {case} in {dtype}"

    def block(tokens: int, real: Sequence[int] | None) -> Tensor:
        x = torch.randn(BATCH, tokens, layer.layout.embed_dim, generator=generator).to(device, dtype)
        for row, length in enumerate(real or ()):
            x[row, length:] = torch.nan
        return x

    with torch.no_grad():
        layer(block(PROMPT, lengths[0]), cache=cache, lengths=lengths[0], backend="reference")
        twin = copy.deepcopy(cache)
        for tokens, real in zip(STEPS, lengths[1:], strict=True):
            x = block(tokens, real)
            gate = torch.rand(BATCH, layer.layout.num_heads, generator=generator).to(device, dtype)
            options: dict[str, Any] = {
                "lengths": real,
                "mask": case.mask,
                "statistics": case.statistics,
                "head_gate": gate if case.gate else None,
            }
            step(layer, x, cache, twin, f"{tokens} tokens over {name}", backend=backend, **options)


def step(
    layer: MultiHeadAttention, x: Tensor, cache: KVCache, twin: KVCache, name: str, *, backend: str, **options: Any
) -> None:
    """Append to a cache and to its twin, decode over the one and compare with the formula over the other."""
    with Recorded() as recorded:
        result = layer(x, cache=cache, backend=backend, **options)
        assert recorded.arguments is None, name
        assert recorded.decoded == 1, name
        formula = layer(x, cache=twin, backend="reference", **options)
    assert result.backend == "fused"
    assert result.output.dtype is x.dtype
    assert cache.lengths == twin.lengths
    compare(result, formula, layer, twin, recorded, name)


def compare(
    result: AttentionOutput,
    formula: AttentionOutput,
    layer: MultiHeadAttention,
    cache: KVCache,
    recorded: Recorded,
    name: str,
) -> None:
    """Hold a decoded step against the formula: in float64 on what the cache holds, with the budget of the dtype."""
    assert recorded.arguments is not None
    query, key, value = recorded.arguments
    dtype, options = query.dtype, recorded.options
    mask, sinks = options["mask"], options["sinks"]
    held = [key.double(), value.double()]
    if isinstance(cache, QuantizedCache):  # what comes back of it is rounded once more
        storage = cache.view().storage
        assert storage.key_scale is not None
        assert storage.value_scale is not None
        held = [
            storage.key.double() * storage.key_scale.double()[..., None],
            storage.value.double() * storage.value_scale.double()[..., None],
        ]
    exact = attention(
        query.double(),
        *held,
        mask=mask,
        scale=options["scale"],
        softcap=options["softcap"],
        sinks=None if sinks is None else sinks.double(),
        statistics=options["statistics"],
        backend="reference",
    )
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    visibility = None
    if mask is not None:
        visibility = resolve(mask, batch=batch, heads=heads, queries=queries, keys=keys, device=query.device)
    everything = (0, queries), (0, keys)
    visible = None if visibility is None else visibility.allowed_tile(*everything)
    bias = None if visibility is None else visibility.bias_tile(*everything, torch.float64)
    seen = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=query.device) if visible is None else visible
    clean = [x.masked_fill(~seen.any(2).any(1)[:, None, :, None], 0.0) for x in (key, value)]
    inputs = query.nan_to_num(0.0), *clean
    given = {"visible": visible, "bias": bias, "sinks": sinks, **{x: options[x] for x in ("scale", "softcap")}}
    plain = plain_formula(*inputs, **given)
    if layer.gate_proj is None:
        heads_out = result.output.unflatten(-1, (heads, -1)).transpose(1, 2)
        outputs = [Compared(heads_out, exact.output, plain.output), output_in_orders(*inputs, exact.output, **given)]
        assert_draws_within_error_budget([{"output": x} for x in outputs], name=name)
    else:  # gates round as well, and come after the same heads either way
        size = 4 * torch.finfo(dtype).eps * float(formula.output.double().abs().max())
        assert_close(result.output, formula.output.double(), size, name)
    # No logit is larger than this.
    rows, columns = query.double().nan_to_num(0.0).norm(dim=-1), held[0].nan_to_num(0.0).norm(dim=-1)
    largest = float(rows.max() * columns.max()) * (options["scale"] or HEAD_DIM**-0.5)
    added = 0.0 if bias is None else float(bias.abs().max())
    bound = 1e-5 * (1 + largest + added)
    assert result.logsumexp is not None
    assert exact.logsumexp is not None
    assert_close(result.logsumexp, exact.logsumexp, bound, f"log-sum-exp of {name}")
    if exact.statistics is None:
        assert result.statistics is None
        return
    assert result.statistics is not None
    expected = dict(exact.statistics.items())
    found = dict(result.statistics.items())
    assert list(found) == list(expected)
    for statistic, tensor in expected.items():
        assert found[statistic].dtype is torch.float32
        if statistic in ("max_logit", "max_abs_logit"):
            allowed = bound
        elif statistic == "visible_keys":
            allowed = 0.0
        elif "distance" in statistic or "offset" in statistic:
            allowed = 1e-5 * max(1.0, float(tensor.abs().max()))
        else:
            allowed = 1e-5
        assert_close(found[statistic], tensor, allowed, f"{statistic} of {name}")


# ---- in Triton's interpreter


def check_all(kinds: Sequence[str], cases: Sequence[str], dtype: torch.dtype) -> None:
    for kind in kinds:
        for case in cases:
            check(kind, CASES[case], dtype, "cpu")


# Lengths, kept keys and statistics read where a cache has its tokens: every kind has them, and "everything" with a
# softcap, sinks, a window and ALiBi. Heads, rotations and the like meet the same cache, so each kind has half of them.
BY_CACHE = ("window with kept keys", "ragged", "a sequence that waits", "statistics", "everything")
OTHERS = [case for case in CASES if case not in BY_CACHE]


@pytest.mark.numerics
@pytest.mark.parametrize(("half", "kind"), list(enumerate(CACHES)), ids=list(CACHES))
def test_in_the_interpreter_every_step_gives_the_formula(half: int, kind: str) -> None:
    in_the_interpreter(check_all, [kind], [*BY_CACHE, *OTHERS[half % 2 :: 2]], torch.float32)


@pytest.mark.numerics
def test_in_the_interpreter_half_precision_does_too() -> None:
    cases = ["grouped", "window with kept keys", "ragged", "everything"]
    in_the_interpreter(check_all, list(CACHES), cases, torch.float16)


@pytest.mark.numerics
def test_in_the_interpreter_the_backend_may_be_named() -> None:
    in_the_interpreter(check, "paged", CASES["statistics"], torch.float32, "cpu", backend="fused")


def check_walk(kind: str, device: str) -> None:
    """Beams, drafts that are taken back, forks: whatever is done to a cache between two steps."""
    case = Case(positions=lambda heads: Rotary(HEAD_DIM), statistics=("mean_distance", "visible_keys"))
    layer = make(case, torch.float32, device)
    generator = torch.Generator().manual_seed(19)

    def block(tokens: int) -> Tensor:
        return torch.randn(BATCH, tokens, layer.layout.embed_dim, generator=generator).to(device)

    def go(tokens: int, lengths: Sequence[int] | None = None) -> None:
        options = {"lengths": lengths, "statistics": case.statistics}
        step(layer, block(tokens), cache, twin, f"{kind} after {done}", backend="auto", **options)

    done: list[str] = []
    with torch.no_grad():
        cache = new_cache(kind, layer)
        layer(block(PROMPT), cache=cache, backend="reference")
        twin = copy.deepcopy(cache)
        go(1)
        for act in (
            lambda x: x.crop(x.lengths[0] - 1),
            lambda x: x.reorder([1, 0]),
            lambda x: x.crop([x.lengths[0] - 1, x.lengths[1]]),
            lambda x: x.reorder([1, 1]),
            lambda x: x.reset(),
        ):
            done.append(act.__code__.co_names[0])
            act(cache)
            act(twin)
            go(1)
            go(1, [1, 0])
        done.append("fork")
        kept, cache, twin = cache, cache.fork(), twin.fork()
        go(2)
        go(1)
        cache, twin = kept, copy.deepcopy(kept)
        go(1)


@pytest.mark.numerics
@pytest.mark.parametrize("kind", CACHES)
def test_in_the_interpreter_steps_go_on_after_whatever_is_done_to_a_cache(kind: str) -> None:
    in_the_interpreter(check_walk, kind, "cpu")


class Allocations(TorchDispatchMode):
    """Notes the elements of the largest new memory that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        given = {x.untyped_storage().data_ptr() for x in flat if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


LONG: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 700}),
    "quantized": (QuantizedCache, {"capacity": 700}),
    "paged": (PagedCache, {"num_pages": 64, "page_size": 16}),
    "rolling": (RollingCache, {"window": 499}),
}


def long_cache(kind: str, layer: MultiHeadAttention, lengths: Sequence[int]) -> KVCache:
    build, options = LONG[kind]
    weight = layer.q_proj.weight
    layout, place = layer.layout, {"dtype": weight.dtype, "device": weight.device}
    cache = build.for_layout(layout, batch_size=len(lengths), **place, **options)
    shape = (len(lengths), layout.num_kv_heads, max(lengths))
    key, value = torch.randn(*shape, layout.head_dim, **place), torch.randn(*shape, layout.value_dim, **place)
    cache.append(key, value, lengths=lengths)
    return cache


def check_allocations(kind: str) -> None:
    """A step makes nothing as long as the cache; a rolling one makes a number for each slot, where its token stands."""
    layer = make(Case(heads=(2, 1)), torch.float32, "cpu")
    names = ("entropy", "max_logit", "mean_distance")
    with torch.no_grad():
        for lengths in ([499], [499, 401]):
            x = torch.randn(len(lengths), 1, layer.layout.embed_dim)
            cache = long_cache(kind, layer, lengths)
            layer(x, cache=cache)  # a growing cache grows here
            with Recorded() as recorded, Allocations() as allocations:
                layer(x, cache=cache, statistics=names)
            assert recorded.decoded == 1
            assert allocations.largest <= (len(lengths) * 499 if kind == "rolling" else 498), allocations.largest
            if kind in ("paged", "quantized"):
                with Allocations() as allocations:
                    layer(x, cache=cache, statistics=names, backend="reference")
                assert allocations.largest >= 500 * HEAD_DIM


@pytest.mark.parametrize("kind", LONG)
def test_in_the_interpreter_a_step_allocates_nothing_as_long_as_the_cache(kind: str) -> None:
    in_the_interpreter(check_allocations, kind)


@pytest.mark.parametrize("kind", ["paged", "quantized"])
def test_a_cache_is_put_together_when_its_keys_are_asked_for_and_no_sooner(kind: str) -> None:
    layer = make(Case(heads=(2, 1)), torch.float32, "cpu")
    cache = long_cache(kind, layer, [499])
    token = torch.ones(1, 1, 1, HEAD_DIM), torch.ones(1, 1, 1, VALUE_DIM)
    with Allocations() as allocations:
        view = cache.append(*token)
    assert allocations.largest < 499
    assert view.key.shape == (1, 1, 500, HEAD_DIM)
    assert view.key is view.key
    assert view.value is view.value
    assert torch.equal(view.key[:, :, -1:], token[0])
    assert torch.equal(view.value[:, :, -1:], token[1])


# ---- what goes the old way


def check_the_old_way() -> None:
    """Weights, gradients, dropout, other dtypes and masks, other backends by name: all by `attention`, and no worse."""
    plain = Case()

    def went(layer: MultiHeadAttention, tokens: int = 1, **options: Any) -> AttentionOutput:
        embed, dtype = layer.layout.embed_dim, layer.q_proj.weight.dtype
        cache = PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, capacity=59, dtype=dtype)
        with torch.no_grad():
            layer(torch.randn(BATCH, PROMPT, embed, dtype=dtype), cache=cache, backend="reference")
        with Recorded() as recorded:
            result = layer(torch.randn(BATCH, tokens, embed, dtype=dtype), cache=cache, **options)
        assert recorded.decoded == 0
        assert recorded.arguments is not None
        return result

    layer = make(plain, torch.float32, "cpu").requires_grad_(False)
    keys = PROMPT + 1
    assert went(layer, weights=True).weights is not None
    assert went(layer, seed=3).weights is None
    for backend in ("reference", "blockwise", "sdpa"):
        assert went(layer, backend=backend).backend == backend
    assert went(layer, MOST_QUERIES + 1, backend="fused").backend == "fused"
    went(layer, mask=Mask.dense(torch.rand(1, keys) > 0.1))
    went(layer, mask=Mask.bias(torch.randn(1, keys)))
    went(layer, mask=Mask.documents([0], [0] * keys))
    went(layer, mask=Mask.lengths([keys, 5], side="left"))
    went(make(plain, torch.float64, "cpu").requires_grad_(False))
    went(MultiHeadAttention(60, 5, causal=True).requires_grad_(False))  # heads of 12 channels
    dropping = MultiHeadAttention(64, 4, causal=True, dropout=0.3).requires_grad_(False)
    went(dropping.train())
    learning = make(Case(options={"sinks": True}), torch.float32, "cpu").requires_grad_(False)
    assert learning.sinks is not None
    learning.sinks.requires_grad_(True)
    went(learning).output.sum().backward()
    assert learning.sinks.grad is not None
    biased = make(CASES["T5"], torch.float32, "cpu").requires_grad_(False)
    assert biased.positions is not None
    biased.positions.requires_grad_(True)
    assert went(biased).output.requires_grad
    with torch.no_grad(), Recorded() as recorded:
        cache = PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, capacity=53)
        assert layer(torch.randn(BATCH, 0, layer.layout.embed_dim), cache=cache).output.shape[1] == 0
        source = torch.randn(BATCH, 3, layer.layout.embed_dim)
        layer(source[:, :1], layer.remember(source))
        assert recorded.decoded == 0
        layer(source, cache=cache)
        assert recorded.decoded == 1


def test_in_the_interpreter_what_decode_has_not_goes_the_old_way() -> None:
    in_the_interpreter(check_the_old_way)


def check_lengths_of_the_callers() -> None:
    """A mask of lengths beside a cache without any is read as the cache's own would be."""
    layer = make(Case(statistics=True), torch.float32, "cpu")
    with torch.no_grad():
        for queries in (None, [3, 2]):
            cache = new_cache("paged", layer)
            layer(torch.randn(BATCH, PROMPT, layer.layout.embed_dim), cache=cache, backend="reference")
            twin = copy.deepcopy(cache)
            x = torch.randn(BATCH, 3, layer.layout.embed_dim)
            mask = Mask.lengths([PROMPT + 3, 17], queries=queries)
            options = {"mask": mask, "lengths": [3] * BATCH, "statistics": True}
            step(layer, x, cache, twin, "a caller's lengths", backend="auto", **options)
        cache = new_cache("growing", layer)
        x = torch.randn(BATCH, 5, layer.layout.embed_dim)
        options = {"mask": Mask.lengths([5, 2]), "lengths": [5] * BATCH}
        step(layer, x, cache, GrowingCache(), "nothing before", backend="auto", **options)


@pytest.mark.numerics
def test_in_the_interpreter_a_callers_lengths_are_served_too() -> None:
    in_the_interpreter(check_lengths_of_the_callers)


def check_programs() -> None:
    """Autocast decodes in its dtype, and a compiled layer decodes what the eager one does, in one graph."""
    case = CASES["rotary, a scale, norms and gates"]
    layer = make(case, torch.float32, "cpu")
    x = torch.randn(BATCH, PROMPT + 2, layer.layout.embed_dim)
    with torch.no_grad():
        cache = GrowingCache()
        with torch.autocast("cpu", torch.float16), Recorded() as recorded:
            layer(x[:, :PROMPT], cache=cache)
            half = layer(x[:, PROMPT:], cache=cache).output
            assert recorded.decoded == 1
        assert half.dtype is torch.float16
        whole = layer(x).output[:, PROMPT:]
        assert float((half - whole).abs().max()) < 2**-6 * float(whole.abs().max())
        with torch.autocast("cpu", torch.float16), Recorded() as recorded:
            cache = PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, capacity=53)
            reasons = cached_reasons(torch.ones(BATCH, 4, 1, HEAD_DIM), cache.view().storage, 1, mask=None)
            assert reasons == ["autocast computes in torch.float16, got a query of torch.float32"]

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for kind, lengths in (("preallocated", None), ("quantized", [PROMPT, 23])):
            caches = [new_cache(kind, layer) for _ in range(2)]
            for cache in caches:  # compiled prompts: tests/layers/multi_head/test_multi_head_programs.py
                layer(x[:, :PROMPT], cache=cache, lengths=lengths)
            for at in (PROMPT, PROMPT + 1):
                ours, theirs = (
                    call(x[:, at : at + 1], cache=cache, statistics="entropy")
                    for call, cache in zip((compiled, layer), caches, strict=True)
                )
                torch.testing.assert_close(ours.output, theirs.output, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(ours.statistics.entropy, theirs.statistics.entropy, rtol=1e-5, atol=1e-5)
            assert ours.backend == theirs.backend == "fused"


def test_in_the_interpreter_autocast_and_compiled_layers_decode() -> None:
    in_the_interpreter(check_programs)


def test_on_a_cpu_nothing_is_decoded() -> None:
    layer = make(Case(), torch.float32, "cpu")
    with torch.no_grad(), Recorded() as recorded:
        for _ in range(2):
            result = layer(torch.randn(BATCH, 1, layer.layout.embed_dim), cache=GrowingCache())
    assert recorded.decoded == 0
    assert result.backend == "sdpa"


# ---- reasons


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": Mask.dense(torch.ones(1, 19, dtype=torch.bool))}, "got a dense mask"),
        ({"mask": Mask.bias(torch.full((1, 19), 0.5))}, "got a bias tensor"),
        ({"mask": Mask.documents([0], [0] * 19)}, "got documents"),
        ({"mask": Mask.lengths([19, 3]) & Mask.lengths([19, 4])}, "one set of lengths or positions, got several"),
        ({"mask": Mask.lengths([19, 3], side="left")}, "decode needs padding on the right, got padding on the left"),
        ({"mask": Mask.lengths([19, 3, 2])}, "lengths must have 2 entries, got 3"),
        ({"mask": Mask.lengths([20, 3])}, "must not exceed the sequence, got 20 for 19 tokens"),
        ({"mask": Mask.lengths([19, 3], queries=[1, 2])}, "must not exceed the sequence, got 2 for 1 tokens"),
        ({"mask": Mask.positions(torch.tensor([5]), torch.arange(18))}, r"positions must be \[2 or 1, 19\]"),
        ({"mask": Mask.relative(torch.zeros(5, 3), 1)}, "got 5 rows for 6 heads"),
        ({"mask": Mask.relative(torch.zeros(6, 3), 1) & Mask.relative(torch.zeros(1, 3), 1)}, "relative bias, got 2"),
        ({"mask": Mask.relative(torch.zeros(6, 3, requires_grad=True), 1)}, "no gradient, got a relative bias"),
        ({"mask": torch.ones(1, 19)}, "must be a polyhead.Mask, got Tensor"),
        ({"mask": None, "sinks": torch.zeros(5)}, r"sinks must have one .* number per head on cpu, got .* shape \[5\]"),
        ({"mask": None, "sinks": torch.zeros(6, requires_grad=True)}, "no gradient, got a sinks"),
        ({"mask": None, "scale": torch.zeros(6, dtype=torch.int64)}, "scale must have one floating-point number"),
    ],
)
def test_what_decode_cannot_serve_has_a_reason(options: dict[str, Any], words: str) -> None:
    key = torch.zeros(2, 3, 19, 16)
    reasons = cached_reasons(torch.zeros(2, 6, 1, 16), CacheArguments(key, key), 19, **options)
    ours = [reason for reason in reasons if "CUDA devices" not in reason]
    assert len(ours) == 1
    assert re.search(words, ours[0])


def test_pages_take_no_positions_and_nothing_is_no_step() -> None:
    pages = torch.zeros(5, 4, 3, 16)
    cache = CacheArguments(pages, pages, block_table=torch.zeros(2, 5, dtype=torch.int32))
    mask = Mask.positions(torch.tensor([5]), torch.arange(19))
    reasons = cached_reasons(torch.zeros(2, 6, 1, 16), cache, 19, mask=mask)
    assert "a paged cache takes no explicit positions" in reasons[-1]
    for query, keys in ((torch.zeros(2, 6, 0, 16), 19), (torch.zeros(2, 6, 1, 16), 0)):
        assert "decode needs queries and keys" in cached_reasons(query, cache, keys, mask=None)[0]


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "case", "dtype"), in_two_dtypes(itertools.product(CACHES, CASES)))
def test_on_a_gpu_every_step_gives_the_formula(kind: str, case: str, dtype: torch.dtype) -> None:
    check(kind, CASES[case], dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
def test_on_a_gpu_steps_go_on_after_whatever_is_done_to_a_cache(kind: str) -> None:
    check_walk(kind, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LONG)
def test_on_a_gpu_a_step_takes_no_memory_that_grows_with_the_cache(kind: str) -> None:
    layer = make(Case(heads=(4, 2)), torch.bfloat16, "cuda")
    build, options = LONG[kind]
    capacity = 1 << 16
    sizes = {"page_size": 16, "num_pages": 2 * capacity // 16, "window": capacity - 999, "capacity": capacity}
    larger = {name: sizes[name] for name in options}
    with torch.no_grad(), mock.patch.dict(LONG, {kind: (build, larger)}):
        cache = long_cache(kind, layer, [capacity - 5, capacity - 99])
        x = torch.randn(2, 1, layer.layout.embed_dim, device="cuda", dtype=torch.bfloat16)
        layer(x, cache=cache, statistics=("entropy", "max_logit"))  # a growing cache grows, kernels are compiled
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert layer(x, cache=cache, statistics=("entropy", "max_logit")).backend == "fused"
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
    tokens = 2 * capacity
    # Parts of up to 128 splits; where tokens stand, in a rolling cache, is a few 64-bit numbers a slot.
    parts = 128 * 8 * (VALUE_DIM + 8) * 4 + (1 << 20)
    assert taken < (48 * tokens if kind == "rolling" else 0) + parts, taken


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, [1, 1], [3, 1]], ids=["uniform", "ragged", "padded"])
@pytest.mark.parametrize("kind", CACHES)
def test_on_a_gpu_no_step_waits(kind: str, lengths: list[int] | None) -> None:
    layer = make(CASES["everything"], torch.bfloat16, "cuda")
    with torch.no_grad():
        cache = new_cache(kind, layer)
        tokens = 1 if lengths is None else max(lengths)
        prompt = torch.randn(BATCH, PROMPT, layer.layout.embed_dim, device="cuda", dtype=torch.bfloat16)
        x = prompt[:, :tokens].clone()
        layer(prompt, cache=cache, lengths=None if lengths is None else [PROMPT, 23])
        layer(x, cache=cache, lengths=lengths, statistics=True)
        with waiting_is_an_error():
            for _ in range(3):
                result = layer(x, cache=cache, lengths=lengths, statistics=True, logsumexp=True)
        assert result.backend == "fused"

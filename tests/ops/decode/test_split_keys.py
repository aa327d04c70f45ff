"""Decoding over every cache layout, against the formula in float64: in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import AttentionOutput, Mask, Statistics, attention
from polyhead.errors import BackendUnsupported, OptionError, ShapeError
from polyhead.ops.common.statistics import NAMES
from polyhead.ops.common.visibility import resolve
from polyhead.ops.decode import fused as decoding
from polyhead.ops.decode.fused import CacheArguments, decode, decode_reasons, plan_blocks, plan_splits
from tests.error_budget import Compared, assert_draws_within_error_budget, output_in_orders, plain_formula
from tests.ops.interpreter.interpreted import in_the_interpreter
from tests.two_dtypes import in_two_dtypes

ALL = tuple(name for name in NAMES if name != "learned_sink_mass")
BATCH, KV_HEADS = 2, 2
LENGTHS = (397, 131)  # of tokens in the cache, the new ones included


@dataclass(frozen=True)
class Case:
    """One decode: the layout of the cache and the options of the attention."""

    layout: str = "contiguous"  # or "rolling", "paged", "int8"
    group: int = 2
    queries: int = 1
    dims: tuple[int, int] = (16, 24)
    lengths: tuple[int, ...] | None = LENGTHS  # None: every sequence fills its slots
    new_lengths: tuple[int, ...] | None = None
    splits: int | None = 3
    causal: bool = True
    left: int | None = None
    first_keys: int = 0
    softcap: float | None = None
    sinks: bool = False
    head_scale: bool = False
    table: int = 0  # distances in a relative bias
    spread: float = 1.0  # of the keys: 1 gives ordinary logits
    names: tuple[str, ...] = ALL
    sink_keys: int = 2
    window: int | None = 19  # None: the default
    page_size: int = 16


CASES = [
    Case(),
    Case(splits=1),
    Case(splits=None, lengths=None),
    Case(splits=7, names=()),
    Case(splits=40, dims=(16, 256), names=("max_logit", "entropy", "visible_keys")),  # more parts than tiles of keys
    Case(splits=2, names=("max_logit", "entropy"), lengths=None, dims=(64, 64)),
    Case(group=1, dims=(8, 8), names=("confidence", "visible_keys"), lengths=(5, 130)),
    Case(group=19, dims=(40, 16), splits=1, names=("mean_distance", "max_logit")),
    Case(queries=3, group=1),
    Case(queries=3, splits=1, new_lengths=(2, 0)),
    Case(queries=16, group=5, splits=1, new_lengths=(16, 9)),  # more rows than one tile has
    Case(queries=2, causal=False, splits=2, names=("next_mass", "mean_offset")),
    Case(queries=7, lengths=(397, 4), splits=1),  # fewer tokens than queries: the first rows see nothing
    Case(left=211, first_keys=3),
    Case(left=211, first_keys=3, splits=1, queries=3, sinks=True, names=NAMES),
    Case(left=12, splits=5, window=None, names=("window_mass", "visible_keys", "sink_mass")),
    Case(left=0, queries=2, names=("self_mass", "previous_mass")),
    Case(softcap=5.0, sinks=True, head_scale=True, names=NAMES, spread=4.0),
    Case(sinks=True, names=NAMES, splits=1, new_lengths=(1, 0)),
    Case(table=64, queries=2, names=()),
    Case(table=9, splits=1),
    Case(spread=3000.0, names=("max_logit", "max_abs_logit", "entropy", "confidence")),
    Case(layout="paged", names=("entropy", "mean_squared_distance")),
    Case(layout="paged", page_size=7, queries=4, new_lengths=(4, 1), splits=1),
    Case(layout="paged", page_size=128, left=100, first_keys=5, sinks=True, names=NAMES),
    Case(layout="rolling"),
    Case(layout="rolling", queries=3, left=211, first_keys=3, splits=2, names=("mean_distance", "sink_mass")),
    Case(layout="rolling", left=40, splits=1, lengths=None),
    Case(layout="int8"),
    Case(layout="int8", queries=3, splits=1, new_lengths=(3, 2), names=()),
    Case(layout="int8", spread=2.0, left=150, dims=(64, 32), names=("max_logit",)),
    Case(layout="int8", spread=20.0, left=150, dims=(64, 32), names=("max_logit",)),
    Case(spread=20.0, group=8, dims=(64, 32), names=("entropy",), splits=1),
]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN, so that unwritten elements cannot pass for zero."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(5).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Scene:
    """A case with its tensors: keys and values in order, and in the layout of the cache."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str, seed: int = 11) -> None:
        self.case = case
        dim_key, dim_value = case.dims
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.lengths = case.lengths or (max(LENGTHS),) * BATCH
        self.keys = max(self.lengths)
        heads = KV_HEADS * case.group
        # Views into something wider: no stride but the last is that of a contiguous tensor.
        wide = random(BATCH, case.queries, heads, dim_key + 8).to(dtype)
        self.query = wide[..., :dim_key].transpose(1, 2)
        key = (case.spread * random(BATCH, KV_HEADS, self.keys, dim_key)).to(dtype)
        value = random(BATCH, KV_HEADS, self.keys, dim_value).to(dtype)
        self.options: dict[str, Any] = {"scale": dim_key**-0.5, "softcap": case.softcap}
        self.sinks = random(heads, 3)[:, 1] if case.sinks else None
        self.head_scale = random(heads, 2).exp()[:, 1] if case.head_scale else None
        self.table = random(case.table, heads).T if case.table else None
        self.real = torch.arange(self.keys, device=device) < torch.tensor(self.lengths, device=device)[:, None]
        self.cache, self.key, self.value = self._lay(key, value, random)

    def integers(self, values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=self.query.device)

    def _lay(self, key: Tensor, value: Tensor, random: Any) -> tuple[CacheArguments, Tensor, Tensor]:
        """Return the cache, with NaN where it has no token, and its keys and values in float64."""
        case, device = self.case, key.device
        hidden = ~self.real[:, None, :, None]
        lengths, new_lengths = self.integers(case.lengths), self.integers(case.new_lengths)
        if case.layout == "int8":
            (key, key_scale), (value, value_scale) = (_quantize(x) for x in (key, value))
            exact = [
                (x * scale.double()).masked_fill(hidden, 0.0) for x, scale in ((key, key_scale), (value, value_scale))
            ]
            # Every second number of something wider: neither scale is contiguous.
            wide = [x.masked_fill(hidden, torch.nan).repeat(1, 1, 1, 2) for x in (key_scale, value_scale)]
            scales = [x[..., 0] for x in wide]
            return CacheArguments(key, value, lengths, new_lengths, None, None, None, *scales), *exact
        exact = [x.double().masked_fill(hidden, 0.0) for x in (key, value)]
        key, value = (x.masked_fill(hidden, torch.nan) for x in (key, value))
        if case.layout == "paged":
            pages = -(-self.keys // case.page_size)
            table = torch.randperm(BATCH * pages + 2, generator=torch.Generator().manual_seed(5))[: BATCH * pages]
            table = table.view(BATCH, pages).to(device)
            pools = []
            for x in (key, value):
                pool = x.new_full((BATCH * pages + 2, case.page_size, KV_HEADS, x.shape[3]), torch.nan)
                padded = x.new_full((BATCH, pages * case.page_size, KV_HEADS, x.shape[3]), torch.nan)
                padded[:, : self.keys] = x.transpose(1, 2)
                pool[table.flatten()] = padded.view(BATCH * pages, case.page_size, KV_HEADS, -1)
                pools.append(pool)
            held = self.integers(self.lengths)
            # Columns of a wider table: pages of a longer sequence.
            wide_table = torch.nn.functional.pad(table.to(torch.int32), (0, 2))[:, :pages]
            return CacheArguments(*pools, held, new_lengths, block_table=wide_table), *exact
        if case.layout == "rolling":
            order = torch.randperm(self.keys, generator=torch.Generator().manual_seed(5)).to(device)
            position = torch.where(self.real, torch.arange(self.keys, device=device), -1)[:, order].to(torch.int32)
            first = torch.tensor(self.lengths, device=device)[:, None] - case.queries
            query_position = (first + torch.arange(case.queries, device=device)).to(torch.int32)
            if case.lengths is None:
                position, query_position = position[:1], query_position[:1]
            key, value = key[:, :, order], value[:, :, order]
            return CacheArguments(key, value, key_position=position, query_position=query_position), *exact
        # Slots of a larger buffer, tokens before heads.
        buffers = [x.new_full((BATCH, self.keys + 3, KV_HEADS, x.shape[3] + 8), torch.nan) for x in (key, value)]
        slots = [b[:, : self.keys, :, : x.shape[3]].transpose(1, 2) for b, x in zip(buffers, (key, value), strict=True)]
        for slot, x in zip(slots, (key, value), strict=True):
            slot.copy_(x)
        return CacheArguments(*slots, lengths, new_lengths), *exact

    def mask(self) -> Mask:
        case = self.case
        new = case.new_lengths or (case.queries,) * BATCH
        mask = Mask.lengths(self.lengths, queries=new)
        if case.causal:
            mask = mask & Mask.causal()
        if case.left is not None:
            mask = mask & Mask.window(left=case.left, right=0 if case.causal else None, sinks=case.first_keys)
        if self.table is not None:
            mask = mask & Mask.relative(self.table.double(), case.table // 2)
        return mask

    def run(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        case = self.case
        return decode(
            self.query,
            self.cache,
            **self.options,
            head_scale=self.head_scale,
            sinks=self.sinks,
            left=case.left,
            right=0 if case.causal else None,
            first_keys=case.first_keys,
            table=self.table,
            table_zero=case.table // 2,
            names=case.names,
            splits=case.splits,
            **self.statistic_options,
        )

    @property
    def statistic_options(self) -> dict[str, int]:
        window = {} if self.case.window is None else {"window": self.case.window}
        return {"sink_keys": self.case.sink_keys, **window}

    def scale(self, dtype: torch.dtype) -> float | Tensor:
        scale = self.options["scale"]
        return scale if self.head_scale is None else scale * self.head_scale.to(dtype)


def compared(scene: Scene, dtype: torch.dtype) -> tuple[list[Compared], Tensor, dict[str, Tensor], AttentionOutput]:
    """Return outputs paired with the formula's, in several key orders, log-sum-exp, statistics and exact results."""
    case = scene.case
    with poisoned():
        output, logsumexp, found = scene.run()
    mask = scene.mask()
    exact = attention(
        scene.query.double(),
        scene.key,
        scene.value,
        mask=mask,
        scale=scene.scale(torch.float64),
        softcap=case.softcap,
        sinks=None if scene.sinks is None else scene.sinks.double(),
        statistics=Statistics(*case.names, **scene.statistic_options) if case.names else None,
        backend="reference",
    )
    batch, heads, queries, _ = scene.query.shape
    visibility = resolve(mask, batch=batch, heads=heads, queries=queries, keys=scene.keys, device=scene.query.device)
    assert visibility is not None
    everything = (0, queries), (0, scene.keys)
    visible = visibility.allowed_tile(*everything)
    inputs = scene.query, scene.key.to(dtype), scene.value.to(dtype)
    options = {
        "visible": visible,
        "bias": visibility.bias_tile(*everything, torch.float64),
        "scale": scene.scale(dtype),
        "softcap": case.softcap,
        "sinks": scene.sinks,
    }
    plain = plain_formula(*inputs, **options)
    assert output.dtype is dtype
    assert output.transpose(1, 2).is_contiguous()
    outputs = [Compared(output, exact.output, plain.output), output_in_orders(*inputs, exact.output, **options)]
    return outputs, logsumexp, found, exact


def check(case: Case, dtype: torch.dtype, device: str, *, kind: type[Scene] = Scene, draws: int = 1) -> None:
    """Check outputs against one error budget for all draws, and the other results of the first draw against bounds."""
    scene = kind(case, dtype, device)
    outputs, logsumexp, found, exact = compared(scene, dtype)
    for draw in range(1, draws):
        outputs += compared(kind(case, dtype, device, seed=11 + draw), dtype)[0]
    assert_draws_within_error_budget([{"output": x} for x in outputs], name=f"{case} in {dtype}")
    # Log-sum-exp and largest logit are float32 whatever the inputs are, so the size of the logits bounds their error.
    bound = 1e-5 * (1 + logit_bound(scene))
    assert_close(logsumexp, exact.logsumexp, bound, f"log-sum-exp of {case} in {dtype}")
    assert tuple(found) == case.names
    large = logit_bound(scene) > 100
    for name in case.names:
        expected = getattr(exact.statistics, name)
        assert found[name].dtype is torch.float32
        assert found[name].shape == expected.shape
        if name in ("max_logit", "max_abs_logit"):
            bound = 1e-5 * logit_bound(scene)
        elif name == "visible_keys":
            bound = 0.0
        elif "distance" in name or "offset" in name:
            bound = 1e-5 * max(1.0, float(expected.abs().max()))
        else:
            bound = 1e-3 if large else 1e-5
        assert_close(found[name], expected, bound, f"{name} of {case} in {dtype}")


def logit_bound(scene: Scene) -> float:
    """Return scale * |q| * max|k|, an upper bound of the logits."""
    scale = scene.scale(torch.float64)
    largest = float(scene.query.double().norm(dim=-1).max() * scene.key.norm(dim=-1).max())
    return largest * (float(scale.max()) if isinstance(scale, Tensor) else scale)


def assert_close(actual: Tensor, exact: Tensor, bound: float, name: str) -> None:
    infinite = exact.isinf()
    assert torch.equal(actual.double()[infinite], exact[infinite]), f"{name}: infinities stand elsewhere"
    error = (actual.double() - exact)[~infinite].abs()
    assert bool((error <= bound).all()), f"{name}: error {float(error.max()):.3e} exceeds {bound:.3e}"


def _quantize(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scale = tensor.float().abs().amax(-1, keepdim=True) / 127
    return (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def check_nonfinite_values(dtype: torch.dtype, device: str) -> None:
    """Check that a NaN in the values of the new tokens reaches only the rows that see it."""
    for layout in ("contiguous", "rolling", "paged"):
        scene = Scene(Case(layout=layout, queries=3, lengths=None, splits=2, names=()), dtype, device)
        clean = scene.run()[0]
        key, value, last = scene.cache.key, scene.cache.value, scene.keys - 1
        if scene.cache.block_table is not None:
            page = int(scene.cache.block_table[1, last // scene.case.page_size])
            value[page, last % scene.case.page_size, 0] = torch.nan
        elif scene.cache.key_position is not None:
            value[1, 0, int((scene.cache.key_position[0] == last).nonzero())] = torch.nan
        else:
            value[1, 0, last] = torch.nan
        broken = scene.run()[0]
        sees = torch.zeros_like(clean, dtype=torch.bool)
        sees[1, : scene.case.group, 2] = True
        assert broken[sees].isnan().all(), layout
        assert broken[~sees].equal(clean[~sees]), layout
        assert key.isnan().any() == (layout == "paged"), layout


def check_operator(device: str) -> None:
    """Check the operator with opcheck (schema, fake tensors) and compile it without a graph break."""
    scene = Scene(
        Case(queries=2, group=1, sinks=True, splits=1, names=("entropy", "learned_sink_mass")), torch.float32, device
    )
    cache = tuple(scene.cache)
    numbers = (0.25, None, None, 0, 0, 0, [2, 13], 1, 64, 1)
    torch.library.opcheck(decoding._decode, (scene.query, *cache, None, scene.sinks, None, *numbers))
    compiled = torch.compile(Scene.run, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(scene)[:2], scene.run()[:2], strict=True):
        assert ours.equal(theirs)


def check_all(cases: list[Case], dtype: torch.dtype, device: str) -> None:
    for case in cases:
        check(case, dtype, device)


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_the_interpreter_every_layout_gives_the_formula(dtype: torch.dtype) -> None:
    # The same code in either dtype: every third in float16, the others in float32.
    cases = [case for i, case in enumerate(CASES) if (i % 3 == 0) == (dtype is torch.float16)]
    in_the_interpreter(check_all, cases, dtype, "cpu")


def test_in_the_interpreter_a_nonfinite_value_reaches_only_rows_that_see_it() -> None:
    in_the_interpreter(check_nonfinite_values, torch.float32, "cpu")


def test_in_the_interpreter_the_operator_can_be_traced() -> None:
    in_the_interpreter(check_operator, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), in_two_dtypes(CASES, torch.float16))
def test_on_a_gpu_every_layout_gives_the_formula(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(dims=(128, 128), group=4), Case(dims=(256, 96), group=32, queries=2)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "paged", "rolling", "int8"])
def test_on_a_gpu_sizes_of_real_models_give_the_formula(case: Case, layout: str) -> None:
    check(replace(case, layout=layout), torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_a_nonfinite_value_reaches_only_rows_that_see_it() -> None:
    check_nonfinite_values(torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 16])
def test_on_a_gpu_steps_in_a_graph_follow_each_other(splits: int) -> None:
    """Each step reads what the previous step wrote, and reuses its memory for partial results."""
    generator = torch.Generator("cuda").manual_seed(3)
    key, value, query = (
        torch.randn(2, heads, length, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((2, 4099), (2, 4099), (4, 1))
    )

    def walk(steps: int, *, waiting: bool) -> list[Tensor]:
        state, results = query, []
        for _ in range(steps):
            output, logsumexp, _ = decode(state, CacheArguments(key, value), scale=1.0, splits=splits)
            if waiting:
                torch.cuda.synchronize()
            state = output
            results.append(logsumexp)
        return [*results, state]

    expected = walk(50, waiting=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = walk(50, waiting=False)
    graph.replay()
    for actual in (walk(50, waiting=False), replayed):
        assert all(one.equal(other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_a_graph_follows_lengths_that_change_between_replays() -> None:
    scene = Scene(Case(names=("max_logit", "entropy"), splits=None), torch.bfloat16, "cuda")
    cache, lengths = scene.cache, scene.cache.lengths
    assert lengths is not None
    scene.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, logsumexp, found = scene.run()
    lengths.copy_(torch.tensor([17, 130], dtype=torch.int32))
    graph.replay()
    shorter = scene.run()
    assert output.equal(shorter[0])
    assert logsumexp.equal(shorter[1])
    assert all(found[name].equal(shorter[2][name]) for name in found)
    assert cache.lengths is lengths


def tensors(**changes: Any) -> tuple[Tensor, CacheArguments]:
    query, key = torch.zeros(2, 6, 1, 16), torch.zeros(2, 3, 19, 16)
    return query, CacheArguments(key, key)._replace(**changes)


def test_the_cpu_is_unsupported() -> None:
    query, cache = tensors()
    with pytest.raises(BackendUnsupported, match="run on CUDA devices, got tensors on cpu"):
        decode(query, cache, scale=0.25)


@pytest.mark.parametrize(
    ("query", "cache", "words"),
    [
        (torch.zeros(2, 6, 17, 16), {}, "up to 16 new tokens per sequence, got 17"),
        (torch.zeros(2, 6, 1, 16, dtype=torch.float64), {}, "got torch.float64"),
        (torch.zeros(2, 6, 1, 16, dtype=torch.float16), {}, "must be torch.float16 here, got torch.float32"),
        (torch.zeros(2, 6, 1, 16), {"value": torch.zeros(2, 3, 19, 12)}, "value_dim must be a multiple of 8 up to 256"),
        (torch.zeros(2, 6, 1, 16), {"key": torch.zeros(2, 3, 16, 19).mT}, "last axis of query, keys"),
        (torch.zeros(2, 6, 1, 16, requires_grad=True), {}, "no gradient"),
        (torch.zeros(2, 6, 1, 16, device="meta"), {}, r"one device, got \['cpu', 'meta'\]"),
    ],
)
def test_unsupported_tensors_raise_with_a_reason(query: Tensor, cache: dict[str, Tensor], words: str) -> None:
    with pytest.raises(BackendUnsupported, match=words):
        decode(query, tensors(**cache)[1], scale=0.25)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": torch.zeros(2, 4, 19, 16), "value": torch.zeros(2, 4, 19, 16)}, "multiple of KV heads, got 6 and 4"),
        ({"value": torch.zeros(2, 3, 18, 16)}, r"got \[2, 6, 1, 16\], \[2, 3, 19, 16\] and \[2, 3, 18, 16\]"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must be \[2\], got \[3\]"),
        ({"key": torch.zeros(5, 3, 19, 16), "value": torch.zeros(5, 3, 19, 16)}, r"key must be \[2, 3, 19, 16\], got"),
        ({"key": torch.zeros(57, 16)}, "must have four axes"),
    ],
)
def test_mismatched_shapes_raise(changes: dict[str, Tensor], words: str) -> None:
    query, cache = tensors(**changes)
    with pytest.raises(ShapeError, match=words):
        decode(query, cache, scale=0.25)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"key_scale": torch.zeros(2, 3, 19)}, {}, "must be passed together, got key_scale alone"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, {}, "a block table needs lengths"),
        ({}, {"first_keys": 4}, "got first_keys 4 and left None"),
        ({}, {"names": ("learned_sink_mass",)}, "needs learned sinks, got sinks None"),
        ({}, {"splits": 129}, "between 1 and 128, got 129"),
    ],
)
def test_invalid_options_raise(changes: dict[str, Tensor], options: dict[str, Any], words: str) -> None:
    query, cache = tensors(**changes)
    if cache.block_table is not None:
        cache = cache._replace(key=torch.zeros(5, 16, 3, 16), value=torch.zeros(5, 16, 3, 16))
    with pytest.raises(OptionError, match=words):
        decode(query, cache, scale=0.25, **options)


def test_all_reasons_are_reported_at_once() -> None:
    query, cache = tensors()
    assert len(decode_reasons(query.double(), cache)) == 3


@pytest.mark.parametrize(("pairs", "tiles"), [(8, 512), (128, 128), (512, 64), (16, 512), (1, 1), (3, 0), (5000, 9)])
def test_splits_fill_the_device_and_no_more(pairs: int, tiles: int) -> None:
    splits = plan_splits(pairs, tiles, 264)
    assert 1 <= splits <= max(tiles, 1)
    if pairs >= 264 * 8:
        assert splits == 1
    if pairs * tiles >= 264 * 8:
        assert pairs * splits >= 132


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("dims", [(8, 8), (40, 16), (128, 128), (96, 256), (256, 256)])
@pytest.mark.parametrize("rows", [1, 19, 32, 512])
def test_tiles_are_powers_of_two_and_fit_into_shared_memory(rows: int, dims: tuple[int, int], itemsize: int) -> None:
    blocks = plan_blocks(rows, *dims, itemsize, 3, False)
    for size in (blocks.rows, blocks.keys, blocks.dim_key, blocks.dim_value):
        assert size >= 16
        assert size & (size - 1) == 0
    assert blocks.dim_key >= dims[0]
    assert blocks.dim_value >= dims[1]
    tile = blocks.keys * (blocks.dim_key + blocks.dim_value) * itemsize
    assert blocks.resident * (blocks.stages - 1) * tile <= 200 * 1024

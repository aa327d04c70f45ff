"""The forward kernel against float64, by the design's bounds: in Triton's interpreter and on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import Statistics
from polyhead.ops.common.dropout import keep_tile
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernel_masks import pack
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.statistics import NAMES, RowStatistics
from polyhead.ops.common.visibility import resolve
from tests.error_budget import DRAWS, Compared, assert_draws_within_error_budget
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory
from tests.ops.oracle import Scene, Who, normal
from tests.two_dtypes import DTYPES, in_two_dtypes

SINK_KEYS, WINDOW, SEED = 2, 6, 11
SMALL = (16, 16, 4, 1)  # tiles so small that short sequences have several, some of them full
HALVES_AND_SINGLES = [torch.float32, torch.float16]


@dataclass(frozen=True)
class Found:
    output: Tensor
    logsumexp: Tensor
    statistics: dict[str, Tensor]
    indices: dict[str, Tensor]


def scene(
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    queries: int = 23,
    keys: int = 41,
    dims: tuple[int, int] = (11, 7),
    spread: float = 1.0,
    **options: Any,
) -> Scene:
    return Scene(
        normal(batch, heads[0], queries, dims[0], seed=1) * spread,
        normal(batch, heads[1], keys, dims[0], seed=2) * spread,
        normal(batch, heads[1], keys, dims[1], seed=3),
        **options,
    )


def hiding(*shape: int) -> Tensor:
    """Return a bias that also masks some keys."""
    return torch.where(normal(*shape, seed=4) > 1.2, -torch.inf, normal(*shape, seed=5))


def dense(*shape: int) -> Tensor:
    allowed = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed[..., 5:8, :] = False
    return allowed


def flags() -> dict[str, Scene]:
    """Return one scene per option of the kernel, and combinations that share code."""
    documents = ((0,) * 19 + (-1,) * 3 + (1,) * 19, (2,) * 31 + (0,) * 10)
    positions = tuple((7 * i) % 47 - (i % 5 == 0) * 70 for i in range(41))
    return {
        "nothing": scene(),
        "causal": scene(who=Who(causal=True)),
        "causal, more queries than keys": scene(queries=41, keys=23, who=Who(causal=True)),
        "window": scene(who=Who(left=9, right=0)),
        "window of both sides": scene(who=Who(left=18, right=17)),
        "window and first keys": scene(who=Who(left=3, right=0, first=2)),
        "wide window and first keys": scene(queries=41, who=Who(left=33, right=1, first=18)),
        "right padding": scene(batch=2, keys=23, who=Who(key_lengths=(19, 0), causal=True)),
        "left padding": scene(batch=2, keys=23, who=Who(key_lengths=(19, 3), side="left", left=4, first=2)),
        "documents": scene(batch=2, queries=41, who=Who(query_documents=documents, causal=True)),
        "positions": scene(who=Who(query_positions=(tuple(range(20, 43)),), key_positions=(positions,), causal=True)),
        "dense": scene(who=Who(dense=dense(1, 2, 23, 41))),
        "dense keys": scene(batch=2, who=Who(dense=dense(2, 1, 1, 41)[:, :, :1])),
        "bias": scene(bias=hiding(1, 2, 23, 41)),
        "bias of keys": scene(batch=2, bias=normal(2, 1, 1, 41, seed=5), who=Who(causal=True)),
        "table": scene(table=normal(2, 9, seed=6), zero=5, who=Who(causal=True)),
        "one table": scene(table=normal(1, 101, seed=6), zero=60),
        "softcap": scene(softcap=2.5, spread=2.0),
        "softcap, large": scene(softcap=50.0, who=Who(causal=True)),
        "softcap, bias and table": scene(softcap=2.5, bias=hiding(1, 1, 23, 41), table=normal(2, 9, seed=6), zero=5),
        "sinks": scene(sinks=normal(2, seed=7), who=Who(causal=True)),
        "sinks alone": scene(batch=2, keys=23, sinks=normal(2, seed=7), who=Who(key_lengths=(19, 0))),
        "sinks of every size": scene(heads=(3, 1), sinks=torch.tensor([-90.0, 0.0, 90.0], dtype=torch.float64)),
        "sinks and bias": scene(sinks=normal(2, seed=7), bias=hiding(1, 1, 23, 41)),
        "a negative scale": scene(scale=-0.4, who=Who(causal=True)),
        "a scale a head": scene(heads=(4, 2), scale=torch.tensor([0.3, -0.6, 0.0, 1.1], dtype=torch.float64)),
        "everything at once": scene(
            heads=(4, 2),
            queries=41,
            bias=hiding(1, 1, 41, 41),
            table=normal(4, 9, seed=6),
            zero=5,
            sinks=normal(4, seed=7),
            scale=normal(4, seed=8),
            softcap=2.5,
            who=Who(left=20, right=3, first=2, query_documents=documents[:1], dense=dense(1, 4, 41, 41)),
        ),
    }


def sizes() -> dict[str, Scene]:
    """Return causal scenes of irregular head dims, groups and lengths, with full and edge tiles."""
    who = Who(causal=True)
    return {
        "one of everything": scene(heads=(1, 1), queries=1, keys=1, dims=(1, 1), who=who),
        "one query": scene(queries=1, dims=(16, 16)),
        "many queries a KV head": scene(heads=(7, 1), queries=5, dims=(8, 24), who=who),
        "no group": scene(heads=(3, 3), queries=19, keys=19, dims=(24, 8), who=who),
        "dims of 40 and 72": scene(heads=(2, 2), queries=17, keys=33, dims=(40, 72), who=who),
        "dims of 96": scene(queries=17, keys=17, dims=(96, 96), who=who),
        "dims of 256": scene(queries=17, keys=17, dims=(256, 256), who=who),
        "a whole number of tiles": scene(queries=32, keys=48, dims=(16, 16), who=who),
    }


@functools.cache
def long() -> dict[str, Scene]:
    """Return scenes of several GPU-sized tiles."""
    result = {}
    for dim in (16, 64, 80, 128, 256):
        result[f"nothing, {dim}"] = scene(heads=(4, 2), queries=390, keys=517, dims=(dim, dim))
        result[f"causal, {dim}"] = scene(heads=(4, 2), queries=517, keys=517, dims=(dim, dim), who=Who(causal=True))
        result[f"window, {dim}"] = scene(queries=517, keys=517, dims=(dim, 64), who=Who(left=200, right=0, first=3))
    for dims in ((24, 8), (40, 24), (72, 24), (136, 24)):  # wrong in tiles of few value channels; see `tile_dims`
        result[f"causal, {dims}"] = scene(heads=(4, 2), queries=261, keys=261, dims=dims, who=Who(causal=True))
    return result


@contextmanager
def tiles(blocks: tuple[int, int, int, int] | None) -> Iterator[None]:
    from polyhead.ops.attention.kernels import forward as module

    if blocks is None:
        yield
        return
    with mock.patch.object(module, "choose_blocks", return_value=module.Blocks(*blocks)):
        yield


def arguments(case: Scene, device: str) -> MaskArguments:
    batch, heads, queries, keys = case.sizes
    mask = None if case.mask is None else case.mask.to(device)
    if mask is None:
        return MaskArguments(offset=keys - queries)
    where = torch.zeros(0, device=device).device  # cuda is cuda:0
    visibility = resolve(mask, batch=batch, heads=heads, queries=queries, keys=keys, device=where, ordinals=True)
    return MaskArguments(offset=keys - queries) if visibility is None else pack(visibility)


def run(case: Scene, device: str, names: tuple[str, ...] = NAMES, rate: float = 0.0, **options: Any) -> Found:
    from polyhead.ops.attention.kernels.forward import forward

    scale = case.query.shape[-1] ** -0.5 if case.scale is None else case.scale
    is_per_head = isinstance(scale, Tensor)
    with poisoned_memory():
        call = KernelCall(
            case.query.to(device),
            case.key.to(device),
            case.value.to(device),
            options.pop("mask", None) or arguments(case, device),
            scale=1.0 if is_per_head else scale,
            head_scale=scale.to(device) if is_per_head else None,
            softcap=case.softcap,
            sinks=None if case.sinks is None else case.sinks.to(device),
            dropout=rate,
            seed=torch.tensor([SEED], device=device) if rate else None,
            names=tuple(name for name in names if name != "learned_sink_mass" or case.sinks is not None),
            sink_keys=SINK_KEYS,
            window=WINDOW,
        )
        found = forward(call, argmax=options.pop("argmax", True), **options)
    output, logsumexp, statistics, indices = found
    by_name = ({name: x.cpu() for name, x in some.items()} for some in (statistics, indices))
    return Found(output.cpu(), logsumexp.cpu(), *by_name)


def bounds(case: Scene) -> dict[str, float]:
    """Return the error bound of each statistic; for sums of weights, from the rounding of the logits."""
    scale = case.query.shape[-1] ** -0.5 if case.scale is None else case.scale
    scale = float(scale.abs().max()) if isinstance(scale, Tensor) else abs(scale)
    size = scale * float(case.query.norm(dim=-1).max() * case.key.norm(dim=-1).max())
    logit = 1e-5 * size
    for bias in (case.bias, case.table):
        if bias is not None:
            size += float(bias[bias.isfinite()].abs().max())
    weight = 2**-23 * (16 + 4 * size)
    batch, _, queries, keys = case.sizes
    distance = float(case.who.distances(batch, queries, keys).abs().max())
    loose = {"entropy": 1e-3, "max_logit": logit, "max_abs_logit": logit, "visible_keys": 0.0}
    far = {"mean_distance": distance, "mean_offset": distance, "mean_squared_distance": distance * distance}
    return {name: loose.get(name, weight * far.get(name, 1.0)) for name in NAMES}


def check_statistics(name: str, found: dict[str, Tensor], exact: RowStatistics, bound: dict[str, float]) -> None:
    right = dict(exact.items())
    for statistic, actual in found.items():
        where = f"{name}: {statistic}"
        expected = right[statistic]
        assert actual.dtype is torch.float32
        infinite = expected.isinf()
        assert torch.equal(actual.double()[infinite], expected[infinite]), f"{where}: infinities stand elsewhere"
        error = (actual.double() - expected)[~infinite].abs()
        assert not error.isnan().any(), f"{where}: NaN"
        assert (error <= bound[statistic]).all(), f"{where}: off by {error.max():.3e}, allowed {bound[statistic]:.3e}"


def check(
    name: str,
    case: Scene,
    dtype: torch.dtype,
    device: str,
    blocks: tuple[int, int, int, int] | None = SMALL,
    *,
    rate: float = 0.0,
    **options: Any,
) -> None:
    """Check output and log-sum-exp against the error budget, and statistics against their bounds."""
    name = f"{name}, {dtype}"
    case = case.to(dtype)
    exact_case = case.to(torch.float64)
    there = case.on(device)
    requested = Statistics(sink_keys=SINK_KEYS, window=WINDOW)
    exact = there.to(torch.float64).run("reference", there.query.device.type, statistics=requested)
    with tiles(blocks):
        found = run(case, device, rate=rate, **options)
    assert found.output.dtype is dtype
    assert found.logsumexp.dtype is torch.float32
    samples = [by_formula(there, rate), by_formula(there.reordered(DRAWS), rate)]
    for part, actual in (("output", found.output), ("logsumexp", found.logsumexp)):
        samples[0][part] = samples[0][part]._replace(actual=actual.to(there.query.device))
    assert_draws_within_error_budget(samples, name=name)
    assert exact.statistics is not None
    right = replace(exact.statistics, **{what: x.cpu() for what, x in exact.statistics.items()})
    check_statistics(name, found.statistics, right, bounds(exact_case))
    check_indices(name, exact_case, found)


def by_formula(case: Scene, rate: float) -> dict[str, Compared]:
    """Return the result of the formula in float64 and in the dtype of the case."""
    batch, heads, queries, keys = case.sizes
    keep = (
        keep_tile(torch.tensor([SEED], device=case.query.device), rate, batch, heads, (0, queries), (0, keys))
        if rate
        else None
    )
    exact, plain = (x.formula(keep=keep, rate=rate) for x in (case.to(torch.float64), case))
    return {
        "output": Compared(None, exact.output, plain.output),
        "logsumexp": Compared(None, exact.logsumexp, plain.logsumexp),
    }


def logits_of(case: Scene) -> Tensor:
    """Return the logits of a float64 scene by the formula, -inf if masked."""
    batch, heads, queries, keys = case.sizes
    scale = case.query.shape[-1] ** -0.5 if case.scale is None else case.scale
    factor = scale[:, None, None] if isinstance(scale, Tensor) else scale
    logits = case.query @ case.key.repeat_interleave(heads // case.key.shape[1], 1).transpose(-1, -2) * factor
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    if case.bias is not None:
        logits = logits + case.bias
    if case.table is not None:
        place = (case.who.distances(batch, queries, keys) + case.zero).clamp(0, case.table.shape[1] - 1)
        logits = logits + case.table[:, place].transpose(0, 1)
    return torch.where(case.visible(), logits, -torch.inf)


def check_indices(name: str, case: Scene, found: Found) -> None:
    """Check that the returned keys have the max logits, up to rounding; -1 without keys."""
    logits = logits_of(case)
    sees = case.visible().any(-1)
    bound = max(bounds(case)["max_logit"], 1e-6)
    place = found.indices["argmax"].long()
    assert torch.equal(place >= 0, sees), name
    there = logits.gather(-1, place.clamp_min(0)[..., None])[..., 0]
    assert ((there - logits.amax(-1)).abs()[sees] <= bound).all(), name
    code = found.indices["argmax_abs"].long()
    assert torch.equal(code >= 0, sees), name
    there = logits.gather(-1, (code.clamp_min(0) >> 1)[..., None])[..., 0]
    size = torch.where(case.visible(), logits.abs(), -1.0).amax(-1)
    assert ((there.abs() - size).abs()[sees] <= bound).all(), name
    clear = sees & (there.abs() > bound)
    assert torch.equal((code & 1)[clear], (there < 0).long()[clear]), name


def check_all(cases: dict[str, Scene], dtypes: list[torch.dtype], device: str, **options: Any) -> None:
    for name, case in cases.items():
        for dtype in dtypes:
            check(name, case, dtype, device, **options)


ONE_BY_ONE = {"nothing": Who(), "causal": Who(causal=True)}


def check_each_mask_one_by_one(device: str) -> None:
    for name in ONE_BY_ONE:
        check_one_by_one(name, device)


def check_one_by_one(name: str, device: str, blocks: tuple[int, int, int, int] | None = SMALL) -> None:
    """Check each statistic requested alone, with its own range of full tiles, and no statistics."""
    case = scene(queries=41, sinks=normal(2, seed=7), who=ONE_BY_ONE[name]).to(torch.float32)
    exact_case = case.to(torch.float64)
    exact = exact_case.run("reference", statistics=Statistics(sink_keys=SINK_KEYS, window=WINDOW)).statistics
    assert exact is not None
    with tiles(blocks):
        for requested in NAMES:
            found = run(case, device, (requested,), argmax=False)
            assert list(found.statistics) == [requested]
            assert not found.indices
            check_statistics(name, found.statistics, exact, bounds(exact_case))
        assert run(case, device, (), argmax=True).statistics == {}


def check_ties(device: str, blocks: tuple[int, int, int, int] | None = SMALL) -> None:
    """Check that the lowest key is returned among ties, whatever the order of tiles."""
    for who in (Who(), Who(causal=True), Who(left=30, right=9, first=2)):
        query, key = normal(1, 2, 41, 4, seed=1).sign(), normal(1, 1, 41, 4, seed=2).sign()
        case = Scene(query, key, normal(1, 1, 41, 3, seed=3), who=who, scale=1.0)
        with tiles(blocks):
            found = run(case.to(torch.float32), device).indices
        logits = torch.where(case.visible(), query @ key.transpose(-1, -2), -torch.inf)
        size = torch.where(case.visible(), logits.abs(), -1.0)
        place = torch.arange(41)
        lowest = torch.where(logits == logits.amax(-1, keepdim=True), place, 41).amin(-1)
        lowest_abs = torch.where(size == size.amax(-1, keepdim=True), place, 41).amin(-1)
        assert torch.equal(found["argmax"].long(), lowest)
        negative = (logits.gather(-1, lowest_abs[..., None])[..., 0] < 0).long()
        assert torch.equal(found["argmax_abs"].long(), 2 * lowest_abs + negative)


def check_extremes(device: str, blocks: tuple[int, int, int, int] | None = SMALL) -> None:
    """Check logits up to 1e4, one-hot rows, uniform rows, and the most negative bias of a float."""
    for who in (Who(), Who(causal=True)):
        check("huge", scene(queries=41, keys=41, dims=(16, 8), spread=50.0, who=who), torch.float32, device, blocks)
        one_hot = scene(queries=41, keys=41, dims=(16, 8), who=who)
        one_hot = replace(one_hot, query=one_hot.query * 0 + 30.0, key=one_hot.key.sign() * 30.0)
        check("one weight", one_hot, torch.float32, device, blocks)
        uniform = scene(queries=41, keys=41, dims=(16, 8), who=who)
        check("uniform", replace(uniform, query=uniform.query * 0), torch.float32, device, blocks)
        lowest = torch.full((1, 1, 41, 41), torch.finfo(torch.float32).min, dtype=torch.float64)
        lowest[:, :, ::2, 7:20] = 0.5
        check("lowest bias", scene(queries=41, keys=41, who=who, bias=lowest), torch.float32, device, blocks)
        absent = replace(uniform, sinks=torch.full((2,), -torch.inf)).to(torch.float32)
        with tiles(blocks):
            found, expected = run(absent, device), run(replace(absent, sinks=None), device)
        assert (found.statistics.pop("learned_sink_mass") == 0).all()
        assert all(found.statistics[name].equal(expected.statistics[name]) for name in expected.statistics)


def check_poison(device: str, blocks: tuple[int, int, int, int] | None = SMALL) -> None:
    """Check that rows that see a non-finite key are NaN except for `visible_keys`, and no others."""
    for who in (Who(), Who(causal=True), Who(left=9, right=0), Who(dense=dense(1, 1, 41, 41))):
        case = scene(queries=41, who=who).to(torch.float32)
        mask = arguments(case, device)
        poison = torch.zeros(1, 1, 41, device=device)
        poison[:, :, 21::30] = torch.nan
        with tiles(blocks):
            # A poison of zeros, so that both results come from one compiled kernel and must agree bit for bit.
            clean, found = (run(case, device, mask=mask._replace(poison=x)) for x in (torch.zeros_like(poison), poison))
        seen = (case.visible() & poison.cpu().isnan()[:, :, None]).any(-1)
        assert seen.any()
        assert found.output.isnan().all(-1).equal(seen)
        assert found.output[~seen].equal(clean.output[~seen])
        for name, rows in {"sum": found.logsumexp, **found.statistics}.items():
            before = clean.logsumexp if name == "sum" else clean.statistics[name]
            if name == "visible_keys":
                assert rows.equal(before)
            else:
                assert rows.isnan().equal(seen), name
                assert rows[~seen].equal(before[~seen]), name


def check_nothing_there(device: str) -> None:
    """Check empty batches, queries and keys."""
    for batch, queries, keys in ((0, 5, 7), (2, 0, 7), (2, 5, 0)):
        case = scene(batch=batch, queries=queries, keys=keys, sinks=None).to(torch.float32)
        found = run(case, device)
        assert found.output.equal(torch.zeros(batch, 2, queries, 7))
        assert found.logsumexp.shape == (batch, 2, queries)
        assert (found.logsumexp == -torch.inf).all()
        for name, rows in found.statistics.items():
            assert (rows == (-torch.inf if name == "max_logit" else 0.0)).all(), name


def check_strides(device: str, blocks: tuple[int, int, int, int] | None = SMALL) -> None:
    """Check views into wider tensors, and one head expanded to many."""
    wide = normal(2, 37, 4, 40, seed=1, dtype=torch.float32)
    query, key, value = (wide[..., a:b].transpose(1, 2) for a, b in ((0, 16), (16, 32), (32, 40)))
    for kv in ((key, value), (key[:, :1].expand(-1, 4, -1, -1), value[:, :2, :, :].expand(2, 2, 37, 8))):
        case = Scene(query, kv[0][:, : kv[1].shape[1]], kv[1], who=Who(causal=True))
        dense_case = Scene(*(x.contiguous() for x in (case.query, case.key, case.value)), who=case.who)
        with tiles(blocks):
            found, expected = (run(x, device, ("entropy",)) for x in (case, dense_case))
        assert found.output.equal(expected.output)
        assert found.statistics["entropy"].equal(expected.statistics["entropy"])


def check_vectors(device: str, blocks: tuple[int, int, int, int] | None = SMALL) -> None:
    """Check numbers per head in every second element of a tensor, and one number for all heads."""
    dense = normal(8, seed=9, dtype=torch.float32).to(device)
    single = scene(heads=(4, 2)).to(torch.float32)
    for vector in (dense[::2], dense[:1].expand(4)):
        case, dense_case = (replace(single, sinks=x, scale=x) for x in (vector, vector.contiguous()))
        with tiles(blocks):
            found, expected = (run(x, device, ("entropy",)) for x in (case, dense_case))
        assert found.output.equal(expected.output)
        assert found.statistics["entropy"].equal(expected.statistics["entropy"])


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", HALVES_AND_SINGLES, ids=str)
def test_in_the_interpreter_every_option_keeps_to_the_bounds(dtype: torch.dtype) -> None:
    # The same code in either dtype: every third in float16, the others in float32.
    cases = {name: case for i, (name, case) in enumerate(flags().items()) if (i % 3 == 2) == (dtype is torch.float16)}
    in_the_interpreter(check_all, cases, [dtype], "cpu")


@pytest.mark.numerics
def test_in_the_interpreter_all_sizes_keep_to_the_bounds() -> None:
    in_the_interpreter(check_all, sizes(), HALVES_AND_SINGLES, "cpu")


@pytest.mark.numerics
def test_in_the_interpreter_tensor_descriptors_give_the_same() -> None:
    cases = {"causal": scene(dims=(16, 8), who=Who(causal=True)), "dims of 40 and 72": sizes()["dims of 40 and 72"]}
    in_the_interpreter(check_all, cases, HALVES_AND_SINGLES, "cpu", descriptors=True)


@pytest.mark.numerics
def test_in_the_interpreter_the_tiles_of_a_gpu_keep_to_the_bounds() -> None:
    case = scene(queries=70, keys=141, who=Who(causal=True))
    in_the_interpreter(check, "causal", case, torch.float16, "cpu", None)


@pytest.mark.numerics
def test_in_the_interpreter_dropout_leaves_the_weights_it_should() -> None:
    case = scene(batch=2, who=Who(causal=True))
    in_the_interpreter(check, "dropout", case, torch.float32, "cpu", rate=0.3)


def test_in_the_interpreter_each_statistic_can_be_requested_alone() -> None:
    in_the_interpreter(check_each_mask_one_by_one, "cpu")


def test_in_the_interpreter_ties_go_to_the_lowest_key() -> None:
    in_the_interpreter(check_ties, "cpu")


@pytest.mark.numerics
def test_in_the_interpreter_extreme_rows_keep_to_the_bounds() -> None:
    in_the_interpreter(check_extremes, "cpu")


def test_in_the_interpreter_poison_reaches_rows_that_see_it_and_empty_inputs_give_zeros() -> None:
    in_the_interpreter(check_poison, "cpu")
    in_the_interpreter(check_nothing_there, "cpu")


def test_in_the_interpreter_any_strides_give_the_same() -> None:
    in_the_interpreter(check_strides, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(flags()))
def test_on_a_gpu_every_option_keeps_to_the_bounds(name: str, dtype: torch.dtype) -> None:
    check(name, flags()[name], dtype, "cuda", None)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(sizes()))
def test_on_a_gpu_all_sizes_keep_to_the_bounds(name: str, dtype: torch.dtype) -> None:
    check(name, sizes()[name], dtype, "cuda", None)


@pytest.mark.gpu
@pytest.mark.parametrize("descriptors", [False, None], ids=["pointers", "descriptors where they fit"])
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(long()))
def test_on_a_gpu_long_sequences_keep_to_the_bounds(name: str, dtype: torch.dtype, descriptors: bool | None) -> None:
    check(name, long()[name], dtype, "cuda", None, descriptors=descriptors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_dropout_leaves_the_weights_it_should(dtype: torch.dtype) -> None:
    check("dropout", scene(queries=300, keys=300, who=Who(causal=True)), dtype, "cuda", None, rate=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_on_a_gpu_each_statistic_can_be_asked_for_alone(name: str) -> None:
    check_one_by_one(name, "cuda", None)


def test_in_the_interpreter_numbers_of_heads_have_any_stride() -> None:
    in_the_interpreter(check_vectors, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("check_rest", [check_ties, check_extremes, check_poison, check_strides, check_vectors])
def test_on_a_gpu_the_rest_holds_too(check_rest: Callable[[str, None], None]) -> None:
    check_rest("cuda", None)


@pytest.mark.gpu
def test_on_a_gpu_nothing_gives_zeros() -> None:
    check_nothing_there("cuda")


@pytest.mark.gpu
def test_on_a_gpu_more_than_65535_heads_are_served() -> None:
    case = scene(batch=70_001, heads=(1, 1), queries=3, keys=3, dims=(16, 16)).to(torch.bfloat16)
    found = run(case, "cuda", ("entropy",))
    last = replace(case, query=case.query[-5:], key=case.key[-5:], value=case.value[-5:])
    assert found.output[-5:].equal(run(last, "cuda", ("entropy",)).output)


@pytest.mark.gpu
def test_on_a_gpu_tensors_beyond_31_bits_are_served() -> None:
    from polyhead.ops.attention.kernels.forward import forward

    keys, dim = (1 << 24) + 300, 128
    key = torch.zeros(1, 1, keys, dim, device="cuda", dtype=torch.bfloat16)
    key[:, :, -400:] = torch.randn(400, dim, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(1, 2, 40, dim, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"scale": 0.1, "names": ("entropy", "mean_distance"), "window": 1}
    for descriptors in (False, None):
        mask = MaskArguments(left=200, right=0, offset=keys - 40)
        far = forward(KernelCall(query, key, key, mask, **options), descriptors=descriptors)
        tail = key[:, :, -400:]
        near = forward(KernelCall(query, tail, tail, mask._replace(offset=360), **options))
        assert torch.allclose(far[0], near[0], atol=2e-2)
        assert torch.allclose(far[2]["entropy"], near[2]["entropy"], atol=1e-3)
        assert torch.allclose(far[2]["mean_distance"], near[2]["mean_distance"], atol=1e-3)

"""The backward kernels against float64 autograd through the reference, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import Statistics
from polyhead.ops.common.dropout import keep_tile
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernel_masks import mask_reasons, pack
from polyhead.ops.common.statistics import LINEAR
from polyhead.ops.common.visibility import Visibility, resolve
from tests.error_budget import Compared, assert_draws_within_error_budget
from tests.ops.interpreter.interpreted import in_the_interpreter
from tests.ops.oracle import Scene, Who, normal
from tests.two_dtypes import in_two_dtypes

SEED = 5
SINK_KEYS, WINDOW = 2, 3
SMALL = ((16, 32, 4, 2), (32, 16, 4, 2))  # tiles so small that short sequences have several, some of them full
NAMES = ("entropy", "confidence", *LINEAR)
GRADIENTS = ("query", "key", "value", "sinks", "bias", "table")


@dataclass(frozen=True)
class Case:
    scene: Scene
    graded_statistics: tuple[str, ...] = ()  # statistics that have a gradient, which may include "logsumexp"
    rate: float = 0.0


def scene(
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    queries: int = 53,
    keys: int = 59,
    dims: tuple[int, int] = (11, 7),
    **options: object,
) -> Scene:
    return Scene(
        normal(batch, heads[0], queries, dims[0], seed=1),
        normal(batch, heads[1], keys, dims[0], seed=2),
        normal(batch, heads[1], keys, dims[1], seed=3),
        **options,
    )


def hiding(*shape: int) -> Tensor:
    """Return a bias that also masks some keys."""
    return torch.where(normal(*shape, seed=4) > 1.2, -torch.inf, normal(*shape, seed=5))


def flags() -> dict[str, Case]:
    """Return one scene per option, and one with all compatible options."""
    causal = Who(causal=True)
    everything = ("logsumexp", *NAMES)
    documents = tuple(tuple([0] * 20 + [1] * 13 + [-1] * 5 + [2] * (15 + extra)) for extra in (0, 6))
    dense = torch.rand(2, 2, 53, 59, generator=torch.Generator().manual_seed(0)) < 0.4
    dense[1, 1, 7] = False
    small = {"queries": 23, "keys": 29}
    return {
        "nothing": Case(scene()),
        "one head, one channel": Case(scene(batch=1, heads=(1, 1), dims=(1, 1), **small)),
        "groups of heads": Case(scene(batch=1, heads=(6, 2), dims=(16, 40), **small)),
        "one query": Case(scene(batch=2, heads=(6, 2), queries=1)),
        "one key": Case(scene(batch=2, heads=(6, 2), keys=1)),
        "causal": Case(scene(who=causal)),
        "causal, more queries than keys": Case(scene(queries=71, keys=37, who=causal)),
        "window": Case(scene(who=Who(left=21, right=18))),
        "window with first keys": Case(scene(who=Who(left=9, right=0, first=3))),
        "window with a block of first keys": Case(scene(who=Who(left=9, right=4, first=37))),
        "padding on the right": Case(scene(batch=2, who=Who(causal=True, key_lengths=(59, 31), query_lengths=(40, 0)))),
        "padding on the left": Case(scene(batch=2, keys=53, who=Who(causal=True, key_lengths=(53, 31), side="left"))),
        "documents": Case(
            scene(batch=2, who=Who(causal=True, query_documents=documents[:1] * 2, key_documents=documents[1:] * 2))
        ),
        "positions": Case(
            scene(
                who=Who(
                    causal=True,
                    query_positions=(tuple(range(3, 56)),),
                    key_positions=(tuple((7 * j) % 60 - 1 for j in range(59)),),
                )
            )
        ),
        "dense": Case(scene(batch=2, who=Who(dense=dense))),
        "bias": Case(scene(batch=2, bias=hiding(2, 2, 53, 59))),
        "bias shared by heads": Case(scene(batch=2, bias=hiding(2, 1, 53, 59))),
        "bias by key": Case(scene(batch=2, bias=hiding(1, 2, 1, 59))),
        "table": Case(scene(table=normal(2, 150, seed=6), zero=70, who=causal)),
        "table held at its ends": Case(scene(table=normal(1, 9, seed=6), zero=4)),
        "softcap": Case(scene(softcap=2.5, who=causal)),
        "softcap far away": Case(scene(softcap=50.0)),
        "sinks": Case(scene(batch=2, sinks=normal(2, seed=7), who=Who(left=3, key_lengths=(49, 20)))),
        "scale": Case(scene(scale=0.375)),
        "scale a head": Case(scene(scale=normal(2, seed=8), who=causal)),
        "dropout": Case(scene(who=causal), rate=0.3),
        "logsumexp": Case(scene(), ("logsumexp",)),
        **{name: Case(scene(who=causal, **small), (name,)) for name in NAMES},
        "statistics, no mask": Case(scene(), everything),
        "statistics, window": Case(scene(who=Who(left=9, right=30, first=1)), everything),
        "statistics, padding on the left": Case(
            scene(batch=2, keys=53, who=Who(key_lengths=(53, 31), side="left")), everything
        ),
        "statistics and learned sinks": Case(
            scene(batch=2, sinks=normal(2, seed=7), who=Who(causal=True, key_lengths=(49, 20))),
            (*everything, "learned_sink_mass"),
        ),
        "all at once": Case(
            scene(
                batch=2,
                bias=hiding(1, 2, 53, 59),
                table=normal(2, 15, seed=6),
                zero=7,
                sinks=normal(2, seed=7),
                scale=normal(2, seed=8),
                softcap=2.5,
                who=Who(left=40, right=9, first=2, dense=dense[:, :1]),
            ),
            (*everything, "learned_sink_mass"),
            rate=0.2,
        ),
    }


def sizes() -> dict[str, Case]:
    """Return scenes for the default tiles of each size; the last is not a power of two."""
    graded_statistics = ("logsumexp", "entropy", "mean_distance")
    return {
        f"head dim {dim}, value dim {value_dim}": Case(
            scene(batch=1, heads=(2, 1), queries=130, keys=137, dims=(dim, value_dim), who=Who(causal=True)),
            graded_statistics,
        )
        for dim, value_dim in ((64, 64), (128, 128), (256, 256), (72, 200))
    }


def functional(case: Case, directions: dict[str, Tensor], result: dict[str, Tensor]) -> Tensor:
    """Return a scalar whose gradients the kernels compute.

    Of the confidence exp(max - L) they compute only the term that all keys of a row share, -confidence * dL.
    """
    loss = (result["output"] * directions["output"]).double().sum()
    for name in case.graded_statistics:
        graded_statistics = result[name]
        if name == "confidence":
            graded_statistics = -graded_statistics.detach() * torch.where(
                result["logsumexp"] == -torch.inf, 0.0, result["logsumexp"]
            )
        loss = (
            loss
            + (
                torch.where(graded_statistics == -torch.inf, 0.0, graded_statistics)
                * directions[name].to(graded_statistics.dtype)
            )
            .double()
            .sum()
        )
    return loss


def exactly(case: Case, backend: str = "reference", device: str = "cpu") -> dict[str, Tensor]:
    names = tuple(name for name in case.graded_statistics if name != "logsumexp")
    statistics = Statistics(*names, sink_keys=SINK_KEYS, window=WINDOW) if names else None
    result = case.scene.run(backend, device, statistics=statistics, dropout=case.rate, seed=SEED)
    graded_statistics = {} if result.statistics is None else dict(result.statistics.items())
    return {
        name: x.cpu()
        for name, x in {"output": result.output, "logsumexp": result.logsumexp, **graded_statistics}.items()
    }


def plainly(case: Case) -> dict[str, Tensor]:
    """Compute the formula with every intermediate rounded to the dtype of the query."""
    own = case.scene
    batch, heads, queries, keys = own.sizes
    keep = None
    if case.rate:
        keep = keep_tile(torch.tensor([SEED]), case.rate, batch, heads, (0, queries), (0, keys))
    formula = own.formula(keep, case.rate)
    weights, logsumexp = formula.weights, formula.logsumexp
    result = {"output": formula.output, "logsumexp": logsumexp, "confidence": weights.amax(-1)}
    entropy = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    if own.sinks is not None:
        log_share = own.sinks.to(weights.dtype)[:, None] - logsumexp
        result["learned_sink_mass"] = log_share.exp()
        entropy = entropy - log_share.exp() * log_share
    distance = own.who.distances(batch, queries, keys)[:, None]
    ordinal = torch.tensor([[own.who.place(b, 0, j, queries, keys)[2] for j in range(keys)] for b in range(batch)])
    factors = {
        "mean_distance": distance.abs(),
        "mean_offset": distance,
        "mean_squared_distance": distance**2,
        "sink_mass": (ordinal < SINK_KEYS)[:, None, None],
        "self_mass": distance == 0,
        "previous_mass": distance == -1,
        "next_mass": distance == 1,
        "window_mass": distance.abs() <= WINDOW,
    }
    result |= {name: (weights * factor.to(weights.dtype)).sum(-1) for name, factor in factors.items()}
    return {**result, "entropy": entropy}


def gradients(
    case: Case, graded_statistics: Callable[[Case], dict[str, Tensor]], directions: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    case = replace(case, scene=case.scene.with_gradients())
    result = graded_statistics(case)
    inputs = {name: x for name, x in case.scene.learned.items() if name in GRADIENTS}
    found = torch.autograd.grad(functional(case, directions, result), list(inputs.values()), allow_unused=True)
    named = zip(inputs.items(), found, strict=True)
    grads = {name: torch.zeros_like(x) if grad is None else grad for (name, x), grad in named}
    return grads, {name: x.detach() for name, x in result.items()}


def strided(x: Tensor, device: str) -> Tensor:
    """Copy to [batch, tokens, heads, dim] order, with NaN after each row that must not be read."""
    batch, heads, tokens, dim = x.shape
    wide = torch.full((batch, tokens + 1, heads, dim + 3), torch.nan, dtype=x.dtype, device=device)
    view = wide[:, :tokens, :, :dim].transpose(1, 2)
    view.copy_(x)
    return view


@contextmanager
def guarded_memory() -> Iterator[None]:
    """Fill new tensors and guard bands with NaN or large integers; check at the end that the guards are unchanged."""
    margin, buffers = 512, []

    def filling(dtype: torch.dtype) -> float:
        return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max - 1

    def fresh(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def guarded(*args: object, **options: object) -> Tensor:
            model = make(*args, **options)
            size = model.numel() + 2 * margin
            flat = torch.full((size,), filling(model.dtype), dtype=model.dtype, device=model.device)
            buffers.append(flat)
            return flat.as_strided(model.shape, model.stride(), margin)

        return guarded

    with (
        mock.patch.object(torch, "empty", fresh(torch.empty)),
        mock.patch.object(torch, "empty_like", fresh(torch.empty_like)),
    ):
        yield
    assert len(buffers) >= 4
    for flat in buffers:
        for guard in (flat[:margin], flat[-margin:]):
            torch.testing.assert_close(
                guard, torch.full_like(guard, filling(flat.dtype)), rtol=0, atol=0, equal_nan=True
            )


def visibility_of(scene: Scene, device: str) -> Visibility:
    batch, heads, queries, keys = scene.sizes
    mask = scene.mask
    where = torch.zeros(0, device=device).device  # cuda is cuda:0
    visibility = None
    if mask is not None:
        visibility = resolve(
            mask.to(device), batch=batch, heads=heads, queries=queries, keys=keys, device=where, ordinals=True
        )
    return visibility or Visibility(queries, keys, where, offset=keys - queries)


def run_kernels(
    case: Case, result: dict[str, Tensor], directions: dict[str, Tensor], device: str, tiles: object = SMALL
) -> dict[str, Tensor]:
    from polyhead.ops.attention.kernels import backward as module

    own = case.scene
    query, key, value, output, grad_output = (
        strided(x.to(own.query.dtype), device)
        for x in (own.query, own.key, own.value, result["output"], directions["output"])
    )
    head_scale = own.scale.to(device) if isinstance(own.scale, Tensor) else None
    scale = own.query.shape[3] ** -0.5 if own.scale is None else own.scale
    names = [name for name in case.graded_statistics if name != "logsumexp"]
    choose = module.choose_blocks if tiles is None else lambda *_: tuple(module.Blocks(*x) for x in tiles)
    with guarded_memory(), mock.patch.object(module, "choose_blocks", choose):
        call = KernelCall(
            query,
            key,
            value,
            pack(visibility_of(own, device), for_columns=True),
            scale=1.0 if head_scale is not None else scale,
            head_scale=head_scale,
            softcap=own.softcap,
            sinks=None if own.sinks is None else own.sinks.to(device),
            dropout=case.rate,
            seed=torch.tensor([SEED], device=device),
            sink_keys=SINK_KEYS,
            window=WINDOW,
        )
        found = module.backward(
            call,
            grad_output,
            output,
            result["logsumexp"].float().to(device),
            row_gradients={name: directions[name].float().to(device) for name in case.graded_statistics},
            row_values={name: result[name].float().to(device) for name in names},
            bias_shape=None if own.bias is None else tuple(own.bias.shape),
            table_shape=None if own.table is None else tuple(own.table.shape),
        )
    assert [x is None for x in found[3:]] == [x is None for x in (own.sinks, own.bias, own.table)]
    for grad, like in zip(found[:3], (own.query, own.key, own.value), strict=True):
        assert grad.dtype is like.dtype
    return {name: grad.cpu() for name, grad in zip(GRADIENTS, found, strict=True) if grad is not None}


def directions_for(case: Case) -> dict[str, Tensor]:
    """Return the upstream gradients: bfloat16 numbers, the same in every dtype."""
    generator = torch.Generator().manual_seed(11)
    batch, heads, queries, _ = case.scene.sizes
    shapes = {"output": (batch, heads, queries, case.scene.value.shape[3])}
    shapes |= dict.fromkeys(case.graded_statistics, (batch, heads, queries))
    return {
        graded_statistics: torch.randn(shape, generator=generator).bfloat16().double()
        for graded_statistics, shape in shapes.items()
    }


def by_formula(case: Case, dtype: torch.dtype) -> dict[str, Compared]:
    """Return the gradients of a case in float64, and by the formula in its dtype."""
    directions = directions_for(case)
    exact, _ = gradients(case, exactly, directions)
    rounded = replace(case, scene=case.scene.to(dtype))
    plain, _ = gradients(
        rounded, plainly, {graded_statistics: x.to(dtype) for graded_statistics, x in directions.items()}
    )
    return {name: Compared(None, grad, plain[name]) for name, grad in exact.items()}


def check(name: str, case: Case, dtype: torch.dtype, device: str, tiles: object = SMALL) -> None:
    directions = directions_for(case)
    samples = [by_formula(case, dtype), by_formula(replace(case, scene=case.scene.redrawn()), dtype)]
    rounded = replace(case, scene=case.scene.to(dtype))
    # As our own forward gives it in that dtype: its roundings of the logits are in the log-sum-exp too.
    result = exactly(rounded, "fused", device)

    # Nothing of a row that sees no key may be read: not its query, not what arrives for its output and statistics.
    empty = ~case.scene.visible().any(-1)
    query = torch.where(empty[..., None], torch.nan, rounded.scene.query)
    rounded = replace(rounded, scene=replace(rounded.scene, query=query))
    directions["output"] = torch.where(empty[..., None], torch.nan, directions["output"])
    for graded_statistics in case.graded_statistics:
        if case.scene.sinks is None or graded_statistics not in ("logsumexp", "learned_sink_mass"):
            directions[graded_statistics] = torch.where(empty, torch.nan, directions[graded_statistics])

    actual = run_kernels(rounded, result, directions, device, tiles)
    assert not actual["query"][empty].any()
    if not samples[0]["query"].exact.any():
        check_one_key(case, directions, {name: actual.pop(name) for name in ("query", "key")}, dtype)
    ours = {learned: samples[0][learned]._replace(actual=grad) for learned, grad in actual.items()}
    others = {learned: samples[1][learned] for learned in ours}
    assert_draws_within_error_budget([ours, others], name=f"{name}, {dtype}: the gradient of")


def check_one_key(case: Case, directions: dict[str, Tensor], found: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Check rows with one key: its weight is 1 and its logit's gradient dO . V - dO . O is 0, as O is V.

    The formula adds both in one order without rounding error, which leaves no budget. The kernel adds them in two, so
    each is off by at most its number of terms times eps / 2 times the sum of their magnitudes.
    """
    own = case.scene
    group = own.query.shape[1] // own.key.shape[1]
    output = exactly(case)["output"]
    terms = (directions["output"] * output).abs().sum(-1)
    scale = own.query.shape[3] ** -0.5 if own.scale is None else float(torch.as_tensor(own.scale).abs().max())
    logit = own.value.shape[3] * torch.finfo(torch.float32).eps * float(terms.nan_to_num(0.0).max()) * scale
    rows = {"query": 1, "key": group * own.query.shape[2]}  # of logits in a sum
    for name, other in (("query", own.key), ("key", own.query)):
        bound = logit * rows[name] * float(other.abs().max()) + torch.finfo(dtype).tiny
        assert float(found[name].double().abs().max()) <= bound, name


def check_all(cases: dict[str, Case], dtypes: list[torch.dtype], device: str, tiles: object = SMALL) -> None:
    for name, case in cases.items():
        for dtype in dtypes:
            check(name, case, dtype, device, tiles)


def check_scenes(dtype: torch.dtype, device: str, examples: int) -> None:
    """Check random masks with random options."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from tests.ops.oracle import scenes

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(scenes(), st.sets(st.sampled_from(("logsumexp", *NAMES))), st.sampled_from([0.0, 0.4]))
    def each(scene: Scene, graded_statistics: set[str], rate: float) -> None:
        if scene.mask is not None and mask_reasons(visibility_of(scene, "cpu")):
            return
        check("any scene", Case(scene, tuple(sorted(graded_statistics)), rate), dtype, device, ((16, 16, 4, 2),) * 2)

    each()


def check_poison(device: str) -> None:
    """Check that rows that see a poisoned key are NaN, and no others."""
    case = Case(scene(who=Who(left=5, right=2)), ("entropy",))
    visible = case.scene.visible()
    broken = 40
    _, result = gradients(case, exactly, directions_of(case))
    sees = visible[..., broken]  # [batch, heads, queries]
    result = {name: torch.where(sees if x.ndim == 3 else sees[..., None], torch.nan, x) for name, x in result.items()}
    rounded = replace(case, scene=case.scene.to(torch.float32))
    actual = run_kernels(rounded, result, directions_of(case), device)
    touched = (visible & sees[..., None]).any(1).any(1)[:, None]  # keys that share a row with the broken one
    assert actual["query"].isnan().all(-1).equal(sees)
    assert not actual["query"][~sees].isnan().any()
    for name in ("key", "value"):
        assert actual[name].isnan().all(-1).equal(touched)
        assert not actual[name][~touched].isnan().any()


def directions_of(case: Case) -> dict[str, Tensor]:
    batch, heads, queries, _ = case.scene.sizes
    directions = {"output": normal(batch, heads, queries, case.scene.value.shape[3], seed=9)}
    return directions | {name: normal(batch, heads, queries, seed=10) for name in case.graded_statistics}


def check_nothing_there(device: str) -> None:
    """Check empty queries, keys and batches: all existing elements are zero."""
    for batch, queries, keys in ((2, 0, 5), (2, 5, 0), (0, 5, 5)):
        own = scene(batch=batch, queries=queries, keys=keys, sinks=normal(2, seed=7)).to(torch.float32)
        case = Case(own)
        result = {
            "output": torch.zeros(batch, 2, queries, 7),
            "logsumexp": own.sinks[:, None].expand(batch, 2, queries),
        }
        directions = directions_of(case)
        if not keys:
            directions["output"] = torch.full_like(directions["output"], torch.nan)
        for name, grad in run_kernels(case, result, directions, device).items():
            assert grad.shape == getattr(own, name).shape
            assert not grad.any(), name


def check_twice(device: str) -> None:
    """Check that the gradients of queries, keys and values are bit-identical in every run."""
    case = flags()["all at once"]
    rounded = replace(case, scene=case.scene.to(torch.float32))
    _, result = gradients(case, exactly, directions_of(case))
    first, second = (run_kernels(rounded, result, directions_of(case), device) for _ in range(2))
    for name in ("query", "key", "value", "sinks"):
        assert first[name].equal(second[name])


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_the_interpreter_every_option_gives_the_gradients_of_the_formula(dtype: torch.dtype) -> None:
    # The same code in either dtype: every third in float16, beside the random scenes below, the others in float32.
    cases = {name: case for i, (name, case) in enumerate(flags().items()) if (i % 3 == 0) == (dtype is torch.float16)}
    in_the_interpreter(check_all, cases, [dtype], "cpu")


@pytest.mark.numerics
@pytest.mark.slow
def test_in_the_interpreter_any_mask_with_any_options_gives_the_gradients_of_the_formula() -> None:
    # In float16 alone: among a handful of numbers, what float32 loses is a matter of luck, for the formula as for us.
    in_the_interpreter(check_scenes, torch.float16, "cpu", 20)


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_the_interpreter_every_choice_of_tiles_gives_the_gradients_of_the_formula(dtype: torch.dtype) -> None:
    cases = list(sizes().items())
    in_the_interpreter(check_all, dict(cases[1::2] if dtype is torch.float32 else cases[::2]), [dtype], "cpu", None)


def test_in_the_interpreter_poison_reaches_rows_that_see_it_and_empty_inputs_give_zeros() -> None:
    in_the_interpreter(check_poison, "cpu")
    in_the_interpreter(check_nothing_there, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(flags(), torch.float16))
def test_on_a_gpu_every_option_gives_the_gradients_of_the_formula(name: str, dtype: torch.dtype) -> None:
    check(name, flags()[name], dtype, "cuda", None)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(sizes(), torch.float16))
def test_on_a_gpu_every_choice_of_tiles_gives_the_gradients_of_the_formula(name: str, dtype: torch.dtype) -> None:
    check(name, sizes()[name], dtype, "cuda", None)


@pytest.mark.gpu
def test_on_a_gpu_poison_reaches_rows_that_see_it_and_empty_inputs_give_zeros() -> None:
    check_poison("cuda")
    check_nothing_there("cuda")


@pytest.mark.gpu
def test_on_a_gpu_the_gradients_are_the_same_bits_at_every_run() -> None:
    check_twice("cuda")

"""Statistics of every row against their definitions in float64, in every backend, with every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from polyhead import AttentionOutput, Mask, Statistics, attention, explain
from polyhead.errors import OptionError
from polyhead.ops.common import tiles
from polyhead.ops.common.statistics import NAMES, POSITIONAL, RowStatistics
from tests.gradients import FAST, of_one_vector
from tests.ops.attention.test_blockwise import Allocations
from tests.ops.oracle import Scene, Who, normal, scenes
from tests.pairs import latin

OURS = ("reference", "blockwise")
ALL = (*OURS, "sdpa")
DIFFERENTIABLE = tuple(name for name in NAMES if name != "visible_keys")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink tiles so that these sizes have several, skipped and partial tiles, and parts."""
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 13)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)


# ---- the definitions


def logits_of(scene: Scene) -> Tensor:
    """Return the logits [batch, heads, queries, keys], arbitrary at masked keys."""
    batch, heads, queries, keys = scene.sizes
    key = scene.key.repeat_interleave(heads // scene.key.shape[1], 1)
    scale = scene.query.shape[-1] ** -0.5 if scene.scale is None else scene.scale
    scale = scale[:, None, None] if isinstance(scale, Tensor) else scale
    logits = (scene.query @ key.transpose(-1, -2)) * scale
    if scene.softcap is not None:
        logits = scene.softcap * torch.tanh(logits / scene.softcap)
    if scene.bias is not None:
        logits = logits + torch.where(scene.bias.detach() == -torch.inf, 0.0, scene.bias)
    if scene.table is not None:
        place = (scene.who.distances(batch, queries, keys) + scene.zero).clamp(0, scene.table.shape[1] - 1)
        logits = logits + scene.table[:, place].transpose(0, 1)
    return logits


def has_ties(scene: Scene) -> bool:
    """Return True if the two largest logits of a row, or their magnitudes, are equal up to rounding."""
    logits, seen = logits_of(scene), scene.visible()
    for x in (logits, logits.abs()):
        largest = torch.where(seen, x, -torch.inf).sort(-1, descending=True).values[..., :2]
        if largest.shape[-1] == 2 and (largest[..., 0] - largest[..., 1] < 1e-9).any():
            return True
    return False


def definitions(scene: Scene, *, sink_keys: int = 1, window: int = 8) -> dict[str, Tensor]:
    """Compute every statistic by its definition, differentiably, with a mask built pair by pair."""
    batch, heads, queries, keys = scene.sizes
    logits, seen = logits_of(scene), scene.visible()
    columns = torch.where(seen, logits, -torch.inf)
    if scene.sinks is not None:
        columns = torch.cat([columns, scene.sinks[:, None, None].expand(batch, heads, queries, 1)], -1)
    # A row without visible keys gets a dummy key, which keeps NaN out of the gradients.
    nothing = (columns == -torch.inf).all(-1, keepdim=True)
    columns = torch.cat([columns, torch.where(nothing, 0.0, -torch.inf)], -1)
    log_weights = torch.log_softmax(columns, -1)
    every = torch.where(columns == -torch.inf, 0.0, log_weights.exp())
    weights = every[..., :keys]
    distance = scene.who.distances(batch, queries, keys)[:, None]
    rank = torch.tensor([[scene.who.place(b, 0, j, queries, keys)[2] for j in range(keys)] for b in range(batch)])
    first = ((rank >= 0) & (rank < sink_keys))[:, None, None]
    filled = seen.any(-1)
    sizes = torch.where(seen, logits.abs(), -1.0)

    def mass(where: Tensor) -> Tensor:
        return (weights * where).sum(-1)

    found = {
        "max_logit": torch.where(filled, torch.where(seen, logits, -torch.inf).max(-1).values, -torch.inf),
        "max_abs_logit": torch.where(filled, sizes.max(-1).values, 0.0),
        "entropy": -(every * torch.where(columns == -torch.inf, 0.0, log_weights)).sum(-1),
        "confidence": torch.where(filled, weights.max(-1).values, 0.0),
        "mean_distance": mass(distance.abs()),
        "mean_offset": mass(distance),
        "mean_squared_distance": mass(distance**2),
        "sink_mass": mass(first),
        "self_mass": mass(distance == 0),
        "previous_mass": mass(distance == -1),
        "next_mass": mass(distance == 1),
        "window_mass": mass(distance.abs() <= window),
        "visible_keys": seen.sum(-1).to(weights.dtype),
    }
    if scene.sinks is not None:
        found["learned_sink_mass"] = every[..., keys]
    return found


def functional(found: dict[str, Tensor], *, seed: int = 3) -> Tensor:
    """Return a random weighted sum of all differentiable statistics."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for name in DIFFERENTIABLE:
        if name in found:
            x = found[name]
            direction = torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype)
            loss = loss + (torch.where(x.detach() == -torch.inf, 0.0, x) * direction).double().sum()
    return loss


def gradients(loss: Tensor, scene: Scene) -> dict[str, Tensor]:
    learned = {name: x for name, x in scene.learned.items() if name != "value"}
    grads = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(learned.items(), grads, strict=True)
    }


def assert_as_defined(scene: Scene, backend: str, requested: Statistics, *, tolerance: float = 1e-9) -> None:
    scene = scene.with_gradients()
    expected = definitions(scene, sink_keys=requested.sink_keys, window=requested.window)
    found = dict(scene.run(backend, statistics=requested).statistics.items())
    assert list(found) == [name for name in NAMES if name in expected]
    for name, x in found.items():
        torch.testing.assert_close(
            x, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{backend} {name}: {m}"
        )
    exact = gradients(functional(expected), scene)
    for name, grad in gradients(functional(found), scene).items():
        torch.testing.assert_close(
            grad, exact[name], rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{backend}, gradient of {name}: {m}"
        )


@settings(max_examples=40)
@given(scene=scenes(), sink_keys=st.integers(1, 5), window=st.integers(0, 9))
@pytest.mark.usefixtures("small_tiles")
def test_every_statistic_is_its_definition_in_every_backend(scene: Scene, sink_keys: int, window: int) -> None:
    requested = Statistics(sink_keys=sink_keys, window=window)
    plain = replace(scene, sinks=None, softcap=None, bias=None, table=None)
    assume(not has_ties(scene) and not has_ties(plain))
    for backend in OURS:
        assert_as_defined(scene, backend, requested)
    assert_as_defined(plain, "sdpa", requested)


SIZES = {"self": (31, 31), "more keys": (19, 43), "more queries": (43, 19), "one query": (1, 37)}
MASKS: dict[str, Callable[[int, int], Who]] = {
    "nothing": lambda q, k: Who(),
    "causal": lambda q, k: Who(causal=True),
    "window with first keys": lambda q, k: Who(left=3, right=0, first=2),
    "window of both sides": lambda q, k: Who(left=4, right=3),
    "right padding": lambda q, k: Who(key_lengths=(k - 5, 0)),
    "left padding": lambda q, k: Who(key_lengths=(k - 5, k), side="left", causal=True),
    "documents": lambda q, k: Who(
        query_documents=(tuple(i * 3 // max(q, 1) for i in range(q)),),
        key_documents=(tuple(j * 4 // k - 1 for j in range(k)),),
    ),
    "positions": lambda q, k: Who(
        query_positions=(tuple(range(5, 5 + q)),), key_positions=(tuple((j * 7) % (k + 3) - 1 for j in range(k)),)
    ),
    "dense by head": lambda q, k: Who(dense=torch.rand(1, 6, q, k) < 0.6),
}


def plain_scene(queries: int, keys: int, who: Who, seed: int = 0) -> Scene:
    shapes = ((2, 6, queries, 13), (2, 2, keys, 13), (2, 2, keys, 11))
    return Scene(*(normal(*shape, seed=seed + index) for index, shape in enumerate(shapes)), who=who)


# Each mask with each backend and, in one backend or the other, with each size.
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("mask", "backend", "size"), latin(MASKS, ALL, SIZES, each=2))
def test_every_kind_of_mask_gives_the_statistics_of_its_definition(mask: str, backend: str, size: str) -> None:
    queries, keys = SIZES[size]
    assert_as_defined(
        plain_scene(queries, keys, MASKS[mask](queries, keys)), backend, Statistics(sink_keys=2, window=3)
    )


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_far_from_the_diagonal_add_up_to_the_same_reach(
    monkeypatch: pytest.MonkeyPatch, backend: str, causal: bool
) -> None:
    """Far tiles use the moments of their columns instead of each distance."""
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 16)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 16 * 16)
    scene = Scene(*(normal(1, 2, 211, 8, seed=seed) for seed in range(3)))
    scene = scene.with_gradients()
    mask = Mask.causal() if causal else None
    names = ("mean_distance", "mean_offset", "mean_squared_distance", "window_mass", "next_mass")
    results = []
    for name in ("reference", backend):
        result = attention(
            scene.query, scene.key, scene.value, mask=mask, backend=name, statistics=Statistics(*names, window=40)
        )
        found = dict(result.statistics.items())
        results.append((found, gradients(functional(found), scene)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


# ---- rounding


def bounded(scene: Scene, backend: str) -> None:
    """Return the error bounds for float32: entropy 1e-3 nats, logits 1e-5 * scale * |q| * max|k|."""
    scene = scene.to(torch.float32)
    found = scene.run(backend, statistics=True).statistics
    expected = definitions(scene.to(torch.float64))
    exact = {name: x.float() for name, x in expected.items()}
    assert float((found.entropy - exact["entropy"]).abs().max()) <= 1e-3
    scale = scene.query.shape[-1] ** -0.5 if scene.scale is None else float(scene.scale)
    bound = 1e-5 * scale * scene.query.norm(dim=-1) * scene.key.norm(dim=-1).max()
    for name in ("max_logit", "max_abs_logit"):
        x, right = getattr(found, name), exact[name]
        assert ((x - right).abs() <= bound)[right.isfinite()].all(), name
        assert torch.equal(x.isfinite(), right.isfinite())
    for name in ("confidence", "sink_mass", "self_mass", "previous_mass", "next_mass", "window_mass"):
        assert float((getattr(found, name) - exact[name]).abs().max()) <= 2e-3, name
    assert torch.equal(found.visible_keys, exact["visible_keys"])


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e4])
def test_float32_statistics_keep_their_bounds_at_any_size_of_the_logits(backend: str, size: float) -> None:
    for causal in (False, True):
        query, key = normal(1, 4, 67, 16, seed=1), normal(1, 2, 67, 16, seed=2)
        largest = float((query @ key.repeat_interleave(2, 1).transpose(-1, -2)).abs().max()) * 0.25
        scene = Scene(query * (size / largest), key, key, who=Who(causal=causal))
        bounded(scene, backend)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_half_precision_inputs_are_float32(backend: str, dtype: torch.dtype) -> None:
    scene = plain_scene(19, 23, Who(causal=True)).to(dtype)
    found = scene.run(backend, statistics=True).statistics
    expected = definitions(scene.to(torch.float64))
    for name, x in found.items():
        assert x.dtype is torch.float32
        torch.testing.assert_close(x.double(), expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ALL)
def test_a_row_on_one_key_and_a_row_on_all_have_the_known_entropies(backend: str) -> None:
    keys = 61
    query = torch.zeros(1, 1, 2, 4)
    query[0, 0, 1, 0] = 1e4
    key = torch.zeros(1, 1, keys, 4)
    key[0, 0, 17, 0] = 1.0
    found = attention(query, key, key, scale=1.0, backend=backend, statistics=True).statistics
    torch.testing.assert_close(found.entropy[0, 0], torch.tensor([math.log(keys), 0.0]), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found.confidence[0, 0], torch.tensor([1 / keys, 1.0]), rtol=1e-6, atol=0.0)
    assert found.max_logit.flatten().tolist() == [0.0, 1e4]
    # The two queries stand beside the last two keys.
    torch.testing.assert_close(found.mean_offset[0, 0], torch.tensor([-29.0, 17.0 - 60.0]), rtol=1e-6, atol=0.0)
    assert found.visible_keys.flatten().tolist() == [keys, keys]


@pytest.mark.parametrize("backend", OURS)
def test_the_tiles_near_the_diagonal_keep_a_short_reach_exact(backend: str) -> None:
    """Every query attends to the previous key, thousands of tokens from the start: the distance is 1."""
    n = 2100
    query, key = torch.zeros(1, 1, n, 2), torch.zeros(1, 1, n, 2)
    angle = torch.arange(n) * 0.3
    key[0, 0] = torch.stack([angle.cos(), angle.sin()], -1)
    query[0, 0] = torch.stack([(angle - 0.3).cos(), (angle - 0.3).sin()], -1) * 4000.0
    mask = Mask.window(9)
    found = attention(query, key, key, mask=mask, scale=1.0, backend=backend, statistics=True).statistics
    later = slice(1, None)
    for name in ("mean_distance", "mean_squared_distance", "previous_mass"):
        torch.testing.assert_close(getattr(found, name)[..., later], torch.ones(1, 1, n - 1), rtol=1e-6, atol=1e-6)


# ---- rows with nothing, ties, and what is hidden


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_without_keys_has_no_statistics_and_no_gradient(backend: str, sinks: bool) -> None:
    if sinks and backend == "sdpa":
        pytest.skip("PyTorch's kernels have no learned sinks")
    query, key = torch.randn(2, 3, 7, 5, requires_grad=True), torch.randn(2, 3, 7, 5, requires_grad=True)
    sink = torch.randn(3, requires_grad=True) if sinks else None
    mask = Mask.lengths([7, 4])
    found = attention(query, key, key, mask=mask, sinks=sink, backend=backend, statistics=True).statistics
    for name, x in found.items():
        expected = {"max_logit": -torch.inf, "learned_sink_mass": 1.0}.get(name, 0.0)
        assert (x[1, :, 4:] == expected).all(), name
        assert x[0].isfinite().all(), name
    grad_query, grad_key = torch.autograd.grad(functional(dict(found.items())), (query, key))
    assert int(grad_query[1, :, 4:].count_nonzero()) == int(grad_key[1, :, 4:].count_nonzero()) == 0
    assert grad_query.isfinite().all()
    assert float(grad_query[0].abs().min()) > 0


@pytest.mark.parametrize("backend", ALL)
def test_without_keys_statistics_are_those_of_empty_rows(backend: str) -> None:
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    found = attention(query, key, key, backend=backend, statistics=True).statistics
    for name, x in found.items():
        assert x.shape == (1, 2, 3), name
        assert (x == (-torch.inf if name == "max_logit" else 0.0)).all(), name


@pytest.mark.parametrize("backend", OURS)
def test_a_sink_of_minus_infinity_is_none(backend: str) -> None:
    scene = plain_scene(11, 13, Who(causal=True))
    requested = Statistics("entropy", "confidence", "learned_sink_mass")
    sinks = torch.full((6,), -torch.inf, dtype=torch.float64, requires_grad=True)
    found = replace(scene, sinks=sinks).run(backend, statistics=requested).statistics
    plain = scene.run(backend, statistics=("entropy", "confidence")).statistics
    torch.testing.assert_close(found.entropy, plain.entropy)
    torch.testing.assert_close(found.confidence, plain.confidence)
    assert int(found.learned_sink_mass.count_nonzero()) == 0
    (grad,) = torch.autograd.grad(found.entropy.sum() + found.learned_sink_mass.sum(), sinks)
    assert int(grad.count_nonzero()) == 0


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("name", ["max_logit", "max_abs_logit", "confidence"])
def test_the_lowest_of_several_largest_keys_has_the_gradient(backend: str, name: str) -> None:
    """Keys 3, 9 and 20 are equal, in three tiles."""
    query, key = torch.randn(1, 1, 4, 3, dtype=torch.float64), torch.randn(1, 1, 23, 3, dtype=torch.float64) * 0.1
    query = query.abs() * (-1.0 if name == "max_abs_logit" else 1.0)
    key[..., [3, 9, 20], :] = torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64)
    key.requires_grad_()
    found = getattr(attention(query, key, key, backend=backend, statistics=name).statistics, name)
    if name == "confidence":  # beside the key itself, every key pulls at a weight through the sum
        (grad,) = torch.autograd.grad(torch.log(found).sum(), key)
        direct = grad[0, 0, 3] - grad[0, 0, 9]
        torch.testing.assert_close(direct, query[0, 0].sum(0) * 3**-0.5)
        torch.testing.assert_close(grad[0, 0, 9], grad[0, 0, 20])
        return
    (grad,) = torch.autograd.grad(found.sum(), key)
    assert grad[0, 0].count_nonzero(-1).nonzero().flatten().tolist() == [3]
    sign = -1.0 if name == "max_abs_logit" else 1.0
    torch.testing.assert_close(grad[0, 0, 3], sign * query[0, 0].sum(0) * 3**-0.5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_hidden_is_in_no_statistic_and_no_gradient(backend: str, broken: float) -> None:
    query, key = torch.randn(2, 3, 17, 5, requires_grad=True), torch.randn(2, 3, 17, 5)
    mask = Mask.lengths([17, 11])
    results = []
    for value in (0.0, broken):
        keys = key.clone()
        keys[1, :, 11:] = value
        keys.requires_grad_()
        found = attention(query, keys, keys, mask=mask, backend=backend, statistics=True).statistics
        grads = torch.autograd.grad(functional(dict(found.items())), (query, keys))
        results.append((dict(found.items()), grads))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", ALL)
def test_a_row_that_sees_nan_is_nan_and_its_neighbours_are_not(backend: str) -> None:
    query, key = torch.randn(1, 2, 17, 5), torch.randn(1, 2, 17, 5)
    key[0, :, 9] = math.nan
    found = attention(query, key, key, mask=Mask.causal(), backend=backend, statistics=True).statistics
    for name, x in found.items():
        assert x[..., :9].isfinite().all(), name
        assert name == "visible_keys" or x[..., 9:].isnan().all(), name
    assert found.visible_keys[0, 0].tolist() == list(range(1, 18))


# ---- asking


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "learned_sink_mass"])
def test_each_statistic_alone_is_what_it_is_among_all(backend: str, name: str) -> None:
    scene = plain_scene(19, 23, Who(causal=True))
    everything = scene.run(backend, statistics=True)
    alone = scene.run(backend, statistics=name)
    assert [field for field, _ in alone.statistics.items()] == [name]
    torch.testing.assert_close(getattr(alone.statistics, name), getattr(everything.statistics, name))
    torch.testing.assert_close(alone.output, everything.output)


@pytest.mark.parametrize("backend", ALL)
def test_statistics_come_with_the_same_output_and_a_log_sum_exp(backend: str) -> None:
    scene = plain_scene(19, 23, Who(causal=True))
    plain, watched = scene.run(backend), scene.run(backend, statistics=("entropy",), logsumexp=True)
    torch.testing.assert_close(watched.output, plain.output)
    torch.testing.assert_close(watched.logsumexp, scene.formula().logsumexp)
    assert plain.statistics is None
    assert isinstance(watched.statistics, RowStatistics)
    assert watched.statistics.mean_distance is None


class Operators(Allocations):
    """Counter of the operators that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_only_requested_statistics_are_computed() -> None:
    query = torch.randn(1, 2, 32, 8)

    def operators(*names: str) -> int:
        with Operators() as counted:
            attention(query, query, query, backend="blockwise", statistics=names)
        return counted.count

    nothing = operators()
    alone = {name: operators(name) - nothing for name in NAMES if name != "learned_sink_mass"}
    together = operators(*alone) - nothing
    assert all(0 < cost < together / 3 for cost in alone.values()), (alone, together)


@pytest.mark.parametrize(("mask", "most"), [(None, 54), (Mask.causal(), 71)], ids=["unmasked", "causal"])
@pytest.mark.parametrize("records", [False, True], ids=["no_grad", "grad mode"])
def test_a_call_of_one_tile_runs_few_operators(records: bool, mask: Mask | None, most: int) -> None:
    """A small call takes as long as the operators that it runs, whatever their sizes."""
    query, key, value = (normal(2, 6, 19, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    with torch.set_grad_enabled(records), Operators() as operators:
        attention(query, key, value, mask=mask, statistics=("entropy", "max_logit", "mean_distance"))
    assert 0 < operators.count <= most


def test_a_mass_at_one_distance_is_read_from_the_tiles_that_hold_it() -> None:
    query = torch.randn(1, 1, 2048, 8)
    tile = 512 * 512

    def full_passes(*names: str) -> int:
        passes = 0

        class Passes(Allocations):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal passes
                is_view = func.is_view or "view" in func.name()
                passes += not is_view and any(isinstance(x, Tensor) and x.numel() >= tile for x in args)
                return super().__torch_dispatch__(func, types, args, kwargs)

        with Passes():
            attention(query, query, query, backend="blockwise", statistics=names)
        return passes

    assert full_passes("self_mass", "previous_mass", "next_mass", "sink_mass") == full_passes()


def test_dropout_changes_no_statistic() -> None:
    scene = plain_scene(19, 23, Who(causal=True))
    for backend in OURS:
        plain = scene.run(backend, statistics=True)
        dropped = scene.run(backend, statistics=True, dropout=0.4, seed=5)
        assert not torch.equal(plain.output, dropped.output)
        for (name, ours), (_, theirs) in zip(plain.statistics.items(), dropped.statistics.items(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("backend", ALL)
def test_cross_attention_has_no_positions(backend: str) -> None:
    scene = plain_scene(11, 13, Who())
    found = scene.run(backend, statistics=Statistics(cross=True)).statistics
    assert [name for name, _ in found.items()] == [
        name for name in NAMES if name not in (*POSITIONAL, "learned_sink_mass")
    ]


Q = torch.randn(2, 6, 7, 5, generator=torch.Generator().manual_seed(1))
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "unknown name": (lambda: attention(Q, Q, Q, statistics=("entropy", "sharpness")), "got 'sharpness'"),
    "not a name": (lambda: attention(Q, Q, Q, statistics=3), r"polyhead.Statistics\(...\), got int"),
    "positions of a cross-attention": (
        lambda: Statistics("entropy", "mean_distance", "self_mass", cross=True),
        "no common positions, got a request for mean_distance, self_mass; remove these names",
    ),
    "no sinks": (lambda: attention(Q, Q, Q, statistics="learned_sink_mass"), "got an attention without sinks"),
    "no sink keys": (lambda: Statistics(sink_keys=0), "sink_keys must be an integer of at least 1, got 0"),
    "a window before the row": (lambda: Statistics(window=-1), "window must be an integer of at least 0, got -1"),
    "a window that is no number": (lambda: Statistics(window=True), "got True"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_request_that_cannot_be_met_says_why(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(OptionError, match=words):
        call()


@pytest.mark.parametrize("backend", ALL)
def test_the_number_of_visible_keys_has_no_gradient(backend: str) -> None:
    query = Q.clone().requires_grad_()
    found = attention(query, Q, Q, backend=backend, statistics=("visible_keys", "entropy")).statistics
    assert found.entropy.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.visible_keys.sum().backward()


def test_explain_reports_the_backend_for_statistics() -> None:
    said = explain(Q, Q, Q, statistics=True)
    assert all(said[backend].supported for backend in ALL)
    assert explain(Q, Q, Q, statistics=True, softcap=3.0)["sdpa"].reasons == (
        "PyTorch's fused kernels have no softcap",
    )


# ---- memory and derivatives


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_memory_of_statistics_and_their_gradients_grows_with_n(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    tile = 1 << 15
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 256)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile)
    peaks = []
    for n in (512, 1024):
        query, key = torch.randn(1, 2, n, 8, requires_grad=True), torch.randn(1, 1, n, 8, requires_grad=True)
        with Allocations() as allocations:
            result = attention(query, key, key, mask=Mask.causal(), backend=backend, statistics=True)
            loss = result.output.sum() + functional(dict(result.statistics.items()))
            torch.autograd.grad(loss, (query, key))
        assert allocations.largest <= max(tile, 2 * n * 8)
        peaks.append(allocations.peak)
    assert peaks[1] < 2.2 * peaks[0]


GRADIENT_MASKS = {
    "nothing": None,
    "causal": Mask.causal(),
    "lengths": Mask.lengths([5]) & Mask.causal(),
    "positions": Mask.positions(torch.arange(18), torch.arange(7) * 2),
}


# Options change a tile after the mask has: each mask and each option is there, and both with a mask that hides.
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        ("nothing", {"softcap": 1.5}),
        ("causal", {}),
        ("lengths", {"softcap": 1.5}),
        ("lengths", {"dropout": 0.4, "seed": 3}),
        ("positions", {"dropout": 0.4, "seed": 3}),
    ],
    ids=str,
)
def test_first_and_second_derivatives_are_those_of_the_numbers(
    monkeypatch: pytest.MonkeyPatch, mask: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 3)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)

    def compute(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        both = Mask.bias(bias) if GRADIENT_MASKS[mask] is None else Mask.bias(bias) & GRADIENT_MASKS[mask]
        result = attention(
            query, key, value, mask=both, sinks=sinks, backend="blockwise", statistics=Statistics(window=2), **options
        )
        found = [
            torch.where(x.detach() == -torch.inf, 0.0, x) for n, x in result.statistics.items() if n != "visible_keys"
        ]
        return result.output, result.logsumexp, torch.stack(found)

    shapes = [(1, 4, 18, 3), (1, 2, 7, 3), (1, 2, 7, 2), (1, 1, 18, 7), (4,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    joined, vector = of_one_vector(compute, inputs)
    assert gradcheck(joined, vector, **FAST)
    assert gradgradcheck(joined, vector, **FAST)


# The statistics of sdpa come from the same tiles, without values.
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(
            ("blockwise", name)
            for name in ("max_logit", "max_abs_logit", "entropy", "confidence", "mean_distance", "self_mass")
        ),
        *(("sdpa", name) for name in ("max_logit", "entropy")),
    ],
)
def test_each_statistic_can_be_differentiated_alone(monkeypatch: pytest.MonkeyPatch, backend: str, name: str) -> None:
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 2)

    def compute(query: Tensor, key: Tensor) -> Tensor:
        return getattr(attention(query, key, key, backend=backend, statistics=name).statistics, name)

    inputs = [torch.randn(1, 2, size, 3, dtype=torch.float64, requires_grad=True) for size in (3, 5)]
    assert gradcheck(compute, inputs)
    assert gradgradcheck(compute, inputs, **FAST)


# ---- inside other people's programs


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ALL)
def test_statistics_compile_in_one_graph_with_their_gradients(backend: str) -> None:
    # `sdpa` takes its statistics from the tiles of `blockwise`, so the two share the masks between them, and Dynamo
    # alone follows it.
    masked = Mask.lengths(torch.tensor([19, 11])) & Mask.causal()
    masks = {"reference": [masked], "blockwise": [None], "sdpa": [masked]}[backend]

    def compute(query: Tensor, key: Tensor) -> list[AttentionOutput]:
        return [attention(query, key, key, mask=mask, backend=backend, statistics=True) for mask in masks]

    inputs = [torch.randn(2, 6, 19, 8, requires_grad=True), torch.randn(2, 2, 19, 8, requires_grad=True)]
    compiled = torch.compile(compute, fullgraph=True, backend="eager" if backend == "sdpa" else "aot_eager")
    results = []
    for run in (compute, compiled):
        found = [dict(result.statistics.items()) for result in run(*inputs)]
        loss = sum(functional(x) for x in found)
        results.append((found, torch.autograd.grad(loss, inputs)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor) -> AttentionOutput:
        return attention(query, key, key, mask=Mask.causal(), **self.options)


@pytest.mark.usefixtures("fresh_compiler")
def test_statistics_are_returned_by_an_exported_program() -> None:
    query, key = torch.randn(2, 6, 19, 8), torch.randn(2, 2, 19, 8)
    module = Attends(statistics=("entropy", "mean_distance"), backend="reference")
    result = torch.export.export(module, (query, key)).module()(query, key)
    expected = module(query, key)
    assert isinstance(result.statistics, RowStatistics)
    torch.testing.assert_close(dict(result.statistics.items()), dict(expected.statistics.items()))
    assert result.statistics.max_logit is None

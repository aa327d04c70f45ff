"""Attention over uneven groups equals attention over a key and a value for each head, in one call or by group size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead import Mask, attention
from polyhead.errors import BackendUnsupported, MaskError, ShapeError
from polyhead.ops import uneven_groups
from polyhead.ops.uneven_groups import (
    MANY_QUERIES,
    calls_of,
    groups_of,
    one_group_of,
    select_heads,
    uneven_attention,
)
from tests.gradients import FAST
from tests.ops.oracle import ON_THE_CPU

BATCH, QUERIES, KEYS, DIM, VALUE, KV_HEADS = 2, 5, 11, 7, 3, 4
MAP = (2, 0, 2, 3, 1, 2, 0)
HEADS = len(MAP)
DOUBLE = torch.float64
# From how many queries on there is one call, and for how many keys a query.
WAYS = {"one call": (0, 1 << 40), "by group size": (1 << 40, 0)}


def take(way: str, patch: pytest.MonkeyPatch) -> None:
    for name, limit in zip(("MANY_QUERIES", "KEYS_A_QUERY"), WAYS[way], strict=True):
        patch.setattr(uneven_groups, name, limit)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        take(request.param, patch)
        yield request.param


both_ways = pytest.mark.usefixtures("way")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE)


def inputs(key_heads: tuple[int, ...] = MAP) -> tuple[Tensor, Tensor, Tensor]:
    count = max(key_heads) + 1
    query = randn(BATCH, len(key_heads), QUERIES, DIM)
    return query, randn(BATCH, count, KEYS, DIM), randn(BATCH, count, KEYS, VALUE)


def repeated(query: Tensor, key: Tensor, value: Tensor, key_heads: tuple[int, ...] = MAP, **options: Any) -> Any:
    return attention(query, key[:, list(key_heads)], value[:, list(key_heads)], **options)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


OPTIONS: dict[str, Any] = {
    "nothing": dict,
    "causal": lambda: {"mask": Mask.causal()},
    "lengths and a window": lambda: {"mask": Mask.lengths([11, 7]) & Mask.window(left=3, right=2)},
    "a mask for each head": lambda: {"mask": Mask.dense(torch.rand(BATCH, HEADS, QUERIES, KEYS) > 0.3)},
    "a bias for each head": lambda: {"mask": Mask.bias(randn(1, HEADS, QUERIES, KEYS))},
    "a bias for all": lambda: {"mask": Mask.bias(randn(BATCH, 1, QUERIES, KEYS))},
    "a table for each head": lambda: {"mask": Mask.relative(randn(HEADS, 13), 6)},
    "scales": lambda: {"scale": torch.rand(HEADS, dtype=DOUBLE)},
    "sinks": lambda: {"sinks": randn(HEADS)},
    "softcap": lambda: {"softcap": 2.0},
}


@both_ways
@pytest.mark.parametrize("backend", ["auto", *ON_THE_CPU])
@pytest.mark.parametrize("name", OPTIONS)
def test_output_and_gradient_equal_those_of_repeated_keys(name: str, backend: str) -> None:
    tensors, options = inputs(), OPTIONS[name]()
    if backend == "sdpa" and name in ("sinks", "softcap"):
        with pytest.raises(BackendUnsupported):
            uneven_attention(*tensors, MAP, backend=backend, **options)
        return
    learned = [x.requires_grad_() for x in (*tensors, *(x for x in options.values() if isinstance(x, Tensor)))]
    toward = randn(BATCH, HEADS, QUERIES, VALUE)
    ours = uneven_attention(*tensors, MAP, backend=backend, **options).output
    theirs = repeated(*tensors, backend="reference", **options).output
    close(ours, theirs)
    close(torch.autograd.grad(ours, learned, toward), torch.autograd.grad(theirs, learned, toward))


@both_ways
def test_all_results_are_in_the_order_of_the_query_heads() -> None:
    tensors = inputs()
    requested: dict[str, Any] = {"weights": True, "logsumexp": True, "statistics": True, "sinks": randn(HEADS)}
    ours, theirs = uneven_attention(*tensors, MAP, **requested), repeated(*tensors, **requested)
    close(ours.weights, theirs.weights)
    close(ours.logsumexp, theirs.logsumexp)
    close(dict(ours.statistics.items()), dict(theirs.statistics.items()))
    few = uneven_attention(*tensors, MAP, statistics=("entropy", "mean_distance")).statistics
    assert [name for name, _ in few.items()] == ["entropy", "mean_distance"]
    assert ours.backend == "reference"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_any_map_matches_repeated_keys(readers: list[int]) -> None:
    numbers = sorted(set(readers))
    key_heads = tuple(numbers.index(x) for x in readers)
    tensors = inputs(key_heads)
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            take(way, patch)
            close(uneven_attention(*tensors, key_heads).output, repeated(*tensors, key_heads).output)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """Record the tensors of every call of `attention`."""
    found = []

    def recorded(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        found.append((query, key, value))
        return attention(query, key, value, **options)

    monkeypatch.setattr(uneven_groups, "attention", recorded)
    return found


def test_few_queries_make_one_call_per_group_size_without_repeated_keys(calls: list[tuple[Tensor, ...]]) -> None:
    query, key, value = inputs()
    uneven_attention(query, key, value, MAP)
    assert [(q.shape[1], k.shape[1], v.shape[1]) for q, k, v in calls] == [(2, 2, 2), (2, 1, 1), (3, 1, 1)]
    # 1 and 3, then 0, then 2: all stand at equal distances, so none was moved.
    assert [k.data_ptr() for _, k, _ in calls] == [key[:, head].data_ptr() for head in (1, 0, 2)]
    assert all(v.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() for _, _, v in calls)


def test_many_queries_make_one_call_with_equal_groups(calls: list[tuple[Tensor, ...]]) -> None:
    key_heads = (0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2)
    query, key, value = randn(2, 12, MANY_QUERIES, 7), randn(2, 3, 11, 7), randn(2, 3, 11, 5)
    close(uneven_attention(query, key, value, key_heads).output, repeated(query, key, value, key_heads).output)
    ((taken, keys, values),) = calls
    assert taken is query  # they are in the order of their KV heads
    assert torch.equal(keys, key[:, [0, 0, 1, 2, 2, 2]])
    assert torch.equal(values, value[:, [0, 0, 1, 2, 2, 2]])


@pytest.mark.parametrize(
    ("queries", "keys", "number"), [(127, 127, 3), (128, 128, 1), (128, 512, 1), (128, 513, 3), (4096, 4096, 1)]
)
def test_the_number_of_calls_depends_on_queries_and_keys(queries: int, keys: int, number: int) -> None:
    assert len(calls_of(MAP, queries, keys)) == number


def test_even_groups_out_of_order_are_one_call_without_a_copy_of_keys(
    way: str, calls: list[tuple[Tensor, ...]]
) -> None:
    query, key, value = inputs((1, 1, 0, 0))
    close(uneven_attention(query, key, value, (1, 1, 0, 0)).output, repeated(query, key, value, (1, 1, 0, 0)).output)
    ((_, keys, values),) = calls
    assert keys is key
    assert values is value


class Operators(TorchDispatchMode):
    """Counts how often each operator ran, except views."""

    VIEWS = ("slice", "split", "expand", "transpose", "view", "_unsafe_view", "unsqueeze", "detach", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in self.VIEWS and "attention" not in name:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


IN_ORDER = (0,) * 8 + (1,) * 4 + (2,) * 2 + (3,) * 2
OUT_OF_ORDER = (2, 0, 1, 0, 0, 3, 0, 1, 0, 0, 3, 1, 0, 2, 0, 1)


@pytest.mark.parametrize(("key_heads", "moved"), [(IN_ORDER, 0), (OUT_OF_ORDER, 2)], ids=["in order", "out of order"])
@pytest.mark.parametrize("by_token", [True, False])
def test_a_backward_fills_nothing_with_zeros_and_adds_no_slices(
    key_heads: tuple[int, ...], moved: int, by_token: bool
) -> None:
    """A copy of keys and one of values, and of queries and outputs that are not in order; two heads are repeated."""
    sizes = [(2, MANY_QUERIES, heads, 8) for heads in (16, 4, 4)]
    sizes = sizes if by_token else [(batch, heads, rows, dim) for batch, rows, heads, dim in sizes]
    leaves = [torch.randn(size).requires_grad_() for size in sizes]
    query, key, value = (x.transpose(1, 2) if by_token else x for x in leaves)
    with Operators() as forward:
        output = uneven_attention(query, key, value, key_heads).output
    assert forward.found == {"cat": 2 + moved}
    # What lay token by token still does, so that a layer puts the heads of a token side by side for nothing.
    assert output.transpose(1, 2).is_contiguous() or not by_token
    toward = torch.randn_like(output)
    with Operators() as backward:
        torch.autograd.grad(output, leaves, toward)
    assert backward.found == {"cat": 2 + moved, "sum": 2 * 2}


@both_ways
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 11), (2, 0, 11), (2, 5, 0), (1, 1, 1)])
def test_sizes_zero_and_one(batch: int, queries: int, keys: int) -> None:
    leaves = [randn(batch, HEADS, queries, DIM), randn(batch, 4, keys, DIM), randn(batch, 4, keys, VALUE)]
    leaves = [x.requires_grad_() for x in leaves]
    ours, theirs = (f(*leaves, MAP, statistics=True) for f in (uneven_attention, repeated))
    close(ours.output, theirs.output)
    close(dict(ours.statistics.items()), dict(theirs.statistics.items()))
    toward = torch.randn_like(ours.output)
    close(torch.autograd.grad(ours.output, leaves, toward), torch.autograd.grad(theirs.output, leaves, toward))


@both_ways
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_second_derivatives_and_transforms() -> None:
    tensors = inputs()

    def ours(*x: Tensor) -> Tensor:
        return uneven_attention(*x, MAP, backend="reference").output.square().sum()

    def theirs(*x: Tensor) -> Tensor:
        return repeated(*x, backend="reference").output.square().sum()

    arguments = (0, 1, 2)
    close(*(torch.func.grad(f, arguments)(*tensors) for f in (ours, theirs)))
    many = [torch.stack([x, x.flip(0)]) for x in tensors]
    close(*(torch.func.vmap(torch.func.grad(f, arguments))(*many) for f in (ours, theirs)))
    close(*(torch.func.jvp(f, tensors, tensors) for f in (ours, theirs)))
    few = [x[:1, :, :3, :2].clone().requires_grad_() for x in tensors]
    assert torch.autograd.gradgradcheck(lambda *x: uneven_attention(*x, MAP, backend="reference").output, few, **FAST)


@pytest.mark.parametrize("queries", [7, MANY_QUERIES])
def test_it_compiles_in_one_graph(queries: int) -> None:
    sizes = [(BATCH, HEADS, queries, DIM), (BATCH, 4, queries, DIM), (BATCH, 4, queries, DIM)]
    leaves = [randn(*size).requires_grad_() for size in sizes]

    def ours(*tensors: Tensor) -> Tensor:
        return uneven_attention(*tensors, MAP, mask=Mask.causal(), finite=True).output

    theirs = repeated(*leaves, mask=Mask.causal())
    compiled = torch.compile(ours, fullgraph=True, dynamic=False, backend="aot_eager")(*leaves)
    close(compiled, theirs.output)
    toward = torch.randn_like(compiled)
    close(torch.autograd.grad(compiled, leaves, toward), torch.autograd.grad(theirs.output, leaves, toward))


def test_groups_are_those_of_the_map() -> None:
    assert [(g.heads, g.key_heads) for g in groups_of(MAP)] == [((4, 3), (1, 3)), ((1, 6), (0,)), ((0, 2, 5), (2,))]
    (even,) = groups_of((1, 1, 0, 0))
    assert (even.heads, even.key_heads) == ((2, 3, 0, 1), (0, 1))
    one = one_group_of(MAP)
    assert (one.heads, one.key_heads) == ((1, 6, 4, 0, 2, 5, 3), (0, 0, 1, 2, 2, 2, 3))


@pytest.mark.parametrize("heads", [(0,), (0, 1, 2, 3, 4), (1, 3), (4, 2, 0), (0, 1, 3, 2), (2, 2), (3, 3, 0, 3)])
def test_heads_are_selected_in_order(heads: tuple[int, ...]) -> None:
    x = randn(2, 5, 3).requires_grad_()
    for ours, theirs in (
        (select_heads(x, heads), x[:, list(heads)]),
        (select_heads(x.transpose(0, 1), heads, 0), x.transpose(0, 1)[list(heads)]),
    ):
        assert torch.equal(ours, theirs)
        toward = torch.randn_like(theirs)
        close(torch.autograd.grad(ours, x, toward), torch.autograd.grad(theirs, x, toward))


@pytest.mark.parametrize("heads", [(4, 2, 0, 1, 3), (0, 0, 1, 2)])
def test_a_copy_of_heads_keeps_the_memory_order(heads: tuple[int, ...]) -> None:
    x = randn(2, 3, 5, 7)
    assert select_heads(x.transpose(1, 2), heads).transpose(1, 2).is_contiguous()
    assert select_heads(x, tuple(min(head, 2) for head in heads)).is_contiguous()


@both_ways
def test_seeded_dropout_is_replayed_and_differs_between_groups() -> None:
    query, key, value = inputs((0, 1, 1))
    query[:, 1], key[:, 1], value[:, 1] = query[:, 0], key[:, 0], value[:, 0]
    for seed in (31, torch.tensor([31])):
        first, again = (uneven_attention(query, key, value, (0, 1, 1), dropout=0.5, seed=seed).output for _ in range(2))
        assert torch.equal(first, again)
        # In every sequence: heads are numbered anew in each call, the first of the first sequence alike.
        assert (first[:, 0] - first[:, 1]).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize("seed", [31, torch.tensor([31])], ids=["int", "tensor"])
def test_seeded_dropout_of_one_call_is_that_of_heads_in_the_order_of_their_keys(
    seed: int | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    take("one call", monkeypatch)
    query, key, value = (x.requires_grad_() for x in inputs())
    order = sorted(range(HEADS), key=MAP.__getitem__)
    ours = uneven_attention(query, key, value, MAP, dropout=0.5, seed=seed).output[:, order]
    theirs = repeated(query[:, order], key, value, tuple(sorted(MAP)), dropout=0.5, seed=seed).output
    close(ours, theirs)
    toward, leaves = torch.randn_like(ours), (query, key, value)
    close(torch.autograd.grad(ours, leaves, toward), torch.autograd.grad(theirs, leaves, toward))


@pytest.mark.parametrize(
    ("key_heads", "words"),
    [
        ((0, 1), "for each of the 7 heads, got 2"),
        ((0, 1, 2, 3, 4, 0, 0), "must read each of the 4 KV heads at least once and no other"),
        ((0, 0, 0, 1, 1, 3, 3), r"which never reads \[2\]"),
        ((0, 1, 2, 3, -1, 0, 0), "KV head indices, from 0 on"),
        (("0",) * 7, "KV head indices, from 0 on"),
        (3, "must list a KV head for each head, got 3"),
    ],
)
def test_an_invalid_map_raises(key_heads: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        uneven_attention(*inputs(), key_heads)


@both_ways
def test_invalid_tensors_raise_the_errors_of_attention() -> None:
    query, key, value = inputs()
    with pytest.raises(ShapeError, match=r"got shapes \[7, 5, 7\]"):
        uneven_attention(query[0], key, value, MAP)
    with pytest.raises(ShapeError, match="same heads, got 4 and 3"):
        uneven_attention(query, key, value[:, :3], MAP)
    with pytest.raises(ShapeError, match=r"sinks must have one number per head, got shape \[4\] for 7 heads"):
        uneven_attention(query, key, value, MAP, sinks=randn(4))
    with pytest.raises(MaskError, match="a mask must have 7 heads or 1"):
        uneven_attention(query, key, value, MAP, mask=Mask.bias(randn(1, 4, QUERIES, KEYS)))
    with pytest.raises(MaskError, match=r"must be a polyhead\.Mask, got Tensor"):
        uneven_attention(query, key, value, MAP, mask=randn(QUERIES, KEYS))

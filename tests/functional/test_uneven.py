"""Attention over uneven groups equals attention over keys and values that are repeated, and repeats none itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhead import Mask, attention
from polyhead.errors import BackendUnsupported, MaskError, ShapeError
from polyhead.functional import uneven
from polyhead.functional.uneven import groups_of, select_heads, uneven_attention
from tests.functional.oracle import ON_THE_CPU

BATCH, QUERIES, KEYS, DIM, VALUE, KV_HEADS = 2, 5, 11, 7, 3, 4
MAP = (2, 0, 2, 3, 1, 2, 0)
HEADS = len(MAP)
DOUBLE = torch.float64


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


@pytest.mark.parametrize("backend", ["auto", *ON_THE_CPU])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_equals_repeated_keys_in_output_and_gradient(name: str, backend: str) -> None:
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


def test_all_that_is_told_is_in_the_order_of_the_query_heads() -> None:
    tensors = inputs()
    asked: dict[str, Any] = {"weights": True, "logsumexp": True, "statistics": True, "sinks": randn(HEADS)}
    ours, theirs = uneven_attention(*tensors, MAP, **asked), repeated(*tensors, **asked)
    close(ours.weights, theirs.weights)
    close(ours.logsumexp, theirs.logsumexp)
    close(dict(ours.statistics.items()), dict(theirs.statistics.items()))
    few = uneven_attention(*tensors, MAP, statistics=("entropy", "reach")).statistics
    assert [name for name, _ in few.items()] == ["entropy", "reach"]
    assert ours.backend == "reference"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_any_map_will_do(readers: list[int]) -> None:
    numbers = sorted(set(readers))
    key_heads = tuple(numbers.index(x) for x in readers)
    tensors = inputs(key_heads)
    close(uneven_attention(*tensors, key_heads).output, repeated(*tensors, key_heads).output)


def test_there_is_one_call_for_each_group_size_and_no_key_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def recorded(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        calls.append((query, key, value))
        return attention(query, key, value, **options)

    monkeypatch.setattr(uneven, "attention", recorded)
    query, key, value = inputs()
    uneven_attention(query, key, value, MAP)
    assert [(q.shape[1], k.shape[1], v.shape[1]) for q, k, v in calls] == [(2, 2, 2), (2, 1, 1), (3, 1, 1)]
    # 1 and 3, then 0, then 2: all stand at equal distances, so none was moved.
    assert [k.data_ptr() for _, k, _ in calls] == [key[:, head].data_ptr() for head in (1, 0, 2)]
    assert all(v.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() for _, _, v in calls)


def test_groups_are_those_of_the_map() -> None:
    assert [(g.heads, g.key_heads) for g in groups_of(MAP)] == [((4, 3), (1, 3)), ((1, 6), (0,)), ((0, 2, 5), (2,))]
    (even,) = groups_of((1, 1, 0, 0))
    assert (even.heads, even.key_heads) == ((2, 3, 0, 1), (0, 1))


@pytest.mark.parametrize("heads", [(0,), (0, 1, 2, 3, 4), (1, 3), (4, 2, 0), (0, 1, 3, 2), (2, 2)])
def test_heads_are_selected_in_order(heads: tuple[int, ...]) -> None:
    x = randn(2, 5, 3)
    assert torch.equal(select_heads(x, heads), x[:, list(heads)])
    assert torch.equal(select_heads(x.transpose(0, 1), heads, 0), x.transpose(0, 1)[list(heads)])


def test_seeded_dropout_is_replayed_and_differs_between_groups() -> None:
    query, key, value = inputs((0, 1, 1))
    query[:, 1], key[:, 1], value[:, 1] = query[:, 0], key[:, 0], value[:, 0]
    for seed in (31, torch.tensor([31])):
        first, again = (uneven_attention(query, key, value, (0, 1, 1), dropout=0.5, seed=seed).output for _ in range(2))
        assert torch.equal(first, again)
        assert (first[:, 0] - first[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("key_heads", "words"),
    [
        ((0, 1), "for each of the 7 heads, got 2"),
        ((0, 1, 2, 3, 4, 0, 0), "the 4 key heads must each be read.*no other be named"),
        ((0, 0, 0, 1, 1, 3, 3), r"which never reads \[2\]"),
        ((0, 1, 2, 3, -1, 0, 0), "numbers of key heads, from 0 on"),
        (("0",) * 7, "numbers of key heads, from 0 on"),
        (3, "must list a key head for each head, got 3"),
    ],
)
def test_a_wrong_map_is_refused(key_heads: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        uneven_attention(*inputs(), key_heads)


def test_wrong_tensors_are_refused_as_attention_refuses_them() -> None:
    query, key, value = inputs()
    with pytest.raises(ShapeError, match=r"got shapes \[7, 5, 7\]"):
        uneven_attention(query[0], key, value, MAP)
    with pytest.raises(ShapeError, match="same heads, got 4 and 3"):
        uneven_attention(query, key, value[:, :3], MAP)
    with pytest.raises(ShapeError, match=r"sinks must have one number a head, got shape \[4\] for 7 heads"):
        uneven_attention(query, key, value, MAP, sinks=randn(4))
    with pytest.raises(MaskError, match="a mask must have 7 heads or 1"):
        uneven_attention(query, key, value, MAP, mask=Mask.bias(randn(1, 4, QUERIES, KEYS)))
    with pytest.raises(MaskError, match=r"must be a polyhead\.Mask, got Tensor"):
        uneven_attention(query, key, value, MAP, mask=randn(QUERIES, KEYS))

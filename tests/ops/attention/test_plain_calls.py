"""Plain calls take a short way after the first of their sizes, and return what the long way returns."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyhead import Mask, attention
from polyhead.errors import DtypeError, MaskError, OptionError, ShapeError
from polyhead.ops.attention import plain_calls

SHAPE = (2, 6, 19, 8)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    plain_calls._known.clear()
    yield
    plain_calls._known.clear()


def tensors(*, kv_heads: int = 6, keys: int = 19, value_dim: int = 8) -> list[Tensor]:
    return [torch.randn(SHAPE), torch.randn(2, kv_heads, keys, 8), torch.randn(2, kv_heads, keys, value_dim)]


def transposed(inputs: list[Tensor], *axes: int) -> list[Tensor]:
    return [x.transpose(*axes).contiguous().transpose(*axes) for x in inputs]


SHORT = {
    "heads": tensors(),
    "groups": tensors(kv_heads=2),
    "tokens first": transposed(tensors(), 1, 2),
    "float64": [x.double() for x in tensors()],
    "bfloat16": [x.bfloat16() for x in tensors()],
}
LONG = {"another value width": tensors(value_dim=5), "columns first": transposed(tensors(), 2, 3)}


def long_way(inputs: list[Tensor], **options: object) -> Tensor:
    return attention(*inputs, backend="sdpa", **options).output


@pytest.mark.parametrize("mask", [None, Mask.causal()], ids=["unmasked", "causal"])
@pytest.mark.parametrize("kind", [*SHORT, *LONG])
def test_every_call_gives_the_numbers_and_the_gradients_of_the_named_backend(kind: str, mask: Mask | None) -> None:
    expected = long_way((SHORT | LONG)[kind], mask=mask, scale=0.3)
    inputs = [x.detach().requires_grad_() for x in (SHORT | LONG)[kind]]
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad(long_way(inputs, mask=mask, scale=0.3), inputs, direction)
    for checks in (1, 0):
        with mock.patch.object(plain_calls, "checked_request", wraps=plain_calls.checked_request) as check:
            result = attention(*inputs, mask=mask, scale=0.3)
        assert check.call_count == checks
        assert result.backend == "sdpa"
        assert result.output.equal(expected)
        assert list(plain_calls._known.values()) == [kind in SHORT]
        found = torch.autograd.grad(result.output, inputs, direction)
        assert all(map(torch.equal, found, gradients))


def test_cross_attention_and_one_query_under_a_causal_mask_stay_right() -> None:
    for queries in (1, 5):
        query, key, value = tensors()
        for _ in range(2):
            for mask in (None, Mask.causal()):
                result = attention(query[:, :, :queries], key, value, mask=mask)
                expected = attention(query[:, :, :queries], key, value, mask=mask, backend="reference")
                assert torch.allclose(result.output, expected.output, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in torch.func.jvp itself
def test_what_changes_between_calls_of_one_size_is_read_in_every_call() -> None:
    query, key, value = tensors()
    first = attention(query, key, value, mask=Mask.causal()).output
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(query, key, value, mask=Mask.causal()).output.dtype is torch.bfloat16
    with sdpa_kernel(SDPBackend.MATH):
        assert attention(query, key, value, mask=Mask.causal()).backend == "blockwise"
    gradient = torch.func.grad(lambda x: attention(x, key, value, mask=Mask.causal()).output.sum())(query)
    assert gradient.isfinite().all()
    _, tangent = torch.func.jvp(lambda x: attention(x, key, value, mask=Mask.causal()).output, (query,), (query,))
    assert tangent.isfinite().all()
    broken = value.clone()
    broken[:, :, -1] = torch.nan
    result = attention(query, key, broken, mask=Mask.causal()).output
    assert torch.equal(result[:, :, :-1], first[:, :, :-1])
    assert result[:, :, -1].isnan().all()
    assert attention(query, key, value, mask=Mask.causal()).output.equal(first)
    assert not attention(query, key, value).output.equal(first)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scale": float("nan")}, OptionError),
        ({"scale": "1"}, OptionError),
        ({"dropout": False}, OptionError),
        ({"mask": torch.ones(19, 19, dtype=torch.bool)}, MaskError),
        ({"key": torch.randn(2, 6, 19, 8).double()}, DtypeError),
        ({"key": torch.randn(2, 5, 19, 8)}, ShapeError),
        ({"backend": "flash"}, OptionError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_wrong_call_is_refused_after_a_right_one_of_the_same_sizes(
    options: dict[str, object], error: type[Exception]
) -> None:
    query, key, value = tensors()
    arguments = {"query": query, "key": key, "value": value}
    attention(**arguments)
    for _ in range(2):
        with pytest.raises(error):
            attention(**(arguments | options))


def test_dtypes_that_autocast_casts_are_refused_without_it() -> None:
    query, key, value = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        attention(query, key.bfloat16(), value)
    with pytest.raises(DtypeError, match="query, key and value must have one dtype"):
        attention(query, key.bfloat16(), value)


def test_the_number_of_known_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_calls, "_MOST_KNOWN", 3)
    for keys in range(1, 9):
        attention(*tensors(keys=keys))
        assert len(plain_calls._known) <= 3

"""Talking heads in every backend against the formula: outputs, gradients, statistics and masked values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead import AttentionOutput, Mask, attention
from polyhead.errors import BackendUnsupported, DeviceError, DtypeError, MaskError, OptionError, ShapeError
from polyhead.ops.common import tiles
from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.talking_heads import blockwise
from polyhead.ops.talking_heads.api import mixed_weights, talking_attention
from tests.error_budget import DRAWS, Compared, assert_draws_within_error_budget, token_orders
from tests.ops.talking_heads.formula import mixed, plain_talking, talking_maps, visible

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM, VALUE_DIM = 2, 6, 3, 23, 29, 5, 7
DOUBLE = torch.float64
NAMES = ("query", "key", "value", "logits_mix", "weights_mix")
BACKENDS = ("reference", "blockwise")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def inputs(
    queries: int = QUERIES, keys: int = KEYS, heads: int = HEADS, kv_heads: int = KV_HEADS, draw: int = 0
) -> list[Tensor]:
    """Return query, key, value and mixes that are far from the identity."""
    seed = 10 * draw
    return [
        normal(BATCH, heads, queries, DIM, seed=seed + 1),
        normal(BATCH, kv_heads, keys, DIM, seed=seed + 2),
        normal(BATCH, kv_heads, keys, VALUE_DIM, seed=seed + 3),
        normal(heads, heads, seed=seed + 4) * 0.7,
        normal(heads, heads, seed=seed + 5) * 0.7,
    ]


def talk(tensors: Sequence[Tensor], **options: Any) -> AttentionOutput:
    query, key, value, logits_mix, weights_mix = tensors
    return talking_attention(query, key, value, logits_mix=logits_mix, weights_mix=weights_mix, **options)


def differentiated(function: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor) -> dict[str, Tensor]:
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    output = function(*tensors)
    return {
        "output": output,
        **dict(zip(NAMES, torch.autograd.grad(output, tensors, grad.to(output.dtype)), strict=True)),
    }


@contextmanager
def small_tiles() -> Iterator[None]:
    """16 rows and 8 columns, so that short sequences have several tiles."""
    with mock.patch.object(tiles, "TILE_COLUMNS", 8), mock.patch.object(blockwise, "TILE_ELEMENTS", 1):
        yield


HIDDEN = torch.arange(KEYS) >= torch.tensor([19, 0])[:, None]  # of the second sequence everything
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 14, [3] * 5 + [-1] * 4 + [2] * 14])
MASKS = {
    "none": (None, KEYS),
    "causal": (Mask.causal(), KEYS),
    "window": (Mask.window(6), KEYS),
    "window of both sides": (Mask.window(left=4, right=3), KEYS),
    "window and first keys": (Mask.window(5, sinks=2), QUERIES),
    "lengths": (Mask.lengths([17, 0]) & Mask.causal(), QUERIES),
    "left padding": (Mask.lengths([17, 11], side="left") & Mask.causal(), QUERIES),
    "documents": (Mask.documents(DOCUMENTS) & Mask.causal(), QUERIES),
    "positions": (
        Mask.positions(torch.arange(QUERIES)[None], torch.arange(KEYS).flip(0)[None] - 3) & Mask.causal(),
        KEYS,
    ),
    "dense": (Mask.dense(normal(QUERIES, KEYS, seed=7) > -0.3), KEYS),
    "dense a sequence": (Mask.dense(normal(BATCH, 1, QUERIES, KEYS, seed=8) > 1.4), KEYS),
    "padding of torch": (Mask.from_torch(key_padding_mask=HIDDEN) & Mask.causal(), KEYS),
    "padding and edge of torch": (
        Mask.from_torch(torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(5), key_padding_mask=HIDDEN),
        KEYS,
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_every_gradient_are_those_of_the_formula(name: str, backend: str) -> None:
    mask, keys = MASKS[name]
    tensors, grad = inputs(keys=keys), normal(BATCH, HEADS, QUERIES, VALUE_DIM, seed=6)
    exact = differentiated(lambda *x: plain_talking(*x, mask=mask, scale=0.4), tensors, grad)
    with small_tiles():
        found = differentiated(lambda *x: talk(x, mask=mask, scale=0.4, backend=backend).output, tensors, grad)
    for part, expected in exact.items():
        torch.testing.assert_close(
            found[part], expected, rtol=1e-11, atol=1e-12, msg=lambda text, p=part: f"{p}: {text}"
        )


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dtype_keeps_to_the_error_budget(backend: str, dtype: torch.dtype) -> None:
    samples = []
    for draw in range(DRAWS):
        tensors = [x.to(dtype) for x in inputs(keys=QUERIES, heads=12, kv_heads=12, draw=draw)]
        grad = normal(BATCH, 12, QUERIES, VALUE_DIM, seed=6 + 10 * draw).to(dtype)
        samples.append(compared(tensors, grad, Mask.causal(), backend))
        assert all(x.actual is not None and x.actual.dtype is dtype for x in samples[-1].values())
    # In other orders of queries and keys, all of them at once; the mixes' gradients are sums over all sequences.
    (query, visible), (key, _), (value, _), (grad, _) = (orders_of(x) for x in (*tensors[:3], grad))
    found = compared([query, key, value, *tensors[3:]], grad, Mask.dense(visible[:, None]), backend)
    samples.append({part: x for part, x in found.items() if not part.endswith("mix")})
    assert_draws_within_error_budget(samples)


def compared(tensors: Sequence[Tensor], grad: Tensor, mask: Mask, backend: str) -> dict[str, Compared]:
    exact = differentiated(lambda *x: plain_talking(*x, mask=mask), [x.double() for x in tensors], grad.double())
    plain = differentiated(lambda *x: plain_talking(*x, mask=mask), tensors, grad)
    found = differentiated(lambda *x: talk(x, mask=mask, backend=backend).output, tensors, grad)
    return {part: Compared(found[part], expected, plain[part]) for part, expected in exact.items()}


def orders_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return [batch, heads, tokens, dim] in several orders of the tokens, and the visibility under a causal mask."""
    _, heads, tokens, dim = x.shape
    edge = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    ordered, visible = token_orders(x.transpose(1, 2).flatten(2), edge)
    return ordered.unflatten(2, (heads, dim)).transpose(1, 2), visible


@pytest.mark.parametrize("heads", [8, 12, 16, 32])
def test_identity_mixes_give_plain_attention(heads: int) -> None:
    query, key, value, *_ = inputs(heads=heads, kv_heads=heads // 4)
    eye = torch.eye(heads, dtype=DOUBLE)
    expected = attention(query, key, value, mask=Mask.causal(), statistics=True, backend="reference")
    found = talk((query, key, value, eye, eye), mask=Mask.causal(), statistics=True, backend="blockwise")
    torch.testing.assert_close(found.output, expected.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.logsumexp, expected.logsumexp, rtol=1e-12, atol=1e-12)
    assert isinstance(expected.statistics, RowStatistics)
    told = {} if found.statistics is None else dict(found.statistics.items())
    assert set(told) == {name for name, _ in expected.statistics.items()}
    for name, x in expected.statistics.items():
        torch.testing.assert_close(told[name], x, rtol=1e-10, atol=1e-12, msg=name)


def test_one_head_acts_through_another() -> None:
    """The queries of head 0 determine the attention of head 1, and through the second mix its output."""
    tensors = inputs(kv_heads=HEADS)
    before = talk(tensors).output
    changed = tensors[0].clone()
    changed[:, 0] += 1
    after = talk((changed, *tensors[1:])).output
    assert (after[:, 1:] != before[:, 1:]).any(-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["none", "window", "lengths", "documents", "dense a sequence", "padding of torch"])
def test_statistics_are_those_of_each_softmax(name: str, backend: str) -> None:
    mask, keys = MASKS[name]
    tensors = inputs(keys=keys)
    logits, weights = talking_maps(tensors[0], tensors[1], tensors[3], mask=mask)
    seen = visible(mask, tensors[0], tensors[1]).expand_as(weights)
    with small_tiles():
        found = talk(tensors, mask=mask, statistics=True, backend=backend)
    told = found.statistics
    assert told is not None
    filled = seen.any(-1)
    entropy = -torch.where(weights > 0, weights * torch.log(torch.where(weights > 0, weights, 1.0)), 0.0).sum(-1)
    largest = torch.where(seen, logits, -torch.inf).amax(-1)
    distance = torch.arange(keys) - (torch.arange(QUERIES)[:, None] + keys - QUERIES)
    expected = {
        "entropy": entropy,
        "max_logit": largest,
        "max_abs_logit": (logits.abs() * seen).amax(-1),
        "confidence": weights.amax(-1),
        "visible_keys": seen.sum(-1).to(DOUBLE),
        "mean_distance": (weights * distance.abs()).sum(-1),
        "self_mass": (weights * (distance == 0)).sum(-1),
        "previous_mass": (weights * (distance == -1)).sum(-1),
    }
    for statistic, x in expected.items():
        torch.testing.assert_close(getattr(told, statistic), x, rtol=1e-10, atol=1e-11, msg=statistic)
    total = torch.exp(torch.where(seen, logits, -torch.inf)).sum(-1)
    torch.testing.assert_close(
        found.logsumexp, torch.where(filled, torch.log(total), -torch.inf), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_and_logsumexp_have_no_gradient(backend: str) -> None:
    tensors = [x.requires_grad_() for x in inputs()]
    found = talk(tensors, statistics=True, backend=backend)
    assert found.output.requires_grad
    assert found.statistics is not None
    assert found.logsumexp is not None
    assert not found.logsumexp.requires_grad
    assert not any(x.requires_grad for _, x in found.statistics.items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["none", "causal", "lengths", "dense a sequence"])
def test_mixed_weights_have_three_statistics(name: str, backend: str) -> None:
    mask, keys = MASKS[name]
    query, key, _, logits_mix, weights_mix = inputs(keys=keys)
    _, weights = talking_maps(query, key, logits_mix, mask=mask)
    combined = mixed(weights, weights_mix)
    with small_tiles():
        told = mixed_weights(query, key, logits_mix=logits_mix, weights_mix=weights_mix, mask=mask, backend=backend)
    for found, expected in (
        (told.signed_mass, combined.sum(-1)),
        (told.absolute_mass, combined.abs().sum(-1)),
        (told.largest_weight, combined.abs().amax(-1)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(OptionError, match=r"can be negative and need not sum to 1.*got 'entropy'"):
        mixed_weights(query, key, logits_mix=logits_mix, weights_mix=weights_mix, statistics="entropy")


def test_weights_are_those_of_each_softmax_and_only_the_reference_has_them() -> None:
    tensors = inputs()
    _, weights = talking_maps(tensors[0], tensors[1], tensors[3], mask=Mask.causal())
    found = talk(tensors, mask=Mask.causal(), weights=True)
    assert found.backend == "reference"
    assert found.weights is not None
    torch.testing.assert_close(found.weights, weights, rtol=1e-11, atol=1e-12)
    with pytest.raises(BackendUnsupported, match="never materialise the full weights"):
        talk(tensors, weights=True, backend="blockwise")


class _Largest(TorchDispatchMode):
    """Records the largest number of elements that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
        return found


def test_tiles_allocate_nothing_of_size_n_squared_forward_or_backward() -> None:
    length = 160
    tensors = [x.requires_grad_() for x in inputs(queries=length, keys=length)]
    with small_tiles(), _Largest() as seen:
        talk(tensors, mask=Mask.causal(), backend="blockwise").output.sum().backward()
    assert seen.numbers == BATCH * HEADS * length * VALUE_DIM
    with _Largest() as seen:
        talk(tensors, mask=Mask.causal(), backend="reference").output.sum().backward()
    assert seen.numbers == BATCH * HEADS * length**2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dense_padding_mask_equals_lengths(backend: str) -> None:
    """Padding tokens may have any values."""
    tensors, grad = inputs(keys=QUERIES), normal(BATCH, HEADS, QUERIES, VALUE_DIM, seed=6)
    lengths = torch.tensor([17, 11])
    broken = [x.clone() for x in tensors]
    for x, bad in zip(broken[1:3], (torch.inf, torch.nan), strict=True):
        x[0, :, 17:], x[1, :, 11:] = bad, bad
    for row, length in enumerate(lengths):
        grad[row, :, length:] = 0  # queries that are padding see the keys of their text here, and nothing there
    masks = (Mask.lengths(lengths), Mask.from_torch(key_padding_mask=torch.arange(QUERIES) >= lengths[:, None]))
    with small_tiles():
        expected, found = (
            differentiated(lambda *x, m=mask: talk(x, mask=m, backend=backend).output, given, grad)
            for mask, given in zip(masks, (tensors, broken), strict=True)
        )
    for row, length in enumerate(lengths):
        for x in (expected, found):
            x["output"] = x["output"].detach().clone()
            x["output"][row, :, length:] = 0
    for part, x in expected.items():
        torch.testing.assert_close(found[part], x, rtol=1e-12, atol=1e-12, msg=part)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_values_reach_no_output_and_no_gradient(backend: str) -> None:
    mask = Mask.lengths([17, 11]) & Mask.causal()
    tensors, grad = inputs(keys=QUERIES), normal(BATCH, HEADS, QUERIES, VALUE_DIM, seed=6)
    broken = [x.clone() for x in tensors]
    for x, bad in zip(broken[:3], (torch.nan, torch.inf, torch.nan), strict=True):
        x[0, :, 17:], x[1, :, 11:] = bad, bad
    spoilt = grad.clone()
    spoilt[0, :, 17:] = torch.nan

    def run(*x: Tensor) -> Tensor:
        return talk(x, mask=mask, backend=backend).output

    with small_tiles():
        expected, found = differentiated(run, tensors, grad), differentiated(run, broken, spoilt)
    for part, x in expected.items():
        torch.testing.assert_close(found[part], x, rtol=1e-12, atol=1e-12, msg=part)
    assert (found["output"][0, :, 17:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_visible_nonfinite_values_propagate(which: int, backend: str) -> None:
    tensors = [x.clone() for x in inputs(keys=QUERIES)]
    tensors[which][1, 0, 13] = torch.nan
    with small_tiles():
        output = talk(tensors, mask=Mask.causal(), backend=backend).output
    rows = output.isnan().any(-1)
    expected = torch.zeros(BATCH, HEADS, QUERIES, dtype=torch.bool)
    expected[1, :, 13 if which == 0 else slice(13, None)] = True
    assert rows.equal(expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("queries", "keys"), [(0, KEYS), (QUERIES, 0), (1, 1)])
def test_empty_inputs_give_empty_outputs(queries: int, keys: int, backend: str) -> None:
    tensors = [x.requires_grad_() for x in inputs(queries=queries, keys=keys)]
    found = talk(tensors, statistics=True, backend=backend)
    found.output.sum().backward()
    assert found.output.shape == (BATCH, HEADS, queries, VALUE_DIM)
    assert bool((found.output == 0).all()) == (keys == 0 or queries == 0)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


def refused(error: type[Exception], words: str, **changes: Any) -> None:
    query, key, value, logits_mix, weights_mix = inputs(keys=QUERIES)
    options = {"logits_mix": logits_mix, "weights_mix": weights_mix, **changes}
    with pytest.raises(error, match=words):
        talking_attention(query, key, value, **options)


def test_invalid_arguments_raise() -> None:
    refused(ShapeError, r"logits_mix must be \[6, 6\], heads by heads, got \[5, 6\]", logits_mix=normal(5, 6, seed=1))
    refused(DtypeError, r"weights_mix must be a floating-point tensor \[6, 6\], got list", weights_mix=[1.0])
    refused(DtypeError, "got torch.int64", weights_mix=torch.eye(6, dtype=torch.int64))
    refused(DeviceError, "logits_mix must be on the device of the query", logits_mix=torch.eye(6, device="meta"))
    refused(OptionError, "one number for talking heads, got a tensor", scale=torch.ones(6))
    refused(OptionError, "backend must be 'auto' or one of 'fused'.*got 'sdpa'", backend="sdpa")
    refused(BackendUnsupported, "our kernels run on CUDA devices.*float16 or bfloat16", backend="fused")
    dense = torch.ones(1, 1, QUERIES, QUERIES, dtype=torch.bool)
    by_head = Mask.dense(dense.expand(1, HEADS, -1, -1))
    refused(
        MaskError, r"\[batch, 1, queries, keys\], got a Mask.dense of \[1, 6, 23, 23\]", mask=Mask.causal() & by_head
    )
    refused(MaskError, r"the mask must be \[2 or 1, 6 or 1, 23 or 1, 23\]", mask=Mask.dense(dense[..., 1:]))
    refused(MaskError, "got Mask.bias", mask=Mask.causal() & Mask.bias(torch.zeros(1, 1, QUERIES, QUERIES)))
    refused(MaskError, "got a relative bias", mask=Mask.relative(torch.zeros(6, 3), zero=1))
    refused(MaskError, "mask must be a polyhead.Mask, got Tensor", mask=dense)


def test_auto_reports_its_backend_and_transforms_use_plain_operators() -> None:
    tensors = inputs()
    assert talk(tensors).backend == "blockwise"
    assert talk(tensors, mask=MASKS["padding of torch"][0]).backend == "blockwise"

    def loss(query: Tensor) -> Tensor:
        found = talk((query, *tensors[1:]))
        assert found.backend == "reference"
        return found.output.sum()

    expected = differentiated(lambda *x: talk(x).output, tensors, torch.ones(BATCH, HEADS, QUERIES, VALUE_DIM))
    torch.testing.assert_close(torch.func.grad(loss)(tensors[0]), expected["query"], rtol=1e-11, atol=1e-12)
    with pytest.raises(BackendUnsupported, match="function transforms"):
        torch.func.grad(lambda x: talk((x, *tensors[1:]), backend="blockwise").output.sum())(tensors[0])


def test_autocast_rounds_to_its_dtype() -> None:
    tensors = [x.float() for x in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = talk(tensors)
    assert found.output.dtype is torch.bfloat16
    assert found.output.equal(talk([x.bfloat16() for x in tensors]).output)


def test_a_second_derivative_of_tiles_raises() -> None:
    tensors = [x.requires_grad_() for x in inputs()]
    (first,) = torch.autograd.grad(talk(tensors, backend="reference").output.sum(), tensors[0], create_graph=True)
    assert first.requires_grad
    with pytest.raises(BackendUnsupported, match='no second derivative; backend="reference" has one'):
        torch.autograd.grad(talk(tensors, backend="blockwise").output.sum(), tensors[0], create_graph=True)

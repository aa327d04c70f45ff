"""The backward kernel for Hopper against float64 autograd through the reference, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import Mask, attention
from tests.ops.attention.kernels import test_backward as portable
from tests.ops.attention.kernels.test_backward import Case, scene
from tests.ops.oracle import Who
from tests.two_dtypes import in_two_dtypes

ROW_TERMS = ("entropy", "mean_distance", "mean_offset")
EVERY_TERM = ("logsumexp", "confidence", *ROW_TERMS)


def cases() -> dict[str, Case]:
    """Return scenes with several tiles of 128 keys and 64 rows, which end inside a tile."""
    causal = Who(causal=True)
    return {
        "no mask": Case(scene(queries=130, keys=137, dims=(64, 64))),
        "one tile": Case(scene(queries=5, keys=19, dims=(64, 40))),
        "one query": Case(scene(queries=1, keys=139, dims=(128, 128))),
        "causal, groups": Case(scene(batch=2, heads=(6, 2), queries=197, keys=197, dims=(128, 128), who=causal)),
        "causal, more keys": Case(scene(queries=71, keys=293, dims=(40, 72), who=causal)),
        "window": Case(scene(queries=331, keys=331, dims=(64, 128), who=Who(left=70, right=0))),
        "window on both sides": Case(scene(queries=211, keys=283, dims=(96, 64), who=Who(left=30, right=80))),
        "statistics": Case(scene(queries=151, keys=157, dims=(64, 64)), EVERY_TERM),
        "statistics, causal": Case(scene(queries=157, keys=157, dims=(128, 128), who=causal), EVERY_TERM),
        "statistics, window": Case(scene(queries=211, keys=223, dims=(128, 64), who=Who(left=9, right=30)), EVERY_TERM),
        **{name: Case(scene(queries=139, keys=139, dims=(128, 128), who=causal), (name,)) for name in ROW_TERMS},
    }


def strided(x: Tensor, device: str) -> Tensor:
    """Copy to [batch, tokens, heads, dim] order with aligned rows, and NaN after each that must not be read."""
    batch, heads, tokens, dim = x.shape
    wide = torch.full((batch, tokens + 1, heads, dim + 8), torch.nan, dtype=x.dtype, device=device)
    view = wide[:, :tokens, :, :dim].transpose(1, 2)
    view.copy_(x)
    return view


@contextmanager
def calls_of_the_kernel() -> Iterator[list[object]]:
    from polyhead.ops.attention.kernels import backward_hopper

    calls: list[object] = []
    original = backward_hopper.backward

    def counted(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        return original(*arguments, **options)

    with mock.patch.object(backward_hopper, "backward", counted):
        yield calls


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(cases(), torch.float16))
def test_on_a_gpu_gradients_keep_to_the_error_budget(name: str, dtype: torch.dtype) -> None:
    dtype = torch.bfloat16 if dtype is torch.float32 else dtype  # the kernel has no float32
    with mock.patch.object(portable, "strided", strided), calls_of_the_kernel() as calls:
        portable.check(name, cases()[name], dtype, "cuda", None)
    assert len(calls) == 1


def run(query: Tensor, key: Tensor, value: Tensor, mask: Mask, grad_output: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    result = attention(*inputs, mask=mask, backend="fused")
    return list(torch.autograd.grad(result.output, inputs, grad_output))


def inputs_on_a_gpu() -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = [(2, heads, 419, 64) for heads in (4, 2, 2, 4)]
    return [torch.randn(x, device="cuda", dtype=torch.bfloat16, generator=generator) for x in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_on_a_gpu_nan_reaches_the_gradients_that_the_portable_kernel_gives_it(part: str) -> None:
    from polyhead.ops.attention.kernels import backward_hopper

    query, key, value, grad_output = inputs_on_a_gpu()
    {"query": query, "key": key, "value": value}[part][0, 1, 200, 3] = torch.nan
    arguments = query, key, value, Mask.window(left=50, right=0), grad_output
    with calls_of_the_kernel() as calls:
        ours = run(*arguments)
    assert len(calls) == 1
    with mock.patch.object(backward_hopper, "can_serve", return_value=False):
        expected = run(*arguments)
    for actual, exact in zip(ours, expected, strict=True):
        assert 0 < int(exact.isnan().sum()) < exact.numel() // 2
        if part != "query":  # a NaN of a query reaches all keys of a tile, whose size differs
            assert actual.isnan().equal(exact.isnan())
        torch.testing.assert_close(actual.nan_to_num(), exact.nan_to_num(), rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_on_a_gpu_gradients_of_keys_are_the_same_bits_and_all_are_if_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key, value, grad_output = inputs_on_a_gpu()
    first, second = (run(query, key, value, Mask.causal(), grad_output) for _ in range(2))
    assert first[1].equal(second[1])
    assert first[2].equal(second[2])
    torch.testing.assert_close(first[0], second[0], rtol=2**-7, atol=2**-7)  # one rounding of sums in another order
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with calls_of_the_kernel() as calls:
            third, fourth = (run(query, key, value, Mask.causal(), grad_output) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not calls
    assert all(x.equal(y) for x, y in zip(third, fourth, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["expanded", "sliced", "odd address", "tokens-first"])
def test_on_a_gpu_the_layout_of_the_output_gradient_does_not_matter(layout: str) -> None:
    query, key, value, grad_output = inputs_on_a_gpu()
    if layout == "expanded":
        grad_output = grad_output[:1, :1].expand_as(query)
    plain = grad_output.contiguous()
    if layout == "sliced":
        grad_output = torch.cat([plain, plain], -1)[..., :64]
    elif layout == "odd address":
        grad_output = torch.cat([plain.flatten()[:1], plain.flatten()])[1:].view_as(plain)
    elif layout == "tokens-first":
        grad_output = plain.transpose(1, 2).contiguous().transpose(1, 2)
    with calls_of_the_kernel() as calls:
        actual = run(query, key, value, Mask.causal(), grad_output)
        expected = run(query, key, value, Mask.causal(), plain)
    assert len(calls) == 2
    torch.testing.assert_close(actual[0], expected[0], rtol=2**-7, atol=2**-7)
    assert actual[1].equal(expected[1])
    assert actual[2].equal(expected[2])

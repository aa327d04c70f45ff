"""Tensors whose rows do not start at multiples of 16 bytes give the same results as their copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import polyhead
from polyhead import Mask
from polyhead.ops.attention import cudnn_backward
from polyhead.ops.attention.alignment import aligned
from polyhead.ops.attention.scaled_dot_product import scaled_dot_product
from tests.pairs import in_turn


def shifted(x: Tensor) -> Tensor:
    """Return the same numbers one element after an aligned address, with NaN before them."""
    return torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape)


def padded(x: Tensor) -> Tensor:
    """Return the same numbers as rows of a wider tensor, with NaN between them."""
    return torch.nn.functional.pad(x, (0, 3), value=torch.nan)[..., : x.shape[-1]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"shifted": shifted, "padded": padded}
MASKS = {
    "no mask": None,
    "causal": Mask.causal(),
    "window": Mask.window(20, sinks=2),
    "lengths": Mask.causal() & Mask.lengths([61, 40]),
}
HALVES_AND_SINGLES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", HALVES_AND_SINGLES)
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_aligned_tensors_are_not_copied(dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 7, 3, dim).to(dtype)
    for view in (x[0], x[0].transpose(1, 2), x[0, :1].expand(5, 7, 3, dim), x[:, :, :, 1].transpose(1, 2)):
        assert aligned(view)[0] is view
    odd = torch.randn(2, 3, 7, 33).to(dtype)  # PyTorch pads these rows
    assert aligned(odd)[0] is odd
    single = torch.randn(1, 3, 7, 8).to(dtype).as_strided((1, 3, 7, 8), (5, 56, 8, 1))  # a stride that is never used
    assert aligned(single)[0] is single


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALVES_AND_SINGLES)
def test_others_are_copied_and_gradients_pass(dtype: torch.dtype, layout: str) -> None:
    x = torch.randn(2, 3, 7, 8).to(dtype)
    source = LAYOUTS[layout](x).requires_grad_()
    (copy,) = aligned(source)
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, x)
    assert aligned(copy)[0] is copy
    (gradient,) = torch.autograd.grad(copy.square().sum(), source)
    assert torch.equal(gradient, 2 * x)


class Tagged(Tensor):
    """A tensor with memory of its own, as those of torchvision are."""


def test_others_are_copied_of_any_class_with_memory() -> None:
    x = shifted(torch.randn(2, 3, 7, 8))
    for view in (x.as_subclass(Tagged), torch.nn.Parameter(x)):
        (copy,) = aligned(view)
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy.as_subclass(Tensor), x)


def test_others_are_copied_in_a_dispatch_mode() -> None:
    x = shifted(torch.randn(2, 3, 7, 8))
    with FlopCounterMode(display=False):
        (copy,) = aligned(x)
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, x)


def test_tensors_without_an_address_are_returned_as_they_are() -> None:
    x = shifted(torch.randn(2, 3, 7, 8))
    seen = []
    torch.func.vmap(lambda row: seen.append(aligned(row)[0] is row) or row)(x)
    assert seen == [True]
    meta = torch.empty(2, 3, 7, 8, device="meta")
    assert aligned(meta)[0] is meta
    with FakeTensorMode():
        fake = torch.empty(2, 3, 7, 8)
        assert aligned(fake)[0] is fake


def results(tensors: tuple[Tensor, ...], grad: Tensor, mask: Mask | None, **options: object) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = polyhead.attention(*leaves, mask=mask, **options).output
    gradients = torch.autograd.grad(output, leaves, grad)
    with torch.no_grad():
        forward = polyhead.attention(*tensors, mask=mask, **options).output
    return {"output": output.detach(), "forward": forward, **dict(zip("qkv", gradients, strict=True))}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        size = float(x.float().abs().max())
        # Another kernel may run for the copies: two roundings of each dtype, of the largest number.
        tolerance = 4 * torch.finfo(x.dtype).eps * size
        torch.testing.assert_close(
            found[name], x, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize(("name", "dim", "dtype"), in_turn(MASKS, (8, 24, 128), HALVES_AND_SINGLES), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu_any_address_gives_the_same(
    layout: str, name: str, dim: int, dtype: torch.dtype, backend: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, heads, 61, dim, generator=generator).to("cuda", dtype) for heads in (6, 2, 2, 6)]
    *tensors, grad = parts
    mask = MASKS[name]
    mask = None if mask is None else mask.to("cuda")
    expected = results(tuple(tensors), grad, mask, backend=backend)
    change = LAYOUTS[layout]
    for index in range(4):  # each tensor alone, the gradient of the output included
        other = [change(x) if i == index else x for i, x in enumerate(parts)]
        assert_close(results(tuple(other[:3]), other[3], mask, backend=backend), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu_a_bias_of_any_address_gives_the_same(layout: str) -> None:
    query, key, value = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    expected = scaled_dot_product(query, key, value, bias)
    torch.testing.assert_close(scaled_dot_product(query, key, value, LAYOUTS[layout](bias)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu_cudnns_backward_takes_any_address(layout: str) -> None:
    parts = [torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    query, key, value, grad = parts
    result = polyhead.attention(query, key, value, mask=Mask.causal(), statistics="entropy")
    assert result.logsumexp is not None
    rest = result.output, result.logsumexp, True, 0.125
    expected = cudnn_backward.backward(grad, query, key, value, *rest)
    for index in range(4):
        grad, *tensors = [LAYOUTS[layout](x) if i == index else x for i, x in enumerate((parts[3], *parts[:3]))]
        for found, x in zip(cudnn_backward.backward(grad, *tensors, *rest), expected, strict=True):
            torch.testing.assert_close(found, x)

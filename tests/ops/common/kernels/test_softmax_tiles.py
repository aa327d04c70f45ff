"""The arithmetic of the kernels against float64, function by function, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter.interpreted import in_the_interpreter

UNIT = 2.0**-23  # in the last place of 1 in float32


def drawn(low: float, high: float, device: str) -> Tensor:
    return (torch.rand(50_000, generator=torch.Generator().manual_seed(0)) * (high - low) + low).to(device)


def check_exp2(device: str) -> None:
    from tests.ops.interpreter.elementwise import apply

    x = drawn(-125, 10, device)
    exact = torch.exp2(x.double())
    assert ((apply("exp2", x).double() - exact) / exact).abs().max() <= UNIT
    ends = torch.tensor([0.0, -1.0, -3.0, 5.0, -127.5, -1e30, -torch.inf, torch.nan], device=device)
    assert apply("exp2", ends).tolist()[:7] == [1.0, 0.5, 0.125, 32.0, 0.0, 0.0, 0.0]
    assert apply("exp2", ends)[7].isnan()


def check_log2(device: str) -> None:
    from tests.ops.interpreter.elementwise import apply

    # Close to 1 and far from it: the sum of a row's exponentials is at least 1 and at most its keys.
    for x in (drawn(1, 1.01, device), drawn(1, 2, device), drawn(1, 1e6, device)):
        exact = torch.log2(x.double())
        assert ((apply("log2", x).double() - exact).abs() / exact.clamp_min(1)).max() <= UNIT
    assert apply("log2", torch.ones(1, device=device)).item() == 0
    assert apply("log2", torch.full([1], torch.nan, device=device)).isnan()


def check_tanh(device: str) -> None:
    from tests.ops.interpreter.elementwise import apply

    for x in (drawn(-1e-3, 1e-3, device), drawn(-1, 1, device), drawn(-40, 40, device)):
        exact = torch.tanh(x.double())
        for name, units in (("tanh", 3), ("exact_tanh", 2)):
            relative = (apply(name, x).double() - exact).abs() / exact.abs().clamp_min(1e-30)
            assert relative.max() <= units * UNIT
        # The exponent of the slope is 2x, rounded.
        slope = torch.cosh(x.double()) ** -2
        assert (((apply("tanh_slope", x).double() - slope) / slope).abs() <= (3 + 1.5 * x.abs()) * UNIT).all()
    ends = torch.tensor([0.0, 1e30, -torch.inf], device=device)
    assert apply("exact_tanh", ends).tolist() == [0.0, 1.0, -1.0]
    assert apply("tanh_slope", ends).tolist() == [1.0, 0.0, 0.0]


def check_sums(device: str) -> None:
    """Check that a tile's products are summed before they are added: one by one they would be rounded away."""
    from tests.ops.interpreter.elementwise import added

    ones = torch.ones(32, 32, device=device)
    total = ones * 2.0**24
    assert added(total, ones, ones).equal(total + 32)
    halves = ones.half()
    assert added(ones, halves, halves).equal(ones * 33)


CHECKS = {"exp2": check_exp2, "log2": check_log2, "tanh": check_tanh, "sums": check_sums}


@pytest.mark.parametrize("name", CHECKS)
def test_in_the_interpreter_a_function_is_that_of_float64(name: str) -> None:
    in_the_interpreter(CHECKS[name], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu_a_function_is_that_of_float64(name: str) -> None:
    CHECKS[name]("cuda")

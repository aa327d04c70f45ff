"""Grouped products of rows with their matrices, against the sum that defines them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhead.errors import ShapeError
from polyhead.ops.selected_rows import row_products
from polyhead.ops.selected_rows.row_products import RowGroups, sorted_groups, spread_product, summed_product

TOKENS, SLOTS, MATRICES, INNER, OUTER = 7, 3, 5, 4, 6
DOUBLE = torch.float64


def choices(tokens: int = TOKENS, slots: int = SLOTS, matrices: int = MATRICES) -> Tensor:
    return torch.rand(tokens, matrices).argsort(-1)[:, :slots]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_every_row_is_multiplied_with_its_own_matrix(data: Any) -> None:
    matrices = data.draw(st.integers(1, 6))
    tokens, slots = data.draw(st.integers(0, 9)), data.draw(st.integers(1, matrices))
    chosen = choices(tokens, slots, matrices)
    used = torch.rand(tokens, slots) < data.draw(st.sampled_from([0.0, 0.5, 1.1]))
    groups = RowGroups.of(chosen, matrices, used)
    stack = torch.randn(matrices, INNER, OUTER, dtype=DOUBLE)
    x, rows = torch.randn(tokens, INNER, dtype=DOUBLE), torch.randn(tokens * slots, INNER, dtype=DOUBLE)
    spread = torch.einsum("ta,tsab->tsb", x, stack[chosen]) * used[..., None]
    torch.testing.assert_close(spread_product(x, stack, groups), spread.flatten(0, 1))
    summed = torch.einsum("tsa,tsab->tsb", rows.view(tokens, slots, INNER), stack[chosen]) * used[..., None]
    torch.testing.assert_close(summed_product(rows, stack, groups), summed.sum(1))


@pytest.mark.parametrize("used", [None, torch.rand(TOKENS, SLOTS) < 0.6])
def test_gradients_of_any_order(used):
    groups = RowGroups.of(choices(), MATRICES, used)
    stack = torch.randn(MATRICES, INNER, 2, dtype=DOUBLE, requires_grad=True)
    x = torch.randn(TOKENS, INNER, dtype=DOUBLE, requires_grad=True)
    rows = torch.randn(TOKENS * SLOTS, INNER, dtype=DOUBLE, requires_grad=True)
    for product, left in ((spread_product, x), (summed_product, rows)):
        call = partial(_called, product, groups)
        assert torch.autograd.gradcheck(call, (left, stack), fast_mode=True)
        assert torch.autograd.gradgradcheck(call, (left, stack), fast_mode=True)


def test_a_gradient_of_matrices_has_their_memory_layout():
    groups = RowGroups.of(choices(), MATRICES)
    stack = torch.randn(MATRICES, INNER, OUTER, dtype=DOUBLE, requires_grad=True)
    for product, rows in ((spread_product, TOKENS), (summed_product, TOKENS * SLOTS)):
        (gradient,) = torch.autograd.grad(product(torch.randn(rows, INNER, dtype=DOUBLE), stack, groups).sum(), stack)
        assert gradient.stride() == stack.stride()


def _called(product: Callable[..., Tensor], groups: RowGroups, left: Tensor, stack: Tensor) -> Tensor:
    return product(left, stack, groups)


def test_the_order_within_a_group_is_stable():
    order, ends = sorted_groups(torch.tensor([3, 1, 0, 1, 2, 0]), 3)
    assert order.tolist() == [2, 5, 1, 3, 4, 0]
    assert ends.tolist() == [2, 4, 5]
    assert ends.dtype is torch.int32
    groups = RowGroups(order, ends, 1)
    assert groups.places[order].tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_without_a_matrix_may_be_nan():
    used = torch.tensor([[True, False]] * TOKENS)
    groups = RowGroups.of(choices(slots=2), MATRICES, used)
    stack = torch.randn(MATRICES, INNER, OUTER, dtype=DOUBLE)
    rows = torch.randn(TOKENS * 2, INNER, dtype=DOUBLE)
    expected = summed_product(rows, stack, groups)
    rows[1::2] = torch.nan
    assert torch.equal(summed_product(rows, stack, groups), expected)


def test_half_precision_is_accumulated_in_float32():
    groups = RowGroups.of(torch.arange(64).view(1, 64), 64)
    stack = torch.ones(64, 1, 1, dtype=torch.float16)
    rows = torch.full((64, 1), 0.001, dtype=torch.float16)
    rows[0] = 32.0  # after it, nothing as small as the others changes a sum in float16
    assert summed_product(rows, stack, groups).item() == pytest.approx(32.0625, abs=0.02)


def test_compilers_see_one_operator():
    groups = RowGroups.of(choices(), MATRICES)
    stack = torch.randn(MATRICES, INNER, OUTER, dtype=DOUBLE)
    x = torch.randn(TOKENS, INNER, dtype=DOUBLE)
    seen = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(spread_product, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x, stack, groups), spread_product(x, stack, groups))
    assert any("polyhead.spread_product" in name for name in seen)
    rows = torch.randn(TOKENS * SLOTS, OUTER, dtype=DOUBLE)
    arguments = (x, rows, groups.order, groups.ends, SLOTS, True)
    for transposed in (False, True):
        outer = torch.ops.polyhead.row_outer_product.default
        torch.library.opcheck(outer, (*arguments, transposed), test_utils="test_faketensor")
    torch.library.opcheck(torch.ops.polyhead.summed_product.default, (rows, stack.mT, *arguments[2:]))


def test_grouped_mm_gives_the_same_results(monkeypatch):
    for used in (None, torch.rand(TOKENS, SLOTS) < 0.6):
        groups = RowGroups.of(choices(), MATRICES, used)
        stack = torch.randn(MATRICES, 16, 8, requires_grad=True)
        x, rows = (torch.randn(n, 16, requires_grad=True) for n in (TOKENS, TOKENS * SLOTS))
        found = []
        for takes in (False, True):
            monkeypatch.setattr(row_products, "_grouped_mm_takes", lambda left, right, takes=takes: takes)
            spread, summed = spread_product(x, stack, groups), summed_product(rows, stack, groups)
            loss = (spread.sin().sum() + summed.sin().sum(),)
            found.append((spread, summed, *torch.autograd.grad(loss, (x, rows, stack))))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


def test_factors_without_a_kernel_are_multiplied_before_and_have_gradients():
    groups = RowGroups.of(choices(), MATRICES)
    stack = torch.randn(MATRICES, INNER, OUTER, dtype=DOUBLE)
    rows = torch.randn(TOKENS * SLOTS, INNER, dtype=DOUBLE)
    factors = torch.rand(TOKENS * SLOTS, dtype=DOUBLE, requires_grad=True)
    assert not row_products.weighs_rows(rows, stack, factors)
    ours = summed_product(rows, stack, groups, factors)
    theirs = summed_product(rows * factors[:, None], stack, groups)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(x.sum(), factors)[0] for x in (ours, theirs)))


def test_shapes_that_do_not_fit_are_refused():
    groups = RowGroups.of(choices(), MATRICES)
    stack = torch.randn(MATRICES, INNER, OUTER)
    with pytest.raises(ShapeError, match=r"got shapes \[7, 5\] and \[5, 4, 6\]"):
        spread_product(torch.randn(TOKENS, 5), stack, groups)
    with pytest.raises(ShapeError, match="groups of 21 rows in 5 matrices for 24 rows and 5 matrices"):
        spread_product(torch.randn(8, INNER), stack, groups)
    with pytest.raises(ShapeError, match="for 21 rows and 4 matrices"):
        summed_product(torch.randn(21, INNER), stack[:4], groups)
    with pytest.raises(ShapeError, match=r"must be \[tokens, slots\], got \[21\]"):
        RowGroups.of(choices().flatten(), MATRICES)

"""The grouped product kernels against float64: gathered rows, groups of any size, rows without a matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.error_budget import DRAWS, Compared, assert_draws_within_error_budget
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory

# tokens, slots, matrices, inner and outer channels: ragged edges, empty groups, long and short inner axes
SIZES = {
    "short": (9, 3, 4, 24, 40),
    "long": (7, 2, 3, 260, 20),
    "a group of many blocks": (300, 1, 2, 260, 8),  # of 128 rows at most
    "more matrices than rows": (2, 2, 11, 16, 33),
    "no tokens": (0, 2, 3, 16, 16),
}
LARGE = [(700, 4, 16, 512, 128), (700, 4, 16, 128, 512), (90, 5, 70, 264, 72), (5000, 2, 3, 1024, 256)]


def check_all(device: str, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, used_share: float | None) -> None:
    """Check outputs and gradients of both products against the error budget, with NaN in elements that are not read."""
    from polyhead.ops.selected_rows.row_products import RowGroups, spread_product, summed_product, weighs_rows

    tokens, slots, matrices, inner, outer = sizes
    chosen = torch.rand(tokens, matrices).argsort(-1)[:, :slots].to(device)
    used = None if used_share is None else (torch.rand(tokens, slots) < used_share).to(device)
    groups = RowGroups.of(chosen, matrices, used)
    x, stack, rows = (
        torch.randn(shape).to(device, dtype)
        for shape in ((tokens, inner), (matrices, inner, outer), (tokens * slots, inner))
    )
    away = torch.zeros(tokens * slots, dtype=torch.bool, device=device) if used is None else ~used.flatten()
    for product, left in ((spread_product, x), (summed_product, rows)):
        hidden = left if product is spread_product else torch.where(away[:, None], torch.nan, left)
        gradient = torch.randn(tokens * slots if product is spread_product else tokens, outer).to(device, dtype)
        poison = gradient if product is summed_product else torch.where(away[:, None], torch.nan, gradient)
        with poisoned_memory():
            found = _differentiated(lambda a, b, *_, p=product: p(a, b, groups), hidden, stack, poison)
        samples = []
        for draw in range(DRAWS if tokens < 100 else 1):
            inputs = [x if draw == 0 else torch.randn(x.shape).to(x) for x in (left, stack, gradient)]
            more = chosen, used, product is spread_product
            plain, exact = (_differentiated(_formula, *x, *more) for x in (inputs, [x.double() for x in inputs]))
            ours = found if draw == 0 else (None, None, None)
            named = zip(("product", "left", "matrices"), ours, exact, plain, strict=True)
            samples.append({name: Compared(*parts) for name, *parts in named})
        assert_draws_within_error_budget(samples, name=product.__name__)
    factors = torch.rand(tokens * slots).to(device, dtype)
    with torch.no_grad(), poisoned_memory():
        assert weighs_rows(rows, stack, factors)
        weighed = summed_product(torch.where(away[:, None], torch.nan, rows), stack, groups, factors)
        assert weighed.equal(summed_product(rows * factors[:, None], stack, groups))


def _differentiated(call, left: Tensor, stack: Tensor, gradient: Tensor, *more: object) -> tuple[Tensor, ...]:
    left, stack = (x.detach().clone().requires_grad_() for x in (left, stack))
    result = call(left, stack, *more)
    return (result, *torch.autograd.grad(result, (left, stack), gradient))


def _formula(left: Tensor, stack: Tensor, chosen: Tensor, used: Tensor | None, spread: bool) -> Tensor:
    """Compute the formula with every product rounded to the dtype of the inputs before the sum."""
    tokens, slots = chosen.shape
    rows = left.repeat_interleave(slots, 0) if spread else left
    parts, order = [], []
    for index, matrix in enumerate(stack):  # a matrix for each row at once would be gigabytes
        mine = (chosen == index if used is None else (chosen == index) & used).flatten().nonzero()[:, 0]
        parts.append(rows[mine] @ matrix)
        order.append(mine)
    products = rows.new_zeros(tokens * slots, stack.shape[2]).index_copy(0, torch.cat(order), torch.cat(parts))
    return products if spread else products.view(tokens, slots, stack.shape[2]).sum(1)


def check_layer() -> None:
    from polyhead.layers.variants import RoutedHeads
    from tests.layers.variants.routed_formula import routed_formula, scramble

    torch.manual_seed(5)
    layer = scramble(RoutedHeads(24, 4, head_dim=8, shape="full", top_p=0.5))
    x = torch.randn(2, 5, 24)
    result = layer(x)
    assert result.backend == "fused", result.backend
    expected, _ = routed_formula(layer, x, result.routing)
    torch.testing.assert_close(result.output, expected)


KINDS = [(torch.float16, 0.4), (torch.float32, 0.4), (torch.float16, None)]


@pytest.mark.numerics
def test_products_and_gradients_in_the_interpreter():
    for index, sizes in enumerate(SIZES.values()):
        in_the_interpreter(check_all, "cpu", sizes, *KINDS[index % len(KINDS)])


def test_the_layer_runs_on_them_in_the_interpreter():
    in_the_interpreter(check_layer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("share", [None, 0.4])
@pytest.mark.parametrize("sizes", [*SIZES.values(), *LARGE])
def test_products_and_gradients_on_a_gpu(sizes, share, dtype):
    check_all("cuda", sizes, dtype, share)

"""Reduction of rows to four numbers per statistic and head, by kernel and PyTorch, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead.ops.common import row_reduction
from polyhead.ops.common.row_reduction import SHARE, RowTotals, reduce_rows
from polyhead.ops.common.statistics import RowStatistics
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory
from tests.waiting import waiting_is_an_error

NAMES = ("entropy", "max_logit", "mean_distance", "sink_mass")
COLUMNS = ("entropy", SHARE, "max_logit", "mean_distance")
HEADS, MANY_HEADS = 3, 7
SIZES = [(1, 1), (3, 11), (2, 131), (1, 257), (2, 2053), (1, 10_007)]  # the last one is cut into chunks


def empty(columns: int = len(COLUMNS), heads: int = HEADS, device: str = "cpu") -> RowTotals:
    zeros = torch.zeros(columns, heads, dtype=torch.float64, device=device)
    return RowTotals(zeros, zeros, zeros, torch.full_like(zeros, -torch.inf))


def rows_of(
    batch: int,
    queries: int,
    device: str = "cpu",
    *,
    heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
    hidden: bool = True,
) -> RowStatistics:
    """Return rows with 0, 1 or more visible keys.

    Rows without keys contain NaN and -Inf, and no statistic is centred at 0.
    """
    shape = (batch, heads, queries)
    keys = torch.randint(0 if hidden else 1, 4, shape).mul(torch.randint(1, 9, shape)).to(dtype)
    values = {name: torch.randn(shape, dtype=dtype) * 3 + 40 * (place - 1) for place, name in enumerate(NAMES)}
    for name in values:
        values[name] = torch.where(keys > 0, values[name], -torch.inf if name == "max_logit" else torch.nan)
    return RowStatistics(**{name: x.to(device) for name, x in values.items()}, visible_keys=keys.to(device))


def real_of(batch: int, queries: int, device: str = "cpu") -> Tensor:
    return (torch.rand(batch, queries) > 0.3).to(device)


def exact(calls, columns=COLUMNS, heads=range(HEADS), *, learned_sinks: bool = False) -> RowTotals:
    """Compute the totals for one statistic of one head at a time, over all its rows at once."""
    found = RowTotals(*(x.clone() for x in empty(len(columns), len(heads))))
    for (i, name), (j, head) in itertools.product(enumerate(columns), enumerate(heads)):
        samples = []
        for rows, real in calls:
            keys = rows.visible_keys[:, head].cpu().double()
            values = getattr(rows, "entropy" if name == SHARE else name)[:, head].detach().cpu().double()
            counted = keys > 0
            if real is not None:
                counted = counted & real.cpu()
            if name == SHARE:
                counted = counted & (keys + learned_sinks > 1)
                values = values / (keys + learned_sinks).log()
            samples.append(values[counted])
        seen = torch.cat(samples)
        if len(seen):
            numbers = (len(seen), seen.mean(), (seen - seen.mean()).square().sum(), seen.max())
            for part, number in zip(found, numbers, strict=True):
                part[i, j] = number
    return found


def assert_equal(actual: RowTotals, expected: RowTotals, columns=COLUMNS) -> None:
    """Check counts and maxima exactly, sums up to float64 rounding; a share may be float32."""
    for name, one, other in zip(RowTotals._fields, actual, expected, strict=True):
        assert one.dtype is torch.float64
        for place, column in enumerate(columns):
            is_exact = name == "total" or (name == "largest" and column != SHARE)
            bound = 0.0 if is_exact else 1e-6 if column == SHARE else 1e-11
            message = f"{name} of {column}"
            torch.testing.assert_close(one[place].cpu(), other[place], rtol=bound, atol=bound, msg=message)


# ---- what holds on every device, in the interpreter as well


def check_sizes(device: str) -> None:
    for place, (batch, queries) in enumerate(SIZES):
        torch.manual_seed(queries)
        for with_real, hidden in [(False, False), (True, True), (place % 2 == 0, place % 2 == 1)]:
            rows = rows_of(batch, queries, device, hidden=hidden)
            real = real_of(batch, queries, device) if with_real else None
            sinks = hidden != (place % 2 == 0)
            found = reduce_rows(rows, real, COLUMNS, range(HEADS), empty(device=device), learned_sinks=sinks)
            assert_equal(found, exact([(rows, real)], learned_sinks=sinks))


def check_strides_and_dtypes(device: str) -> None:
    rows, real = rows_of(3, 23, device), real_of(3, 23, device)
    expected = exact([(rows, real)])

    def laid_out(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
        back = [order.index(axis) for axis in range(3)]
        return torch.stack([tensor, tensor]).permute(0, *(1 + x for x in order)).contiguous()[1].permute(back)

    every = {name: laid_out(x, (2, 0, 1)) for name, x in rows.items()}
    mixed = {name: laid_out(x, (1, 2, 0)) if name == "mean_distance" else x for name, x in every.items()}
    for values in (every, mixed):
        view = RowStatistics(**values)
        assert_equal(
            reduce_rows(view, real.t().contiguous().t(), COLUMNS, range(HEADS), empty(device=device)), expected
        )
    double = RowStatistics(**{name: x.double() for name, x in rows.items()})
    assert_equal(reduce_rows(double, real, COLUMNS, range(HEADS), empty(device=device)), expected)
    whole = replace(rows, visible_keys=rows.visible_keys.int())
    assert_equal(reduce_rows(whole, real, COLUMNS, range(HEADS), empty(device=device)), expected)
    shared = real[:1]
    found = reduce_rows(rows, shared, COLUMNS, range(HEADS), empty(device=device))
    assert_equal(found, exact([(rows, shared.expand(3, -1))]))
    # The same number of keys for all, broadcast.
    one = replace(rows_of(2, 13, device, hidden=False), visible_keys=torch.full((1, 1, 1), 13.0, device=device))
    one = replace(one, visible_keys=one.visible_keys.expand(2, HEADS, 13))
    assert_equal(reduce_rows(one, None, COLUMNS, range(HEADS), empty(device=device)), exact([(one, None)]))


def check_chosen(device: str) -> None:
    rows, real, every = rows_of(2, 29, device, heads=MANY_HEADS), real_of(2, 29, device), (*NAMES, SHARE)
    whole = reduce_rows(rows, real, every, range(MANY_HEADS), empty(len(every), MANY_HEADS, device))
    for heads in [(3,), (0, 2, 4), (1, 2, 6), (0, 1, 3, 6), (6, 2)]:
        for columns in [("mean_distance",), (SHARE,), (SHARE, "sink_mass"), ("max_logit", "entropy")]:
            found = reduce_rows(rows, real, columns, heads, empty(len(columns), len(heads), device))
            assert_equal(found, exact([(rows, real)], columns, heads), columns)
            places = [every.index(name) for name in columns]
            for one, other in zip(found, whole, strict=True):
                assert torch.equal(one, other[places][:, list(heads)])
    state = empty(device=device)
    assert reduce_rows(rows_of(2, 0, device), None, COLUMNS, range(HEADS), state) is state
    assert reduce_rows(rows, None, (), (), state) is state


def check_state(device: str) -> None:
    """Check that several calls equal one, empty calls change no bit, and states are never modified."""
    calls = [(rows_of(b, q, device), real_of(b, q, device)) for b, q in [(1, 5), (3, 301), (2, 1), (1, 9001), (2, 64)]]
    states, copies = [empty(device=device)], []
    for rows, real in calls:
        copies.append([x.clone() for x in states[-1]])
        states.append(reduce_rows(rows, real, COLUMNS, range(HEADS), states[-1]))
    assert_equal(states[-1], exact(calls))
    for state, copy in zip(states, copies, strict=False):
        assert all(torch.equal(one, other) for one, other in zip(state, copy, strict=True))
    rows, _ = calls[1]
    nothing = torch.zeros(3, 301, dtype=torch.bool, device=device)
    after = reduce_rows(rows, nothing, COLUMNS, range(HEADS), states[-1])
    assert all(torch.equal(one, other) for one, other in zip(after, states[-1], strict=True))
    before = empty(device=device)
    after = reduce_rows(rows, nothing, COLUMNS, range(HEADS), before)
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def check_values(device: str) -> None:
    """Check that NaN stays in its head, and that a small variance survives a large mean."""
    rows = rows_of(2, 3001, device, hidden=False)
    for name in ("mean_distance", "max_logit"):
        getattr(rows, name)[1, 2, 2500] = torch.nan
    state = empty(device=device)
    found = reduce_rows(rows, None, COLUMNS, range(HEADS), state)
    for part in (found.mean, found.squares, found.largest):
        broken = part.isnan().cpu()
        assert broken[2:, 2].all()
        assert broken.sum() == 2
    again = reduce_rows(rows_of(1, 3, device, hidden=False), None, COLUMNS, range(HEADS), found)
    assert again.largest[2:, 2].isnan().all()
    far = replace(rows_of(1, 5000, device, hidden=False), mean_distance=torch.randn(1, HEADS, 5000).add(1e4).to(device))
    assert_equal(reduce_rows(far, None, COLUMNS, range(HEADS), state), exact([(far, None)]))


def check_determinism(device: str) -> None:
    rows, real = rows_of(1, 9001, device), real_of(1, 9001, device)
    one, other = (reduce_rows(rows, real, COLUMNS, range(HEADS), empty(device=device)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check_splits(device: str) -> None:
    """Check any split of a head's rows over programs."""
    from polyhead.ops.common.kernels import row_reduction as kernels

    rows, real = rows_of(3, 3001, device), real_of(3, 3001, device)
    values = [rows.entropy, rows.entropy, rows.max_logit, rows.mean_distance]
    before = reduce_rows(rows_of(1, 17, device), None, COLUMNS, range(HEADS), empty(device=device))
    expected = reduce_rows(rows, real, COLUMNS, range(HEADS), before)
    for chunks in (1, 2, 4, 64):
        found = kernels.reduce_rows(
            values, rows.visible_keys, real, before, heads=range(HEADS), share=1, learned_sinks=False, chunks=chunks
        )
        assert_equal(RowTotals(*found), RowTotals(*(x.cpu() for x in expected)))


CHECKS = (check_sizes, check_strides_and_dtypes, check_chosen, check_state, check_values, check_determinism)
# The interpreter runs one program after another, so that there the same rows give the same bits whatever a kernel does.
INTERPRETED = (check_sizes, check_strides_and_dtypes, check_chosen, check_state, check_values, check_splits)


def check_kernel(check: Callable[[str], None]) -> None:
    from polyhead.ops.common.kernels import row_reduction as kernels

    with poisoned_memory(), mock.patch.object(kernels, "reduce_rows", wraps=kernels.reduce_rows) as kernel:
        check("cpu")
    assert kernel.call_count


@pytest.mark.parametrize("check", CHECKS)
def test_in_plain_pytorch(check):
    with mock.patch.object(row_reduction, "has_kernel", return_value=False):
        check("cpu")


@pytest.mark.parametrize("check", INTERPRETED)
def test_in_the_interpreter(check: Callable[[str], None]) -> None:
    in_the_interpreter(check_kernel, check)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [*CHECKS, check_splits])
def test_on_a_gpu(check):
    with poisoned_memory():
        check("cuda")


@pytest.mark.gpu
def test_on_a_gpu_without_a_kernel():
    with mock.patch.object(row_reduction, "has_kernel", return_value=False):
        for check in CHECKS:
            check("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [True, False])
def test_on_a_gpu_nothing_synchronises(kernel):
    rows, real = rows_of(2, 9001, "cuda", heads=MANY_HEADS), real_of(2, 9001, "cuda")
    state, chosen = empty(heads=MANY_HEADS, device="cuda"), empty(heads=3, device="cuda")
    with mock.patch.object(row_reduction, "has_kernel", return_value=kernel), waiting_is_an_error():
        reduce_rows(rows, real, COLUMNS, range(MANY_HEADS), state)
        reduce_rows(rows, None, COLUMNS, (1, 2, 6), chosen)


@pytest.mark.gpu
def test_on_a_gpu_rows_beyond_two_gigabytes():
    # The last row of the last statistic lies past 2^31 elements.
    base = torch.zeros(2, 3, 2**29 - 63, device="cuda")
    keys = torch.ones((), device="cuda").expand(2, 3, 2**29 - 63)
    base[1, 2, -1] = 5.0
    rows = RowStatistics(mean_distance=base, visible_keys=keys)
    found = reduce_rows(rows, None, ("mean_distance",), range(3), empty(1, 3, "cuda"))
    assert found.largest.tolist() == [[0.0, 0.0, 5.0]]
    assert found.total.tolist() == [[2.0 * (2**29 - 63)] * 3]


def test_gradients_are_left_alone():
    rows = rows_of(2, 13, hidden=False)
    leaf = rows.entropy.clone().requires_grad_()
    found = reduce_rows(replace(rows, entropy=leaf * 1.0), None, COLUMNS, range(HEADS), empty())
    assert not any(x.requires_grad for x in found)
    assert_equal(found, exact([(rows, None)]))


def test_under_a_dispatch_mode_no_value_is_read():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        rows = RowStatistics(**{name: mode.from_tensor(x) for name, x in rows_of(2, 13).items()})
        found = reduce_rows(rows, mode.from_tensor(real_of(2, 13)), COLUMNS, range(HEADS), empty())
    assert [tuple(x.shape) for x in found] == [(4, HEADS)] * 4

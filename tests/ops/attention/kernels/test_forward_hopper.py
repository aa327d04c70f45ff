"""The Hopper kernel against float64 and against the portable kernel; it needs a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyhead import Mask, attention
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.statistics import RowStatistics
from tests.error_budget import assert_within_error_budget, plain_formula

NAMES = ("max_logit", "entropy", "confidence", "mean_distance", "mean_offset", "visible_keys")
BANDS = {
    "all": (None, None),
    "causal": (None, 0),
    "some after": (None, 30),
    "window": (100, 0),
    "both sides": (200, 300),
    "narrow": (3, 2),
    "self": (0, 0),
}


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")]


def tensors(
    batch: int, heads: tuple[int, int], queries: int, keys: int, dims: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    torch.manual_seed(batch + queries + keys)
    query = torch.randn(batch, queries, heads[0], dims[0], device="cuda", dtype=dtype).transpose(1, 2)
    key = torch.randn(batch, heads[1], keys, dims[0], device="cuda", dtype=dtype)
    value = torch.randn(batch, keys, heads[1], dims[1], device="cuda", dtype=dtype).transpose(1, 2)
    return [query, key, value]


def band(left: int | None, right: int | None) -> Mask | None:
    return None if left is None and right is None else Mask.window(left=left, right=right)


def exact(inputs: list[Tensor], mask: Mask | None) -> tuple[Tensor, Tensor, RowStatistics]:
    doubles = [x.double() for x in inputs]
    result = attention(*doubles, mask=mask, statistics=NAMES, logsumexp=True, backend="reference")
    assert result.logsumexp is not None
    assert result.statistics is not None
    return result.output, result.logsumexp, result.statistics


def plain(inputs: list[Tensor], left: int | None, right: int | None) -> Tensor:
    """Return the output of the formula, rounded at every step, which sets the error budget."""
    (batch, heads, queries, _), keys = inputs[0].shape, inputs[1].shape[2]
    place = torch.arange(queries, device="cuda")[:, None] + keys - queries
    distance = torch.arange(keys, device="cuda") - place
    visible = torch.ones_like(distance, dtype=torch.bool)
    visible &= distance <= (keys if right is None else right)
    visible &= distance >= -(keys if left is None else left)
    return plain_formula(*inputs, visible=visible.expand(batch, heads, queries, keys)).output


def run(inputs: list[Tensor], left: int | None, right: int | None, row_poison: Tensor | None = None):
    from polyhead.ops.attention.kernels.forward_hopper import can_serve, forward

    query, key, value = inputs
    mask = MaskArguments(left=left, right=right, offset=key.shape[2] - query.shape[2])
    call = KernelCall(query, key, value, mask, scale=query.shape[3] ** -0.5)
    assert can_serve(call, NAMES)
    return forward(call, row_poison=row_poison, names=NAMES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, (4, 2), 500, 777, (128, 128)), (3, (6, 2), 333, 333, (64, 64))])
@pytest.mark.parametrize("kind", BANDS)
def test_output_and_statistics_are_those_of_float64(kind: str, sizes: tuple, dtype: torch.dtype) -> None:
    inputs = tensors(*sizes, dtype)
    left, right = BANDS[kind]
    output, logsumexp, statistics = run(inputs, left, right)
    want, want_sum, want_statistics = exact(inputs, band(left, right))
    keys = sizes[3]
    assert_within_error_budget(output, exact=want, plain=plain(inputs, left, right), name="output")
    size = (inputs[0].double().norm(dim=-1) * inputs[1].double().norm(dim=-1).max()).max() * sizes[4][0] ** -0.5
    bounds = {"max_logit": 1e-5 * float(size), "entropy": 1e-3, "confidence": 1e-5, "visible_keys": 0.0}
    torch.testing.assert_close(logsumexp.double(), want_sum, rtol=0, atol=1e-5 * float(size))
    assert set(statistics) == set(NAMES)
    for name, found in statistics.items():
        bound = bounds.get(name, 1e-5 * keys)
        torch.testing.assert_close(found.double(), getattr(want_statistics, name), rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize("dims", [(40, 40), (64, 128), (80, 72), (96, 96), (128, 64)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 257])
def test_any_length_and_head_dim(dims: tuple[int, int], length: int) -> None:
    inputs = tensors(2, (2, 1), length, length, dims, torch.bfloat16)
    output, _, statistics = run(inputs, None, 0)
    want, _, want_statistics = exact(inputs, Mask.causal())
    assert_within_error_budget(output, exact=want, plain=plain(inputs, None, 0), name="output")
    assert (statistics["entropy"].double() - want_statistics.entropy).abs().max() < 1e-3
    assert (statistics["mean_distance"].double() - want_statistics.mean_distance).abs().max() < 1e-3


def test_huge_logits_keep_their_entropy() -> None:
    query, key, value = tensors(1, (2, 2), 512, 512, (128, 128), torch.bfloat16)
    inputs = [query * 32, key * 32, value]
    _, _, statistics = run(inputs, None, 0)
    _, _, want = exact(inputs, Mask.causal())
    assert want.max_logit.max() > 2000
    assert (statistics["entropy"].double() - want.entropy).abs().max() < 1e-3
    assert (statistics["confidence"].double() - want.confidence).abs().max() < 1e-3


def test_a_poisoned_row_gives_nan_and_no_other_does() -> None:
    inputs = tensors(2, (4, 2), 200, 200, (64, 64), torch.bfloat16)
    clean, _, _ = run(inputs, None, 0)
    poison = torch.zeros(2, 2, 200, device="cuda")
    poison[1, 0, 150:] = torch.nan
    output, logsumexp, statistics = run(inputs, None, 0, poison)
    broken = poison.repeat_interleave(2, 1).isnan()
    assert output.isnan().any(-1).equal(broken)
    assert logsumexp.isnan().equal(broken)
    for name in ("max_logit", "entropy", "confidence", "mean_distance"):
        assert statistics[name].isnan().equal(broken), name
    assert output[~broken].equal(clean[~broken])


@pytest.mark.parametrize("kind", ["all", "causal"])
def test_more_heads_than_a_grid_axis_holds_and_more_elements_than_32_bits(kind: str) -> None:
    batch, heads, length, dim = 16400, 32, 66, 64
    assert batch * heads * length * dim > 1 << 31
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")
    query, key, value = (
        torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )  # fmt: skip
    left, right = BANDS[kind]
    output, logsumexp, statistics = run([query, key, value], left, right)
    for part in (slice(0, 2), slice(batch - 2, batch)):
        inputs = [x[part] for x in (query, key, value)]
        want, want_sum, want_statistics = exact(inputs, band(left, right))
        assert_within_error_budget(output[part], exact=want, plain=plain(inputs, left, right), name="output")
        assert (logsumexp[part].double() - want_sum).abs().max() < 1e-4
        assert (statistics["entropy"][part].double() - want_statistics.entropy).abs().max() < 1e-3


def test_what_it_cannot_address_is_left_to_the_portable_kernel() -> None:
    from polyhead.ops.attention.kernels.forward_hopper import can_serve

    query, key, value = tensors(1, (2, 2), 64, 64, (64, 64), torch.bfloat16)
    call = KernelCall(query, key, value, MaskArguments(right=0), scale=0.125)
    assert can_serve(call, NAMES)
    shifted = torch.randn(1, 2, 64, 72, device="cuda", dtype=torch.bfloat16)[..., 3:67]
    assert not can_serve(replace(call, query=shifted), NAMES)
    assert not can_serve(call, ("sink_mass",))
    assert not can_serve(replace(call, mask=call.mask._replace(table=torch.zeros(1, 3, device="cuda"))), NAMES)
    fewer = replace(call, key=key[:, :, :30], value=value[:, :, :30], mask=call.mask._replace(offset=-34))
    assert not can_serve(fewer, NAMES)
    assert not can_serve(replace(call, query=query.float(), key=key.float(), value=value.float()), NAMES)

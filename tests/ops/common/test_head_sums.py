"""Sums per head over tokens, by kernel and in PyTorch, against float64."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead.ops.common import head_sums
from polyhead.ops.common.head_sums import count_tokens, quadratic_forms, squared_norms
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory
from tests.waiting import waiting_is_an_error

BINS = 7
SIZES = [(1, 1, 1), (3, 2, 11), (1, 37, 7), (1, 5, 71)]  # batch, heads, queries; more heads than a block


def rows_of(batch: int, heads: int, queries: int, device: str, *, learned_sinks: bool = False) -> tuple[Tensor, ...]:
    """Return visible keys, 0 and 1 among them, entropies in the middle of bins or NaN, real rows, and the bins."""
    keys = torch.randint(0, 4, (batch, heads, queries)) * torch.randint(1, 9, (batch, heads, queries))
    keys[:, :, ::5] = 0  # of all heads
    keys[:, 1:, 1::5] = 0
    keys[:, :1, 1::5] = 3  # of the first head alone
    index = torch.randint(0, BINS, keys.shape)
    entropy = (index + 0.5) / BINS * (keys + learned_sinks).clamp_min(2).log()
    entropy = torch.where(keys > 0, entropy, torch.nan)
    return (*(x.to(device) for x in (keys.float(), entropy, torch.rand(batch, queries) > 0.3)), index)


def strided(x: Tensor) -> Tensor:
    """Return the same values in another layout: [heads, queries, 2 batch] in memory, every second."""
    spread = torch.full((*x.shape[1:], 2 * len(x)), 99.0, dtype=torch.float64, device=x.device).to(x.dtype)
    spread[..., ::2] = x.movedim(0, -1)
    return spread[..., ::2].movedim(-1, 0)


def check_tokens(device: str) -> None:
    for place, (batch, heads, queries) in enumerate(SIZES):
        torch.manual_seed(queries)
        sinks = place % 2 == 0
        keys, entropy, real, index = rows_of(batch, heads, queries, device, learned_sinks=sinks)
        for chosen, layout in ((real, strided), (None, torch.clone), (real[:1], torch.clone)):
            found = count_tokens(layout(keys), chosen, layout(entropy), bins=BINS, learned_sinks=sinks)
            is_real = torch.ones(batch, queries, dtype=torch.bool) if chosen is None else chosen.cpu().expand(batch, -1)
            expected = (keys > 0).any(1).cpu() & is_real
            assert torch.equal(found.tokens.cpu(), expected)
            assert int(found.number) == int(expected.sum())
            counted = ((keys > 0) & (keys + sinks > 1)).cpu() & is_real[:, None]
            counts = [index[:, head][counted[:, head]].bincount(minlength=BINS + 1) for head in range(heads)]
            assert torch.equal(found.entropies.cpu(), torch.stack(counts))
    assert count_tokens(keys, None).entropies is None
    empty = count_tokens(keys[:, :, :0], None, entropy[:, :, :0], bins=BINS)
    assert (tuple(empty.tokens.shape), int(empty.number)) == ((batch, 0), 0)


def check_entropies_beyond_the_bins(device: str) -> None:
    keys = torch.full((1, 1, 5), 3.0, device=device)
    entropy = torch.tensor([-1e-6, 0.0, 1.0986124, torch.nan, torch.inf], device=device).view(1, 1, 5)
    counts = count_tokens(keys, None, entropy, bins=BINS).entropies
    assert counts.tolist() == [[2, 0, 0, 0, 0, 0, 2, 1]]


def check_norms(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for batch, heads, queries, dim in ((1, 1, 1, 1), (2, 3, 131, 24), (3, 5, 67, 17), (2, 2, 33, 129)):
            torch.manual_seed(queries)
            tokens = (torch.rand(batch, queries) > 0.4).to(device)
            x = torch.randn(batch, queries, heads, dim).to(device, dtype)
            x = torch.where(tokens[..., None, None], x, torch.nan)
            expected = torch.where(tokens[..., None, None], x.double(), 0.0).square().sum((0, 1, 3))
            wider = torch.nn.functional.pad(x, (3, 2))[..., 3:-2]  # an odd address and stride
            scattered = torch.repeat_interleave(x, 2, -1)[..., ::2]
            for layout in (x, x.transpose(1, 2).contiguous().transpose(1, 2), wider, scattered):
                found = squared_norms(layout.transpose(1, 2), tokens)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
                assert found.dtype is torch.float64
    ones = torch.ones(2, 3, device=device, dtype=torch.bfloat16)
    found = squared_norms(ones[:, None, :, None].expand(2, 4, 3, 8), torch.ones(2, 3, dtype=torch.bool, device=device))
    assert found.tolist() == pytest.approx([48.0] * 4, rel=1e-6)


def check_forms(device: str) -> None:
    is_interpreted = device == "cpu" and head_sums.has_kernel(torch.ones(1))
    half = torch.float16 if is_interpreted else torch.bfloat16  # whose products the interpreter gets wrong
    for dtype, bound in ((torch.float32, 2e-6), (half, 2e-6), (torch.float64, 1e-13)):
        for count, heads, dim in ((1, 1, 1), (131, 3, 24), (67, 2, 136), (1009, 1, 17)):
            torch.manual_seed(count)
            x = torch.randn(count, heads, dim).to(device, dtype)
            root = torch.randn(heads, dim, 5, device=device)
            matrices = (root @ root.mT).to(torch.promote_types(dtype, torch.float32))
            wide = torch.nn.functional.pad(x, (0, 3))[..., :dim]
            scattered = torch.repeat_interleave(x, 2, -1)[..., ::2]
            tokens = (torch.rand(count) > 0.4).to(device)
            for layout, chosen in ((x, None), (x, tokens), (wide, tokens), (scattered, None)):
                rows = layout.double() if chosen is None else torch.where(chosen[:, None, None], layout.double(), 0.0)
                exact = torch.einsum("thi,hij,thj->h", rows, matrices.double(), rows)
                size = torch.einsum("thi,hij,thj->h", rows.abs(), matrices.double().abs(), rows.abs())
                if chosen is not None:
                    layout = torch.where(chosen[:, None, None], layout, torch.nan)
                found = quadratic_forms(layout, matrices, chosen)
                assert found.dtype is torch.float64
                assert ((found - exact).abs() <= bound * size).all()


CHECKS = (check_tokens, check_entropies_beyond_the_bins, check_norms, check_forms)


def check_kernel(check: Callable[[str], None]) -> None:
    with poisoned_memory(), mock.patch.object(head_sums, "has_kernel", wraps=head_sums.has_kernel) as has_kernel:
        check("cpu")
        assert has_kernel.call_count
        assert head_sums.has_kernel(torch.ones(1))


@pytest.mark.parametrize("check", CHECKS)
def test_in_plain_pytorch(check: Callable[[str], None]) -> None:
    check("cpu")


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check: Callable[[str], None]) -> None:
    in_the_interpreter(check_kernel, check)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(check: Callable[[str], None]) -> None:
    with poisoned_memory():
        check("cuda")


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_same_numbers_give_the_same_bits() -> None:
    keys, entropy, real, _ = rows_of(2, 5, 3001, "cuda")
    x = torch.randn(2, 3001, 5, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    with waiting_is_an_error():
        counted = [count_tokens(keys, real, entropy, bins=BINS) for _ in range(2)]
        norms = [squared_norms(x, counted[0].tokens) for _ in range(2)]
        matrices, read = torch.ones(5, 64, 64, device="cuda"), x.transpose(1, 2).reshape(-1, 5, 64)
        forms = [quadratic_forms(read, matrices, counted[0].tokens) for _ in range(2)]
    assert torch.equal(*norms)
    assert torch.equal(*forms)
    for one, other in zip(*counted, strict=True):
        assert torch.equal(one, other)

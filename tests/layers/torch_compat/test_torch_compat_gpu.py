"""The drop-in on a CUDA device: PyTorch's numbers, its dropout under a seed, and no wait for the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from polyhead.layers.torch_compat import MultiheadAttention
from tests.waiting import waiting_is_an_error

pytestmark = pytest.mark.gpu

BATCH, TOKENS, WIDTH, HEADS = 3, 71, 64, 4
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float64: 1e-10}
KINDS = ("no mask", "padding", "float padding", "causal", "causal hint", "per head", "both")
both = pytest.mark.parametrize("need_weights", [False, True], ids=["no weights", "weights"])
modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def masks(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    padding = torch.arange(TOKENS, device="cuda").expand(BATCH, -1) >= torch.tensor([[71], [40], [3]], device="cuda")
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cuda").triu(1)
    return {
        "no mask": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.zeros_like(padding, dtype=dtype).masked_fill(padding, -math.inf)},
        "causal": {"attn_mask": causal},
        "causal hint": {"attn_mask": causal, "is_causal": True},
        "per head": {"attn_mask": causal.expand(BATCH * HEADS, -1, -1)},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }[kind]


def pair(dtype: torch.dtype, training: bool, **options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device="cuda", dtype=dtype, **options)
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True, device="cuda", dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours.train(training), theirs.train(training)


@both
@modes
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_on_the_device_gives_the_numbers_of_pytorch(
    kind: str, dtype: torch.dtype, training: bool, need_weights: bool
) -> None:
    modules = pair(dtype, training)
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda", dtype=dtype)
    results = []
    for module in modules:
        tokens = x.clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            output, weights = module(tokens, tokens, tokens, need_weights=need_weights, **masks(kind, dtype))
        results.append([output] if weights is None else [output, weights])
        if training:
            output.square().sum().backward()
            results[-1] += [tokens.grad, *(p.grad for p in module.parameters())]
    for mine, expected in zip(*results, strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCE[dtype] * max(largest, 1.0))


@both
@pytest.mark.parametrize("kind", ["no mask", "causal"])
def test_a_seed_drops_on_the_device_what_pytorch_drops(kind: str, need_weights: bool) -> None:
    outputs = []
    for module in pair(torch.float32, True, dropout=0.3):
        torch.manual_seed(5)
        x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
        outputs.append(module(x, x, x, need_weights=need_weights, **masks(kind, torch.float32))[0])
    torch.testing.assert_close(*outputs, rtol=2e-3, atol=2e-3)


@both
@modes
def test_padding_and_empty_rows_stay_clean_on_the_device(training: bool, need_weights: bool) -> None:
    module, _ = pair(torch.float32, training)
    padding = torch.arange(TOKENS, device="cuda").expand(BATCH, -1) >= torch.tensor([[71], [40], [0]], device="cuda")
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda").masked_fill(padding[..., None], math.nan)
    query = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
    with torch.set_grad_enabled(training):
        output, weights = module(query, x, x, key_padding_mask=padding, need_weights=need_weights)
    assert output.isfinite().all()
    assert torch.equal(output[2], module.out_proj.bias.expand_as(output[2]))
    if need_weights:
        assert not weights[2].any()
    if training:
        output.sum().backward()
        assert all(p.grad.isfinite().all() for p in module.parameters())


@both
@modes
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_never_waits_for_the_device(kind: str, dropout: float, training: bool, need_weights: bool) -> None:
    module, _ = pair(torch.bfloat16, training, dropout=dropout)
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    options = masks(kind, torch.bfloat16)
    with torch.set_grad_enabled(training):
        module(x, x, x, need_weights=need_weights, **options)  # the first call loads kernels
        with waiting_is_an_error():
            module(x, x, x, need_weights=need_weights, **options)


def test_the_trap_for_waiting_works() -> None:
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        torch.ones(3, device="cuda").sum().item()

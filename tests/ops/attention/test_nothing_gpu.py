"""Empty batches, queries and keys on a GPU, where cuDNN's kernels return no tensor."""

from __future__ import annotations

import pytest
import torch

import polyhead
from polyhead import Mask

pytestmark = pytest.mark.gpu


SIZES = {"sequences": (0, 5, 5), "queries": (2, 0, 5), "keys": (2, 5, 0)}
# PyTorch has no fused kernel for empty queries or keys, and warns.
SERVED = [(name, backend) for name in SIZES for backend in ("auto", "fused")] + [("sequences", "sdpa")]


@pytest.mark.parametrize("mask", [None, Mask.causal()], ids=["open", "causal"])
@pytest.mark.parametrize(("name", "backend"), SERVED)
def test_empty_inputs_give_empty_outputs_or_zeros(name, backend, mask):
    batch, queries, keys = SIZES[name]
    query = torch.randn(batch, 4, queries, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.randn(batch, 2, keys, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )
    output = polyhead.attention(query, key, value, mask=mask, backend=backend).output
    assert output.shape == query.shape
    assert not output.any()
    gradients = torch.autograd.grad(output.sum(), (query, key, value))
    assert all(not gradient.any() for gradient in gradients)
    with torch.no_grad():
        assert not polyhead.attention(query, key, value, mask=mask, backend=backend).output.any()


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_takes_an_empty_batch(causal):
    layer = polyhead.MultiHeadAttention(256, 4, causal=causal, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(0, 7, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output = layer(x).output
    assert output.shape == x.shape
    assert all(not gradient.any() for gradient in torch.autograd.grad(output.sum(), [x, *layer.parameters()]))

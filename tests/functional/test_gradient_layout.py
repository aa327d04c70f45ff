"""A gradient reaches PyTorch's attention in the layout of the output, whoever takes the output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead import HeadMix, Mask, MultiHeadAttention, attention
from polyhead.functional import gradient_layout
from polyhead.functional.gradient_layout import keep_gradient_layout, laid_out

BATCH, HEADS, TOKENS, DIM = 2, 3, 5, 4


class Seen(torch.autograd.Function):
    """Passes everything on, and remembers how the gradient lay."""

    strides: tuple[int, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Seen.strides = grad.stride()
        return grad


@pytest.fixture
def everywhere(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(gradient_layout, "_may_be_planned", lambda output: True)


def heads_of(tokens: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] as a layer has it, from [batch, tokens, heads, dim]."""
    return tokens.transpose(1, 2)


def mixed(heads: Tensor) -> Tensor:
    """A product over heads, whose gradient comes back with the heads outermost."""
    return torch.einsum("rh,bhnd->rbnd", torch.ones(HEADS, HEADS), heads)


def test_numbers_stay_and_strides_are_those_that_are_asked_for():
    x = torch.randn(BATCH, HEADS, TOKENS, DIM)
    strides = x.transpose(1, 2).contiguous().transpose(1, 2).stride()
    found = laid_out(x, strides)
    assert found.stride() == strides
    assert torch.equal(found, x)
    assert laid_out(x, x.stride()) is x
    assert laid_out(x[:1], (7, *x.stride()[1:])) is not None
    assert laid_out(x[:1], (7, *x.stride()[1:])).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("take", [mixed, lambda heads: heads.permute(3, 2, 1, 0), lambda heads: heads.sum()])
def test_a_gradient_is_brought_into_the_layout_of_the_output(everywhere, take):
    x = heads_of(torch.randn(BATCH, TOKENS, HEADS, DIM)).requires_grad_()
    output = keep_gradient_layout(Seen.apply(x))
    taken = take(output)
    (found,) = torch.autograd.grad(taken, x, torch.randn_like(taken))
    assert Seen.strides == output.stride()
    assert found.shape == x.shape


def test_without_it_the_layout_is_another():
    x = heads_of(torch.randn(BATCH, TOKENS, HEADS, DIM)).requires_grad_()
    output = Seen.apply(x)
    taken = mixed(output)
    torch.autograd.grad(taken, x, torch.randn_like(taken))
    assert Seen.strides != output.stride()


def test_gradients_are_those_of_the_formula(everywhere):
    query, key, value = (torch.randn(BATCH, HEADS, TOKENS, DIM, requires_grad=True) for _ in range(3))
    weight = torch.randn(HEADS, BATCH, TOKENS, DIM)
    found, exact = (
        torch.autograd.grad(
            (mixed(attention(query, key, value, backend=name).output) * weight).sum(), (query, key, value)
        )
        for name in ("sdpa", "reference")
    )
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_compilers_and_transforms_take_it(everywhere):
    def loss(x: Tensor) -> Tensor:
        return (mixed(keep_gradient_layout(x.softmax(-1) * x)) ** 2).sum()

    x = torch.randn(BATCH, HEADS, TOKENS, DIM, requires_grad=True)
    (exact,) = torch.autograd.grad(loss(x), x)
    torch.compiler.reset()
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(compiled, exact)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), exact)
    several = torch.func.vmap(torch.func.grad(loss))(torch.stack((x, 2 * x)).detach())
    torch.testing.assert_close(several[0], exact)


def test_an_exported_graph_holds_plain_operators_alone(everywhere):
    class Kept(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(DIM))

        def forward(self, x: Tensor) -> Tensor:
            return keep_gradient_layout(x * self.weight)

    exported = torch.export.export(Kept(), (torch.randn(BATCH, HEADS, TOKENS, DIM),))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert called == ["aten.mul.Tensor"]


def test_nothing_is_held_that_needs_no_gradient(everywhere):
    x = torch.randn(BATCH, HEADS, TOKENS, DIM)
    assert keep_gradient_layout(x) is x
    assert x._backward_hooks is None


@pytest.mark.gpu
@pytest.mark.parametrize("statistics", [None, "entropy"])
@pytest.mark.parametrize("mixed_first", [False, True])
def test_two_layouts_of_one_gradient_both_get_their_gradients(mixed_first, statistics):
    """In sizes that no other test has, so that no plan is there yet."""
    tokens = 136 + 8 * mixed_first + 16 * (statistics is not None)
    takes = [lambda heads: heads.transpose(1, 2).flatten(2), lambda heads: torch.einsum("hr,bhnd->rbnd", mix, heads)]
    mix = torch.randn(HEADS, HEADS, device="cuda", dtype=torch.bfloat16)
    made = torch.randn(3, BATCH, tokens, HEADS, 64, device="cuda", dtype=torch.bfloat16)
    inputs = [heads_of(x).requires_grad_() for x in made]
    for take in reversed(takes) if mixed_first else takes:
        output = attention(*inputs, statistics=statistics, mask=Mask.causal()).output
        exact = attention(*inputs, backend="reference", mask=Mask.causal()).output
        weight = torch.randn_like(take(output))
        found, wanted = (torch.autograd.grad(take(x), inputs, weight) for x in (output, exact))
        for ours, theirs in zip(found, wanted, strict=True):
            assert F.cosine_similarity(ours.flatten().float(), theirs.flatten().float(), 0) > 0.999


@pytest.mark.gpu
def test_layers_of_two_kinds_learn_beside_each_other():
    torch.manual_seed(0)
    x = torch.randn(4, 168, 384, device="cuda", dtype=torch.bfloat16)
    for layer in (MultiHeadAttention(384, 6, causal=True), HeadMix(384, 6, causal=True)):
        layer = layer.to("cuda", torch.bfloat16)
        grads = []
        for backend in ("auto", "reference"):
            layer.backend = backend
            output = layer(x).output
            grads.append(torch.autograd.grad(output, layer.q_proj.weight, torch.ones_like(output).cumsum(1) % 7)[0])
        assert F.cosine_similarity(grads[0].flatten().float(), grads[1].flatten().float(), 0) > 0.99

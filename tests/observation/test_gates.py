"""Gates of a session: factors per head, per row and per query, in every kind of layer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import polyhead
from polyhead.errors import OptionError, ShapeError
from tests.integrations.huggingface import models

FAMILIES = {family.name: family for family in models.FAMILIES}
BATCH, HEADS, QUERIES, WIDTH = 3, 4, 7, 32
SHAPES = {"head": (HEADS,), "row": (BATCH, HEADS), "token": (BATCH, HEADS, QUERIES)}


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = polyhead.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, causal=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).output


class Torchs(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.batch_first:
            return self.layer(x, x, x)[0]
        x = x.transpose(0, 1)
        return self.layer(x, x, x)[0].transpose(0, 1)


class Llama(nn.Module):
    """One layer's attention of a model of transformers, as the whole of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.build(FAMILIES["llama"]).model
        self.model.set_attn_implementation(
            polyhead.integrations.huggingface.register()
        )  # eager has its softmax in float32
        self.layer = self.model.layers[0].self_attn

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.layer.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
        self.model(inputs_embeds=x, use_cache=False)
        handle.remove()
        return seen[0]


KINDS = {"ours": Ours, "torch": lambda: Torchs(True), "torch, batch second": lambda: Torchs(False), "llama": Llama}


def output_weight(model: nn.Module) -> nn.Parameter:
    layer = model.layer
    return (layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj).weight


def name_of(model: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is model.layer)


def without(model: nn.Module, head: int, x: Tensor) -> Tensor:
    """The layer's output with the head's columns of the output projection at zero."""
    weight = output_weight(model)
    before = weight.detach().clone()
    size = weight.shape[1] // HEADS
    with torch.no_grad():
        weight[:, head * size : (head + 1) * size] = 0.0
        result = model(x)
        weight.copy_(before)
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gate_is_a_factor_of_what_a_head_adds(kind, shape):
    model = KINDS[kind]().eval()
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    gate = torch.rand(SHAPES[shape], dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        whole = model(x)
        parts = torch.stack([whole - without(model, head, x) for head in range(HEADS)], 1)  # [batch, heads, queries, _]
    factors = gate if gate.ndim == 3 else gate[..., None].expand(BATCH, HEADS, QUERIES)
    expected = whole - ((1 - factors)[..., None] * parts).sum(1)
    with polyhead.observe(model, statistics=False) as session:
        session.gates[name_of(model), "self"] = gate
        actual = model(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    pull = torch.randn_like(expected)
    slopes = [torch.autograd.grad((pull * y).sum(), gate)[0] for y in (actual, expected)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-10)
    assert slopes[0].shape == gate.shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("own", SHAPES)
def test_a_callers_gate_and_a_sessions_are_multiplied(shape, own):
    layer = polyhead.MultiHeadAttention(WIDTH, HEADS).double()
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    callers, sessions = (torch.rand(SHAPES[name], dtype=torch.float64) for name in (own, shape))
    layer.head_gate = sessions
    expected = layer(x, head_gate=callers).output
    layer.head_gate = None
    with polyhead.observe(layer, statistics=False) as session:
        session.gates["MultiHeadAttention", "self"] = sessions
        actual = layer(x, head_gate=callers).output
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [(5,), (HEADS, 1), (BATCH, HEADS, 5), (BATCH, HEADS, QUERIES, 1), ()])
def test_a_gate_of_another_shape_is_refused(kind, wrong):
    model = KINDS[kind]().eval()
    words = r"\[4\], \[3, 4\] or \[3, 4, 7\], got \[" + ", ".join(map(str, wrong)) + r"\]"
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    with polyhead.observe(model, statistics=False) as session:
        session.gates[name_of(model), "self"] = torch.ones(wrong)
        with pytest.raises(ShapeError, match=words):
            model(x)


def test_a_gate_that_is_a_number_is_refused():
    layer = polyhead.MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(BATCH, QUERIES, WIDTH)
    with polyhead.observe(layer, statistics=False) as session:
        session.gates["MultiHeadAttention", "self"] = 0.5
        with pytest.raises(ShapeError, match="got float"):
            layer(x)


def test_a_sequence_without_a_batch_has_one_row():
    layer = nn.MultiheadAttention(WIDTH, HEADS).double()
    x = torch.randn(QUERIES, WIDTH, dtype=torch.float64)
    gate = torch.rand(1, HEADS, QUERIES, dtype=torch.float64)
    results = []
    for one in (x, x[:, None]):
        with polyhead.observe(layer, statistics=False) as session:
            session.gates["MultiheadAttention", "self"] = gate
            results.append(layer(one, one, one)[0].reshape(QUERIES, WIDTH))
    torch.testing.assert_close(*results)
    assert not torch.allclose(results[0], layer(x, x, x)[0])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (("typo", "self"), "needs the path of an attention module, got 'typo'; the model has MultiHeadAttention"),
        (("MultiHeadAttention", "itself"), "by path and kind (self or cross), got ('MultiHeadAttention', 'itself')"),
        ("MultiHeadAttention", "by path and kind (self or cross), got 'MultiHeadAttention'"),
    ],
)
def test_a_gate_that_would_never_be_used_is_refused(key, words) -> None:
    session = polyhead.observe(polyhead.MultiHeadAttention(8, 2))
    with pytest.raises(OptionError, match=re.escape(words)):
        session.gates[key] = torch.ones(2)
    with pytest.raises(OptionError, match=re.escape(words)):
        session.gates.update({key: torch.ones(2)})
    with pytest.raises(OptionError, match=re.escape(words)):
        session.gates.setdefault(key, torch.ones(2))
    assert not session.gates

"""Selective checkpointing caches results by the order of operators, among which are none of a session."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import polyhead
from polyhead.layers.base_attention import BaseAttention
from polyhead.layers.variants import TalkingHeads
from polyhead.observation import AttentionDistances, AttentionMaps, BatchMetadata, Contributions
from polyhead.observation.role_evidence import EvidenceCollector
from polyhead.training import HeadMonitor
from tests.observation.test_adapters import Adapter, Handwritten

BATCH, TOKENS, HEADS, WIDTH = 3, 13, 2, 10
SAVED = ("addmm", "mm", "bmm")


class OtherWidths(nn.MultiheadAttention):
    """Separate projections, whose results have the shape of the output projection's."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, kdim=7, vdim=7, batch_first=True)


class Block(nn.Module):
    """Attention between layers whose gradients depend on its output."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.linear = attention, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        match self.attention:
            case OtherWidths():
                attended = self.attention(x, x[..., :7], x[..., :7])[0]
            case nn.MultiheadAttention():
                attended = self.attention(x, x, x, need_weights=False)[0]
            case BaseAttention():
                attended = self.attention(x).output
            case _:
                attended = self.attention(x)
        return self.linear(attended.tanh()).sin()


ATTENTIONS = {
    "polyhead": lambda: polyhead.MultiHeadAttention(WIDTH, HEADS, causal=True),
    "polyhead, all keys": lambda: polyhead.MultiHeadAttention(WIDTH, HEADS),
    "talking heads": lambda: TalkingHeads(WIDTH, HEADS, causal=True),
    "torch": lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    "torch, separate projections": OtherWidths,
    "adapter": Handwritten,
}


def gradients(model, x, saved):
    """Gradients of a checkpointed call in which the results of some operators are cached."""
    operators = [getattr(torch.ops.aten, name).default for name in saved]

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    loss = checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().sum()
    return torch.autograd.grad(loss, [x, *model.parameters()]), loss


@pytest.mark.parametrize("tokens", [TOKENS, 599], ids=["one tile", "workspace"])
@pytest.mark.parametrize("causal", [False, True])
def test_statistics_do_not_overwrite_results_that_are_cached(causal, tokens):
    """Also without a session, and where the mode does not check that."""
    torch.manual_seed(0)
    layer = polyhead.MultiHeadAttention(WIDTH, HEADS, causal=causal).double()
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    saved = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.bmm.out]
    contexts = partial(create_selective_checkpoint_contexts, saved, allow_cache_entry_mutation=True)

    def call(x):
        return layer(x, statistics=("entropy", "mean_distance")).output.sin()

    expected = torch.autograd.grad(call(x).square().sum(), [x, *layer.parameters()])
    y = checkpoint(call, x, use_reentrant=False, context_fn=contexts)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), expected)


def build(name):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(ATTENTIONS[name]()) for _ in range(2))).double().train()
    return model, torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("saved", [SAVED, *((x,) for x in SAVED)], ids="-".join)
@pytest.mark.parametrize("option", ["statistics", "collectors", "keep_statistics"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradients_are_those_of_the_model_alone(name, option, saved):
    model, x = build(name)
    adapters = {Handwritten: Adapter()} if name == "adapter" else None
    collectors = [Contributions(), AttentionMaps(TOKENS), AttentionDistances(), EvidenceCollector()]
    session = polyhead.observe(
        model,
        adapters=adapters,
        collect=collectors if option == "collectors" else (),
        keep_statistics=option == "keep_statistics",
    )
    tokens = torch.arange(TOKENS).remainder(5).expand(BATCH, -1)
    session.metadata = BatchMetadata(documents=torch.arange(BATCH), tokens=tokens)
    expected, _ = gradients(model, x, saved)
    with session:
        actual, _ = gradients(model, x, saved)
    torch.testing.assert_close(actual, expected)
    assert session.profile["tokens"].eq(BATCH * TOKENS).all()


@pytest.mark.parametrize("saved", [SAVED, *((x,) for x in SAVED)], ids="-".join)
@pytest.mark.parametrize("pairs_every", [1, 2])
@pytest.mark.parametrize("name", ["polyhead", "torch"])
def test_gradients_of_a_monitored_step_are_those_of_the_model_alone(name, pairs_every, saved):
    model, x = build(name)
    expected, _ = gradients(model, x, saved)
    with HeadMonitor(model, pairs_every=pairs_every) as monitor:
        for _ in range(3):
            actual, loss = gradients(model, x, saved)
            torch.testing.assert_close(actual, expected)
            monitor.step(loss)
    assert monitor.history["output_norm"].isfinite().all()
    assert monitor.history["gradient_norm"].isfinite().all()

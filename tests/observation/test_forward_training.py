"""Training on `session.statistics`: regularisers, gradient accumulation and checkpointed layers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyhead
from polyhead.errors import GradientError
from tests.integrations.huggingface import models
from tests.observation.entropy_from_weights import assert_close, assert_same_gradients, gradients
from tests.observation.test_forward_statistics import BATCH, HEADS, KEEP, TOKENS, WIDTH, Stack, llama, noise
from tests.observation.test_session import assert_equal_tables, build

# ---- training


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61
    )
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(config)


def trained(make, penalty, steps: int = 20) -> tuple[float, float]:
    """The mean entropy before and after training with a penalty; attention begins sharp, so it can go both ways."""
    model = make().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
                parameter.mul_(15)
    ids, mask = models.tokens(), (torch.arange(models.TOKENS) < torch.tensor([[23], [9], [17]])).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    means = []
    with polyhead.observe(model, **KEEP) as session:
        for _ in range(steps):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            optimizer.zero_grad()
            (loss + penalty(session)).backward()
            optimizer.step()
            means.append(float(session.statistics.mean("entropy").detach().mean()))
    return means[0], means[-1]


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_regulariser_moves_the_entropy_where_it_is_to_go(make, sign):
    start, end = trained(make, lambda session: sign * 3.0 * session.statistics.mean("entropy").mean())
    if sign > 0:
        assert end < 0.3 * start
    else:
        assert end > start + 0.5


def test_a_penalty_on_the_table_trains_nothing_because_it_is_detached():
    """Without keep_statistics this was the only number there is, and the model that it trains is that of no penalty."""
    plain = trained(llama, lambda session: 0.0)
    assert trained(llama, lambda session: 3.0 * session.profile["entropy"].mean()) == plain
    assert plain[1] > 0.6 * plain[0]
    assert "detached" in polyhead.observation.Session.__doc__
    assert "detached" in polyhead.observation.Session.profile.__doc__


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_gradients_add_up_over_small_batches_compiled_or_not(wrap):
    """Inside the block nothing runs compiled, so a compiled model is served as well."""
    model, batches = build(), [models.tokens(seed=seed) for seed in (3, 4)]
    called = wrap(model)
    with polyhead.observe(model, **KEEP) as session:
        for ids in batches:
            called(input_ids=ids)
            (session.statistics.mean("entropy").sum() / 2).backward()
        added = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        called(input_ids=torch.cat(batches))
        whole = gradients_of_sum(session.statistics.mean("entropy"), model)
    for name, gradient in added.items():
        assert_close(gradient, whole[name], name)


def gradients_of_sum(result: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(result.sum(), list(parameters.values()), allow_unused=True, retain_graph=True)
    return {name: torch.zeros(()) if x is None else x for name, x in zip(parameters, found, strict=True)}


# ---- checkpointing


@pytest.mark.parametrize("padded", [False, True])
def test_a_checkpointed_model_of_transformers_keeps_its_gradients(padded):
    ids, results = models.tokens(), []
    mask = (torch.arange(models.TOKENS) < torch.tensor([[23], [9], [17]])).long() if padded else None
    for checkpointed in (False, True):
        model = build().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with polyhead.observe(model, keep_statistics=True) as session:
            loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
            mean = torch.cat([session.statistics.mean(name) for name in ("entropy", "sink_mass", "normalized_entropy")])
            assert all(len(rows.calls) == 1 for rows in session.statistics.values())
            results.append((mean.detach(), gradients(torch.cat([mean, loss[None]]), model), session.profile))
            assert all(len(rows.calls) == 1 for rows in session.statistics.values())  # computed again, kept once
    (plain, plain_gradients, table), (mean, found, other) = results
    assert_close(mean, plain)
    assert_same_gradients(found, plain_gradients)
    assert_equal_tables(other, table)


class Handwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.input(x).chunk(3, -1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(x)
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


class Adapter:
    def watch(self, module, notify):
        return module.register_forward_pre_hook(
            lambda module, inputs: notify(*module.heads(*inputs), scale=1.0) and None
        )


class OfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class OfOurs(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.attention = kind(WIDTH, HEADS, causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x).output


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.layer(x)
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


LAYERS = {
    "adapter": Handwritten,
    "torch": OfTorch,
    "ours": lambda: OfOurs(polyhead.MultiHeadAttention),
    "talking": lambda: OfOurs(polyhead.layers.variants.TalkingHeads),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpointed_layer_keeps_its_gradients(kind, every):
    x, results = noise(BATCH, TOKENS, WIDTH).double().requires_grad_(), []
    options = {"adapters": {Handwritten: Adapter()}} if kind == "adapter" else {}
    for reentrant in (None, False):
        torch.manual_seed(0)
        model = Checkpointed(LAYERS[kind](), reentrant).double()
        with polyhead.observe(model, **KEEP, every=every, **options) as session:
            for _ in range(2):  # the second is one that `every` leaves out of the table; it is kept all the same
                output = model(x)
                mean = session.statistics.mean("entropy")
                found = gradients(torch.cat([mean, output.square().mean()[None]]), model)
        results.append((mean.detach(), found))
        assert session.profile["tokens"].eq(BATCH * TOKENS * (2 if every == 1 else 1)).all()
    assert_close(results[1][0], results[0][0])
    assert_same_gradients(results[1][1], results[0][1])


def test_a_model_that_is_checkpointed_as_a_whole_keeps_its_gradients():
    model, x = Stack().double(), noise(BATCH, TOKENS, WIDTH).double()
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        with polyhead.observe(model, **KEEP) as session:
            run(x)
            mean = session.statistics.mean("entropy")
            found.append(gradients(mean, model))  # a statistic alone computes its layers again
            assert torch.equal(session.statistics.mean("entropy"), mean)  # no forward has begun
    assert_same_gradients(found[1], found[0])


def test_reentrant_checkpointing_leaves_no_gradient_and_is_refused():
    model = build().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with polyhead.observe(model, **KEEP) as session:
        loss = model(input_ids=models.tokens(), labels=models.tokens(), use_cache=False).loss
        with pytest.raises(GradientError, match=r"reentrant checkpointing \(use_reentrant=False keeps gradients\)"):
            session.statistics.mean("entropy")
        loss.backward()
        with pytest.raises(GradientError, match="which does not"):  # nor by the recomputation
            session.statistics.mean("entropy")

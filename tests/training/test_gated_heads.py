"""DropHead and learned gates: what they multiply, when, and what is left after pruning."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import HeadId, MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.training import DropHead, HeadGates
from polyhead.training.gated_heads import HIGH, LOW, TEMPERATURE

WIDTH, HEADS = 32, 4
HF = {"vocab_size": 61, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}


def llama(**options) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**HF, num_attention_heads=HEADS, **options))


def head_outputs(layer: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    """Return the contribution of each head to the output, [heads, batch, tokens, width]; by hand."""
    query, key, value = (
        p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    heads = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value
    columns = layer.out_proj.weight.unflatten(1, (HEADS, -1))  # [width, heads, head_dim]
    return torch.einsum("bhtd,whd->hbtw", heads, columns)


# ---- DropHead


def test_dropped_heads_are_whole_heads_of_single_sequences_scaled_to_a_mean_of_one():
    layer, x = MultiHeadAttention(WIDTH, HEADS).double().train(), torch.randn(50, 3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        by_head = head_outputs(layer, x)
        with DropHead(layer, 0.5):
            output = layer(x).output - layer.out_proj.bias
        # The gates of each sequence, by least squares over its numbers.
        found = torch.stack(
            [torch.linalg.lstsq(by_head[:, i].flatten(1).T, output[i].flatten()).solution for i in range(50)]
        )
    kept = found > 1e-6
    assert 60 < kept.sum() < 140  # of 200, half on average
    torch.testing.assert_close(found, torch.where(kept, HEADS / kept.double().sum(-1, keepdim=True), 0.0))
    assert (kept.sum(-1) > 0).all()
    assert len(found.round(decimals=3).unique(dim=0)) > 8  # not the same heads everywhere


def test_nothing_is_dropped_in_evaluation_outside_the_block_or_at_rate_zero():
    layer, x = MultiHeadAttention(WIDTH, HEADS), torch.randn(4, 3, WIDTH)
    plain = layer(x).output
    drop = DropHead(layer, 0.9)
    assert torch.equal(layer.train()(x).output, plain)
    with drop:
        torch.testing.assert_close(layer.eval()(x).output, plain)
        assert not torch.allclose(layer.train()(x).output, plain)
    with DropHead(layer, 0.0):
        torch.testing.assert_close(layer(x).output, plain)


def test_the_schedule_of_drop_head_follows_its_steps():
    layer, seen = MultiHeadAttention(WIDTH, HEADS).train(), []

    def rate(step: int) -> float:
        seen.append(step)
        return 0.5 if step < 3 else 1.0

    drop = DropHead(layer, rate)
    with drop:
        drop.step()
        drop.step()
        layer(torch.randn(2, 3, WIDTH))
    assert seen[-1] == 2
    with pytest.raises(OptionError, match=r"below 1, got 1\.0 at step 3"):
        drop.step()


def test_evaluation_between_steps_does_not_change_which_heads_are_dropped():
    layer, x = MultiHeadAttention(WIDTH, HEADS), torch.randn(4, 3, WIDTH)
    outputs = []
    for is_evaluated in (False, True):
        torch.manual_seed(5)
        with torch.no_grad(), DropHead(layer, 0.5):
            if is_evaluated:
                layer.eval()(x)
            outputs.append(layer.train()(x).output)
    assert torch.equal(*outputs)


def test_a_resumed_schedule_continues(tmp_path):
    layer = MultiHeadAttention(WIDTH, HEADS).train()

    def rate(step: int) -> float:
        return 0.1 * step

    drop = DropHead(layer, rate)
    for _ in range(3):
        drop.step()
    torch.save(drop.state_dict(), tmp_path / "drop.pt")
    resumed = DropHead(layer, rate)
    resumed.load_state_dict(torch.load(tmp_path / "drop.pt", weights_only=True))
    assert resumed.steps == 3
    with pytest.raises(OptionError, match=r"got 1\.5 at step 3"):
        DropHead(layer, lambda step: 0.5 * step).load_state_dict(drop.state_dict())


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan, True, "0.1"])
def test_a_rate_must_be_a_probability_below_one(rate):
    with pytest.raises(OptionError, match="at least 0 and below 1"):
        DropHead(MultiHeadAttention(WIDTH, HEADS), rate)


def test_checkpointed_layers_drop_the_same_heads_again():
    model, ids = llama().train(), torch.randint(1, 61, (3, 7))
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    grads = []
    for each in (plain, model):
        torch.manual_seed(5)
        with DropHead(each, 0.5):
            each(ids, labels=ids).loss.backward()
        grads.append([x.grad for x in each.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


# ---- learned gates


def set_gates(gates: HeadGates, values: list[list[float]]) -> None:
    """Give gates their deterministic values."""
    for parameter, wanted in zip(gates.parameters(), values, strict=True):
        share = (torch.tensor(wanted) - LOW) / (HIGH - LOW)
        with torch.no_grad():
            parameter.copy_(torch.logit(share))


def test_gates_multiply_heads_by_their_value_in_evaluation():
    layer, x = MultiHeadAttention(WIDTH, HEADS).eval(), torch.randn(4, 3, WIDTH)
    gates = HeadGates(layer)
    set_gates(gates, [[0.0, 0.25, 1.0, 0.5]])
    (values,) = gates.gates().values()
    torch.testing.assert_close(values, torch.tensor([0.0, 0.25, 1.0, 0.5]), rtol=0, atol=1e-6)
    with torch.no_grad(), gates:
        found = layer(x).output - layer.out_proj.bias
    torch.testing.assert_close(found, torch.einsum("h,hbtw->btw", values, head_outputs(layer, x)), rtol=1e-4, atol=1e-5)


def test_gates_are_the_hard_concrete_distribution_in_training():
    """Shares of zeros and ones against the distribution function of Louizos et al. 2018."""
    layer = MultiHeadAttention(WIDTH, 1).double().train()
    gates = HeadGates(layer).double()
    log_alpha = 0.4
    with torch.no_grad():
        next(gates.parameters()).fill_(log_alpha)
        x = torch.randn(1, 2, WIDTH, dtype=torch.float64).expand(20_000, -1, -1)
        whole = layer(x[:1]).output - layer.out_proj.bias
        with gates:
            output = layer(x).output - layer.out_proj.bias
    found = (output * whole).sum((1, 2)) / whole.square().sum()

    def below(gate: float) -> float:  # probability of a gate of at most this
        share = (gate - LOW) / (HIGH - LOW)
        return 1 / (1 + math.exp(log_alpha - TEMPERATURE * math.log(share / (1 - share))))

    assert float((found < 1e-9).double().mean()) == pytest.approx(below(0.0), abs=0.012)
    assert float((found > 1 - 1e-9).double().mean()) == pytest.approx(1 - below(1.0), abs=0.012)
    assert float((found < 0.5).double().mean()) == pytest.approx(below(0.5), abs=0.012)
    assert gates.penalty().item() == pytest.approx(1 - below(0.0), rel=1e-6)


def test_training_closes_the_gates_of_useless_heads_and_pruning_keeps_the_outputs():
    torch.manual_seed(3)
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    x = torch.randn(64, 6, WIDTH)
    with torch.no_grad():  # heads 0 and 2 make the target, 1 and 3 are noise
        target = head_outputs(layer, x)[[0, 2]].sum(0)
    layer.requires_grad_(False)
    gates = HeadGates(layer, start=0.5)
    optimizer = torch.optim.Adam(gates.parameters(), lr=0.1)
    with gates:
        for _ in range(300):
            optimizer.zero_grad()
            loss = (layer(x).output - layer.out_proj.bias - target).square().mean() / target.var()
            (loss + 0.005 * gates.penalty()).backward()
            optimizer.step()
        layer.eval()
        with torch.no_grad():
            gated = layer(x).output
    assert gates.closed() == [HeadId(0, 1), HeadId(0, 3)]
    gates.fold()
    torch.testing.assert_close(layer(x).output, gated)
    with pytest.raises(OptionError, match="count twice"):
        gates.__enter__()
    polyhead.surgery.apply(layer, [polyhead.surgery.PruneHeads(0, (1, 3))])
    assert layer.layout.num_heads == 2
    torch.testing.assert_close(layer(x).output, gated)


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 2}])
def test_a_gated_transformers_model_equals_its_pruned_one(options):
    model, ids = llama(**options).eval(), torch.randint(1, 61, (3, 7))
    gates = HeadGates(model)
    set_gates(gates, [[0.7, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])  # no gate of the second layer is open
    with torch.no_grad():
        with gates:
            gated = model(ids).logits
        closed = gates.closed()
        assert closed == [HeadId(0, 2), HeadId(0, 3), HeadId(1, 1), HeadId(1, 2), HeadId(1, 3)]
        gates.fold()
        torch.testing.assert_close(model(ids).logits, gated)
        edited = polyhead.prune(model, closed, compensate=False, form="uneven")
        torch.testing.assert_close(edited.model(ids).logits, gated)


def test_gates_are_parameters_of_their_own_and_saved_by_name():
    model = llama()
    gates = HeadGates(model)
    assert [x.shape for x in gates.parameters()] == [(HEADS,), (HEADS,)]
    assert list(gates.state_dict()) == [f"log_alpha.model/layers/{layer}/self_attn" for layer in range(2)]
    other = HeadGates(model, start=0.3)
    other.load_state_dict(gates.state_dict())
    torch.testing.assert_close(other.penalty(), gates.penalty())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HeadGates(MultiHeadAttention(WIDTH, HEADS), start=1.0), "between 0 and 1"),
        (lambda: HeadGates(nn.MultiheadAttention(WIDTH, HEADS)), "can be removed afterwards"),
        (lambda: HeadGates(nn.Linear(3, 3)), "no attention|attention"),
    ],
)
def test_models_and_options_without_meaning_are_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def test_gates_are_not_folded_twice_nor_into_other_heads():
    layer = MultiHeadAttention(WIDTH, HEADS).eval()
    gates, others = HeadGates(layer), HeadGates(layer)
    with gates, pytest.raises(OptionError, match="after the `with` block"):
        gates.fold()
    polyhead.surgery.apply(layer, [polyhead.surgery.PruneHeads(0, (1, 3))])
    before = layer.out_proj.weight.detach().clone()
    with pytest.raises(OptionError, match="those that the gates were made for"):
        others.fold()
    assert torch.equal(layer.out_proj.weight, before)


def test_closed_heads_of_several_stacks_are_told_apart():
    layers = nn.ModuleDict({name: MultiHeadAttention(WIDTH, HEADS) for name in ("encoder", "decoder")})
    gates = HeadGates(layers)
    set_gates(gates, [[0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    assert gates.closed("encoder") == [HeadId(0, 0)]
    assert gates.closed("decoder") == [HeadId(0, 2)]
    with pytest.raises(OptionError, match="stack must be one of encoder, decoder, got None"):
        gates.closed()

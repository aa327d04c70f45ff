"""Applying edits, counting them before, undoing them after; and leaving a model alone whenever something is wrong."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn

import polyhead
import polyhead.huggingface
from polyhead.errors import CheckpointError, OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import ALiBi, Rotary
from polyhead.plan import Workload
from polyhead.surgery import (
    GroupQueries,
    PruneHeads,
    ReorderHeads,
    apply,
    find_layers,
    fingerprint,
    preview,
    stock_config,
    undo,
)
from tests.huggingface import models
from tests.surgery.gated import FAMILIES, build, generated, result_of, switched_off


def llama(heads: int = 6, kv_heads: int = 2) -> nn.Module:
    options = {**FAMILIES["llama"].options, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return build(models.Family("llama", "decoder", {**options, "hidden_size": 60, "head_dim": 10}))


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("pruned", [(1,), (0, 1, 2), (0, 3, 4, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_of_our_layer_that_are_gone_are_heads_switched_off(kv_heads, pruned, bias):
    layer = MultiHeadAttention(
        42, 6, num_kv_heads=kv_heads, head_dim=10, bias=bias, positions=Rotary(10), causal=True, qk_norm="rms"
    ).double()
    x = torch.randn(2, 11, 42, dtype=torch.float64)
    gate = torch.ones(6, dtype=torch.float64)
    gate[list(pruned)] = 0
    whole, expected = layer(x).output, layer(x, head_gate=gate).output
    before = fingerprint(layer)
    record = apply(layer, [PruneHeads(0, pruned)])
    torch.testing.assert_close(layer(x).output, expected, rtol=0, atol=1e-12)
    cache = polyhead.GrowingCache()
    with torch.no_grad():
        steps = [layer(x[:, place : place + 1], cache=cache).output for place in range(11)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-12)
    undo(layer, record)
    assert fingerprint(layer) == before
    assert torch.equal(layer(x).output, whole)


def test_a_plain_layer_of_ours_is_one_product_again_after_surgery():
    layer = MultiHeadAttention(42, 6)
    x = torch.randn(2, 11, 42)
    layer(x)
    record = apply(layer, [PruneHeads(0, (1,))])
    assert layer._of_self.is_one_product(x)
    assert layer._has_plain_heads
    undo(layer, record)
    assert layer._of_self.is_one_product(x)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiHeadAttention(12, 4, sinks=True), "sinks, a parameter by head"),
        (lambda: MultiHeadAttention(12, 4, output_gate="head"), "a gate_proj by head"),
        (lambda: MultiHeadAttention(12, 4, positions=ALiBi(4)), "every head a bias of its own"),
        (lambda: polyhead.GroupedHeads(12, 4, num_groups=2), "GroupedHeads arranges its heads"),
        (lambda: nn.MultiheadAttention(12, 4), "from_torch"),
        (lambda: nn.Linear(12, 4), "got a model without either"),
    ],
)
def test_layers_that_are_not_known_are_refused(make, words):
    model = make()
    before = fingerprint(model)
    with pytest.raises(OptionError, match=words):
        apply(model, [PruneHeads(0, (1,))])
    assert fingerprint(model) == before


def test_an_adapter_in_the_place_of_a_projection_and_a_shared_weight_are_refused():
    layer = MultiHeadAttention(12, 4)
    layer.q_proj = nn.Sequential(layer.q_proj)
    with pytest.raises(OptionError, match="q_proj is a Sequential"):
        apply(layer, [PruneHeads(0, (1,))])
    tied = nn.ModuleList([MultiHeadAttention(12, 4), MultiHeadAttention(12, 4)])
    tied[1].q_proj = tied[0].q_proj
    with pytest.raises(OptionError, match=r"0\.q_proj\.weight, 0\.q_proj\.bias is shared with another module"):
        apply(tied, [PruneHeads(0, (1,))])


def test_cross_attention_of_gpt2_has_its_queries_apart():
    options = {**FAMILIES["gpt2"].options, "add_cross_attention": True}
    family = models.Family("gpt2", "decoder", options)
    model = build(family)
    given = {"input_ids": models.tokens(), "encoder_hidden_states": torch.randn(3, 7, 32, dtype=torch.float64)}
    layers = find_layers(model)
    assert [layer.refusals for layer in layers] == [()] * 4
    cross = next(layer for layer in layers if "crossattention" in layer.path)
    with torch.no_grad(), switched_off(model, {cross.path: (1, 3)}):
        expected = model(**given).logits
    record = apply(model, [PruneHeads(cross.number, (1, 3), stack=cross.stack)])
    assert cross.module.q_attn.weight.shape == (32, 16)
    assert cross.module.c_attn.weight.shape == (32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, expected, rtol=1e-9, atol=1e-9)
    undo(model, record)
    assert fingerprint(model) == record.before


@pytest.mark.parametrize("pruned", [(1,), (0, 3, 4), (1, 2, 3)])
def test_uneven_groups_run_on_our_attention_and_are_refused_by_others(pruned):
    family, model = FAMILIES["llama"], llama()
    model.set_attn_implementation(polyhead.huggingface.register())  # eager rounds its weights to float32
    layers = find_layers(model)
    with switched_off(model, {layer.path: pruned for layer in layers}):
        expected, generation = result_of(model, family), generated(model, family)
    whole = result_of(model, family)
    record = apply(model, [PruneHeads(number, pruned) for number in range(2)])
    uneven = find_layers(model)[0].layout.key_heads
    assert uneven is not None
    assert layers[0].module.polyhead_key_heads == uneven
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with pytest.raises(OptionError, match=f"known to polyhead's attention alone, got '{implementation}'"):
            result_of(model, family)
    model.set_attn_implementation(polyhead.huggingface.register())
    torch.testing.assert_close(result_of(model, family), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(generated(model, family), generation, rtol=1e-9, atol=1e-9)
    with polyhead.observe(model) as session:  # who watches sees every head with a key head of its own
        torch.testing.assert_close(result_of(model, family), expected, rtol=1e-9, atol=1e-9)
    assert {row["head"] for row in session.profile.rows()} == set(range(6 - len(pruned)))
    copied = copy.deepcopy(model)
    torch.testing.assert_close(result_of(copied, family), expected, rtol=1e-9, atol=1e-9)
    undo(model, record)
    assert not hasattr(layers[0].module, "polyhead_key_heads")
    assert torch.equal(result_of(model, family), whole)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(result_of(model, family), whole, rtol=1e-5, atol=1e-5)


def test_uneven_groups_return_weights_of_every_head_also_under_dropout():
    model = llama()
    apply(model, [PruneHeads(0, (1,)), PruneHeads(1, (1,))])
    model.set_attn_implementation(polyhead.huggingface.register())
    ids = models.tokens(length=5)
    weights = model(ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5, 5, dtype=torch.float64))
    for layer in find_layers(model):
        layer.module.attention_dropout = 0.5
    model.train()
    dropped = model(ids, output_attentions=True).attentions[0]
    is_kept = dropped != 0
    torch.testing.assert_close(dropped[is_kept], 2 * weights[is_kept])
    assert 0 < (dropped == 0).logical_and(weights > 0).sum() < (weights > 0).sum()


def test_encoders_with_fewer_key_heads_run_on_our_attention():
    family = FAMILIES["bert"]
    model = build(family)
    with torch.no_grad():
        for layer in find_layers(model):
            for linear in (layer.module.key, layer.module.value):
                for held in (linear.weight, linear.bias):
                    held[8:16], held[24:32] = held[0:8], held[16:24]
    whole = result_of(model, family)
    record = apply(model, [GroupQueries(number, ((0, 1), (2, 3))) for number in range(2)])
    with pytest.raises(OptionError, match=r"read key heads \(0, 0, 1, 1\)"):
        result_of(model, family)
    model.set_attn_implementation(polyhead.huggingface.register())
    torch.testing.assert_close(result_of(model, family), whole, rtol=1e-9, atol=1e-9)
    undo(model, record)
    model.set_attn_implementation("eager")
    assert torch.equal(result_of(model, family), whole)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "modernbert", "opt"])
def test_modules_without_room_for_fewer_key_heads_refuse_them(name):
    model = build(FAMILIES[name])
    before = fingerprint(model)
    with pytest.raises(OptionError, match="gives every head a key head of its own, got 4 heads over 2"):
        apply(model, [GroupQueries(0, ((0, 1), (2, 3)))])
    assert fingerprint(model) == before


def test_the_config_says_what_a_stock_model_can_be_built_of_and_nothing_else():
    model = llama()
    apply(model, [PruneHeads(number, (0, 3)) for number in range(2)])
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 10)
    stock = type(model)(copy.deepcopy(config)).double().eval()
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(result_of(stock, FAMILIES["llama"]), result_of(model, FAMILIES["llama"]))

    uneven = llama()
    assert apply(uneven, [PruneHeads(0, (0, 3))]).config == ()  # one number cannot say two
    assert uneven.config.num_attention_heads == 6
    bert = build(FAMILIES["bert"])
    assert apply(bert, [PruneHeads(number, (0, 1)) for number in range(2)]).config == ()  # width is tied to heads
    assert bert.config.num_attention_heads == 4


def test_a_module_that_reads_the_config_is_edited_in_all_layers_or_none():
    family = FAMILIES["phi3"]
    model = build(family)
    before = fingerprint(model)
    with pytest.raises(OptionError, match="Phi3Attention reads the number of its heads from the config"):
        apply(model, [PruneHeads(0, (0, 1))])
    assert fingerprint(model) == before
    assert model.config.num_attention_heads == 4


@pytest.mark.parametrize("name", ["gpt2", "llama", "whisper", "gpt_neox"])
def test_a_preview_counts_what_is_there_afterwards(name):
    model = build(FAMILIES[name])
    layers = find_layers(model)
    edits = [PruneHeads(layers[0].number, (0,), stack=layers[0].stack)]
    before, counted = fingerprint(model), preview(model, edits, work=Workload.forward(13))
    assert fingerprint(model) == before
    size = sum(p.numel() for p in model.parameters())
    apply(model, edits)
    assert size - sum(p.numel() for p in model.parameters()) == counted.before.parameters - counted.after.parameters > 0
    assert counted.before.heads - counted.after.heads == 1
    changed = [x for x in counted.layers if x.before != x.after]
    assert [x.path for x in changed] == [layers[0].path]
    layout = find_layers(model)[0].layout
    assert changed[0].after.cache_bytes_per_token == 2 * layout.num_kv_heads * layout.head_dim * 8
    assert changed[0].after.flops < changed[0].before.flops
    with pytest.raises(OptionError, match="heads 0 to"):
        preview(model, [PruneHeads(0, (9,), stack=layers[0].stack)])


def test_several_stacks_must_be_told_apart():
    model = build(FAMILIES["bart"])
    with pytest.raises(OptionError, match=r"several stacks of layers, say which: stack is one of model\.encoder"):
        apply(model, [PruneHeads(0, (0,))])


def test_edits_for_another_model_are_refused():
    model, other = llama(), llama()
    with torch.no_grad():
        other.model.embed_tokens.weight[3, 3] += 1e-9
    edits = [PruneHeads(0, (0, 3))]
    with pytest.raises(OptionError, match=f"for the model with fingerprint {fingerprint(model)}, got one with"):
        apply(other, edits, expect=fingerprint(model))
    record = apply(model, edits, expect=fingerprint(model))
    apply(other, edits)
    after = fingerprint(other)
    with pytest.raises(CheckpointError, match=f"fingerprint {record.after}, got one with {after}"):
        undo(other, record)
    assert fingerprint(other) == after
    with pytest.raises(CheckpointError, match=r"num_heads=4.*got .*num_heads=6"):
        undo(llama(), record)


def test_a_model_is_as_it_was_when_something_breaks_midway(monkeypatch):
    model = llama()
    before, config, modules = fingerprint(model), model.config.to_dict(), dict(model.named_parameters())

    def broken(*_: object) -> object:
        raise MemoryError("planted")

    # The package's `apply` is the function, whose module bears the same name.
    monkeypatch.setattr(importlib.import_module("polyhead.surgery.apply"), "config_at", broken)
    with pytest.raises(MemoryError, match="planted"):
        apply(model, [PruneHeads(number, (0, 3)) for number in range(2)])
    assert fingerprint(model) == before
    assert model.config.to_dict() == config
    assert all(p is modules[name] for name, p in model.named_parameters())
    attention = model.model.layers[0].self_attn
    assert (attention.num_key_value_groups, attention.q_proj.out_features) == (3, 60)


def test_what_does_not_train_stays_so_and_only_what_changes_is_replaced():
    model = llama()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    held = dict(model.named_parameters())
    record = apply(model, [PruneHeads(0, (0, 3))])
    now = dict(model.named_parameters())
    assert not now["model.layers.0.self_attn.q_proj.weight"].requires_grad
    assert now["model.layers.0.self_attn.o_proj.weight"].requires_grad
    # Every key head is still read.
    changed = {name for name in held if now[name] is not held[name]}
    assert changed == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"}
    assert set(record.tensors) == changed
    assert record.num_bytes == sum(held[name].nbytes for name in changed)
    assert stock_config.is_transformers_model(model)


def test_an_order_that_splits_groups_is_run_by_its_map():
    family, model = FAMILIES["llama"], llama()
    model.set_attn_implementation(polyhead.huggingface.register())  # eager rounds its weights to float32
    whole = result_of(model, family)
    apply(model, [ReorderHeads(0, (0, 3, 1, 4, 2, 5))])
    assert find_layers(model)[0].layout.key_heads == (0, 1, 0, 1, 0, 1)
    model.set_attn_implementation(polyhead.huggingface.register())
    torch.testing.assert_close(result_of(model, family), whole, rtol=1e-9, atol=1e-9)


def test_tensors_that_lie_in_one_piece_of_memory_are_told_apart_wherever_each_begins() -> None:
    memory = torch.arange(12.0)
    layer, other = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    layer.weight = torch.nn.Parameter(memory[3:5].view(1, 2))  # 12 bytes from the start
    other.weight = torch.nn.Parameter(memory[3:5].view(1, 2).clone())
    assert fingerprint(layer) == fingerprint(other)
    layer = MultiHeadAttention(12, 4, num_kv_heads=2)
    before = fingerprint(layer)
    record = apply(layer, [PruneHeads(0, (0,))])
    undo(layer, record)
    assert fingerprint(layer) == before

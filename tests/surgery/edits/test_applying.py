"""Applying, previewing and undoing edits; any error leaves the model unchanged."""

from __future__ import annotations

import copy

import pytest
import torch

import polyhead
import polyhead.integrations.huggingface
from polyhead.errors import CheckpointError, OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import Rotary
from polyhead.observation.transformers_models import is_pretrained
from polyhead.surgery import GroupQueries, PruneHeads, ReorderHeads, apply, find_layers, fingerprint, undo
from polyhead.surgery.edits import applying
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build, decoder, generated, result_of, switched_off


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
    cache = polyhead.layers.kv_cache.GrowingCache()
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


@pytest.mark.parametrize("pruned", [(1,), (0, 3, 4), (1, 2, 3)])
def test_uneven_groups_run_on_our_attention_and_are_refused_by_others(pruned):
    family, model = FAMILIES["llama"], decoder()
    model.set_attn_implementation(polyhead.integrations.huggingface.register())  # eager rounds its weights to float32
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
        with pytest.raises(OptionError, match=f"which only polyhead's attention supports, got '{implementation}'"):
            result_of(model, family)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    torch.testing.assert_close(result_of(model, family), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(generated(model, family), generation, rtol=1e-9, atol=1e-9)
    with polyhead.observe(model) as session:  # who watches sees every head with a KV head of its own
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
    model = decoder()
    apply(model, [PruneHeads(0, (1,)), PruneHeads(1, (1,))])
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
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
    with pytest.raises(OptionError, match=r"read KV heads \(0, 0, 1, 1\)"):
        result_of(model, family)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    torch.testing.assert_close(result_of(model, family), whole, rtol=1e-9, atol=1e-9)
    undo(model, record)
    model.set_attn_implementation("eager")
    assert torch.equal(result_of(model, family), whole)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "modernbert", "opt"])
def test_modules_without_room_for_fewer_key_heads_refuse_them(name):
    model = build(FAMILIES[name])
    before = fingerprint(model)
    with pytest.raises(OptionError, match="supports only one KV head per head, got 4 heads over 2"):
        apply(model, [GroupQueries(0, ((0, 1), (2, 3)))])
    assert fingerprint(model) == before


def test_several_stacks_must_be_told_apart():
    model = build(FAMILIES["bart"])
    with pytest.raises(OptionError, match=r"several stacks of layers, pass stack as one of model\.encoder"):
        apply(model, [PruneHeads(0, (0,))])


def test_edits_for_another_model_are_refused():
    model, other = decoder(), decoder()
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
        undo(decoder(), record)


def test_a_model_is_as_it_was_when_something_breaks_midway(monkeypatch):
    model = decoder()
    before, config, modules = fingerprint(model), model.config.to_dict(), dict(model.named_parameters())

    def broken(*_: object) -> object:
        raise MemoryError("planted")

    # The package's `apply` is the function, whose module bears the same name.
    monkeypatch.setattr(applying, "config_at", broken)
    with pytest.raises(MemoryError, match="planted"):
        apply(model, [PruneHeads(number, (0, 3)) for number in range(2)])
    assert fingerprint(model) == before
    assert model.config.to_dict() == config
    assert all(p is modules[name] for name, p in model.named_parameters())
    attention = model.model.layers[0].self_attn
    assert (attention.num_key_value_groups, attention.q_proj.out_features) == (3, 60)


def test_what_does_not_train_stays_so_and_only_what_changes_is_replaced():
    model = decoder()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    held = dict(model.named_parameters())
    record = apply(model, [PruneHeads(0, (0, 3))])
    now = dict(model.named_parameters())
    assert not now["model.layers.0.self_attn.q_proj.weight"].requires_grad
    assert now["model.layers.0.self_attn.o_proj.weight"].requires_grad
    # Every KV head is still read.
    changed = {name for name in held if now[name] is not held[name]}
    assert changed == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"}
    assert set(record.tensors) == changed
    assert record.num_bytes == sum(held[name].nbytes for name in changed)
    assert is_pretrained(model)


def test_an_order_that_splits_groups_is_run_by_its_map():
    family, model = FAMILIES["llama"], decoder()
    model.set_attn_implementation(polyhead.integrations.huggingface.register())  # eager rounds its weights to float32
    whole = result_of(model, family)
    apply(model, [ReorderHeads(0, (0, 3, 1, 4, 2, 5))])
    assert find_layers(model)[0].layout.key_heads == (0, 1, 0, 1, 0, 1)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    torch.testing.assert_close(result_of(model, family), whole, rtol=1e-9, atol=1e-9)


def test_edits_in_inference_mode_leave_a_model_that_can_be_trained():
    layer, x = MultiHeadAttention(24, 4), torch.randn(2, 5, 24)
    with torch.inference_mode():
        record = apply(layer, [PruneHeads(0, (1,))])
    layer(x).output.sum().backward()
    assert layer.q_proj.weight.grad is not None
    assert not any(tensor.is_inference() for tensor in record.tensors.values())
    with torch.inference_mode():
        undo(layer, record)
    layer(x).output.sum().backward()
    assert fingerprint(layer) == record.before


def test_a_compiled_model_is_edited_with_its_config():
    model = decoder()
    names, heads = dict(model.named_parameters()).keys(), model.config.num_attention_heads
    compiled = torch.compile(model, backend="eager")
    removed = tuple(range(heads // 2))
    record = apply(compiled, [PruneHeads(layer.number, removed) for layer in find_layers(model)])
    assert model.config.num_attention_heads == heads - len(removed)
    assert set(record.tensors) <= set(names)
    undo(compiled, record)
    assert (fingerprint(model), model.config.num_attention_heads) == (record.before, heads)


def test_replicas_of_data_parallelism_are_refused():
    layer = MultiHeadAttention(24, 4)
    with pytest.raises(OptionError, match=r"must not be wrapped in \w*DataParallel .* edit model\.module"):
        apply(torch.nn.DataParallel(layer), [PruneHeads(0, (1,))])
    assert layer.layout.num_heads == 4

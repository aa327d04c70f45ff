"""`convert_groups` on whole models: against mean pooling, undone, in plain transformers, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import polyhead.integrations.huggingface
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.surgery import (
    GroupQueries,
    ShareKeys,
    apply,
    convert_groups,
    edits_from_json,
    edits_to_json,
    find_layers,
    fingerprint,
    undo,
)
from polyhead.surgery.calibration.layer_moments import collect_inputs
from polyhead.surgery.calibration.streams import uncached_pieces
from polyhead.surgery.kv_sharing.grouping import neighbours
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, batches_of_tokens, build, generated, result_of


def family_with(name: str, **options) -> models.Family:
    family = FAMILIES[name]
    return models.Family(name, family.kind, {**family.options, **options})


@pytest.mark.parametrize(
    ("name", "options", "kv_heads", "rounds"),
    [  # every family; refinement, which starts from the closed form, for every kind of positions
        ("llama", {}, 1, 1),
        ("llama", {"num_key_value_heads": 4}, 2, 0),
        ("qwen2", {}, 1, 0),
        ("qwen3", {}, 1, 1),
        ("cohere", {}, 1, 1),
        ("stablelm", {"num_key_value_heads": 4}, 2, 1),
        ("bert", {}, 2, 0),
        ("bert", {}, 1, 1),
        ("distilbert", {}, 2, 1),
    ],
)
def test_conversion_changes_the_output_less_than_mean_pooling_and_is_undone(name, options, kv_heads, rounds):
    family = family_with(name, **options)
    model = build(family)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    before, config, original = fingerprint(model), model.config.to_dict(), result_of(model, family)
    layers = find_layers(model)
    pooled = apply(model, [GroupQueries(x.number, neighbours(x.layout.num_kv_heads, kv_heads)) for x in layers])
    pooled_error = (result_of(model, family) - original).norm()
    undo(model, pooled)
    calls = []

    def note(done: int, total: int) -> None:
        calls.append((done, total))

    record = convert_groups(model, kv_heads, batches_of_tokens, rounds=rounds, progress=note)
    assert calls == [(1, 2), (2, 2)]
    assert {x.layout.num_kv_heads for x in find_layers(model)} == {kv_heads}
    error = (result_of(model, family) - original).norm()
    assert 0 < error < 0.95 * pooled_error
    assert edits_from_json(edits_to_json(record.edits)) == record.edits
    assert all(isinstance(edit, ShareKeys) for edit in record.edits)
    undo(model, record)
    assert fingerprint(model) == before == record.before
    assert model.config.to_dict() == config
    assert torch.equal(result_of(model, family), original)


def test_a_converted_llama_loads_in_plain_transformers_and_generates():
    family = family_with("llama", num_key_value_heads=4)
    model = build(family)
    convert_groups(model, 2, batches_of_tokens)
    assert model.config.num_key_value_heads == 2
    native = type(model)(copy.deepcopy(model.config)).double().eval()
    native.load_state_dict(model.state_dict())
    torch.testing.assert_close(result_of(native, family), result_of(model, family))
    torch.testing.assert_close(generated(native, family), generated(model, family))


def test_an_encoder_and_a_decoder_are_converted_together_or_one_stack_of_them():
    family = FAMILIES["bart"]
    model = build(family)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    original, before = result_of(model, family), fingerprint(model)
    stacks = list(dict.fromkeys(layer.stack for layer in find_layers(model)))
    assert len(stacks) == 3

    def text() -> list[dict[str, Tensor]]:
        return [models.inputs(family)] * 2

    one = convert_groups(model, 2, text, stack=stacks[0], rounds=1)
    # The encoder is converted from 4 to 2 KV heads; the two stacks of the decoder have 2 from the start.
    assert {(layer.stack, layer.layout.num_kv_heads) for layer in find_layers(model)} == {(x, 2) for x in stacks}
    undo(model, one)
    record = convert_groups(model, 1, text, rounds=1)
    assert {edit.stack for edit in record.edits} == set(stacks)  # cross-attention too
    assert {layer.layout.num_kv_heads for layer in find_layers(model)} == {1}
    assert (result_of(model, family) - original).norm() < original.norm()
    undo(model, record)
    assert fingerprint(model) == before


class Stack(nn.Module):
    """Two polyhead layers in sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(24, 4) for _ in range(2)).double()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).output
        return x


def test_polyhead_layers_are_converted_and_padding_is_ignored():
    model = Stack()
    x = torch.randn(3, 40, 24, dtype=torch.float64)
    padded = torch.cat((x, torch.full((3, 5, 24), 100.0, dtype=torch.float64)), 1)
    mask = torch.cat((torch.ones(3, 40), torch.zeros(3, 5)), 1)
    (first, _) = find_layers(model)
    plain = collect_inputs(model, first, uncached_pieces([{"x": x}]))
    masked = collect_inputs(model, first, uncached_pieces([{"x": padded, "attention_mask": mask}]))
    torch.testing.assert_close(plain.key, masked.key)
    assert (plain.tokens, masked.tokens) == (120, 120)
    original = model(x)
    record = convert_groups(model, 2, lambda: [{"x": x}])
    assert [layer.layout.num_kv_heads for layer in model.layers] == [2, 2]
    assert (model(x) - original).norm() < 0.5 * (original - x).norm()
    undo(model, record)
    assert torch.equal(model(x), original)


@pytest.mark.parametrize(
    ("name", "count", "options", "words"),
    [
        ("bert", 3, {}, "number of KV heads must divide 4, .*, got 3"),
        ("bert", 0, {}, "number of KV heads must divide 4, .*, got 0"),
        ("bert", 4, {}, "every layer has 4 KV heads already"),
        ("bert", 2, {"grouping": "alike"}, "grouping must be one of similar, neighbours, got 'alike'"),
        ("bert", 2, {"rounds": -1}, "rounds must be at least 0, got -1"),
        ("bert", 2, {"ridge": -1.0}, "ridge must be a number of at least 0, got -1.0"),
        ("bert", 2, {"stack": "nowhere"}, r"stack must be one of .*encoder\.layer\.\*.*, got 'nowhere'"),
        ("gpt2", 2, {}, "supports only one KV head per head, got 4 heads over 2"),
        ("gpt_oss", 1, {}, "cannot be edited: it has sinks"),
    ],
)
def test_conversions_that_are_refused_leave_the_model_unchanged(name, count, options, words):
    model = build(FAMILIES[name])
    before = fingerprint(model)
    with pytest.raises(OptionError, match=words):
        convert_groups(model, count, batches_of_tokens, **options)
    assert fingerprint(model) == before


def test_text_that_is_empty_or_too_short_is_refused_and_an_interruption_leaves_the_model_as_it_was():
    model = build(FAMILIES["bert"])
    before = fingerprint(model)
    with pytest.raises(OptionError, match="needs some text, got no batch"):
        convert_groups(model, 2, list)
    with pytest.raises(OptionError, match=r"at least as many tokens as the heads of .* have channels, 32, got 20"):
        convert_groups(model, 2, lambda: [{"input_ids": models.tokens(2, 10)}])

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    model.train()
    with pytest.raises(KeyboardInterrupt):
        convert_groups(model, 2, batches_of_tokens, progress=interrupt)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        convert_groups(model, 2, lambda: [*batches_of_tokens(), {"inputs": 1}])
    assert fingerprint(model) == before
    assert model.training
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)

"""Layer discovery by structure, and the reasons for layers that cannot be edited."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import polyhead
import polyhead.integrations.huggingface
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import ALiBi
from polyhead.surgery import PruneHeads, apply, find_layers, fingerprint, undo
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build, switched_off


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiHeadAttention(12, 4, sinks=True), "sinks, a per-head parameter"),
        (lambda: MultiHeadAttention(12, 4, output_gate="head"), "a per-head gate_proj"),
        (lambda: MultiHeadAttention(12, 4, positions=ALiBi(4)), "positions with a per-head bias"),
        (
            lambda: polyhead.layers.variants.GroupedHeads(12, 4, num_groups=2),
            "GroupedHeads is a variant with its own head layout",
        ),
        (lambda: nn.MultiheadAttention(12, 4), "from_torch"),
        (lambda: nn.Linear(12, 4), "got a model without any"),
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
    with pytest.raises(OptionError, match=r"q_proj is a torch\.nn\.modules\.container\.Sequential"):
        apply(layer, [PruneHeads(0, (1,))])
    tied = nn.ModuleList([MultiHeadAttention(12, 4), MultiHeadAttention(12, 4)])
    tied[1].q_proj = tied[0].q_proj
    with pytest.raises(OptionError, match=r"0\.q_proj\.weight, 0\.q_proj\.bias is shared with another module"):
        apply(tied, [PruneHeads(0, (1,))])


def test_what_a_module_around_attention_adds_per_head_is_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BeitConfig(**sizes, image_size=16, patch_size=8)
    assert find_layers(transformers.BeitModel(config))[0].refusals == ()
    config.use_relative_position_bias = True
    with pytest.raises(OptionError, match="a module around it has relative_position_bias, which may be per head"):
        apply(transformers.BeitModel(config), [PruneHeads(0, (1,))])


def test_heads_that_are_shaped_by_a_local_variable_of_the_model_width_are_refused():
    config = transformers.EfficientLoFTRConfig(
        stage_num_blocks=[1, 1, 1], out_features=[16, 16, 32], stage_stride=[2, 1, 2], hidden_size=32,
        num_attention_layers=1, num_attention_heads=4,
    )  # fmt: skip
    layers = find_layers(transformers.EfficientLoFTRModel(config))
    assert {layer.refusals for layer in layers} == {("it shapes its heads by dim, which is the model width",)}


def test_a_layer_without_groups_has_no_layout():
    model = build(FAMILIES["llama"])
    find_layers(model)[0].module.num_key_value_groups = 0
    with pytest.raises(OptionError, match="its num_key_value_groups is 0"):
        apply(model, [PruneHeads(0, (1,))])


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

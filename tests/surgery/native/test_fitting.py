"""A config follows an edit exactly where a native model can be built from it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import EomtConfig, EomtForUniversalSegmentation

from polyhead.errors import OptionError
from polyhead.surgery import PruneHeads, apply, fingerprint
from tests.surgery.gated import FAMILIES, build, decoder, result_of


def test_the_config_says_what_a_stock_model_can_be_built_of_and_nothing_else():
    model = decoder()
    apply(model, [PruneHeads(number, (0, 3)) for number in range(2)])
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 10)
    native = type(model)(copy.deepcopy(config)).double().eval()
    native.load_state_dict(model.state_dict())
    torch.testing.assert_close(result_of(native, FAMILIES["llama"]), result_of(model, FAMILIES["llama"]))

    uneven = decoder()
    assert apply(uneven, [PruneHeads(0, (0, 3))]).config == ()  # one number cannot say two
    assert uneven.config.num_attention_heads == 6
    bert = build(FAMILIES["bert"])
    assert apply(bert, [PruneHeads(number, (0, 1)) for number in range(2)]).config == ()  # width is tied to heads
    assert bert.config.num_attention_heads == 4


def test_a_model_that_builds_masks_by_the_number_of_heads_is_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_blocks": 1, "num_queries": 5}
    model = EomtForUniversalSegmentation(EomtConfig(**sizes, image_size=32, patch_size=8, num_upscale_blocks=1)).eval()
    pixels = torch.randn(1, 3, 32, 32)
    before, expected = fingerprint(model), model(pixels).class_queries_logits
    with pytest.raises(OptionError, match="EomtAttention or a module around it reads the number of heads"):
        apply(model, [PruneHeads(number, (0,)) for number in range(2)])
    assert fingerprint(model) == before
    assert torch.equal(model(pixels).class_queries_logits, expected)


def test_a_module_that_reads_the_config_is_edited_in_all_layers_or_none():
    family = FAMILIES["phi3"]
    model = build(family)
    before = fingerprint(model)
    with pytest.raises(OptionError, match=r"Phi3Attention .* reads the number of heads from the config"):
        apply(model, [PruneHeads(0, (0, 1))])
    assert fingerprint(model) == before
    assert model.config.num_attention_heads == 4

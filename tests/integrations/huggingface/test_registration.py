"""`set_attention` reaches every model inside a model."""

from __future__ import annotations

import copy

import pytest
import transformers

from polyhead.integrations.huggingface import register, set_attention


@pytest.mark.parametrize("name", ["eager", "polyhead"])
def test_stacks_with_a_config_of_their_own_are_set_too(monkeypatch, name):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=9, **sizes))
    for part in (model.encoder, model.decoder):
        part.config = copy.deepcopy(part.config)

    def set_own(part, implementation):  # what transformers 5.17 does for a model whose stacks have copies
        part.config._attn_implementation = implementation

    monkeypatch.setattr(transformers.PreTrainedModel, "set_attn_implementation", set_own)
    register()
    set_attention(model, name)
    assert {part.config._attn_implementation for part in (model, model.encoder, model.decoder)} == {name}

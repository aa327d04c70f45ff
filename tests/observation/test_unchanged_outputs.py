"""Inside a session a model computes what it computes outside of it, also in rows of padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="these tests are about models of transformers")

import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import polyhead
from tests.integrations.huggingface import models
from tests.integrations.huggingface.compare import assert_same, result
from tests.integrations.huggingface.models import BATCH, TOKENS

FAMILIES = {family.name: family for family in models.FAMILIES}
HAS_SDPA = {"llama", "mistral", "qwen2", "gpt2", "bert", "modernbert", "bart", "llama4_text", "t5"}
PADDED = ("llama", "mistral", "qwen2", "gpt2", "gpt_oss", "gemma2", "bert", "modernbert", "llama4_text", "bart", "t5")


def outputs(model, **inputs):
    """Results of a model outside and inside a session, and the session."""
    with torch.no_grad():
        expected = model(**inputs)
        with polyhead.observe(model) as session:
            actual = model(**inputs)
    return expected, actual, session


def padding(side):
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    if side == "holes":
        mask[0, 7] = mask[1, 11] = 0
    elif side == "left":
        mask[0, :3] = mask[1, :11] = 0
    elif side == "right":
        mask[0, -3:] = mask[1, -11:] = 0
    else:
        mask[1] = 0
    return mask


@pytest.mark.parametrize("side", ["left", "right", "holes", "a sequence of padding"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", PADDED)
def test_rows_of_padding_are_those_of_the_model(name, implementation, side):
    if implementation == "sdpa" and name not in HAS_SDPA:
        pytest.skip("transformers has no sdpa for it")
    family = FAMILIES[name]
    model = models.build(family, dtype=torch.float32)
    model.set_attn_implementation(implementation)
    expected, actual, session = outputs(model, **models.inputs(family), attention_mask=padding(side))
    assert_same(result(actual), result(expected))
    of_input = [
        x
        for x in session.observations.sites
        if name not in ("bart", "t5") or "encoder.block" in x.site.name or ".encoder." in x.site.name
    ]
    assert len(of_input)
    assert all(int(x.compute()["tokens"][0]) == int(padding(side).sum()) for x in of_input)


def paligemma():
    text = {**models._DECODER, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config={**models._VISION, "model_type": "siglip_vision_model"}, projection_dim=32
    )
    return transformers.PaliGemmaModel(config).eval(), {"input_ids": models.tokens()}


def nemotron():
    config = transformers.NemotronAsrStreamingEncoderConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_mel_bins=16,
        subsampling_conv_channels=32, max_position_embeddings=128, sliding_window=4,
    )  # fmt: skip
    return transformers.AutoModel.from_config(config).eval(), {"input_features": torch.randn(2, 64, 16)}


@pytest.mark.parametrize("create", [paligemma, nemotron])
def test_masks_are_those_that_the_implementation_of_the_model_makes(create):
    torch.manual_seed(0)
    model, inputs = create()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, 1.3 / parameter[0].numel() ** 0.5)
    assert model.config._attn_implementation == "sdpa"
    expected, actual, session = outputs(model, **inputs)
    assert_same(actual.last_hidden_state, expected.last_hidden_state)
    if create is paligemma:  # its sdpa has no mask, and its attention modules are not causal
        assert (session.profile["next_mass"] > 0).all()


def test_eager_attention_adds_a_boolean_mask():
    model, ids = models.build(FAMILIES["llama"], dtype=torch.float32), models.tokens()
    mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    expected, actual, session = outputs(model, input_ids=ids, attention_mask=mask)
    assert_same(actual.logits, expected.logits)
    assert (session.profile["next_mass"] > 0).all()
    model.set_attn_implementation("sdpa")
    expected, actual, session = outputs(model, input_ids=ids, attention_mask=mask)
    assert_same(actual.logits, expected.logits)
    assert (session.profile["next_mass"] == 0).all()


class Attention(nn.Module):
    """Attention of a model of transformers, by its attention interface."""

    def __init__(self, config, **attributes):
        super().__init__()
        self.config, self.projection = config, nn.Linear(16, 48)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], 3, 2, 8)
        query, key, value = self.projection(hidden_states).view(shape).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, query, key, value, attention_mask, **kwargs)[0]


class Model(transformers.PreTrainedModel):
    config_class = transformers.PretrainedConfig
    _supports_sdpa = True

    def __init__(self, **attributes):
        super().__init__(transformers.PretrainedConfig(attn_implementation="sdpa"))
        self.attention = Attention(self.config, **attributes)

    def forward(self, hidden_states, **kwargs):
        return self.attention(hidden_states, **kwargs)


class ReadsItsMask(transformers.LlamaForCausalLM):
    """Model code that reads the mask before attention does."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(self.read, with_kwargs=True)

    @staticmethod
    def read(module, args, kwargs):
        mask = kwargs["attention_mask"]
        assert mask.dtype is torch.bool
        mask.logical_not().any()


def test_a_boolean_mask_that_model_code_has_read_stays_one():
    config = transformers.AutoConfig.for_model("llama", **FAMILIES["llama"].options)
    torch.manual_seed(0)
    model = ReadsItsMask(config).eval()
    expected, actual, _ = outputs(model, input_ids=models.tokens(), attention_mask=padding("left"))
    assert_same(actual.logits, expected.logits)


LENGTHS = torch.tensor([0, 5, 13], dtype=torch.int32)
CALLS = {
    "a module without is_causal": ({}, {}),
    "a module that is not causal": ({"is_causal": False}, {}),
    "is_causal of the call": ({"is_causal": True}, {"is_causal": False}),
    "a window without a mask": ({"is_causal": True}, {"sliding_window": 3}),
    "a window without a mask, not causal": ({"is_causal": False}, {"sliding_window": 3}),
    "packed sequences": ({"is_causal": True}, {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS}),
    "sequence indices": ({"is_causal": True}, {"seq_idx": torch.tensor([[0] * 5 + [1] * 8])}),
    "a boolean mask for each head": ({}, {"attention_mask": torch.arange(13) < torch.tensor([7, 4]).view(1, 2, 1, 1)}),
    "a row without keys": ({}, {"attention_mask": torch.ones(1, 1, 13, 13, dtype=torch.bool).tril(-1)}),
    "least numbers": ({}, {"attention_mask": torch.full((1, 1, 13, 13), torch.finfo(torch.float32).min).triu()}),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_of_sdpa_follows_its_rules(case):
    attributes, arguments = CALLS[case]
    torch.manual_seed(0)
    model, hidden = Model(**attributes).eval(), torch.randn(1, 13, 16)
    expected, actual, _ = outputs(model, hidden_states=hidden, **arguments)
    assert_same(actual, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_model_with_the_same_config_computes_the_same(implementation):
    """A session switches the config, which two models may share."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=61, attn_implementation=implementation, **sizes)
    one, other = (transformers.LlamaModel(config).eval() for _ in range(2))
    tokens, mask = torch.randint(3, 61, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:], mask[1, :3] = 0, 0
    with torch.no_grad():
        expected = [model(tokens, attention_mask=mask)[0] for model in (one, other)]
        with polyhead.observe(one):
            torch.testing.assert_close(other(tokens, attention_mask=mask)[0], expected[1], rtol=1e-5, atol=2e-6)
            with polyhead.observe(other):
                actual = [model(tokens, attention_mask=mask)[0] for model in (one, other)]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)

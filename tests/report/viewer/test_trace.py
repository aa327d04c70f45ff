"""Traces of a text: weights, ablated heads and generation agree with the model itself."""

from __future__ import annotations

import pytest
import torch

import polyhead
from polyhead.errors import OptionError
from polyhead.integrations.huggingface import set_attention
from polyhead.report.viewer import tiles, token_weights
from polyhead.report.viewer.failures import RequestError
from polyhead.report.viewer.model import ViewedModel
from polyhead.report.viewer.output import difference
from polyhead.workflows.model_loading import load_model
from tests.inspection import small_models
from tests.report.viewer.conftest import TEXT

KINDS = ("bert", "masked", "llama", "t5")


def all_weights(trace, layer):
    attention = trace.attentions[layer]
    return tiles.window(attention, (0, attention.queries), (0, attention.keys), 0, "sum")


def eager_weights(viewed, trace):
    """Return the weights of eager attention, in the order of the layers."""
    model = viewed.model
    before = model.config._attn_implementation
    set_attention(model, "eager")
    inputs = {"input_ids": torch.tensor([trace.ids]), "output_attentions": True}
    if trace.target_ids is not None:
        inputs["decoder_input_ids"] = torch.tensor([trace.target_ids])
    try:
        with torch.no_grad():
            output = model(**inputs)
    finally:
        set_attention(model, before)
    if trace.target_ids is None:
        return [x[0] for x in output.attentions]
    decoder = [x for pair in zip(output.decoder_attentions, output.cross_attentions, strict=True) for x in pair]
    return [x[0] for x in (*output.encoder_attentions, *decoder)]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_those_of_eager_attention(viewed, kind):
    model = viewed(kind)
    trace = model.trace("A", TEXT, ())
    expected = eager_weights(model, trace)
    assert len(expected) == len(model.layers)
    for layer, weights in enumerate(expected):
        torch.testing.assert_close(all_weights(trace, layer), weights, atol=2e-6, rtol=1e-4)


def test_an_encoder_decoder_has_two_axes(viewed):
    model = viewed("t5")
    trace = model.trace("A", TEXT, ())
    assert [(x.queries, x.keys) for x in model.layers] == [("text", "text")] * 2 + [
        ("target", "target"),
        ("target", "text"),
    ] * 2
    assert trace.target.tokens == ("[PAD]",)
    assert trace.attentions[3].queries == 1
    assert trace.attentions[3].keys == len(trace.ids) == 19


@pytest.mark.parametrize("kind", KINDS)
def test_ablation_equals_a_session_with_head_gates(viewed, kind):
    model = viewed(kind)
    ablated = {(0, 1), (0, 3), (len(model.layers) - 1, 2)}
    whole, trace = model.trace("A", TEXT, ()), model.trace("A", TEXT, ablated)
    session = polyhead.observe(model.model, statistics=False)
    for layer, head in ablated:
        site = model.layers[layer].site
        session.gates.setdefault((site.name, site.kind), torch.ones(site.num_heads))[head] = 0.0
    inputs = {"input_ids": torch.tensor([trace.ids])}
    if trace.target_ids is not None:
        inputs["decoder_input_ids"] = torch.tensor([trace.target_ids])
    with torch.no_grad(), session:
        output = model.model(**inputs)
    if kind == "bert":
        expected = output.last_hidden_state[0].mean(0)
    else:
        expected = output.logits[0, trace.output.position if kind == "masked" else -1].log_softmax(-1)
    torch.testing.assert_close(trace.output.values, expected, atol=1e-6, rtol=1e-5)
    # The first layer is unchanged, later ones are not.
    assert torch.equal(all_weights(whole, 0), all_weights(trace, 0))
    assert not torch.allclose(all_weights(whole, 1), all_weights(trace, 1), atol=1e-4)
    # The same without a new trace.
    again = model.output_without(whole, ablated, lambda done, total: None)
    assert torch.equal(again.values, trace.output.values)


def test_an_effect_is_the_divergence_of_the_two_distributions(viewed):
    model = viewed("llama")
    trace = model.trace("A", TEXT, ())
    after = model.output_without(trace, {(0, 1), (1, 2)}, lambda done, total: None)
    change = difference(trace.output, after)
    p, q = trace.output.values.double().exp(), after.values.double().exp()
    assert change["divergence"] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
    assert change["divergence"] > 1e-4
    assert change["cosine"] is None
    changes = [abs(x["after"] - x["before"]) for x in change["top"]]
    assert changes == sorted(changes, reverse=True)
    for entry in change["top"]:
        assert entry["before"] == pytest.approx(float(p[entry["id"]]), rel=1e-5)
        assert entry["text"].strip() == small_models.NAMES[entry["id"]]
    assert difference(trace.output, trace.output)["divergence"] == 0.0


def test_difference_of_embeddings_is_their_cosine(viewed):
    model = viewed("bert")
    trace = model.trace("A", TEXT, ())
    after = model.output_without(trace, {(0, 1), (1, 2)}, lambda done, total: None)
    change = difference(trace.output, after)
    expected = torch.nn.functional.cosine_similarity(trace.output.values, after.values, dim=0)
    assert change == {"divergence": None, "cosine": pytest.approx(float(expected), abs=1e-6), "top": None}
    assert change["cosine"] < 0.9999


def test_masked_model_predicts_the_mask_token(viewed):
    model = viewed("masked")
    assert model.trace("A", "w1 w2 [MASK] w4", ()).output.position == 3
    assert model.trace("A", "w1 w2 w4", ()).output.position == 3


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_steps_equal_greedy_generation(viewed, kind):
    model = viewed(kind)
    trace = first = model.trace("A", "w1 w2 w3 . a w5", ())
    ids = torch.tensor([first.ids])
    with torch.no_grad():
        expected = model.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4, eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()  # fmt: skip
    for count in range(1, 5):
        trace = model.step(trace, None, lambda done, total: None)
        assert trace.generated == count
    written = trace.ids if kind == "llama" else trace.target_ids
    assert list(written) == expected
    axis = trace.text if kind == "llama" else trace.target
    assert len(axis.tokens) == len(written)
    assert axis.starts[-1] == axis.ends[-1] == -1
    assert trace.to_dict()["cut"] is None
    for _ in range(4):
        trace = model.undo(trace, lambda done, total: None)
    assert (trace.ids, trace.target_ids, trace.text) == (first.ids, first.target_ids, first.text)
    assert torch.equal(trace.output.values, first.output.values)
    with pytest.raises(RequestError, match="only generated tokens"):
        model.undo(trace, lambda done, total: None)


def test_chosen_token_is_appended(viewed):
    model = viewed("llama")
    trace = model.step(model.trace("A", "w1 w2", ()), 30, lambda done, total: None)
    assert trace.ids[-1] == 30
    assert trace.text.tokens[-1].strip() == small_models.NAMES[30]
    with pytest.raises(RequestError, match=f"0 to {len(small_models.NAMES) - 1}, got 5000"):
        model.step(trace, 5000, lambda done, total: None)


def test_an_encoder_does_not_generate(viewed):
    model = viewed("bert")
    assert not model.generates
    with pytest.raises(RequestError, match="encoder"):
        model.step(model.trace("A", TEXT, ()), None, lambda done, total: None)


def test_long_text_is_truncated_and_the_trace_says_so(viewed):
    text = " ".join(["w1"] * 300)
    # bert ends a text with [SEP], llama with its last token.
    bert, llama = viewed("bert").trace("A", text, ()), viewed("llama", context=41).trace("A", text, ())
    assert bert.to_dict()["cut"] == {"tokens_in_text": 302, "tokens_read": 130}
    assert bert.text.tokens[-1] == "[SEP]"
    assert llama.to_dict()["cut"] == {"tokens_in_text": 301, "tokens_read": 41}
    assert llama.text.tokens[-1] == "w1"
    with pytest.raises(RequestError, match="at most 41 tokens"):
        viewed("llama", context=41).step(llama, None, lambda done, total: None)


def test_tokens_have_their_spans_in_the_text(viewed):
    trace = viewed("bert").trace("A", "w1  w2\tw90 .", ())
    axis = trace.text
    assert axis.tokens == ("[CLS]", "w1", "w2", "w90", ".", "[SEP]")
    assert axis.special == (0, 5)
    assert axis.starts == (-1, 0, 4, 7, 11, -1)
    assert axis.ends == (-1, 2, 6, 10, 12, -1)


def test_memory_of_a_trace_is_linear_in_the_tokens(viewed):
    model = viewed("llama")
    short, long = (model.trace("A", " ".join(["w1"] * (count - 1)), ()) for count in (31, 124))
    assert [len(x.ids) for x in (short, long)] == [31, 124]
    assert long.bytes == 4 * short.bytes
    assert model.bytes_per_token == short.bytes // 31
    for attention in long.attentions:
        tensors = (attention.query, attention.key, attention.logsumexp)
        assert sum(x.untyped_storage().nbytes() for x in tensors) == attention.bytes


def test_memory_bounds_the_context(viewed):
    plenty = viewed("llama")
    assert (plenty.context.tokens, plenty.context.reason) == (130, "trained")
    little = viewed("llama", memory=50 * plenty.bytes_per_token + 1)
    assert (little.context.tokens, little.context.reason) == (50, "memory")
    assert viewed("llama", context=47).context.reason == "requested"
    with pytest.raises(OptionError, match="at most 130, the maximum of llama, got 131"):
        viewed("llama", context=131)


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_a_text_without_a_token_is_refused(viewed, text):
    with pytest.raises(RequestError, match="a text must have at least one token"):
        viewed("bert").trace("A", text, ())


def test_half_a_surrogate_pair_is_refused(viewed):
    with pytest.raises(RequestError, match="a lone surrogate at 3"):
        viewed("bert").trace("A", "w1 \ud800", ())


def test_progress_is_reported_per_layer_and_can_stop_the_run(viewed):
    model = viewed("llama")
    reported = []
    model.trace("A", TEXT, (), lambda done, total: reported.append((done, total)))
    assert reported == [(1, 2), (2, 2)]

    def stop(done, total):
        raise RequestError(409, "superseded", "enough")

    hooks = {name: len(module._forward_pre_hooks) for name, module in model.model.named_modules()}
    with pytest.raises(RequestError, match="enough"):
        model.trace("A", TEXT, (), stop)
    assert {name: len(module._forward_pre_hooks) for name, module in model.model.named_modules()} == hooks


def test_rows_and_columns_of_a_token_are_those_of_the_weights(viewed):
    trace = viewed("llama").trace("A", TEXT, ())
    weights = all_weights(trace, 1)
    torch.testing.assert_close(token_weights.attends(trace.attentions[1], 7), weights[:, 7])
    torch.testing.assert_close(token_weights.attended(trace.attentions[1], 7), weights[:, :, 7])


def test_shared_module_is_one_layer_per_call(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=len(small_models.NAMES), embedding_size=16, hidden_size=24, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AlbertModel(config).save_pretrained(tmp_path)
    small_models.tokenizer().save_pretrained(tmp_path)
    model = ViewedModel(load_model(tmp_path))
    assert [layer.call for layer in model.layers] == [0, 1, 2]
    trace = model.trace("A", TEXT, ())
    for layer, weights in enumerate(eager_weights(model, trace)):
        torch.testing.assert_close(all_weights(trace, layer), weights, atol=2e-6, rtol=1e-4)


def test_model_without_text_input_is_refused(loaded):
    import dataclasses

    with pytest.raises(OptionError, match="model of text, got bert, whose input is pixel_values"):
        ViewedModel(dataclasses.replace(loaded("bert"), main_input="pixel_values"))

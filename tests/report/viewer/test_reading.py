"""A text that was read: the weights are the model's own, heads that are off are off, and generation is the model's."""

from __future__ import annotations

import pytest
import torch

import polyhead
from polyhead.errors import OptionError
from polyhead.integrations.huggingface import set_attention
from polyhead.report.viewer import tiles, words
from polyhead.report.viewer.failures import Refused
from polyhead.report.viewer.model import ViewedModel
from polyhead.report.viewer.output import difference
from polyhead.workflows.model_loading import load_model
from tests.inspection import small_models
from tests.report.viewer.conftest import TEXT

KINDS = ("bert", "masked", "llama", "t5")


def all_weights(reading, place):
    attention = reading.attentions[place]
    return tiles.window(attention, (0, attention.queries), (0, attention.keys), 0, "sum")


def eager_weights(viewed, reading):
    """The weights that the model itself returns, in the order of the places."""
    model = viewed.model
    before = model.config._attn_implementation
    set_attention(model, "eager")
    inputs = {"input_ids": torch.tensor([reading.ids]), "output_attentions": True}
    if reading.target_ids is not None:
        inputs["decoder_input_ids"] = torch.tensor([reading.target_ids])
    try:
        with torch.no_grad():
            found = model(**inputs)
    finally:
        set_attention(model, before)
    if reading.target_ids is None:
        return [x[0] for x in found.attentions]
    decoder = [x for pair in zip(found.decoder_attentions, found.cross_attentions, strict=True) for x in pair]
    return [x[0] for x in (*found.encoder_attentions, *decoder)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_that_the_model_itself_returns(viewed, kind):
    model = viewed(kind)
    reading = model.read("A", TEXT, ())
    expected = eager_weights(model, reading)
    assert len(expected) == len(model.places)
    for place, weights in enumerate(expected):
        torch.testing.assert_close(all_weights(reading, place), weights, atol=2e-6, rtol=1e-4)


def test_an_encoder_decoder_has_two_axes(viewed):
    model = viewed("t5")
    reading = model.read("A", TEXT, ())
    assert [(x.queries, x.keys) for x in model.places] == [("text", "text")] * 2 + [
        ("target", "target"),
        ("target", "text"),
    ] * 2
    assert reading.target.tokens == ("[PAD]",)
    assert reading.attentions[3].queries == 1
    assert reading.attentions[3].keys == len(reading.ids) == 19


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_off_are_those_of_a_session_with_gates(viewed, kind):
    model = viewed(kind)
    off = {(0, 1), (0, 3), (len(model.places) - 1, 2)}
    whole, reading = model.read("A", TEXT, ()), model.read("A", TEXT, off)
    session = polyhead.observe(model.model, statistics=False)
    for place, head in off:
        site = model.places[place].site
        session.gates.setdefault((site.name, site.kind), torch.ones(site.num_heads))[head] = 0.0
    inputs = {"input_ids": torch.tensor([reading.ids])}
    if reading.target_ids is not None:
        inputs["decoder_input_ids"] = torch.tensor([reading.target_ids])
    with torch.no_grad(), session:
        found = model.model(**inputs)
    if kind == "bert":
        expected = found.last_hidden_state[0].mean(0)
    else:
        expected = found.logits[0, reading.output.position if kind == "masked" else -1].log_softmax(-1)
    torch.testing.assert_close(reading.output.values, expected, atol=1e-6, rtol=1e-5)
    # What comes after the first layer is not the same any more, and the first is.
    assert torch.equal(all_weights(whole, 0), all_weights(reading, 0))
    assert not torch.allclose(all_weights(whole, 1), all_weights(reading, 1), atol=1e-4)
    # The same without a new reading.
    again = model.output_without(whole, off, lambda done, total: None)
    assert torch.equal(again.values, reading.output.values)


def test_an_effect_is_the_divergence_of_the_two_distributions(viewed):
    model = viewed("llama")
    reading = model.read("A", TEXT, ())
    after = model.output_without(reading, {(0, 1), (1, 2)}, lambda done, total: None)
    told = difference(reading.output, after)
    p, q = reading.output.values.double().exp(), after.values.double().exp()
    assert told["divergence"] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
    assert told["divergence"] > 1e-4
    assert told["cosine"] is None
    changes = [abs(x["after"] - x["before"]) for x in told["top"]]
    assert changes == sorted(changes, reverse=True)
    for entry in told["top"]:
        assert entry["before"] == pytest.approx(float(p[entry["id"]]), rel=1e-5)
        assert entry["text"].strip() == small_models.NAMES[entry["id"]]
    nothing = difference(reading.output, reading.output)
    assert nothing["divergence"] == 0.0


def test_an_encoder_tells_the_cosine_of_its_vector(viewed):
    model = viewed("bert")
    reading = model.read("A", TEXT, ())
    after = model.output_without(reading, {(0, 1), (1, 2)}, lambda done, total: None)
    told = difference(reading.output, after)
    expected = torch.nn.functional.cosine_similarity(reading.output.values, after.values, dim=0)
    assert told == {"divergence": None, "cosine": pytest.approx(float(expected), abs=1e-6), "top": None}
    assert told["cosine"] < 0.9999


def test_a_masked_model_tells_of_the_gap(viewed):
    model = viewed("masked")
    assert model.read("A", "w1 w2 [MASK] w4", ()).output.position == 3
    assert model.read("A", "w1 w2 w4", ()).output.position == 3


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_steps_write_what_the_model_generates(viewed, kind):
    model = viewed(kind)
    reading = first = model.read("A", "w1 w2 w3 . a w5", ())
    ids = torch.tensor([first.ids])
    with torch.no_grad():
        expected = model.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4, eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()  # fmt: skip
    for count in range(1, 5):
        reading = model.step(reading, None, lambda done, total: None)
        assert reading.generated == count
    written = reading.ids if kind == "llama" else reading.target_ids
    assert list(written) == expected
    axis = reading.text if kind == "llama" else reading.target
    assert len(axis.tokens) == len(written)
    assert axis.starts[-1] == axis.ends[-1] == -1
    assert reading.to_dict()["cut"] is None
    for _ in range(4):
        reading = model.back(reading, lambda done, total: None)
    assert (reading.ids, reading.target_ids, reading.text) == (first.ids, first.target_ids, first.text)
    assert torch.equal(reading.output.values, first.output.values)
    with pytest.raises(Refused, match="only generated tokens"):
        model.back(reading, lambda done, total: None)


def test_a_chosen_token_is_written(viewed):
    model = viewed("llama")
    reading = model.step(model.read("A", "w1 w2", ()), 30, lambda done, total: None)
    assert reading.ids[-1] == 30
    assert reading.text.tokens[-1].strip() == small_models.NAMES[30]
    with pytest.raises(Refused, match=f"0 to {len(small_models.NAMES) - 1}, got 5000"):
        model.step(reading, 5000, lambda done, total: None)


def test_only_a_model_that_predicts_the_next_token_writes(viewed):
    model = viewed("bert")
    assert not model.generates
    with pytest.raises(Refused, match="encoder"):
        model.step(model.read("A", TEXT, ()), None, lambda done, total: None)


def test_a_long_text_is_cut_and_the_reading_says_so(viewed):
    text = " ".join(["w1"] * 300)
    closed, open_ended = viewed("bert").read("A", text, ()), viewed("llama", context=41).read("A", text, ())
    assert closed.to_dict()["cut"] == {"tokens_in_text": 302, "tokens_read": 130}
    assert closed.text.tokens[-1] == "[SEP]"
    assert open_ended.to_dict()["cut"] == {"tokens_in_text": 301, "tokens_read": 41}
    assert open_ended.text.tokens[-1] == "w1"
    with pytest.raises(Refused, match="at most 41 tokens"):
        viewed("llama", context=41).step(open_ended, None, lambda done, total: None)


def test_tokens_stand_where_they_stand_in_the_text(viewed):
    reading = viewed("bert").read("A", "w1  w2\tw90 .", ())
    axis = reading.text
    assert axis.tokens == ("[CLS]", "w1", "w2", "w90", ".", "[SEP]")
    assert axis.special == (0, 5)
    assert axis.starts == (-1, 0, 4, 7, 11, -1)
    assert axis.ends == (-1, 2, 6, 10, 12, -1)


def test_what_is_kept_grows_with_the_text_and_not_with_its_square(viewed):
    model = viewed("llama")
    short, long = (model.read("A", " ".join(["w1"] * (count - 1)), ()) for count in (31, 124))
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
    with pytest.raises(Refused, match="a text must have at least one token"):
        viewed("bert").read("A", text, ())


def test_half_a_surrogate_pair_is_refused(viewed):
    with pytest.raises(Refused, match="a lone surrogate at 3"):
        viewed("bert").read("A", "w1 \ud800", ())


def test_progress_is_told_of_every_place_and_can_stop_the_reading(viewed):
    model = viewed("llama")
    told = []
    model.read("A", TEXT, (), lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]

    def stop(done, total):
        raise Refused(409, "superseded", "enough")

    hooks = {name: len(module._forward_pre_hooks) for name, module in model.model.named_modules()}
    with pytest.raises(Refused, match="enough"):
        model.read("A", TEXT, (), stop)
    assert {name: len(module._forward_pre_hooks) for name, module in model.model.named_modules()} == hooks


def test_rows_and_columns_of_a_token_are_those_of_the_weights(viewed):
    reading = viewed("llama").read("A", TEXT, ())
    weights = all_weights(reading, 1)
    torch.testing.assert_close(words.attends(reading.attentions[1], 7).weights, weights[:, 7])
    torch.testing.assert_close(words.attended(reading.attentions[1], 7).weights, weights[:, :, 7])


def test_a_layer_that_is_used_again_is_a_place_for_each_use(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=len(small_models.NAMES), embedding_size=16, hidden_size=24, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AlbertModel(config).save_pretrained(tmp_path)
    small_models.tokenizer().save_pretrained(tmp_path)
    model = ViewedModel(load_model(tmp_path))
    assert [place.call for place in model.places] == [0, 1, 2]
    reading = model.read("A", TEXT, ())
    for place, weights in enumerate(eager_weights(model, reading)):
        torch.testing.assert_close(all_weights(reading, place), weights, atol=2e-6, rtol=1e-4)


def test_a_model_that_reads_no_text_is_refused(loaded):
    import dataclasses

    with pytest.raises(OptionError, match="model of text, got bert, whose input is pixel_values"):
        ViewedModel(dataclasses.replace(loaded("bert"), main_input="pixel_values"))

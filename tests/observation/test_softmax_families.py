"""Families of transformers that compute a softmax by hand, against the attention weights that they return."""

from __future__ import annotations

import pytest
import torch
import transformers
from typer.testing import CliRunner

import polyhead
from polyhead.cli import app
from polyhead.observation.intercepted_calls import MATERIALISED
from tests.inspection.small_models import NAMES, text_folder, tokenizer
from tests.integrations.huggingface import models
from tests.integrations.huggingface.compare import BOUND, assert_same, result
from tests.integrations.huggingface.models import BATCH, TOKENS, VOCABULARY, Family
from tests.observation.from_weights import Expected, assert_table
from tests.observation.test_against_eager import first_of, padding

SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {**SPECIAL, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
DEBERTA = {
    **SIZES, "intermediate_size": 48, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
    "max_position_embeddings": 64,
}  # fmt: skip
WITHOUT_INTERFACE = {
    "bloom": Family("bloom", "decoder", {**SPECIAL, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": Family("falcon", "decoder", {**SIZES, "alibi": False}),
    "falcon_alibi": Family("falcon", "decoder", {**SIZES, "alibi": True, "multi_query": False}),
    "mpt": Family(
        "mpt",
        "decoder",
        {**SPECIAL, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "use_cache": True},
    ),
    "gpt_neo": Family(
        "gpt_neo",
        "decoder",
        {**SPECIAL, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "window_size": 7, "max_position_embeddings": 64},
    ),
    "deberta": Family("deberta", "encoder", DEBERTA),
    "deberta_v2": Family("deberta-v2", "encoder", DEBERTA),
    "xlnet": Family("xlnet", "encoder", {**SPECIAL, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
}  # fmt: skip
DECODERS = ("bloom", "falcon", "falcon_alibi", "mpt", "gpt_neo")
MVP = Family(
    "mvp",
    "seq2seq",
    {**SPECIAL, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
     "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
     "decoder_start_token_id": 2, "forced_eos_token_id": None},
)  # fmt: skip
FAMILIES = {**{family.name: family for family in models.FAMILIES}, **WITHOUT_INTERFACE, "mvp": MVP}

# transformers compiles parts of deberta when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def build(name="bloom", **options):
    return models.build(FAMILIES[name], **{"dtype": torch.float32, **options})


def read(model, *, observing=None, **inputs):
    """Run a model in a session; return its output and the session."""
    with torch.no_grad(), polyhead.observe(model, **(observing or {})) as session:
        output = model(**inputs)
    return output, session


# ---- statistics


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", sorted(WITHOUT_INTERFACE))
def test_statistics_are_those_of_the_returned_weights(name, side):
    model = build(name)
    mask = torch.ones(BATCH, TOKENS).long() if side == "none" else padding(side)
    inputs = {"input_ids": models.tokens()} | ({} if side == "none" else {"attention_mask": mask})
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
    actual, session = read(model, **inputs)
    assert_same(result(actual), result(expected), mask.bool())
    stack = Expected()
    stack.add(expected.attentions, mask.bool(), first_of(mask))
    table = session.profile
    assert table["max_logit"].isfinite().all()
    assert session.skipped == []
    assert_table(table, {"self": stack})


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder_decoder_and_cross_attention(side):
    model, inputs = build("mvp"), models.inputs(MVP)
    source, target = torch.ones(BATCH, TOKENS).long(), torch.ones(BATCH, 11).long()
    if side != "none":
        source, target = padding(side), padding(side, torch.tensor([11, 3, 7]), 11)
        inputs |= {"attention_mask": source, "decoder_attention_mask": target}
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
    actual, session = read(model, **inputs)
    assert_same(result(actual), result(expected), target.bool())
    stacks = {"encoder": Expected(), "decoder": Expected(), "cross": Expected(cross=True)}
    stacks["encoder"].add(expected.encoder_attentions, source.bool(), first_of(source))
    stacks["decoder"].add(expected.decoder_attentions, target.bool(), first_of(target))
    stacks["cross"].add(expected.cross_attentions, target.bool(), first_of(source))
    assert_table(session.profile, stacks)


@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache_counts_every_token_once(name):
    model, mask, new = build(name), padding("left"), 9  # longer than the windows of 7
    options = {
        "input_ids": models.tokens(), "attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new,
        "do_sample": False,
    }  # fmt: skip
    expected = model.generate(**options, output_attentions=True, return_dict_in_generate=True)
    with polyhead.observe(model) as session:
        generated = model.generate(**options)
    assert torch.equal(generated, expected.sequences)
    stack = Expected()
    for step, attentions in enumerate(expected.attentions):
        real = mask.bool() if step == 0 else torch.ones(BATCH, 1, dtype=torch.bool)
        stack.add(attentions, real, first_of(mask), TOKENS + step)
    assert_table(session.profile, {"self": stack})


@pytest.mark.parametrize("name", ["mvp", "t5"])
def test_an_encoder_that_generation_calls_by_itself_is_counted_once(name):
    model, mask, new = build(name), padding("right"), 5
    options = {
        "input_ids": models.tokens(), "attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new,
        "do_sample": False, "num_beams": 1,
    }  # fmt: skip
    expected = model.generate(**options, output_attentions=True, return_dict_in_generate=True)
    with polyhead.observe(model) as session:
        generated = model.generate(**options)
    assert torch.equal(generated, expected.sequences)
    stacks = {"encoder": Expected(), "decoder": Expected(), "cross": Expected(cross=True)}
    one, zero = torch.ones(BATCH, 1, dtype=torch.bool), torch.zeros(BATCH).long()
    stacks["encoder"].add(expected.encoder_attentions, mask.bool(), zero)
    for own, cross in zip(expected.decoder_attentions, expected.cross_attentions, strict=True):
        stacks["decoder"].add(own, one, zero)
        stacks["cross"].add(cross, one, zero)
    assert_table(session.profile, stacks)


def test_rounded_weights_are_normalised_to_sum_to_one():
    _, exact = read(build(), input_ids=models.tokens())
    _, rounded = read(build().half(), input_ids=models.tokens())
    one, other = exact.profile, rounded.profile
    assert other["tokens"].eq(BATCH * TOKENS).all()
    torch.testing.assert_close(other["entropy"], one["entropy"], rtol=0.05, atol=0.05)


# ---- the model's outputs, and its state afterwards


def test_gradients_are_unchanged():
    model, ids = build(), models.tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with polyhead.observe(model):
        model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        size = max(float(expected[name].abs().max()), 1e-6)
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=BOUND * size, msg=name)


# ---- the command


def test_the_command_reads_a_model_that_computes_attention_by_itself(tmp_path):
    pytest.importorskip("pyarrow")
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=len(NAMES), hidden_size=24, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    tokenizer().save_pretrained(tmp_path / "bloom")
    text_folder(tmp_path / "text", documents=3)
    options = ["inspect", tmp_path / "bloom", "--text", tmp_path / "text", "--context", 64, "--device", "cpu"]
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    shown = CliRunner().invoke(app, [str(x) for x in options], env=environment)
    assert shown.exit_code == 0, shown.output
    assert MATERIALISED[1:] in shown.stdout
    assert "head outputs, redundancy, copying and importance" not in shown.stdout
    assert "8 heads" in shown.stdout
    assert "Main findings" in shown.stdout

"""`via_weights`: models that compute attention by themselves are observed through their returned weights."""

from __future__ import annotations

import inspect
import itertools
from contextlib import ExitStack

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import polyhead
from polyhead.cli import app
from polyhead.errors import OptionError
from polyhead.observation import AttentionMaps, BatchMetadata, Contributions
from polyhead.observation.returned_weights import COST
from polyhead.observation.role_evidence import EvidenceCollector
from polyhead.observation.role_evidence_tokens import TokenVectors
from polyhead.observation.token_sample import TokenSample
from tests.inspection.small_models import NAMES, text_folder, tokenizer
from tests.integrations.huggingface import models
from tests.integrations.huggingface.compare import BOUND, assert_same, result
from tests.integrations.huggingface.models import BATCH, TOKENS, VOCABULARY, Family
from tests.observation.from_weights import Expected, assert_table
from tests.observation.test_against_eager import first_of, padding
from tests.observation.test_session import assert_same_trace, trace_of

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
    """Run a model in a session with `via_weights`; return its output and the session."""
    with torch.no_grad(), polyhead.observe(model, via_weights=True, **(observing or {})) as session:
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
    assert "max_logit" not in table.columns
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
    stacks = {"encoder_attentions": Expected(), "decoder_attentions": Expected(), "cross": Expected(cross=True)}
    stacks["encoder_attentions"].add(expected.encoder_attentions, source.bool(), first_of(source))
    stacks["decoder_attentions"].add(expected.decoder_attentions, target.bool(), first_of(target))
    stacks["cross"].add(expected.cross_attentions, target.bool(), first_of(source))
    assert_table(session.profile, stacks)


@pytest.mark.parametrize(
    ("name", "side"),
    [  # a selection: every side of the padding with an encoder, a decoder and an encoder-decoder
        ("vit", "none"), ("bert", "none"), ("bert", "right"), ("llama", "none"), ("llama", "left"), ("bart", "left"),
        ("bart", "right"), ("t5", "none"), ("t5", "left"), ("mistral", "left"), ("mistral", "right"), ("bert", "left"),
    ],
)  # fmt: skip
def test_via_weights_agrees_with_the_attention_interface(name, side):
    """Statistics, and the maps and role evidence of collectors, which need a second pass over the weights."""
    model, inputs = build(name), models.inputs(FAMILIES[name], torch.float32)
    if side != "none":
        inputs["attention_mask"] = padding(side)
        if "decoder_input_ids" in inputs:
            inputs["decoder_attention_mask"] = padding(side, torch.tensor([11, 3, 7]), 11)
    found = []
    for via_weights in (False, True):
        meaning = TokenVectors.of(torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(0)))
        collect = [AttentionMaps(TOKENS), EvidenceCollector(meaning=meaning), Contributions()]
        with torch.no_grad(), polyhead.observe(model, collect=collect, via_weights=via_weights) as session:
            ids = None if "decoder_input_ids" in inputs else inputs.get("input_ids")
            session.metadata = BatchMetadata(documents=torch.arange(BATCH), tokens=ids)
            model(**inputs)
        found.append(session.observations)
    ordinary, weights = found
    by_stack = [sorted(x.sites, key=lambda y: (y.site.kind, "decoder" in y.site.stack, y.site.layer)) for x in found]
    assert len(by_stack[0]) == len(by_stack[1]) > 0
    for one, other in zip(*by_stack, strict=True):
        columns, others = one.compute(), other.compute()
        assert set(columns) - set(others) == {"max_logit", "max_logit_std", "max_logit_max"}
        for column, values in others.items():
            torch.testing.assert_close(values, columns[column], rtol=1e-5, atol=1e-5, msg=f"{one.site}: {column}")
        expected, actual = ordinary.collected[one.site], weights.collected[other.site]
        for collector in ("maps", "evidence"):
            if collector in expected:
                for part, tensor in expected[collector].state().items():
                    torch.testing.assert_close(
                        actual[collector].state()[part], tensor, rtol=1e-4, atol=1e-4, msg=f"{one.site}: {part}"
                    )
        assert expected["contributions"].moments is not None
        assert actual["contributions"].moments is None


@pytest.mark.parametrize("name", [*DECODERS, "mistral"])
def test_generation_with_a_cache_counts_every_token_once(name):
    model, mask, new = build(name), padding("left"), 9  # longer than the windows of 7
    options = {
        "input_ids": models.tokens(), "attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new,
        "do_sample": False,
    }  # fmt: skip
    expected = model.generate(**options, output_attentions=True, return_dict_in_generate=True)
    with polyhead.observe(model, via_weights=True) as session:
        generated = model.generate(**options)
    assert torch.equal(generated, expected.sequences)
    stack = Expected()
    for step, attentions in enumerate(expected.attentions):
        real = mask.bool() if step == 0 else torch.ones(BATCH, 1, dtype=torch.bool)
        stack.add(attentions, real, first_of(mask), TOKENS + step)
    assert_table(session.profile, {"self": stack})


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_slots_of_a_preallocated_cache_that_are_not_written_are_no_keys(name):
    model, ids, mask = build(name), models.tokens(), padding("left")
    tables = []
    for cache in (transformers.DynamicCache(config=model.config), transformers.StaticCache(model.config, 37)):
        with torch.no_grad(), polyhead.observe(model, via_weights=True) as session:
            for end, start in ((13, 0), (17, 13), (TOKENS, 17)):
                model(input_ids=ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        tables.append(session.profile)
    one, other = tables
    assert one["tokens"].eq(int(mask.sum())).all()
    for column in one.columns:
        torch.testing.assert_close(other[column], one[column], rtol=1e-5, atol=1e-5, msg=column)


def test_a_decoder_mask_covers_cached_and_new_tokens():
    """With a cache, a decoder step has fewer queries than its mask has tokens, also in cross-attention."""
    model, target = build("t5"), padding("left", torch.tensor([11, 3, 7]), 11)
    ids, source, encoder_ids = models.tokens(length=11, seed=2), padding("right"), models.tokens()
    tables = []
    for ends in ((11,), (4, 5, 11)):
        with torch.no_grad(), polyhead.observe(model, via_weights=True) as session:
            encoded = model.encoder(input_ids=encoder_ids, attention_mask=source, output_attentions=True)
            cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
            for start, end in itertools.pairwise((0, *ends)):
                model(
                    encoder_outputs=encoded, attention_mask=source, decoder_input_ids=ids[:, start:end],
                    decoder_attention_mask=target[:, :end], past_key_values=cache,
                )  # fmt: skip
        tables.append(session.profile)
    one, other = tables
    assert set(one["tokens"].tolist()) == {45.0, 21.0}
    for column in one.columns:
        torch.testing.assert_close(other[column], one[column], rtol=1e-5, atol=1e-5, equal_nan=True, msg=column)


def test_weights_in_a_passed_encoder_output_are_not_counted_again():
    model, inputs = build("mvp"), models.inputs(MVP)
    with torch.no_grad(), polyhead.observe(model, via_weights=True) as session:
        encoded = model.get_encoder()(input_ids=inputs["input_ids"], output_attentions=True)
        for _ in range(2):
            output = model(
                encoder_outputs=encoded, decoder_input_ids=inputs["decoder_input_ids"], output_attentions=True
            )
    assert len(output.encoder_attentions) == 2
    table = session.profile
    of_encoder = torch.tensor([site.stack == "encoder_attentions.*" for site in table.sites])
    assert table["tokens"][of_encoder].eq(BATCH * TOKENS).all()
    assert table["tokens"][~of_encoder].eq(2 * BATCH * 11).all()


@pytest.mark.parametrize("name", ["mvp", "t5"])
def test_an_encoder_that_generation_calls_by_itself_is_counted_once(name):
    model, mask, new = build(name), padding("right"), 5
    options = {
        "input_ids": models.tokens(), "attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new,
        "do_sample": False, "num_beams": 1,
    }  # fmt: skip
    expected = model.generate(**options, output_attentions=True, return_dict_in_generate=True)
    with polyhead.observe(model, via_weights=True) as session:
        generated = model.generate(**options)
    assert torch.equal(generated, expected.sequences)
    stacks = {"encoder_attentions": Expected(), "decoder_attentions": Expected(), "cross": Expected(cross=True)}
    one, zero = torch.ones(BATCH, 1, dtype=torch.bool), torch.zeros(BATCH).long()
    stacks["encoder_attentions"].add(expected.encoder_attentions, mask.bool(), zero)
    for own, cross in zip(expected.decoder_attentions, expected.cross_attentions, strict=True):
        stacks["decoder_attentions"].add(own, one, zero)
        stacks["cross"].add(cross, one, zero)
    assert_table(session.profile, stacks)


def test_the_work_grows_with_the_square_of_the_context():
    """FLOPs beyond those of the model itself are quadratic in the context length."""
    model = build("bloom", dtype=torch.float32)
    costs = []
    for size in (32, 64):
        ids = torch.randint(5, VOCABULARY, (1, size))
        found = []
        for observed in (False, True):
            with torch.no_grad(), ExitStack() as stack:
                if observed:
                    maps = AttentionMaps(size, resolution=4)
                    stack.enter_context(polyhead.observe(model, collect=[maps], via_weights=True))
                counter = stack.enter_context(FlopCounterMode(display=False))
                model(input_ids=ids, use_cache=False)
            found.append(counter.get_total_flops())
        costs.append(found[1] - found[0])
    assert 0 < costs[1] <= 4 * costs[0]


def test_rounded_weights_are_normalised_to_sum_to_one():
    _, exact = read(build(), input_ids=models.tokens())
    _, rounded = read(build().half(), input_ids=models.tokens())
    one, other = exact.profile, rounded.profile
    assert other["tokens"].eq(BATCH * TOKENS).all()
    torch.testing.assert_close(other["entropy"], one["entropy"], rtol=0.05, atol=0.05)


# ---- the model's outputs, and its state afterwards


@pytest.mark.parametrize("name", ["bloom", "llama", "t5"])
def test_the_caller_gets_weights_only_if_requested(name):
    model, inputs = build(name), models.inputs(FAMILIES[name], torch.float32)
    with torch.no_grad():
        plain, full = model(**inputs), model(**inputs, output_attentions=True)
        with polyhead.observe(model, via_weights=True):
            assert list(model(**inputs)) == list(plain)
            requested = model(**inputs, output_attentions=True)
            assert list(requested) == list(full)
            model.config.output_attentions = True
            by_config = model(**inputs)
            model.config.output_attentions = False
    kind = "cross_attentions" if name == "t5" else "attentions"
    for output in (requested, by_config):
        assert all(torch.equal(x, y) for x, y in zip(output[kind], full[kind], strict=True))


@pytest.mark.parametrize("name", ["bloom", "llama", "t5", "bart"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(name, fails):
    model, inputs = build(name), models.inputs(FAMILIES[name], torch.float32)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "sdpa"
    before, random = trace_of(model), torch.get_rng_state()
    with torch.no_grad():
        expected = result(model(**inputs))
    session = polyhead.observe(model, via_weights=True)
    assert_same_trace(trace_of(model), before)

    def run():
        with torch.no_grad(), session:
            model(**inputs)
            assert model.config._attn_implementation == "eager"
            return 1 // (not fails)

    if fails:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    assert_same_trace(trace_of(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(session.profile)
    with torch.no_grad():
        assert torch.equal(result(model(**inputs)), expected)


def test_calls_after_one_that_raised_are_counted():
    model, ids = build(), models.tokens()
    with torch.no_grad(), polyhead.observe(model, via_weights=True) as session:
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 3), VOCABULARY))
        model.transformer(input_ids=ids)
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 3), VOCABULARY))
        model(input_ids=ids)
    assert session.profile["tokens"].eq(2 * ids.numel()).all()


def test_gradients_are_unchanged():
    model, ids = build(), models.tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with polyhead.observe(model, via_weights=True):
        model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        size = max(float(expected[name].abs().max()), 1e-6)
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=BOUND * size, msg=name)


def test_output_attentions_may_be_positional():
    model, ids = build(), models.tokens()
    names = list(inspect.signature(model.forward).parameters)
    given = [ids, *[None] * (names.index("output_attentions") - 1)]
    with torch.no_grad(), polyhead.observe(model, via_weights=True) as session:
        assert model(*given, False).get("attentions") is None
        assert len(model(*given, True).attentions) == 2
    assert session.profile["tokens"].eq(2 * ids.numel()).all()


# ---- names and selection


def test_base_model_and_full_model_use_the_same_names():
    model, ids = build(), models.tokens()
    with torch.no_grad(), polyhead.observe(model, via_weights=True) as session:
        model(input_ids=ids)
        model.transformer(input_ids=ids)
    table = session.profile
    assert [site.name for site in dict.fromkeys(table.sites)] == ["attentions.0", "attentions.1"]
    assert table["tokens"].eq(2 * ids.numel()).all()
    assert repr(session) == f"Session(BloomForCausalLM, 8 heads observed; {COST})"


def test_a_model_inside_a_module_is_named_by_its_path():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.language = build()

        def forward(self, ids):
            return self.language(input_ids=ids).logits

    model = Wrapped().eval()
    with torch.no_grad(), polyhead.observe(model, via_weights=True) as session:
        model(models.tokens())
    assert {site.name for site in session.profile.sites} == {"language.attentions.0", "language.attentions.1"}


def test_layers_heads_and_every_other_call():
    model, batches = build(), [models.tokens(seed=seed) for seed in range(3)]
    with torch.no_grad():
        with polyhead.observe(model, via_weights=True, layers=["attentions.1"], heads=[2], every=2) as session:
            for ids in batches:
                model(input_ids=ids)
        with polyhead.observe(model, via_weights=True) as expected:
            for ids in batches[::2]:
                model(input_ids=ids)
    table, whole = session.profile, expected.profile
    assert [(site.name, head) for site, head in zip(table.sites, table.heads, strict=True)] == [("attentions.1", 2)]
    for column in table.columns:
        torch.testing.assert_close(table[column][0], whole[column][6], rtol=1e-12, atol=1e-12, msg=column)


def test_a_token_sample_is_empty_without_head_outputs():
    sample = TokenSample({("attentions.0", "self"): torch.zeros(4, 8, 8)})
    with torch.no_grad(), polyhead.observe(build(), via_weights=True, collect=[sample]) as session:
        session.metadata = BatchMetadata(documents=torch.arange(BATCH))
        session.model(input_ids=models.tokens())
    (site,) = [site for site in session.observations.collected if site.name == "attentions.0"]
    assert session.observations.collected[site]["token_sample"].hashes.numel() == 0


# ---- errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"statistics": ("entropy", "max_logit")},
            "logits cannot be recovered from attention weights, got .* max_logit",
        ),
        ({"layers": ["transformer.h.0"]}, "output names such as attentions.3, got 'transformer.h.0'"),
        ({"adapters": {"transformer": None}}, "combined with adapters, got both"),
    ],
)
def test_unsupported_options_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        polyhead.observe(build(), via_weights=True, **options)


def test_a_module_without_a_model_of_transformers_is_refused():
    with pytest.raises(OptionError, match="got Linear, which contains no transformers model"):
        polyhead.observe(nn.Linear(3, 3), via_weights=True)


def test_without_via_weights_the_error_suggests_it():
    with pytest.raises(OptionError, match=r"got BloomForCausalLM.*via_weights=True.*--via-weights"):
        polyhead.observe(build())


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"return_dict": False}, "needs a model output with named fields, got LlamaForCausalLM with return_dict=False"),
        ({"attention_mask": torch.ones(BATCH, 1, TOKENS, TOKENS).bool().tril()}, r"here \[3, 23\] .* got \[3, 1, 23,"),
    ],
)
def test_calls_without_readable_weights_or_mask_are_refused(inputs, words):
    with pytest.raises(OptionError, match=words):
        read(build("llama"), input_ids=models.tokens(), **inputs)


def test_training_is_refused_for_its_dropout():
    with pytest.raises(
        OptionError, match=r"weights after dropout, got BloomForCausalLM in training mode; call model.eval"
    ):
        read(build().train(), input_ids=models.tokens())


def test_learned_sinks_are_refused():
    with pytest.raises(OptionError, match="learned sinks and approximate attention"):
        read(build("gpt_oss"), input_ids=models.tokens())


@pytest.mark.parametrize(
    ("globals_", "words"), [(0, "23 queries and 5 keys"), (1, "local and global attention separately")]
)
def test_weights_in_bands_are_refused(globals_, words):
    options = {**SIZES, "intermediate_size": 48, "attention_window": [4, 4], "max_position_embeddings": 66}
    model = models.build(Family("longformer", "encoder", options), dtype=torch.float32)
    given = torch.zeros(BATCH, TOKENS).long()
    given[:, :globals_] = 1
    with pytest.raises(OptionError, match=words):
        read(model, input_ids=models.tokens(), global_attention_mask=given)


def test_a_model_that_returns_no_weights_of_its_own_is_refused():
    with pytest.raises(OptionError, match=r"CLIPOutput of CLIPModel .* observe one of the models inside it"):
        read(build("clip"), **models.inputs(FAMILIES["clip"], torch.float32))


class Taking(transformers.PreTrainedModel):
    config_class = transformers.PretrainedConfig

    def forward(self, input_ids):
        return input_ids


class TakingAll(Taking):
    def forward(self, input_ids, **others):
        return input_ids


def test_models_without_output_attentions_are_rejected():
    config = transformers.PretrainedConfig()
    with pytest.raises(OptionError, match=r"got Taking, which has no such argument.*adapters="):
        read(Taking(config).eval(), input_ids=models.tokens())
    with pytest.raises(OptionError, match="got Tensor of TakingAll with no named fields"):
        read(TakingAll(config).eval(), input_ids=models.tokens())


def test_gates_are_refused():
    model, ids = build(), models.tokens()
    with torch.no_grad(), polyhead.observe(model, via_weights=True) as session:
        session.gates["attentions.1", "self"] = torch.ones(4)
        with pytest.raises(OptionError, match=r"which via_weights does not observe, got a gate for 'attentions.1'"):
            model(input_ids=ids)


def test_a_second_session_is_refused():
    model = build("llama")
    with (
        polyhead.observe(model, via_weights=True),
        pytest.raises(OptionError, match="one session at a time"),
        polyhead.observe(model),
    ):
        pass


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
    refused = CliRunner().invoke(app, [str(x) for x in options], env=environment)
    assert refused.exit_code == 2
    assert "--via-weights" in refused.stderr
    shown = CliRunner().invoke(app, [str(x) for x in [*options, "--via-weights"]], env=environment)
    assert shown.exit_code == 0, shown.output
    assert COST[1:] in shown.stdout
    assert "Skipped: head outputs, redundancy, copying and importance" in shown.stdout
    assert "8 heads" in shown.stdout
    assert "Main findings" in shown.stdout

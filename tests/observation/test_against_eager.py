"""`observe` agrees with statistics of the weights of eager attention, for each model family."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import transformers

import polyhead
from polyhead.integrations.huggingface.registration import register
from tests.integrations.huggingface import models
from tests.integrations.huggingface.compare import BOUND, assert_same, result
from tests.integrations.huggingface.models import BATCH, TOKENS
from tests.observation.from_weights import Expected, assert_table, largest_logits

FAMILIES = {family.name: family for family in models.FAMILIES}
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "phi3")
ENCODERS = ("bert", "roberta", "electra", "distilbert", "modernbert")
LENGTHS = torch.tensor([TOKENS, 17, 5])


# Under float64 eager attention gives NaN for a row that sees no key, and hands it on to others.
PADDED = torch.float32


def padding(side, lengths=LENGTHS, size=TOKENS):
    index = torch.arange(size)
    real = index < lengths[:, None] if side == "right" else index >= size - lengths[:, None]
    return real.long()


def first_of(mask):
    return mask.argmax(-1)


def run(model, **inputs):
    """The model under eager with its weights, and under observation."""
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        with polyhead.observe(model) as session:
            actual = model(**inputs)
    return expected, actual, session.profile


PADDINGS = ("holes", "right", "left")
# Every family without padding and with two kinds of it; each kind with causal masks, windows, sinks and encoders.
SIDES = [
    (name, side)
    for number, name in enumerate([*DECODERS, *ENCODERS])
    for side in ("none", *PADDINGS)
    if side != PADDINGS[number % 3]
]


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_self_attention(name, side):
    model = models.build(FAMILIES[name], dtype=torch.float64 if side == "none" else PADDED)
    mask = torch.ones(BATCH, TOKENS).long() if side == "none" else padding("right" if side == "holes" else side)
    if side == "holes":
        mask[0, 7] = mask[1, 11] = 0
    given = {} if side == "none" else {"attention_mask": mask}
    expected, actual, table = run(model, input_ids=models.tokens(), **given)
    assert_same(result(actual), result(expected), mask.bool())
    stack = Expected(sinks=name == "gpt_oss")
    stack.add(expected.attentions, mask.bool(), first_of(mask))
    assert_table(table, {"self": stack})


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_encoder_decoder_and_cross_attention(name, side):
    model = models.build(FAMILIES[name], dtype=torch.float64 if side == "none" else PADDED)
    inputs = models.inputs(FAMILIES[name])
    source, target = torch.ones(BATCH, TOKENS).long(), torch.ones(BATCH, 11).long()
    if side != "none":
        source, target = padding(side), padding(side, torch.tensor([11, 3, 7]), 11)
        inputs |= {"attention_mask": source, "decoder_attention_mask": target}
    expected, actual, table = run(model, **inputs)
    assert_same(result(actual), result(expected), target.bool())
    stacks = {"encoder": Expected(), "decoder": Expected(), "cross": Expected(cross=True)}
    stacks["encoder"].add(expected.encoder_attentions, source.bool(), first_of(source))
    stacks["decoder"].add(expected.decoder_attentions, target.bool(), first_of(target))
    # A cross-attention has no order of its keys beyond the mask of its source: the first that it may see.
    first = first_of(source) if side == "left" else torch.zeros(BATCH).long()
    stacks["cross"].add(expected.cross_attentions, target.bool(), first)
    assert_table(table, stacks)


def test_whisper_tells_cross_attention_from_self_attention():
    model = models.build(FAMILIES["whisper"])
    target = padding("right", torch.tensor([11, 3, 7]), 11)
    expected, _, table = run(model, **models.inputs(FAMILIES["whisper"]), decoder_attention_mask=target)
    stacks = {"encoder": Expected(), "decoder": Expected(), "cross": Expected(cross=True)}
    frames, zero = torch.ones(BATCH, 13, dtype=torch.bool), torch.zeros(BATCH).long()
    stacks["encoder"].add(expected.encoder_attentions, frames, zero)
    stacks["decoder"].add(expected.decoder_attentions, target.bool(), zero)
    stacks["cross"].add(expected.cross_attentions, target.bool(), zero)
    assert_table(table, stacks)
    assert {site.kind for site in table.sites} == {"self", "cross"}


@pytest.mark.parametrize("name", ["vit", "dinov2", "wav2vec2"])
def test_vision_and_audio(name):
    model = models.build(FAMILIES[name])
    expected, actual, table = run(model, **models.inputs(FAMILIES[name]))
    assert_same(result(actual), result(expected))
    stack = Expected()
    tokens = expected.attentions[0].shape[2]
    stack.add(expected.attentions, torch.ones(BATCH, tokens, dtype=torch.bool), torch.zeros(BATCH).long())
    assert_table(table, {"self": stack})


def test_two_towers_are_two_stacks():
    model = models.build(FAMILIES["clip"])
    with torch.no_grad(), polyhead.observe(model) as session:
        model(**models.inputs(FAMILIES["clip"]))
    table = session.profile
    towers = {site.stack.split(".")[0]: site.layer for site in table.sites}
    assert towers == {"text_model": 1, "vision_model": 1}
    assert set(table["tokens"].tolist()) == {BATCH * TOKENS, BATCH * 26}


# Each family over one kind of cache; windows alone (mistral), and windows with sinks (gpt_oss), over both.
CACHES = [
    ("gpt2", None), ("llama", "static"), ("mistral", None), ("mistral", "static"), ("qwen2", None),
    ("gemma2", "static"), ("gpt_oss", None), ("gpt_oss", "static"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cache"), CACHES)
def test_generation_counts_every_token_once(name, cache):
    model = models.build(FAMILIES[name], dtype=PADDED)
    mask, new = padding("left"), 9  # longer than the windows of 7
    options = {
        "input_ids": models.tokens(), "attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new,
        "do_sample": False,
    }  # fmt: skip
    expected = model.generate(**options, output_attentions=True, return_dict_in_generate=True)
    static = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    with polyhead.observe(model) as session:
        generated = model.generate(**options, **static)
    assert torch.equal(generated, expected.sequences)
    stack = Expected(sinks=name == "gpt_oss")
    for step, attentions in enumerate(expected.attentions):
        real = mask.bool() if step == 0 else torch.ones(BATCH, 1, dtype=torch.bool)
        stack.add(attentions, real, first_of(mask), TOKENS + step)
    table = session.profile
    assert set(table["tokens"].tolist()) == {int(mask.sum()) + BATCH * (new - 1)}
    assert_table(table, {"self": stack})


@pytest.mark.parametrize("form", ["two axes", "booleans", "finite", "finite rows"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_on_the_left_and_holes(name, form):
    model, mask = models.build(FAMILIES[name], dtype=PADDED), padding("left")
    mask[0, 7] = mask[1, 11] = 0
    square = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    allowed = (square if name == "bert" else square.tril()) & mask.bool()[:, None, None]
    low = torch.finfo(PADDED).min
    of_keys = torch.where(mask.bool()[:, None, None], 0.0, low)
    given = {
        "two axes": mask,
        "booleans": allowed,
        "finite": of_keys if name == "bert" else torch.where(allowed, 0.0, low),
        "finite rows": torch.where(allowed, 0.0, low),
    }[form]
    with torch.no_grad():
        expected = model(models.tokens(), attention_mask=torch.where(allowed, 0.0, low), output_attentions=True)
        model.set_attn_implementation("sdpa")  # eager attention adds booleans
        outside = model(models.tokens(), attention_mask=given)
        with polyhead.observe(model) as session:
            actual = model(models.tokens(), attention_mask=given)
    assert_same(result(actual), result(outside))
    stack = Expected()
    stack.add(expected.attentions, mask.bool(), first_of(mask))
    assert_table(session.profile, {"self": stack})


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("low", [torch.finfo(PADDED).min, -65504.0, -1e4])
def test_padding_on_the_left_of_a_dense_mask(low, keep):
    model, mask = models.build(FAMILIES["llama"], dtype=PADDED), padding("left")
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    given = {"input_ids": models.tokens(), "attention_mask": torch.where(allowed, 0.0, low)}
    with torch.no_grad():
        expected = model(**given, output_attentions=True)
    with polyhead.observe(model, keep_statistics=keep) as session:
        actual = model(**given)
        kept = session.statistics.mean("sink_mass").detach() if keep else None
    assert_same(result(actual).detach(), result(expected), mask.bool())
    stack = Expected()
    stack.add(expected.attentions, mask.bool(), first_of(mask))
    assert_table(session.profile, {"self": stack})
    if kept is not None:
        torch.testing.assert_close(kept.double(), session.profile["sink_mass"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["growing", "window", "preallocated"])
@pytest.mark.parametrize("side", ["none", "left", "holes"])
def test_chunks_from_a_cache_have_the_statistics_of_one_forward(side, kind):
    model, ids = models.build(FAMILIES["llama4_text"], dtype=PADDED), models.tokens()
    mask = padding("left") if side == "left" else torch.ones(BATCH, TOKENS).long()
    if side == "holes":
        mask[0, 9] = mask[1, 15] = 0
    if kind == "growing":
        cache = transformers.DynamicCache(config=model.config)
    elif kind == "window":
        cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 2)
    else:
        layers = [transformers.cache_utils.StaticLayer(TOKENS + 2) for _ in range(model.config.num_hidden_layers)]
        cache = transformers.Cache(layers=layers)
    with torch.no_grad():
        with polyhead.observe(model) as whole:
            model(ids, attention_mask=mask)
        with polyhead.observe(model) as steps:
            for start, stop in itertools.pairwise([0, 5, *range(9, TOKENS + 1)]):
                model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
    for name, values in whole.profile.columns.items():
        torch.testing.assert_close(steps.profile[name], values, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("observed", ["both", "neither"])
def test_caches_with_windows_that_take_turns_or_began_before_the_session(observed):
    model = models.build(FAMILIES["mistral"], dtype=PADDED)
    total = TOKENS + 2
    ids = torch.cat([models.tokens(), models.tokens()[:, :2]], 1)
    stack, parts = Expected(), []
    for lengths in ([total, total - 4, 3], [3, 4, total]):
        mask = padding("left", torch.tensor(lengths), total)
        parts.append((mask, *(transformers.DynamicCache(config=model.config) for _ in range(2))))

    def call(part, start, stop, *, expected):
        mask, own, other = part
        with torch.no_grad():
            outputs = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                past_key_values=other if expected else own,
                output_attentions=expected,
            )
        if expected and (start or observed == "both"):
            stack.add(outputs.attentions, mask[:, start:stop].bool(), first_of(mask), stop)

    calls = [(part, *span) for span in ((0, TOKENS), (TOKENS, TOKENS + 1), (TOKENS + 1, total)) for part in parts]
    for each in calls:
        call(*each, expected=True)
    if observed == "neither":
        for each in calls[:2]:
            call(*each, expected=False)
    with polyhead.observe(model) as session:
        for each in calls if observed == "both" else calls[2:]:
            call(*each, expected=False)
    assert_table(session.profile, {"self": stack})


@pytest.mark.parametrize("form", ["two axes", "four axes"])
@pytest.mark.parametrize(("lengths", "order"), [([12, 5, 3], [2, 0, 1]), ([12, 9, 3], [2, 2, 1]), ([12, 3, 3], [1, 0])])
def test_sequences_over_a_window_that_change_places(lengths, order, form):
    model, prompt, total = models.build(FAMILIES["mistral"], dtype=PADDED), 12, 16
    ids, mask = models.tokens()[:, :total], padding("left", torch.tensor(lengths) + total - prompt, total)
    stack, caches = Expected(), [transformers.DynamicCache(config=model.config) for _ in range(2)]
    window = torch.ones(total, total, dtype=torch.bool).tril().triu(1 - model.config.sliding_window)

    def given(mask, start, stop, first):
        if form == "two axes":
            return mask[:, :stop]
        allowed = window[start:stop, first:stop] & mask[:, None, None, first:stop].bool()
        return torch.where(allowed, 0.0, torch.finfo(PADDED).min)

    with torch.no_grad():
        for cache, is_expected in zip(caches, (True, False), strict=True):
            rows, spans = torch.arange(BATCH), [(0, prompt), *itertools.pairwise(range(prompt, total + 1))]
            with polyhead.observe(model) if not is_expected else contextlib.nullcontext() as session:
                for start, stop in spans:
                    if start == prompt:
                        rows = torch.tensor(order)
                        cache.batch_select_indices(rows) if len(rows) < BATCH else cache.reorder_cache(rows)
                    own, first = mask[rows], max(0, start - model.config.sliding_window + 1)
                    outputs = model(
                        ids[rows, start:stop],
                        attention_mask=given(own, start, stop, first),
                        past_key_values=cache,
                        output_attentions=is_expected,
                    )
                    if is_expected:
                        stack.add(outputs.attentions, own[:, start:stop].bool(), first_of(own), stop)
    assert_table(session.profile, {"self": stack})


@pytest.mark.parametrize("kind", ["growing", "preallocated"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_dense_mask_over_a_cache(side, kind):
    model, ids = models.build(FAMILIES["llama"], dtype=PADDED), models.tokens()
    mask = torch.ones(BATCH, TOKENS).long() if side == "none" else padding(side)
    size = TOKENS if kind == "growing" else TOKENS + 5
    keys = torch.nn.functional.pad(mask, (0, size - TOKENS)).bool()
    allowed = torch.ones(TOKENS, size, dtype=torch.bool).tril() & keys[:, None, None]
    given = torch.where(allowed, 0.0, torch.finfo(PADDED).min)
    caches = {
        "growing": transformers.DynamicCache(config=model.config),
        "preallocated": transformers.StaticCache(config=model.config, max_cache_len=size),
    }
    with torch.no_grad():
        with polyhead.observe(model) as whole:
            model(ids, attention_mask=mask)
        with polyhead.observe(model) as steps:
            for start, stop in itertools.pairwise([0, 12, 15, *range(16, TOKENS + 1)]):
                now = given[:, :, start:stop, : stop if kind == "growing" else size]
                model(ids[:, start:stop], attention_mask=now, past_key_values=caches[kind])
    for name, values in whole.profile.columns.items():
        torch.testing.assert_close(steps.profile[name], values, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("side", ["none", "left"])
def test_several_sinks_leave_a_window_one_by_one(side):
    model, ids = models.build(FAMILIES["mistral"], dtype=PADDED), models.tokens()
    mask = padding("left") if side == "left" else torch.ones(BATCH, TOKENS).long()
    cache, statistics = transformers.DynamicCache(config=model.config), polyhead.Statistics("sink_mass", sink_keys=4)
    with torch.no_grad():
        with polyhead.observe(model, statistics=statistics) as whole:
            model(ids, attention_mask=mask)
        with polyhead.observe(model, statistics=statistics) as steps:
            for start, stop in itertools.pairwise([0, 5, *range(9, TOKENS + 1)]):
                model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
    torch.testing.assert_close(steps.profile["tokens"], whole.profile["tokens"], rtol=0, atol=0)
    torch.testing.assert_close(steps.profile["sink_mass"], whole.profile["sink_mass"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_generation_of_an_encoder_decoder(name):
    model = models.build(FAMILIES[name])
    mask, new = padding("right"), 5
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


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "t5"])
def test_largest_logit(name):
    model = models.build(FAMILIES[name])
    inputs, found = models.inputs(FAMILIES[name]), []
    with torch.no_grad():
        with largest_logits(found):
            model(**inputs)
        with polyhead.observe(model, statistics="max_logit") as session:
            model(**inputs)
    sites = {observed.site: observed for observed in session.observations.sites}
    assert len(found) == len(sites)
    for logits, (site, observed) in zip(found, sites.items(), strict=True):
        computed = observed.compute()
        rows = logits.transpose(0, 1).flatten(1)
        size = float(rows.abs().max())
        for column, value in (
            ("max_logit", rows.mean(-1)),
            ("max_logit_std", rows.std(-1, correction=0)),
            ("max_logit_max", rows.amax(-1)),
        ):
            torch.testing.assert_close(computed[column], value, rtol=0, atol=BOUND * size, msg=f"{site}: {column}")


@pytest.mark.parametrize("form", ["booleans", "least numbers", "infinities", "one row of least numbers"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_is_derived_from_a_custom_mask(name, form):
    model, ids = models.build(FAMILIES[name], dtype=PADDED), models.tokens()
    real = padding("right")
    allowed = real[:, None, None, :].bool()
    if name == "llama":
        allowed = allowed & torch.ones(TOKENS, TOKENS).bool().tril()
    elif not form.startswith("one row"):
        allowed = allowed.expand(-1, -1, TOKENS, -1)
    least = -torch.inf if form == "infinities" else torch.finfo(torch.float32).min
    mask = allowed if form == "booleans" else torch.where(allowed, 0.0, least)
    if form == "booleans":  # eager attention would add them
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        with polyhead.observe(model) as described:
            model(input_ids=ids, attention_mask=real)
        with polyhead.observe(model) as given:
            model(input_ids=ids, attention_mask=mask)
    one, other = described.profile, given.profile
    assert one["tokens"].eq(int(real.sum())).all()
    for column in one.columns:
        torch.testing.assert_close(other[column], one[column], rtol=0, atol=BOUND * TOKENS, msg=column)


@pytest.mark.parametrize("form", ["positions", "cumulative lengths", "two tensors of cumulative lengths"])
def test_packed_rows_start_anew_in_every_document(form):
    model = models.build(FAMILIES["llama"])
    ids, ends = models.tokens(1), (0, 7, 18, TOKENS)
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    positions = torch.cat([torch.arange(part.stop - part.start) for part in parts])[None]
    lengths, given = torch.tensor(ends, dtype=torch.int32), {}
    if form != "positions":
        register()
        model.set_attn_implementation("polyhead")
        given = {
            "cu_seq_lens_q": lengths,
            "cu_seq_lens_k": lengths if form == "cumulative lengths" else lengths.clone(),
        }
    with torch.no_grad():
        with polyhead.observe(model) as packed:
            model(input_ids=ids, position_ids=positions, use_cache=False, **given)
        with polyhead.observe(model) as apart:
            for part in parts:
                model(input_ids=ids[:, part])
    one, other = packed.profile, apart.profile
    assert one["tokens"].eq(TOKENS).all()
    for name in one.columns:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=BOUND * TOKENS, msg=name)

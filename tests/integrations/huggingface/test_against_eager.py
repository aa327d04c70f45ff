"""The registered implementation agrees with eager attention for every family and mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="these tests are about models of transformers")

from transformers import CONFIG_MAPPING

from tests.integrations.huggingface.compare import assert_same, implementation, result
from tests.integrations.huggingface.models import (
    BATCH,
    DECODERS,
    ENCODERS,
    FAMILIES,
    GRANITE_SWA,
    SEQ2SEQ,
    TOKENS,
    VOCABULARY,
    Family,
    build,
    inputs,
    tokens,
)

# opt and gpt_oss do not tell their masks of positions, and llama4 counts its chunks from the start of the row.
NOT_PACKED = ("opt", "gpt_oss", "llama4_text")
REAL = (TOKENS, 14, 5)  # real tokens of each row


def by_name(families: tuple[Family, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=str)


def padding(side: str) -> Tensor:
    """[batch, tokens]: right, left, or right with holes."""
    index = torch.arange(TOKENS)
    lengths = torch.tensor(REAL)[:, None]
    real = index >= TOKENS - lengths if side == "left" else index < lengths
    if side == "holes":
        real[0, 3:5] = False
        real[1, 0] = False
        real[1, 7] = False
    return real.long()


def outputs(family: Family, dtype: torch.dtype = torch.float32, **arguments: Tensor | bool) -> tuple[dict, dict]:
    """Return the outputs of eager and of polyhead for the same call.

    float32, because eager hides keys by adding the least number of the dtype and then rounds to float32: in float64
    a row without keys becomes NaN under eager, and spreads.
    """
    model = build(family, dtype=dtype)
    with torch.no_grad(), implementation(model, "eager"):
        expected = model(**arguments)
    with torch.no_grad(), implementation(model, "polyhead"):
        actual = model(**arguments)
    return actual, expected


@by_name(FAMILIES)
def test_plain_input(family):
    actual, expected = outputs(family, torch.float64, **inputs(family))
    assert_same(result(actual), result(expected))


@by_name(FAMILIES)
def test_gradients_of_every_parameter(family):
    model = build(family)
    found = []
    for name in ("eager", "polyhead"):
        model.zero_grad()
        with implementation(model, name):
            value = result(model(**inputs(family)))
        weight = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)
        (value * weight).sum().backward()
        found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    expected, actual = found
    assert expected.keys() == actual.keys()
    # One bound for all of them: a bias of the keys, say, has no gradient but rounding.
    largest = max(float(x.abs().max()) for x in expected.values())
    for key, gradient in expected.items():
        size = max(float(gradient.abs().max()), 1e-2 * largest)
        torch.testing.assert_close(
            actual[key] / size, gradient / size, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@by_name((*FAMILIES, GRANITE_SWA))
def test_returned_weights(family):
    if family.name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    model = build(family)
    arguments = inputs(family)
    if family.kind == "clip":  # its outputs gather no weights of their own; those of its text tower do
        model, arguments = model.text_model, {"input_ids": tokens()}
    with torch.no_grad(), implementation(model, "eager"):
        expected = model(**arguments, output_attentions=True)
    with torch.no_grad(), implementation(model, "polyhead"):
        actual = model(**arguments, output_attentions=True)
        assert model(**arguments).get("attentions") is None
    names = [name for name in expected if name.endswith("attentions") and len(expected[name])]
    assert names
    assert_same(result(actual), result(expected))
    for name in names:
        assert len(actual[name]) == len(expected[name]) == 2
        for ours, theirs in zip(actual[name], expected[name], strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@by_name((*DECODERS, *ENCODERS))
def test_padded_input(family, side):
    mask = padding(side)
    actual, expected = outputs(family, input_ids=tokens(), attention_mask=mask)
    assert_same(result(actual), result(expected), where=mask.bool())


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@by_name(SEQ2SEQ)
def test_padded_source_and_target(family, side):
    mask = padding(side)
    target = padding(side)[:, -11:] if side == "left" else padding(side)[:, :11]
    arguments = {"input_ids": tokens(), "decoder_input_ids": tokens(length=11, seed=2)}
    actual, expected = outputs(family, **arguments, attention_mask=mask, decoder_attention_mask=target)
    assert_same(result(actual), result(expected), where=target.bool())


@by_name((*DECODERS, *ENCODERS))
def test_a_callers_own_mask(family):
    model = build(family, dtype=torch.float32)
    allowed = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.5
    allowed = allowed | torch.eye(TOKENS, dtype=torch.bool)
    added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    arguments = {"input_ids": tokens()}
    if family.name == "opt":  # which would count its positions in a 2-D mask
        arguments["position_ids"] = torch.arange(TOKENS).expand(BATCH, -1)
    with torch.no_grad(), implementation(model, "eager"):
        expected = result(model(**arguments, attention_mask=added))
    for mask in (added, allowed):
        with torch.no_grad(), implementation(model, "polyhead"):
            actual = result(model(**arguments, attention_mask=mask))
        assert_same(actual, expected)


@by_name(DECODERS)
def test_packed_sequences(family):
    lengths = (9, 3, 11)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = tokens(1)
    actual, expected = outputs(family, input_ids=ids, position_ids=places, use_cache=False)
    assert_same(result(actual), result(expected))
    if family.name in NOT_PACKED:
        return
    model = build(family, dtype=torch.float32)
    with torch.no_grad(), implementation(model, "polyhead"):
        alone = [result(model(input_ids=part, use_cache=False)) for part in ids.split(lengths, dim=1)]
    assert_same(result(actual), torch.cat(alone, 1))


@pytest.mark.parametrize("side", [None, "left"])
@by_name(DECODERS)
def test_decoding_with_a_cache_equals_one_forward(family, side):
    model = build(family, dtype=torch.float32)
    ids = tokens()
    mask = torch.ones_like(ids) if side is None else padding(side)
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad(), implementation(model, "polyhead"):
        whole = result(model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False))
        steps, cache, start = [], None, 0
        for size in (8, 6, *[1] * 9):
            stop = start + size
            step = model(
                input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=places[:, start:stop],
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache, start = step.past_key_values, stop
            steps.append(result(step))
    assert_same(torch.cat(steps, 1), whole, where=mask.bool())


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "sampled window": {"do_sample": True, "num_return_sequences": 2},
}
# A family decides what masks and caches there are, which beams (a cache that grows and is reordered) and a static cache
# go through. How the next token is picked from the logits is the same code for all.
PICKED = ("llama", "mistral", "gpt2")


@pytest.mark.parametrize(
    ("family", "way"),
    [(x, way) for x in DECODERS for way in WAYS if way in ("beams", "static") or x.name in PICKED],
    ids=str,
)
def test_generation_gives_the_tokens_of_eager(family, way):
    model = build(family, dtype=torch.float32)
    options = WAYS[way]
    mask = padding("left")
    ids = tokens() * mask
    found = []
    for name in ("eager", "polyhead"):
        torch.manual_seed(5)
        with implementation(model, name):
            found.append(
                model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=9, min_new_tokens=9, **options)
            )
    assert found[0].shape[1] == TOKENS + 9
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
@by_name(SEQ2SEQ)
def test_generation_from_a_padded_source(family, options):
    model = build(family, dtype=torch.float32)
    found = []
    for name in ("eager", "polyhead"):
        with implementation(model, name):
            found.append(
                model.generate(
                    input_ids=tokens(), attention_mask=padding("right"), max_new_tokens=9, min_new_tokens=9, **options
                )
            )
    assert torch.equal(found[0], found[1])
    assert int(found[0].max()) < VOCABULARY

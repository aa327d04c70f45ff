"""Fewer key heads: closed forms held to direct decompositions, planted likeness found, and whole models converted."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import polyhead.huggingface
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.surgery import (
    GroupQueries,
    HeadWeights,
    KeyForm,
    ShareKeys,
    apply,
    convert_groups,
    edits_from_json,
    edits_to_json,
    find_layers,
    fingerprint,
    preview,
    read_heads,
    share,
    streams,
    turn_keys,
    turn_values,
    undo,
)
from polyhead.surgery.convert import gather_inputs
from polyhead.surgery.grouping import group_loss, neighbours, similar_groups
from polyhead.surgery.head_weights import pack_heads
from polyhead.surgery.input_moments import InputMoments, centred, with_bias
from polyhead.surgery.moments import OutputMoments
from polyhead.surgery.refine import AttendedInputs, refined
from polyhead.surgery.streams import Streams, pieces_of
from tests.huggingface import models
from tests.surgery.gated import FAMILIES, build, generated, result_of
from tests.surgery.test_symmetries import allowed_map, conditioned


def heads_of(num_heads: int = 6, num_kv_heads: int = 6, *, bias: bool = True, width: int = 29) -> HeadWeights:
    layer = MultiHeadAttention(width, num_heads, num_kv_heads=num_kv_heads, head_dim=6, bias=bias).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return read_heads(layer, find_layers(layer)[0])


def inputs_of(width: int = 29) -> InputMoments:
    mixing = torch.randn(width, width, dtype=torch.float64)
    rows = torch.randn(200, width, dtype=torch.float64) @ mixing + 0.5
    moments = OutputMoments.empty(width).update(rows)
    return InputMoments.of(moments, moments, moments)


def tokens(count: int = 6, length: int = 13) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 61, (4, length), generator=generator)} for _ in range(count)]


def root(moments: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(moments)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def products(heads: HeadWeights) -> Tensor:
    """Of queries and keys, biases included: [heads, width + 1, width + 1]."""
    query, key = with_bias(heads.query, heads.query_bias), with_bias(heads.key, heads.key_bias)
    return query.mT @ key[list(heads.key_heads)]


@pytest.mark.parametrize("kv_heads", [6, 3])
def test_shared_keys_are_the_leading_singular_vectors_of_the_stacked_products(kv_heads):
    heads, inputs = heads_of(6, kv_heads), inputs_of()
    found = share(heads, (tuple(range(kv_heads)),), KeyForm(), inputs)
    left, right = root(inputs.query), root(centred(inputs.key))
    stacked = torch.cat([left @ one @ right for one in products(heads)])
    left_over = torch.linalg.svdvals(stacked)[6:].square().sum()
    off = sum((left @ one @ right).square().sum() for one in products(found) - products(heads))
    torch.testing.assert_close(off, left_over, rtol=1e-8, atol=1e-10)
    assert found.key.shape == (1, 6, 29)
    assert found.key_heads == (0,) * 6


@pytest.mark.parametrize("bias", [True, False])
def test_shared_values_are_the_leading_singular_vectors_of_what_is_written(bias):
    heads, inputs = heads_of(bias=bias), inputs_of()
    found = share(heads, ((0, 2, 4), (1, 3, 5)), KeyForm(), inputs)

    def written(x: HeadWeights) -> Tensor:
        return with_bias(x.value, x.value_bias)[list(x.key_heads)].mT @ x.output

    moments = root(centred(inputs.value) if bias else inputs.value)
    left_over = 0.0
    for group in ((0, 2, 4), (1, 3, 5)):
        stacked = torch.cat([moments @ one for one in written(heads)[list(group)]], 1)
        left_over += float(torch.linalg.svdvals(stacked)[6:].square().sum())
    off = float((moments @ (written(found) - written(heads))).square().sum())
    assert off == pytest.approx(left_over, rel=1e-8)
    if bias:  # what is written in the mean stays
        mean = inputs.value[:, -1]
        before, after = (torch.einsum("i,hio->o", mean, written(x)) + x.output_bias for x in (heads, found))
        torch.testing.assert_close(after, before)


def test_under_rotary_positions_every_pair_has_its_leading_complex_vector():
    heads, inputs = heads_of(bias=False), inputs_of()
    form = KeyForm("interleaved", 4)
    found = share(heads, (tuple(range(6)),), form, inputs)
    left, right = root(inputs.query)[:-1, :-1], root(inputs.key[:-1, :-1])
    for one, two in form.pairs:

        def complex_products(x: HeadWeights, one: int = one, two: int = two) -> Tensor:
            query, key = (torch.complex(y[:, one], y[:, two]) for y in (x.query, x.key[list(x.key_heads)]))
            return query.conj()[:, :, None] * key[:, None, :]

        left_c, right_c = left.to(torch.complex128), right.to(torch.complex128)
        stacked = torch.cat([left_c @ x @ right_c for x in complex_products(heads)])
        off = left_c @ (complex_products(found) - complex_products(heads)) @ right_c
        left_over = torch.linalg.svdvals(stacked)[1:].square().sum()
        torch.testing.assert_close(off.abs().square().sum(), left_over, rtol=1e-6, atol=1e-9)
    # Channels that do not turn have a space of their own.
    rest = replace(heads, query=heads.query[:, 4:], key=heads.key[:, 4:])
    now = replace(found, query=found.query[:, 4:], key=found.key[:, 4:])
    left, right = root(inputs.query), root(centred(inputs.key))
    stacked = torch.cat([left @ one @ right for one in products(rest)])
    off = (left @ (products(now) - products(rest)) @ right).square().sum()
    torch.testing.assert_close(off, torch.linalg.svdvals(stacked)[2:].square().sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", [KeyForm(), KeyForm("half", 6), KeyForm("interleaved", 4)], ids=str)
def test_heads_that_are_images_of_one_another_are_found_and_share_without_loss(form):
    heads, groups = heads_of(), ((0, 3), (1, 4), (2, 5))
    place = [0, 1, 2, 0, 1, 2]
    planted = replace(
        heads,
        key=heads.key[place],
        key_bias=heads.key_bias[place],
        value=heads.value[place],
        value_bias=heads.value_bias[place],
    )
    maps = torch.stack([allowed_map(form, 6, seed) for seed in range(6)])
    planted = turn_keys(planted, maps, form)
    planted = turn_values(planted, torch.stack([conditioned(6, seed, 5.0) for seed in range(6)]))
    inputs = inputs_of()
    assert similar_groups(planted, 3, form, inputs) == groups
    loss = group_loss(planted, form, inputs)
    assert loss((0, 3)) < 1e-12 < 1e-3 < loss((0, 1))
    found = share(planted, groups, form, inputs)
    assert found.key_heads == (0, 1, 2, 0, 1, 2)
    x, y = (torch.cat((torch.randn(7, 29), torch.ones(7, 1)), 1).double() for _ in "xy")
    before, after = (torch.einsum("ti,hij,sj->hts", x, products(one), y) for one in (planted, found))
    # Without positions, what is the same for every key changes no softmax.
    centre = (lambda z: z - z.mean(-1, keepdim=True)) if form.rotary_dim < 6 else (lambda z: z)
    torch.testing.assert_close(centre(after), centre(before), rtol=1e-8, atol=1e-8)


def test_the_best_groups_of_all_are_found():
    heads, inputs = heads_of(), inputs_of()
    loss = group_loss(heads, KeyForm(), inputs)
    found = similar_groups(heads, 3, KeyForm(), inputs)

    def pairings(left: list[int]):
        if not left:
            yield ()
        for other in left[1:]:
            rest = [head for head in left[1:] if head != other]
            for others in pairings(rest):
                yield ((left[0], other), *others)

    best = min(pairings(list(range(6))), key=lambda groups: sum(map(loss, groups)))
    assert sum(map(loss, found)) <= 1.02 * sum(map(loss, best))
    assert sum(map(loss, found)) < sum(map(loss, neighbours(6, 3)))


@pytest.mark.parametrize("bias", [True, False])
def test_refined_values_write_what_is_asked_nearer_than_any_output_matrix_could(bias):
    heads, width = share(heads_of(bias=bias), ((0, 1, 2), (3, 4, 5)), KeyForm()), 29
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(6, 6, generator=generator)
    drawn = torch.einsum("hk,tkw->thw", mixing, torch.randn(600, 6, width, generator=generator))
    targets = (
        torch.randn(600, 6 * width, generator=generator) @ torch.randn(6 * width, width, generator=generator) * 0.1
    )
    targets = targets + torch.einsum("thw,hwe->te", drawn, torch.randn(6, width, width, generator=generator))
    sample = AttendedInputs(drawn, targets)

    def off(x: HeadWeights) -> float:
        value = with_bias(x.value, x.value_bias)[list(x.key_heads)].float()
        made = torch.einsum("thw,hdw->thd", torch.cat((drawn, torch.ones_like(drawn[..., :1])), -1), value)
        written = torch.einsum("thd,hde->te", made, x.output.float())
        left = targets - written
        return float((left - left.mean(0) if bias else left).square().sum())

    losses = [off(refined(heads, sample, ridge=1e-9, rounds=rounds)) for rounds in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < 0.97 * losses[0]
    # Without rounds it is W_O alone, solved as any solver would.
    value = heads.value[list(heads.key_heads)].float()
    made = torch.einsum("thw,hdw->thd", drawn, value).flatten(1)
    if heads.value_bias is not None and not bias:
        made = made + heads.value_bias[list(heads.key_heads)].flatten().float()
    centre = (lambda z: z - z.mean(0)) if bias else (lambda z: z)
    solution = torch.linalg.lstsq(centre(made).double(), centre(targets).double()).solution
    best = float((centre(targets).double() - centre(made).double() @ solution).square().sum())
    assert losses[0] == pytest.approx(best, rel=1e-3)


def converted_family(name: str, kv_heads: int, **options) -> models.Family:
    family = FAMILIES[name]
    return models.Family(name, family.kind, {**family.options, **options})


@pytest.mark.parametrize(
    ("name", "options", "kv_heads"),
    [
        ("llama", {}, 1),
        ("llama", {"num_key_value_heads": 4}, 2),
        ("qwen2", {}, 1),
        ("qwen3", {}, 1),
        ("cohere", {}, 1),
        ("stablelm", {"num_key_value_heads": 4}, 2),
        ("bert", {}, 2),
        ("bert", {}, 1),
        ("distilbert", {}, 2),
    ],
)
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_converted_model_is_nearer_to_what_it_was_than_one_with_means_and_comes_back(name, options, kv_heads, rounds):
    family = converted_family(name, kv_heads, **options)
    model = build(family)
    model.set_attn_implementation(polyhead.huggingface.register())
    before, config, whole = fingerprint(model), model.config.to_dict(), result_of(model, family)
    layers = find_layers(model)
    pooled = apply(model, [GroupQueries(x.number, neighbours(x.layout.num_kv_heads, kv_heads)) for x in layers])
    by_means = (result_of(model, family) - whole).norm()
    undo(model, pooled)
    seen = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    record = convert_groups(model, kv_heads, tokens, rounds=rounds, progress=note)
    assert seen == [(1, 2), (2, 2)]
    assert {x.layout.num_kv_heads for x in find_layers(model)} == {kv_heads}
    off = (result_of(model, family) - whole).norm()
    assert 0 < off < 0.95 * by_means
    assert edits_from_json(edits_to_json(record.edits)) == record.edits
    assert all(isinstance(edit, ShareKeys) for edit in record.edits)
    undo(model, record)
    assert fingerprint(model) == before == record.before
    assert model.config.to_dict() == config
    assert torch.equal(result_of(model, family), whole)


def test_a_converted_llama_is_a_stock_model_that_generates():
    family = converted_family("llama", 2, num_key_value_heads=4)
    model = build(family)
    convert_groups(model, 2, tokens)
    assert model.config.num_key_value_heads == 2
    stock = type(model)(copy.deepcopy(model.config)).double().eval()
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(result_of(stock, family), result_of(model, family))
    torch.testing.assert_close(generated(stock, family), generated(model, family))


def test_an_encoder_and_a_decoder_are_converted_together_or_one_stack_of_them():
    family = FAMILIES["bart"]
    model = build(family)
    model.set_attn_implementation(polyhead.huggingface.register())
    whole, before = result_of(model, family), fingerprint(model)
    stacks = list(dict.fromkeys(layer.stack for layer in find_layers(model)))
    assert len(stacks) == 3

    def text() -> list[dict[str, Tensor]]:
        return [models.inputs(family)] * 2

    one = convert_groups(model, 2, text, stack=stacks[0], rounds=1)
    assert {(layer.stack, layer.layout.num_kv_heads) for layer in find_layers(model)} == {(x, 2) for x in stacks}
    undo(model, one)
    record = convert_groups(model, 1, text, rounds=1)
    assert {edit.stack for edit in record.edits} == set(stacks)  # cross-attention too
    assert {layer.layout.num_kv_heads for layer in find_layers(model)} == {1}
    assert (result_of(model, family) - whole).norm() < whole.norm()
    undo(model, record)
    assert fingerprint(model) == before


def test_the_edit_alone_is_counted_and_made_by_weights():
    family = FAMILIES["bert"]
    model = build(family)
    edits = [ShareKeys(number, ((0, 2), (1, 3))) for number in range(2)]
    counted = preview(model, edits)
    assert (counted.before.key_heads, counted.after.key_heads) == (8, 4)
    before = sum(p.numel() for p in model.parameters())
    record = apply(model, edits)
    assert before - sum(p.numel() for p in model.parameters()) == counted.before.parameters - counted.after.parameters
    assert find_layers(model)[0].layout.key_heads is None  # query heads stand in the order of their groups
    undo(model, record)
    assert fingerprint(model) == record.before


class Stack(nn.Module):
    """Two layers of ours, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(24, 4) for _ in range(2)).double()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).output
        return x


def test_our_layers_are_converted_and_padding_counts_nothing():
    model = Stack()
    x = torch.randn(3, 40, 24, dtype=torch.float64)
    padded = torch.cat((x, torch.full((3, 5, 24), 100.0, dtype=torch.float64)), 1)
    mask = torch.cat((torch.ones(3, 40), torch.zeros(3, 5)), 1)
    (first, _) = find_layers(model)
    plain = gather_inputs(model, first, pieces_of([{"x": x}]))
    masked = gather_inputs(model, first, pieces_of([{"x": padded, "attention_mask": mask}]))
    torch.testing.assert_close(plain.key, masked.key)
    assert (plain.tokens, masked.tokens) == (120, 120)
    whole = model(x)
    record = convert_groups(model, 2, lambda: [{"x": x}])
    assert [layer.layout.num_kv_heads for layer in model.layers] == [2, 2]
    assert (model(x) - whole).norm() < 0.5 * (whole - x).norm()
    undo(model, record)
    assert torch.equal(model(x), whole)


@pytest.mark.parametrize(
    ("name", "count", "options", "words"),
    [
        ("bert", 3, {}, "their number divides 4, got 3"),
        ("bert", 0, {}, "their number divides 4, got 0"),
        ("bert", 4, {}, "every layer has 4 key heads already"),
        ("bert", 2, {"grouping": "alike"}, "grouping must be one of similar, neighbours, got 'alike'"),
        ("bert", 2, {"rounds": -1}, "rounds must be an integer of at least 0, got -1"),
        ("bert", 2, {"ridge": -1.0}, "ridge must be a number of at least 0, got -1.0"),
        ("bert", 2, {"stack": "nowhere"}, r"stack must be one of .*encoder\.layer\.\*.*, got 'nowhere'"),
        ("gpt2", 2, {}, "gives every head a key head of its own, got 4 heads over 2"),
        ("gpt_oss", 1, {}, "cannot be edited: it has sinks"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_nothing_is_touched(name, count, options, words):
    model = build(FAMILIES[name])
    before = fingerprint(model)
    with pytest.raises(OptionError, match=words):
        convert_groups(model, count, tokens, **options)
    assert fingerprint(model) == before


def test_text_that_is_empty_or_too_short_is_refused_and_an_interruption_leaves_the_model_as_it_was():
    model = build(FAMILIES["bert"])
    before = fingerprint(model)
    with pytest.raises(OptionError, match="needs some text, got no batch"):
        convert_groups(model, 2, list)
    with pytest.raises(OptionError, match=r"at least as many tokens as the heads of .* have channels, 32, got 20"):
        convert_groups(model, 2, lambda: [{"input_ids": models.tokens(2, 10)}])

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    model.train()
    with pytest.raises(KeyboardInterrupt):
        convert_groups(model, 2, tokens, progress=interrupt)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        convert_groups(model, 2, lambda: [*tokens(), {"inputs": 1}])
    assert fingerprint(model) == before
    assert model.training
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


@pytest.mark.parametrize("name", ["bert", "llama", "bart", "qwen2"])
def test_a_text_is_read_on_from_where_it_stopped_and_looks_the_same(name):
    family = FAMILIES[name]
    model = build(family)
    model.set_attn_implementation(polyhead.huggingface.register())
    layers = [layer for layer in find_layers(model) if layer.stack == find_layers(model)[0].stack]
    heads = read_heads(model, layers[0])
    lending = pack_heads(model, layers[0], replace(heads, output=heads.output * 0.5))
    batches = [models.inputs(family), models.inputs(family)]
    pieces = Streams(model, batches).before(layers[1], lending)
    ran = []
    hook = model.get_submodule(layers[0].output).register_forward_hook(lambda *_: ran.append(1))
    for which in (lending, None):
        for piece, plain in zip(pieces, pieces_of(batches), strict=True):
            seen = piece.look(model, layers[1], lending=which)
            assert not ran  # the first block rests
            expected = plain.look(model, layers[1], lending=which)
            torch.testing.assert_close(seen.heads, expected.heads, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(seen.written, expected.written, rtol=1e-9, atol=1e-9)
            ran.clear()
    hook.remove()
    now, before = (pieces[0].look(model, layers[1], lending=which).heads for which in (lending, None))
    assert not torch.allclose(now, before)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_text_too_long_to_keep_and_a_model_that_cannot_be_entered_run_from_the_beginning(monkeypatch):
    model = build(FAMILIES["bert"])
    layer = find_layers(model)[1]
    assert Streams(model, tokens()).before(layer, {})[0].now is not None
    monkeypatch.setattr(streams, "KEPT_BYTES", 10)
    assert Streams(model, tokens()).before(layer, {})[0].now is None
    monkeypatch.undo()
    # What a block gives is not what the next is given.
    model.encoder.layer[1].register_forward_pre_hook(lambda _, given: (given[0] + model.encoder.layer[0].training + 1,))
    model.encoder.layer[0].register_forward_hook(lambda _, given, gave: (gave, None))
    assert Streams(model, tokens()).before(layer, {})[0].now is None

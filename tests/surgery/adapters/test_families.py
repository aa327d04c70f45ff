"""Every model family: pruned heads equal masked heads, and undo restores them bit for bit."""

from __future__ import annotations

import pytest
import torch

import polyhead.integrations.huggingface
from polyhead.errors import OptionError
from polyhead.observation.projections import find_projections
from polyhead.surgery import PruneHeads, ReorderHeads, apply, find_layers, fingerprint, undo
from polyhead.surgery.adapters.head_weights import read_heads
from tests.integrations.huggingface import models
from tests.surgery.gated import EDITABLE, FAMILIES, REFUSED, build, generated, result_of, some_heads, switched_off

CACHED = sorted(name for name in EDITABLE if FAMILIES[name].kind in ("decoder", "seq2seq", "spectrogram"))
READ = ["gpt2", "llama", "opt", "phi3", "gpt_neox", "bert", "distilbert", "modernbert", "bart", "whisper", "vit"]


@pytest.mark.parametrize("name", READ)
def test_structure_says_what_numbers_say(name):
    """Discovery uses names and order, observation uses activations; both find the same matrices."""
    family = FAMILIES[name]
    model = build(family)
    wirings = {site.name: x for site, x in find_projections(model, lambda: model(**models.inputs(family))).items()}
    layers = find_layers(model)
    assert [layer.path for layer in layers] == list(dict.fromkeys(layer.path for layer in layers))
    assert {layer.path for layer in layers} == set(wirings)
    for layer in layers:
        heads, head_projections = read_heads(model, layer), wirings[layer.path]
        # Some families scale their queries between the projection and the attention.
        scale = (head_projections.query.norm() / heads.query.norm()).item()
        torch.testing.assert_close(head_projections.query, heads.query.mT * scale, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(head_projections.key, heads.key.mT)
        torch.testing.assert_close(head_projections.value, heads.value.mT)
        torch.testing.assert_close(head_projections.output, heads.output)


@pytest.mark.parametrize("name", EDITABLE)
def test_pruned_heads_are_heads_switched_off_and_come_back(name):
    family = FAMILIES[name]
    model = build(family)
    polyhead.integrations.huggingface.register()
    # transformers has no sdpa with the softcap of gemma2
    implementations = [how for how in ("sdpa", "eager", "polyhead") if (name, how) != ("gemma2", "sdpa")]
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    heads = {layer.path: some_heads(layer) for layer in layers}

    def results() -> dict[str, list[torch.Tensor]]:
        found = {}
        for implementation in implementations:
            model.set_attn_implementation(implementation)
            found[implementation] = [result_of(model, family)]
            if name in CACHED and implementation in (implementations[0], "polyhead"):  # one of transformers' and ours
                found[implementation].append(generated(model, family))
        return found

    with switched_off(model, heads):
        expected = results()
    whole = result_of(model, family)
    before, config = fingerprint(model), model.config.to_dict()
    record = apply(model, [PruneHeads(x.number, heads[x.path], stack=x.stack) for x in layers])
    assert fingerprint(model) == record.after != before
    for how, found in results().items():
        for one, wanted in zip(found, expected[how], strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-9)
    assert (expected["polyhead"][0] - whole).abs().max() > 1e-3
    after = {layer.path: layer.layout for layer in find_layers(model) if not layer.refusals}
    for layer in layers:
        assert after[layer.path].num_heads == layer.layout.num_heads - len(heads[layer.path])
    undo(model, record)
    assert fingerprint(model) == record.before == before
    assert model.config.to_dict() == config
    assert torch.equal(result_of(model, family), whole)


@pytest.mark.parametrize("name", [*READ, "qwen3"])
def test_another_order_of_heads_is_the_same_function(name):
    family = FAMILIES[name]
    model = build(family)
    whole = result_of(model, family)
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    edits = []
    for layer in layers:
        if layer.layout.num_heads > 1:
            order = tuple(reversed(range(layer.layout.num_heads)))  # groups stay together
            edits.append(ReorderHeads(layer.number, order, stack=layer.stack))
    before = {layer.path: read_heads(model, layer) for layer in layers}
    record = apply(model, edits)
    for layer in find_layers(model):
        if not layer.refusals:
            torch.testing.assert_close(read_heads(model, layer).query, before[layer.path].query.flip(0), rtol=0, atol=0)
    torch.testing.assert_close(result_of(model, family), whole, rtol=1e-9, atol=1e-9)
    assert record.config == ()
    undo(model, record)
    assert torch.equal(result_of(model, family), whole)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_known_is_refused_by_name_and_nothing_is_touched(name):
    model = build(FAMILIES[name])
    before = fingerprint(model)
    stack = next(layer.stack for layer in find_layers(model))
    with pytest.raises(OptionError, match=REFUSED[name]):
        apply(model, [PruneHeads(0, (1,), stack=stack)])
    assert fingerprint(model) == before


def test_norms_are_known_where_heads_share_them_and_refused_where_each_head_has_its_own():
    phi = models.Family("phi", "decoder", {**FAMILIES["llama"].options, "qk_layernorm": True})
    model = build(phi)
    shared = find_layers(model)[0]
    assert tuple(shared.module.q_layernorm.weight.shape) == (shared.layout.head_dim,)
    with switched_off(model, {shared.path: (0, 1)}):
        expected = result_of(model, phi)
    apply(model, [PruneHeads(0, (0, 1))])
    torch.testing.assert_close(result_of(model, phi), expected, rtol=1e-9, atol=1e-9)
    stablelm = models.Family("stablelm", "decoder", {**FAMILIES["stablelm"].options, "qk_layernorm": True})
    with pytest.raises(OptionError, match=r"it has q_layernorm \(\{'q_layernorm.norms.0.weight': \[8\]"):
        apply(build(stablelm), [PruneHeads(0, (0, 1))])


def test_a_layer_that_is_handed_a_bias_by_head_is_refused_although_it_holds_none():
    model = build(FAMILIES["t5"])
    layer = find_layers(model)[1]
    assert "relative_attention_bias" not in dict(layer.module.named_children())
    with pytest.raises(OptionError, match="its forward takes mask, position_bias, which may be per head"):
        apply(model, [PruneHeads(layer.number, (1,), stack=layer.stack)])

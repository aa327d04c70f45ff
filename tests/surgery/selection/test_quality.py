"""Quality measures relative to the unpruned model, without padding, and the probe's gradients."""

from __future__ import annotations

import math

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.surgery import PruneHeads, apply, find_layers, undo
from polyhead.surgery.calibration.moments import gradient_statistics
from polyhead.surgery.selection.quality import Fidelity, Perplexity, Probe
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build


def test_a_loss_alone_does_not_evaluate_the_unpruned_model(batches):
    model, calls = build(FAMILIES["llama"]), []
    expected = Perplexity(model, batches).loss()
    model.register_forward_hook(lambda *_: calls.append(1))
    perplexity = Perplexity(model, batches, loss_only=True)
    assert not calls
    assert perplexity.loss() == expected
    with torch.no_grad():
        fidelity = Fidelity(model, batches, loss_only=True)  # whose loss is relative to it
        model.get_submodule("model.layers.0.self_attn.o_proj").weight.mul_(-3)
    assert fidelity.loss() > 0.001


def test_perplexity_of_rows_of_one_token_is_an_error():
    model = build(FAMILIES["llama"])
    with pytest.raises(OptionError, match="two tokens or more, got none"):
        Perplexity(model, [{"input_ids": models.tokens()[:, :1]}], loss_only=True).loss()


def test_figures_of_a_model_stand_beside_those_of_the_whole(batches):
    model = build(FAMILIES["llama"])
    perplexity, fidelity = Perplexity(model, batches), Fidelity(model, batches)
    with torch.no_grad():
        means = [model(**batch, labels=batch["input_ids"]).loss for batch in batches]
    assert perplexity.original == pytest.approx(float(torch.stack(means).mean().exp()), rel=1e-5)
    assert perplexity.measure().error == 0
    assert fidelity.measure().value == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.o_proj").weight.mul_(-3)
    assert perplexity.measure().value != perplexity.original
    assert perplexity.measure().error > 0
    assert fidelity.measure().value < 0.999
    cosines = []
    with torch.no_grad():
        for batch in batches:
            linear = model.get_submodule("model.layers.0.self_attn.o_proj")
            found = model.model(**batch).last_hidden_state
            linear.weight.div_(-3)
            original = model.model(**batch).last_hidden_state
            linear.weight.mul_(-3)
            cosines.append(torch.cosine_similarity(found, original, dim=-1).double())
    rows = torch.cat(cosines).mean(1)  # of equally many tokens each
    assert fidelity.measure().value == pytest.approx(float(rows.mean()), abs=1e-6)
    assert fidelity.measure().error == pytest.approx(float(rows.std()) / len(rows) ** 0.5, rel=1e-3)
    assert fidelity.loss() == pytest.approx(1 - fidelity.measure().value)
    for kind in (Perplexity, Fidelity):
        with pytest.raises(OptionError, match="needs some text, got no batch"):
            kind(model, [])


@pytest.mark.parametrize("kind", [Perplexity, Fidelity])
def test_errors_and_intervals_are_over_groups(kind):
    """Rows of one group count as one: repeating every row changes no interval, where rows alone would shrink it."""
    model = build(FAMILIES["llama"])
    ids = torch.cat([models.tokens(seed=seed) for seed in range(2)])
    once, twice = [{"input_ids": ids}], [{"input_ids": ids}, {"input_ids": ids.flip(0)}]
    rows = list(range(len(ids)))
    qualities = [kind(model, once), kind(model, once, groups=rows), kind(model, twice, groups=[*rows, *reversed(rows)])]
    naive = kind(model, twice)
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.o_proj").weight.mul_(-3)
    first, *others = (quality.measure() for quality in qualities)
    for other in others:
        assert [other.value, other.error] == pytest.approx([first.value, first.error], rel=1e-5)
        assert [other.ratio_low, other.ratio_high] == pytest.approx([first.ratio_low, first.ratio_high], rel=1e-5)
    assert naive.measure().error < 0.75 * first.error
    # Student's t with a group less than there are, of a difference of two means with the same error.
    half = 2.570582 * 2**0.5 * first.error
    if kind is Perplexity:
        ratio, half = first.value / qualities[0].original, half / first.value
        assert math.log(first.ratio_high / ratio) == pytest.approx(half, rel=1e-5)
        assert math.log(ratio / first.ratio_low) == pytest.approx(half, rel=1e-5)
    else:
        assert first.value - first.ratio_low == pytest.approx(half, rel=1e-5)
    single = kind(model, [{"input_ids": ids}], groups=[0] * len(ids))
    assert math.isnan(single.measure().ratio_low)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_does_not_count_for_fidelity(name):
    model = build(FAMILIES[name], dtype=torch.float32)
    ids, mask = models.tokens(), torch.ones(models.BATCH, models.TOKENS, dtype=torch.int64)
    mask[1, 13:] = 0
    padded = Fidelity(model, [{"input_ids": ids[:2], "attention_mask": mask[:2]}])
    alone = Fidelity(model, [{"input_ids": ids[:1]}, {"input_ids": ids[1:2, :13]}])
    record = apply(model, [PruneHeads(0, (0, 1))])
    assert padded.measure().value < 0.999
    assert padded.measure().value == pytest.approx(alone.measure().value, abs=1e-5)
    assert padded.measure().error == pytest.approx(alone.measure().error, abs=1e-5)
    undo(model, record)
    assert padded.measure().value == pytest.approx(1, abs=1e-6)


def test_a_probe_has_the_curvature_of_likeness(batches):
    """The mean squared directional derivative is twice the loss of fidelity, for small errors."""
    model = build(FAMILIES["bert"])
    path = find_layers(model)[-1].path
    batch = batches[0]
    found = gradient_statistics(model, [batch] * 60, Probe())[path].sensitivity
    error = torch.randn(32, generator=torch.Generator().manual_seed(1)) * 1e-2
    fidelity = Fidelity(model, [batch])
    linear = model.get_submodule(find_layers(model)[-1].output)
    hook = linear.register_forward_hook(lambda _, __, y: y + error)
    lost = fidelity.loss()
    hook.remove()
    # The last attention layer: a token's error reaches its own final state alone.
    assert float(error.double() @ found.products @ error.double()) / 2 == pytest.approx(lost, rel=0.2)

"""Distillation of output projections, against plain training steps and the model itself."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import NonFiniteError
from polyhead.sources.fingerprint import fingerprint
from polyhead.surgery import find_layers
from polyhead.surgery.calibration import streams
from polyhead.surgery.calibration.streams import recording_blocks
from polyhead.surgery.compensation.distillation import distil
from polyhead.surgery.compensation.least_squares import swapped_projections, unchanged_projections
from polyhead.surgery.selection.quality import Fidelity, Perplexity
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build

REMOVED = {0: (0, 2), 1: (1,)}


def pruned(model):
    layers = {layer.path: layer for layer in find_layers(model)}
    removed = {path: REMOVED[layer.number] for path, layer in layers.items()}
    return layers, unchanged_projections(model, layers, removed)


def batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": models.tokens(seed=seed)} for seed in range(count)]


@pytest.mark.parametrize(("family", "kind"), [("llama", Perplexity), ("gpt2", Perplexity), ("bert", Fidelity)])
def test_the_distance_to_the_original_falls_on_other_text(family, kind):
    model = build(FAMILIES[family], dtype=torch.float32)
    before, flags = fingerprint(model), [x.requires_grad for x in model.parameters()]
    layers, plain = pruned(model)
    seen = []
    found = distil(model, layers, plain, batches_of(60), kind, rate=0.05, progress=seen.append)
    assert seen == [1] * 60
    assert fingerprint(model) == before
    assert [x.requires_grad for x in model.parameters()] == flags
    assert {path: x.heads for path, x in found.items()} == {path: x.heads for path, x in plain.items()}
    other = {"input_ids": models.tokens(seed=99)}
    with torch.no_grad():
        original = kind.outputs(model, other)
        distances = []
        for projections in (plain, found):
            with swapped_projections(model, layers, projections):
                distances.append(float(kind.distance(kind.outputs(model, other), original)))
    assert 0 < distances[1] < 0.9 * distances[0]


def test_a_step_is_that_of_adam_on_the_remaining_rows():
    """One step moves every weight by the rate times the root mean square, against the sign of its gradient."""
    model = build(FAMILIES["llama"], dtype=torch.float32)
    layers, plain = pruned(model)
    (batch,) = batches_of(1)
    found = distil(model, layers, plain, [batch], Perplexity, rate=0.01)
    path = find_layers(model)[0].path
    with torch.no_grad():
        original = model(**batch).logits.log_softmax(-1)
    with swapped_projections(model, layers, plain):
        weight = model.get_submodule(layers[path].output).weight
        log_probs = model(**batch).logits.log_softmax(-1)
        divergence = (original.exp() * (original - log_probs)).sum(-1).mean()
        (gradient,) = torch.autograd.grad(divergence, [weight])
        scale = float(weight.detach().square().mean().sqrt())
    width = gradient.shape[1] // layers[path].layout.num_heads
    kept = torch.cat([gradient.T[width * head : width * (head + 1)] for head in plain[path].heads])
    moved = found[path].matrix - plain[path].matrix
    large = kept.abs() > 1e-6  # far above Adam's epsilon
    assert large.float().mean() > 0.9
    torch.testing.assert_close(moved[large], (-0.01 * scale * kept.sign())[large].double(), rtol=2e-2, atol=1e-9)


def test_the_divergence_is_that_of_the_distributions():
    logits, original = (torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=original), torch.distributions.Categorical(logits=logits)
    )
    torch.testing.assert_close(Perplexity.distance(logits, original), expected.mean())
    assert float(Perplexity.distance(original, original)) == pytest.approx(0, abs=1e-6)


def test_padding_does_not_count():
    ids, mask = models.tokens(), torch.ones(models.BATCH, models.TOKENS, dtype=torch.int64)
    mask[1, 13:] = 0
    model = build(FAMILIES["llama"], dtype=torch.float32)
    with torch.no_grad():
        padded = Perplexity.outputs(model, {"input_ids": ids[:2], "attention_mask": mask[:2]})
        alone = [Perplexity.outputs(model, {"input_ids": x}) for x in (ids[:1], ids[1:2, :13])]
    torch.testing.assert_close(padded, torch.cat(alone), rtol=1e-4, atol=1e-5)


def recorded_blocks(model, layers, batches):
    with torch.no_grad(), recording_blocks(model, list(layers.values())[-1]) as recorded:
        for batch in batches:
            model(**batch)
    return recorded


@pytest.mark.parametrize(("family", "kind"), [("llama", Perplexity), ("gemma2", Perplexity), ("bert", Fidelity)])
def test_blocks_of_the_unpruned_model_whose_outputs_were_recorded_are_skipped(family, kind):
    """After a check on the first batch, with identical results, also where logits are capped (Gemma 2)."""
    model = build(FAMILIES[family], dtype=torch.float32)
    layers, plain = pruned(model)
    batches = batches_of(5)
    recorded = recorded_blocks(model, layers, batches)
    expected = distil(model, layers, plain, batches, kind)
    calls = []
    model.get_submodule(layers[next(iter(layers))].output).register_forward_hook(lambda *_: calls.append(1))
    found = distil(model, layers, plain, batches, kind, recorded=recorded)
    assert len(calls) == 5 + 1
    assert all(torch.equal(found[path].matrix, expected[path].matrix) for path in plain)


def test_recorded_outputs_of_other_text_are_not_used():
    model = build(FAMILIES["llama"], dtype=torch.float32)
    layers, plain = pruned(model)
    batches = batches_of(3)
    recorded = recorded_blocks(model, layers, batches[1:] + batches[:1])
    expected = distil(model, layers, plain, batches, Perplexity)
    found = distil(model, layers, plain, batches, Perplexity, recorded=recorded)
    assert all(torch.equal(found[path].matrix, expected[path].matrix) for path in plain)


def test_outputs_are_recorded_up_to_a_number_of_bytes(monkeypatch):
    model = build(FAMILIES["llama"], dtype=torch.float32)
    layers, _ = pruned(model)
    (first, _) = recorded_blocks(model, layers, batches_of(2))
    monkeypatch.setattr(streams, "MAX_CACHE_BYTES", 2 * first.output.nbytes)
    assert len(recorded_blocks(model, layers, batches_of(3))) == 2


def test_gradients_that_are_not_finite_are_an_error():
    """A finite distance may have none: nothing of it reaches the weights."""
    model = build(FAMILIES["llama"], dtype=torch.float32)
    layers, plain = pruned(model)

    class Steep(Perplexity):
        @staticmethod
        def distance(outputs, originals):
            return (outputs - outputs.detach()).abs().sqrt().sum()  # 0, with an infinite slope

    with pytest.raises(NonFiniteError, match=r"gradients must be finite, got NaN or Inf \(a distance of 0.0\)"):
        distil(model, layers, plain, batches_of(1), Steep)


def test_outputs_that_are_not_finite_are_an_error_and_leave_the_model_as_it_was():
    model = build(FAMILIES["llama"], dtype=torch.float32)
    layers, plain = pruned(model)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = torch.nan
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match=r"must be finite, got NaN or Inf \(a distance of nan\)"):
        distil(model, layers, plain, batches_of(1), Perplexity)
    assert all(torch.equal(x.nan_to_num(), before[name].nan_to_num()) for name, x in model.state_dict().items())

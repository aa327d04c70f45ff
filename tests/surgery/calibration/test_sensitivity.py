"""Loss sensitivities, against gradients computed by hand and the loss itself."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.surgery import loss_weights
from polyhead.surgery.calibration.moments import gradient_statistics
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build


def language(model, batch):
    logits = model(**batch).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")


def test_weights_are_the_mean_squared_gradient_by_what_a_layer_writes():
    model = build(FAMILIES["llama"]).requires_grad_(False)  # no parameter needs a gradient or is given one
    batches = [{"input_ids": models.tokens(seed=seed)} for seed in range(2)]
    found = loss_weights(model, batches, language)
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    path, step = "model.layers.0.self_attn.o_proj", 1e-5
    # A random direction of sign ±1 at every number: its expected squared slope is the sum of squared gradients.
    generator = torch.Generator().manual_seed(0)
    slopes = []
    for batch in batches:
        for _ in range(40):
            signs = torch.randint(0, 2, (3, 23, 32), generator=generator) * 2.0 - 1
            losses = []
            for sign in (step, -step):
                moved = model.get_submodule(path).register_forward_hook(lambda _, __, y, by=sign * signs: y + by)
                losses.append(float(language(model, batch)))
                moved.remove()
            slopes.append(((losses[0] - losses[1]) / (2 * step)) ** 2)
    mean = torch.tensor(slopes).mean().item() / signs.numel()
    spread = torch.tensor(slopes).std().item() / signs.numel() / len(slopes) ** 0.5
    assert abs(found["model.layers.0.self_attn"] - mean) < 4 * spread
    assert all(p.grad is None for p in model.parameters())
    assert all(not x._forward_hooks for x in model.modules())


def test_a_loss_that_says_nothing_is_refused():
    model = build(FAMILIES["llama"])
    batch = {"input_ids": models.tokens()}
    with pytest.raises(OptionError, match="a loss that calls no attention layer"):
        loss_weights(model, [batch], lambda model, batch: torch.zeros(()))
    with pytest.raises(OptionError, match=r"got a tensor \[3\]"):
        loss_weights(model, [batch], lambda model, batch: model(**batch).logits.sum((1, 2)))
    with pytest.raises(OptionError, match="got no batch"):
        loss_weights(model, [], language)
    assert all(not x._forward_hooks for x in model.modules())


def test_moments_count_each_token_by_the_norm_of_its_gradient():
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    batches = [{"input_ids": models.tokens(seed=seed)} for seed in range(2)]
    path = "model.layers.1.self_attn"
    rows, gradients = [], []
    linear = model.get_submodule(f"{path}.o_proj")
    for batch in batches:
        kept = []

        def keep(_, given, written, kept=kept):
            written.retain_grad()
            kept.extend((given[0].detach(), written))

        hook = linear.register_forward_hook(keep)
        language(model, batch).backward()
        hook.remove()
        rows.append(kept[0].flatten(0, 1).double())
        gradients.append(kept[1].grad.double().flatten(0, 1))
    model.zero_grad(set_to_none=True)
    rows, gradients = torch.cat(rows), torch.cat(gradients)
    weights = gradients.norm(dim=-1)
    weights = weights / weights.sum() * int((weights > 0).sum())
    statistics = gradient_statistics(model, batches, language)[path]
    found = statistics.moments
    assert found.count == int((weights > 0).sum()) == 2 * 3 * 22  # the last token of a row predicts nothing
    torch.testing.assert_close(found.total, weights @ rows, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.products, rows.T @ (rows * weights[:, None]), rtol=1e-4, atol=1e-6)
    fisher = gradients.T @ gradients / len(gradients)
    torch.testing.assert_close(statistics.sensitivity.products, fisher, rtol=1e-4, atol=1e-9)
    assert all(parameter.requires_grad for parameter in model.parameters())

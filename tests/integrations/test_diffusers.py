"""Transformers of diffusers are observed as they are: statistics are those of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyhead

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install diffusers")
COLUMNS = ("entropy", "confidence", "max_logit")
HEADS, HEAD_DIM = 3, 8
SIZES = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "in_channels": 4}


@pytest.fixture
def pixart() -> tuple[Any, dict[str, Any]]:
    """Self-attention of 16 patches, and cross-attention to 7 tokens, of which the second text has 5."""
    config = {
        "num_layers": 2,
        "cross_attention_dim": 24,
        "norm_num_groups": 1,
        "sample_size": 8,
        "caption_channels": 24,
    }
    model = diffusers.PixArtTransformer2DModel(**SIZES, **config, use_additional_conditions=False)
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 7, 24),
        "encoder_attention_mask": (torch.arange(7) < torch.tensor([[7], [5]])).long(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return _strengthened(model), inputs


@pytest.fixture
def flux() -> tuple[Any, dict[str, Any]]:
    """Joint attention of 7 tokens of text and 16 of an image, in a double and a single block."""
    config = {"patch_size": 1, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": [4, 2, 2]}
    model = diffusers.FluxTransformer2DModel(**SIZES, **config, joint_attention_dim=24, pooled_projection_dim=16)
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "timestep": torch.rand(2),
        "encoder_hidden_states": torch.randn(2, 7, 24),
        "pooled_projections": torch.randn(2, 16),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return _strengthened(model), inputs


def _strengthened(model: Any) -> Any:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 1.3 / parameter[0].numel() ** 0.5)  # logits far from zero
    return model.eval()


@contextmanager
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Record the logits of `F.scaled_dot_product_attention`, [batch, heads, queries, keys], in float64."""
    logits: list[Tensor] = []
    original = F.scaled_dot_product_attention

    def recording(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
        products = query.double() @ key.double().mT / HEAD_DIM**0.5
        if attn_mask is not None:
            products = products + attn_mask if attn_mask.is_floating_point() else products.where(attn_mask, -torch.inf)
        logits.append(products)
        return original(query, key, value, attn_mask, **options)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", recording)
        yield logits


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "order"), [("pixart", (0, 2, 1, 3)), ("flux", (0, 1))]
)  # self- before cross-attention
def test_statistics_are_those_of_the_weights(name, order, request, monkeypatch):
    model, inputs = request.getfixturevalue(name)
    with _recorded(monkeypatch) as logits:
        expected = model(**inputs).sample
    with polyhead.observe(model, statistics=COLUMNS) as session:
        torch.testing.assert_close(model(**inputs).sample, expected, atol=1e-5, rtol=1e-5)
    assert (len(logits), len(session.skipped), len(session.materialised)) == (len(order), 0, 0)
    logits = [logits[index] for index in order]
    weights = [x.softmax(-1) for x in logits]
    values = {
        "entropy": [-torch.xlogy(x, x).sum(-1) for x in weights],
        "confidence": [x.amax(-1) for x in weights],
        "max_logit": [x.amax(-1) for x in logits],
    }
    assert len(session.profile.sites) == len(order) * HEADS
    for column in COLUMNS:
        means = torch.cat([x.mean((0, 2)) for x in values[column]])
        torch.testing.assert_close(session.profile[column], means, atol=1e-5, rtol=1e-5)
        assert means.std() > 0.01


@torch.no_grad()
def test_the_kinds_of_sites_and_the_weights_of_its_own_processor(pixart, monkeypatch):
    from diffusers.models.attention_processor import Attention, AttnProcessor

    model, inputs = pixart
    with polyhead.observe(model, statistics="entropy") as session:
        model(**inputs)
    sites = [(site.name, site.kind) for site in session.profile.sites[::HEADS]]
    kinds = {"attn1": "self", "attn2": "cross"}
    assert sites == [(f"transformer_blocks.{layer}.{name}", kinds[name]) for name in kinds for layer in (0, 1)]
    weights: list[Tensor] = []
    original = Attention.get_attention_scores
    monkeypatch.setattr(Attention, "get_attention_scores", lambda *args: weights.append(original(*args)) or weights[-1])
    model.set_attn_processor(AttnProcessor())
    model(**inputs)
    own = torch.cat(
        [-torch.xlogy(x, x).sum(-1).unflatten(0, (2, HEADS)).mean((0, 2)) for x in weights[::2] + weights[1::2]]
    )
    torch.testing.assert_close(session.profile["entropy"], own.double(), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_gate_of_zero_is_a_head_whose_output_is_not_read(pixart):
    model, inputs = pixart
    with polyhead.observe(model, statistics=False) as session:
        session.gates["transformer_blocks.1.attn2", "cross"] = torch.tensor([1.0, 0.0, 1.0])
        gated = model(**inputs).sample
    intact = model(**inputs).sample
    model.transformer_blocks[1].attn2.to_out[0].weight[:, HEAD_DIM : 2 * HEAD_DIM] = 0
    torch.testing.assert_close(gated, model(**inputs).sample, atol=1e-5, rtol=1e-5)
    assert (gated - intact).abs().max() > 0.01

"""Terms of the loss on entropies and subspaces, against their formulas."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.training import entropy_band, weight_overlap

WIDTH, HEADS = 32, 4


def normalized_entropies(layer: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    query, key = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return (torch.special.entr(weights).sum(-1) / torch.log(torch.tensor(float(x.shape[1])))).mean((0, 2))


@pytest.mark.parametrize(("floor", "ceiling"), [(0.9, None), (None, 0.2), (0.6, 0.62), (0.0, 1.0)])
def test_the_band_penalises_what_is_outside_and_has_its_gradient(floor, ceiling):
    layer, x = MultiHeadAttention(WIDTH, HEADS).double(), 2 * torch.randn(3, 5, WIDTH, dtype=torch.float64)
    entropy = normalized_entropies(layer, x)
    low, high = floor if floor is not None else 0.0, ceiling if ceiling is not None else 1.0
    expected = ((low - entropy).clamp_min(0) ** 2 + (entropy - high).clamp_min(0) ** 2).mean()
    assert (expected > 0) == ((floor, ceiling) != (0.0, 1.0))
    with polyhead.observe(layer, statistics="normalized_entropy", keep_statistics=True) as session:
        layer(x)
        found = entropy_band(session.statistics, floor=floor, ceiling=ceiling)
        ours = torch.autograd.grad(found, [layer.q_proj.weight, layer.k_proj.weight])
    torch.testing.assert_close(found, expected)
    theirs = torch.autograd.grad(expected, [layer.q_proj.weight, layer.k_proj.weight])
    torch.testing.assert_close(ours, theirs)


def test_heads_that_see_a_single_key_have_no_entropy_and_no_penalty():
    layer = MultiHeadAttention(WIDTH, HEADS)
    with polyhead.observe(layer, statistics="normalized_entropy", keep_statistics=True) as session:
        layer(torch.randn(3, 1, WIDTH))
        found = entropy_band(session.statistics, floor=0.5)
        (grad,) = torch.autograd.grad(found, [layer.q_proj.weight], allow_unused=True)
    assert found == 0
    assert grad is None or not grad.any()


@pytest.mark.parametrize("options", [{}, {"floor": 0.5, "ceiling": 0.4}, {"floor": -0.1}, {"ceiling": 1.1}])
def test_a_band_needs_bounds_between_0_and_1(options):
    layer = MultiHeadAttention(WIDTH, HEADS)
    with polyhead.observe(layer, statistics="normalized_entropy", keep_statistics=True) as session:
        layer(torch.randn(3, 4, WIDTH))
        with pytest.raises(OptionError, match="floor or a ceiling"):
            entropy_band(session.statistics, **options)


def overlap_by_hand(heads: torch.Tensor) -> torch.Tensor:
    pairs = [(i, j) for i in range(len(heads)) for j in range(i)]
    norm = torch.linalg.matrix_norm
    return torch.stack(
        [
            norm(heads[i] @ heads[j].T) ** 2 / (norm(heads[i] @ heads[i].T) * norm(heads[j] @ heads[j].T))
            for i, j in pairs
        ]
    ).mean()


@pytest.mark.parametrize("part", ["query", "key", "value", "output"])
def test_overlap_of_subspaces_is_the_formula_in_every_layout(part):
    layer = MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2).double()
    linear = {"query": layer.q_proj, "key": layer.k_proj, "value": layer.v_proj}.get(part)
    if linear is None:
        heads = layer.out_proj.weight.T.unflatten(0, (HEADS, -1))
    else:
        heads = linear.weight.unflatten(0, (HEADS if part == "query" else 2, -1))
    torch.testing.assert_close(weight_overlap(layer, part), overlap_by_hand(heads))


def test_overlap_of_fused_projections_is_that_of_their_heads():
    config = transformers.GPT2Config(vocab_size=61, n_embd=WIDTH, n_layer=2, n_head=HEADS)
    model = transformers.GPT2LMHeadModel(config)
    values = [block.attn.c_attn.weight[:, 2 * WIDTH :].T.unflatten(0, (HEADS, -1)) for block in model.transformer.h]
    expected = torch.stack([overlap_by_hand(heads) for heads in values]).mean()
    torch.testing.assert_close(weight_overlap(model), expected)


def test_training_on_the_overlap_makes_heads_orthogonal():
    layer = MultiHeadAttention(WIDTH, HEADS)
    assert weight_overlap(layer) > 0.1
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        weight_overlap(layer).backward()
        optimizer.step()
    value = layer.v_proj.weight.unflatten(0, (HEADS, -1))
    assert weight_overlap(layer) < 1e-3
    assert (value[0] @ value[1].T).abs().max() < 0.1 * value.norm(dim=-1).square().mean()


def test_equal_heads_have_an_overlap_of_one():
    layer = MultiHeadAttention(WIDTH, 2)
    with torch.no_grad():
        layer.v_proj.weight[WIDTH // 2 :] = layer.v_proj.weight[: WIDTH // 2]
    torch.testing.assert_close(weight_overlap(layer), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("model", "part", "words"),
    [
        (lambda: MultiHeadAttention(WIDTH, HEADS), "values", "query, key, value or output"),
        (lambda: MultiHeadAttention(WIDTH, 1), "value", "two heads or more"),
        (lambda: nn.MultiheadAttention(WIDTH, HEADS), "value", "must be known"),
        (lambda: nn.Linear(3, 3), "value", "two heads or more"),
    ],
)
def test_an_overlap_needs_known_heads(model, part, words):
    with pytest.raises(OptionError, match=words):
        weight_overlap(model(), part)

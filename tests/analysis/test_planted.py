"""Planted models: their duplicates come first in every relation, and are predictable."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead import HeadId, MultiHeadAttention
from polyhead.analysis.redundancy import THRESHOLD, predictable_shares
from polyhead.analysis.relations import cka, cosine, mutual_information, subspace_overlap
from polyhead.observation.head_moments import HeadMoments
from tests.planted import Sizes, planted_model, random_tokens


def moments_of(model: nn.Module, tokens: Tensor) -> tuple[HeadMoments, Tensor, list[HeadId]]:
    """Of all heads of all layers side by side, with their rows of the output projections."""
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    seen: dict[int, Tensor] = {}
    handles = [
        layer.out_proj.register_forward_pre_hook(lambda _, args, i=i: seen.__setitem__(i, args[0]))
        for i, layer in enumerate(layers)
    ]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    outputs = torch.cat([seen[i].unflatten(-1, (layer.layout.num_heads, -1)) for i, layer in enumerate(layers)], 2)
    weights = torch.stack([head.output for layer in layers for head in layer.heads])
    heads = [HeadId(i, head) for i, layer in enumerate(layers) for head in range(layer.layout.num_heads)]
    moments = HeadMoments.empty(len(heads), outputs.shape[-1]).update(outputs.flatten(0, 1))
    return moments, weights, heads


def ranked(relation: Tensor) -> list[tuple[int, int]]:
    """Pairs of heads, the most alike first."""
    rows, columns = torch.tril_indices(len(relation), len(relation), -1)
    order = torch.where(relation.isnan(), -torch.inf, relation)[rows, columns].argsort(descending=True)
    return [(int(columns[i]), int(rows[i])) for i in order]


def test_planted_duplicates_come_first_and_predict_each_other() -> None:
    sizes = Sizes(vocab_size=32, max_length=32, token_dim=32, num_heads=8)
    planted = planted_model(0, sizes=sizes)
    tokens = random_tokens(0, batch=48, length=31, vocab_size=sizes.vocab_size)
    moments, weights, heads = moments_of(planted.model, tokens)
    truth = {tuple(sorted((heads.index(one), heads.index(other)))) for one, other in planted.duplicates}
    assert len(truth) == 2
    relations = {"cosine": cosine(moments, weights), "CKA": cka(moments, weights), "overlap": subspace_overlap(weights)}
    relations["information"] = mutual_information(moments)
    for name, relation in relations.items():
        assert set(ranked(relation)[:2]) == truth, name
    more = random_tokens(1, batch=250, length=31, vocab_size=sizes.vocab_size)  # more tokens than channels in each half
    shares = predictable_shares(*(moments_of(planted.model, half)[0] for half in more.chunk(2)), weights)
    assert set(ranked(shares.by_head)[:2]) == truth
    for one, other in truth:
        assert min(shares.by_head[one, other], shares.by_head[other, one], *shares.by_others[[one, other]]) > THRESHOLD

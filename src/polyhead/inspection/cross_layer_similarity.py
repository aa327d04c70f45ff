"""Pairs of heads of different layers with similar or opposite outputs, compared on one sample of tokens.

If the outputs of all heads at these tokens fit into `BYTES`, every pair is measured. Otherwise their contributions to
the residual stream are projected to few dimensions at random, candidates are selected by the projections, and a second
pass over the batches with sampled tokens measures them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.inspection.heads import Head, Pair
from polyhead.inspection.wording import Reason
from polyhead.observation import AttentionSite, HeadProjections, Observations
from polyhead.observation.collectors import Collected, states_of
from polyhead.observation.token_sample import SiteSample, TokenSample

TOKENS = 1024  # size of the sample
WIDTH = 64  # dimensions of the random projection
CHUNK = 32  # tokens whose contributions to the residual stream are in memory at a time
HEADS = 48  # heads that are compared with all later ones at a time
CANDIDATES = 20  # number of pairs that are measured and reported
BYTES = 1 << 28  # memory limit for the full outputs of all heads at the sampled tokens
FULL, PROJECTED = "said", "sketches"  # names of the two collectors, fixed by the format of saved observations


def sample_of(
    head_projections: Mapping[AttentionSite, HeadProjections], seed: int, max_bytes: int = BYTES
) -> TokenSample | None:
    """Return the collector of full or projected head outputs; None if fewer than two sites have a known W_O."""
    w_o = _output_projections(head_projections)
    if len(w_o) < 2:
        return None
    if 4 * TOKENS * sum(x.shape[0] * x.shape[1] for x in w_o.values()) <= max_bytes:
        return TokenSample({site_key: _identity(x) for site_key, x in w_o.items()}, TOKENS, seed=seed, name=FULL)
    projections: dict[tuple[str, str], Tensor] = {}
    for width in {x.shape[2] for x in w_o.values()}:
        generator = torch.Generator().manual_seed(seed)
        matrix = torch.randn(width, WIDTH, generator=generator) / WIDTH**0.5
        projections |= {site_key: x.float() @ matrix for site_key, x in w_o.items() if x.shape[2] == width}
    return TokenSample(projections, TOKENS, seed=seed, name=PROJECTED)


def method(sample: TokenSample) -> Reason:
    """Describe how the pairs were found: every pair measured, or candidates by random projections."""
    heads = sum(len(x) for x in sample.projections.values())
    used = 4 * sample.tokens * sum(x.shape[0] * x.shape[2] for x in sample.projections.values()) / 2**20
    fields = {"heads": heads, "tokens": sample.tokens, "mebibytes": used}
    if sample.name == FULL:
        return Reason("every_pair", fields)
    return Reason("projected_pairs", {**fields, "width": WIDTH, "candidates": CANDIDATES})


def pairs(
    collected: Collected,
    sample: TokenSample,
    head_projections: Mapping[AttentionSite, HeadProjections],
    watch: Callable[[TokenSample, Tensor | None], Observations],
) -> tuple[Pair, ...]:
    """Return the pairs of heads of different layers with the largest |cosine similarity|, as measured.

    `watch` runs the model once more with a collector over the batches with sampled tokens, given by their hashes, or
    over all; it is called if the sample has only projected outputs.
    """
    w_o = _output_projections(head_projections)
    candidates: list[tuple[float, Head, Head]] = []
    for sites in _by_stack(collected, sample.name).values():
        candidates += _candidates(sites, w_o if sample.name == FULL else None)
    candidates = sorted(candidates, key=lambda x: -abs(x[0]))[:CANDIDATES]
    if sample.name == FULL:
        return tuple(Pair(one, other, cosine, cosine) for cosine, one, other in candidates)
    measured = _measured(candidates, w_o, sample, states_of(collected, sample.name, SiteSample), watch)
    return tuple(sorted(measured, key=lambda pair: -abs(pair.cosine)))


def _measured(
    candidates: list[tuple[float, Head, Head]],
    w_o: Mapping[tuple[str, str], Tensor],
    sample: TokenSample,
    sampled: Mapping[AttentionSite, SiteSample],
    watch: Callable[[TokenSample, Tensor | None], Observations],
) -> list[Pair]:
    """Measure the cosine similarity of the candidates on their full outputs, in a second pass over the sample."""
    chosen: dict[tuple[str, str], tuple[int, ...]] = {}
    for _, *heads in candidates:
        for site, head in heads:
            site_key = (site.name, site.kind)
            chosen[site_key] = tuple(sorted({*chosen.get(site_key, ()), head}))
    if not len(chosen):
        return []
    identities = {site_key: _identity(w_o[site_key][list(heads)]) for site_key, heads in chosen.items()}
    again = TokenSample(identities, sample.tokens, chosen, sample.seed, "chosen_heads")
    exact = states_of(watch(again, _tokens(sampled)).collected, again.name, SiteSample)
    same = [torch.equal(state.token_hashes(), sampled[site].token_hashes()) for site, state in exact.items()]
    if len(same) < len(chosen) or not all(same):
        # The attention of a site skips rows that are no padding, by whose number its tokens are hashed.
        exact = states_of(watch(again, None).collected, again.name, SiteSample)
    centred: dict[Head, Tensor] = {}
    for site, state in exact.items():
        rows = state.rows()
        for index, head in enumerate(chosen[site.name, site.kind]):
            centred[site, head] = (rows[:, index] - rows[:, index].mean(0)) @ w_o[site.name, site.kind][head]
    return [Pair(one, other, estimate, _cosine(centred[one], centred[other])) for estimate, one, other in candidates]


def _tokens(sampled: Mapping[AttentionSite, SiteSample]) -> Tensor:
    return torch.cat([state.token_hashes() for state in sampled.values()]).unique()


def _output_projections(head_projections: Mapping[AttentionSite, HeadProjections]) -> dict[tuple[str, str], Tensor]:
    """Return W_O by head, [heads, value_dim, embed_dim], of every site where it is known, by (name, kind)."""
    return {
        (site.name, site.kind): x.output.detach().cpu().double()
        for site, x in head_projections.items()
        if x.output is not None
    }


def _identity(w_o: Tensor) -> Tensor:
    """Return an identity projection for each head, so that the sample contains the outputs themselves."""
    return torch.eye(w_o.shape[1]).expand(w_o.shape[0], -1, -1)


def _by_stack(collected: Collected, name: str) -> dict[tuple[str, int], list[Any]]:
    """Group sites whose samples are of the same tokens, as (site, rows), by layer list and number of tokens.

    The path of the layer list distinguishes an encoder from a decoder, whose tokens differ.
    """
    stacks: dict[tuple[str, int], list[Any]] = {}
    for site, state in states_of(collected, name, SiteSample).items():
        rows = state.rows()
        stacks.setdefault((site.stack.partition(".*")[0], len(rows)), []).append((site, rows))
    return stacks


def _candidates(
    sites: list[tuple[AttentionSite, Tensor]], w_o: Mapping[tuple[str, str], Tensor] | None
) -> list[tuple[float, Head, Head]]:
    """Return the pairs of heads of different layers with the largest |cosine similarity| of their rows.

    With `w_o`, rows are multiplied by it first: contributions to the residual stream, [tokens, heads, embed_dim], which
    are too large to store. float32 suffices for cosines.
    """
    heads: list[Head] = [(site, head) for site, rows in sites for head in range(rows.shape[1])]
    tokens = sites[0][1].shape[0]
    if len(sites) < 2 or tokens < 2:
        return []
    outputs = [(rows - rows.mean(0)).transpose(0, 1) for _, rows in sites]  # [heads, tokens, any]
    if w_o is not None:
        outputs = [x.float().contiguous() for x in outputs]
        # W_O is a transposed view of the layer's weight, with which a product takes twice as long.
        matrices = [w_o[site.name, site.kind].float().contiguous() for site, _ in sites]
    similarity = torch.zeros(len(heads), len(heads), dtype=torch.float64)  # of a head with those after it
    for start in range(0, tokens, CHUNK):
        parts = [x[:, start : start + CHUNK] for x in outputs]
        if w_o is not None:
            parts = [torch.bmm(x, matrix) for x, matrix in zip(parts, matrices, strict=True)]
        flat = torch.cat(parts).flatten(1)
        for first in range(0, len(heads), HEADS):
            similarity[first : first + HEADS, first:] += flat[first : first + HEADS] @ flat[first:].T
    norms = similarity.diagonal().sqrt().clamp_min(torch.finfo(similarity.dtype).tiny)
    similarity = similarity / norms / norms[:, None]
    layers = torch.tensor([site.layer for site, _ in heads])
    comparable = (layers[:, None] != layers).triu() & similarity.isfinite()  # a layer may have self and cross-attention
    count = min(CANDIDATES, int(comparable.sum()))
    flat_indices = torch.where(comparable, similarity.abs(), -torch.inf).flatten().topk(count).indices
    values = similarity.flatten()[flat_indices]
    return [
        (float(value), heads[int(index) // len(heads)], heads[int(index) % len(heads)])
        for value, index in zip(values, flat_indices, strict=True)
    ]


def _cosine(one: Tensor, other: Tensor) -> float:
    sizes = one.norm() * other.norm()
    return float((one * other).sum() / sizes) if sizes > 0 else float("nan")

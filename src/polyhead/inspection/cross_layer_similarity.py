"""Heads of different layers that say the same: compared at the same sample of tokens.

Where what all heads say at these tokens fits into `BYTES`, every pair is measured. Where it does not, contributions
are projected at random to few numbers, by which the candidates are picked; those are then measured in a second reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.inspection.heads import Head, Pair
from polyhead.observation import AttentionSite, CollectorState, HeadProjections, Observations
from polyhead.observation.token_sample import SiteSample, TokenSample

TOKENS = 1024  # of the sample
WIDTH = 64  # that every contribution is projected to
CANDIDATES = 20  # that are measured, and told
BYTES = 1 << 28


def sample_of(
    head_projections: Mapping[AttentionSite, HeadProjections], seed: int, most_bytes: int = BYTES
) -> TokenSample | None:
    """What to gather of every head whose output projection is known; None where there are not two layers of them."""
    outputs = _outputs(head_projections)
    if len(outputs) < 2:
        return None
    if 4 * TOKENS * sum(x.shape[0] * x.shape[1] for x in outputs.values()) <= most_bytes:
        return TokenSample({place: _same(x) for place, x in outputs.items()}, TOKENS, seed=seed, name="said")
    projections: dict[tuple[str, str], Tensor] = {}
    for width in {x.shape[2] for x in outputs.values()}:
        generator = torch.Generator().manual_seed(seed)
        matrix = torch.randn(width, WIDTH, generator=generator) / WIDTH**0.5
        projections |= {place: x.float() @ matrix for place, x in outputs.items() if x.shape[2] == width}
    return TokenSample(projections, TOKENS, seed=seed, name="sketches")


def rule(sample: TokenSample) -> str:
    """How pairs of different layers were found, in words."""
    heads = sum(len(x) for x in sample.projections.values())
    used = 4 * sample.tokens * sum(x.shape[0] * x.shape[2] for x in sample.projections.values()) / 2**20
    if sample.name == "said":
        how = "every pair is measured"
    else:
        how = f"projected at random to {WIDTH} numbers; the {CANDIDATES} most alike are then measured without that"
    return f"{heads} heads at {sample.tokens:,} sampled tokens ({used:.0f} MiB): {how}"


def pairs(
    collected: Mapping[AttentionSite, Mapping[str, CollectorState]],
    sample: TokenSample,
    head_projections: Mapping[AttentionSite, HeadProjections],
    watch: Callable[[TokenSample], Observations],
) -> tuple[Pair, ...]:
    """The most alike pairs of heads of different sites, with their measured cosine."""
    outputs = _outputs(head_projections)
    found = _by_stack(collected, sample.name)
    if sample.name == "said":
        found = {key: [(site, _contributions(rows, outputs, site)) for site, rows in x] for key, x in found.items()}
    guesses: list[tuple[float, Head, Head]] = []
    for sites in found.values():
        guesses += _candidates(sites)
    guesses = sorted(guesses, key=lambda x: -x[0])[:CANDIDATES]
    if sample.name == "said":
        return tuple(Pair(one, other, cosine, cosine) for cosine, one, other in guesses)
    measured = _measured(guesses, outputs, sample, watch)
    return tuple(sorted(measured, key=lambda pair: -pair.cosine))


def _measured(
    guesses: list[tuple[float, Head, Head]],
    outputs: Mapping[tuple[str, str], Tensor],
    sample: TokenSample,
    watch: Callable[[TokenSample], Observations],
) -> list[Pair]:
    chosen: dict[tuple[str, str], tuple[int, ...]] = {}
    for _, *heads in guesses:
        for site, head in heads:
            place = (site.name, site.kind)
            chosen[place] = tuple(sorted({*chosen.get(place, ()), head}))
    if not len(chosen):
        return []
    same = {place: _same(outputs[place][: len(heads)]) for place, heads in chosen.items()}
    exact = watch(TokenSample(same, sample.tokens, chosen, sample.seed, "chosen_heads"))
    said: dict[Head, Tensor] = {}
    for site, values in exact.collected.items():
        value = values.get("chosen_heads")
        if isinstance(value, SiteSample):
            _, rows = value.found()
            for index, head in enumerate(chosen[site.name, site.kind]):
                said[site, head] = (rows[:, index] - rows[:, index].mean(0)) @ outputs[site.name, site.kind][head]
    return [Pair(one, other, guess, _cosine(said[one], said[other])) for guess, one, other in guesses]


def _outputs(head_projections: Mapping[AttentionSite, HeadProjections]) -> dict[tuple[str, str], Tensor]:
    """[heads, value_dim, embed_dim] of every site where it is known."""
    return {
        (site.name, site.kind): x.output.detach().cpu().double()
        for site, x in head_projections.items()
        if x.output is not None
    }


def _same(output: Tensor) -> Tensor:
    """Matrices that leave what the heads say as it is."""
    return torch.eye(output.shape[1]).expand(output.shape[0], -1, -1)


def _contributions(rows: Tensor, outputs: Mapping[tuple[str, str], Tensor], site: AttentionSite) -> Tensor:
    """What the heads write [tokens, heads, embed_dim], in float32: only cosines are taken of it."""
    return torch.einsum("thd,hde->the", rows.float(), outputs[site.name, site.kind].float())


def _by_stack(collected: Mapping[AttentionSite, Mapping[str, Any]], name: str) -> dict[tuple[str, int], list[Any]]:
    """Sites whose tokens are the same: those of one stack. Layers of an encoder and of a decoder read other tokens."""
    found: dict[tuple[str, int], list[Any]] = {}
    for site, values in collected.items():
        value = values.get(name)
        if isinstance(value, SiteSample):
            _, rows = value.found()
            found.setdefault((site.stack.partition(".*")[0], len(rows)), []).append((site, rows))
    return found


def _candidates(sites: list[tuple[AttentionSite, Tensor]]) -> list[tuple[float, Head, Head]]:
    heads: list[Head] = [(site, head) for site, rows in sites for head in range(rows.shape[1])]
    if len(sites) < 2 or sites[0][1].shape[0] < 2:
        return []
    said = torch.cat([rows for _, rows in sites], 1)  # [tokens, heads, width]
    flat = (said - said.mean(0)).transpose(0, 1).flatten(1)
    flat = flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    alike = flat @ flat.T
    layer = torch.tensor([index for index, (_, rows) in enumerate(sites) for _ in range(rows.shape[1])])
    alike = torch.where((layer[:, None] < layer), alike, -torch.inf)
    count = min(CANDIDATES, int(alike.isfinite().sum()))
    values, places = alike.flatten().topk(count)
    return [
        (float(value), heads[int(place) // len(heads)], heads[int(place) % len(heads)])
        for value, place in zip(values, places, strict=True)
    ]


def _cosine(one: Tensor, other: Tensor) -> float:
    sizes = one.norm() * other.norm()
    return float((one * other).sum() / sizes) if sizes > 0 else float("nan")

"""Heads of different layers that say the same: picked by a random projection, then measured at the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.inspection.result import Head, Pair
from polyhead.observatory import AttentionSite, Gathered, Observations, Wiring
from polyhead.observatory.token_sample import SiteSample, TokenSample

TOKENS = 1024  # of the sample
WIDTH = 64  # that every contribution is projected to
CANDIDATES = 20  # that are measured

RULE = (
    f"contributions after the output projection at {TOKENS:,} sampled tokens, projected at random to {WIDTH} numbers "
    f"(4 x {TOKENS} x {WIDTH} bytes a head); the {CANDIDATES} pairs of different layers with the largest cosine are "
    "measured without the projection at the same tokens"
)


def sketch(wiring: Mapping[AttentionSite, Wiring], seed: int) -> TokenSample | None:
    """What to gather of every head whose output projection is known; None where there are not two layers of them."""
    outputs = {site: x.output.detach().cpu().float() for site, x in wiring.items() if x.output is not None}
    if len(outputs) < 2:
        return None
    projections: dict[tuple[str, str], Tensor] = {}
    for width in {x.shape[2] for x in outputs.values()}:
        generator = torch.Generator().manual_seed(seed)
        matrix = torch.randn(width, WIDTH, generator=generator) / WIDTH**0.5
        projections |= {(site.name, site.kind): x @ matrix for site, x in outputs.items() if x.shape[2] == width}
    return TokenSample(projections, TOKENS, seed=seed)


def pairs(
    gathered: Mapping[AttentionSite, Mapping[str, Gathered]],
    sample: TokenSample,
    wiring: Mapping[AttentionSite, Wiring],
    watch: Callable[[TokenSample], Observations],
) -> tuple[Pair, ...]:
    """The candidates with their measured cosine, the most alike first."""
    found = _by_stack(gathered, sample.name)
    guesses: list[tuple[float, Head, Head]] = []
    for sites in found.values():
        guesses += _candidates(sites)
    guesses = sorted(guesses, key=lambda x: -x[0])[:CANDIDATES]
    if not len(guesses):
        return ()
    chosen: dict[tuple[str, str], tuple[int, ...]] = {}
    for _, *heads in guesses:
        for site, head in heads:
            place = (site.name, site.kind)
            chosen[place] = tuple(sorted({*chosen.get(place, ()), head}))
    outputs: dict[tuple[str, str], Tensor] = {
        (site.name, site.kind): x.output for site, x in wiring.items() if x.output is not None
    }
    same = {place: torch.eye(outputs[place].shape[1]).expand(len(heads), -1, -1) for place, heads in chosen.items()}
    exact = watch(TokenSample(same, sample.tokens, chosen, sample.seed, "chosen_heads"))
    said: dict[Head, Tensor] = {}
    for site, values in exact.gathered.items():
        value = values.get("chosen_heads")
        if isinstance(value, SiteSample):
            _, rows = value.found()
            for index, head in enumerate(chosen[site.name, site.kind]):
                said[site, head] = (rows[:, index] - rows[:, index].mean(0)) @ _matrix(outputs, site, head)
    measured = [Pair(one, other, guess, _cosine(said[one], said[other])) for guess, one, other in guesses]
    return tuple(sorted(measured, key=lambda pair: -pair.cosine))


def _matrix(outputs: Mapping[tuple[str, str], Tensor], site: AttentionSite, head: int) -> Tensor:
    return outputs[site.name, site.kind][head].detach().cpu().double()


def _by_stack(gathered: Mapping[AttentionSite, Mapping[str, Any]], name: str) -> dict[tuple[str, int], list[Any]]:
    """Sites whose tokens are the same: those of one stack. Layers of an encoder and of a decoder read other tokens."""
    found: dict[tuple[str, int], list[Any]] = {}
    for site, values in gathered.items():
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
    flat = flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
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

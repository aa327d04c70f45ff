"""Latent heads: one token over a latent cache, against a copy of its bytes and a product of the same FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measuring.agreement import hold
from benchmarks.measuring.calls import caches_beyond
from benchmarks.measuring.cases import Case, Entrants, Pair, Run
from benchmarks.measuring.verdicts import Figure
from polyhead.costs.measuring.gpu import l2_bytes, replayed
from polyhead.costs.measuring.runner import Timings
from polyhead.ops.decode.fused import CacheArguments, decode

OURS, COPY, PRODUCT = "polyhead", "a copy of as many bytes", "a matrix product of as many FLOPs"
# Few heads read the cache, many multiply: 60% of the copy's bandwidth, 45% of the product's rate.
BOUNDS = {16: (COPY, 1 / 0.60), 128: (PRODUCT, 1 / 0.45)}
SIDE = 8192  # of the product


@dataclass(frozen=True)
class Place:
    """A latent cache, `batch` sequences of `tokens` latents, and the number of heads that read it."""

    heads: int
    batch: int = 32
    tokens: int = 32_768
    rank: int = 512
    rope_dim: int = 64

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * self.tokens * (self.width + self.rank)

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens} tokens, rank {self.rank} + {self.rope_dim}, {self.heads} heads"


def one_token(run: Run, place: Place) -> Iterator[Case]:
    """Yield CUDA graphs over several caches in turn, which together exceed the L2 cache."""
    generator = torch.Generator(run.device).manual_seed(run.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=run.device, dtype=run.dtype)

    held = normal(place.batch, 1, place.tokens, place.width)
    count = caches_beyond(l2_bytes(run.device), held.nbytes)
    caches = [held, *(normal(*held.shape) for _ in range(1, count))]
    query = normal(place.batch, place.heads, 1, place.width)
    scale = place.width**-0.5
    exact, plain = (
        _formula(query[-1].to(dtype), held[-1].to(dtype), place.rank, scale) for dtype in (torch.float64, run.dtype)
    )

    def ours(held: Tensor) -> Callable[[], Tensor]:
        cache = CacheArguments(held, held[..., : place.rank], shared=True)

        def call() -> Tensor:
            with torch.no_grad():
                return decode(query, cache, scale=scale, names=())[0]

        return call

    def copy(held: Tensor) -> Callable[[], Tensor]:
        half = held.flatten()[: held.numel() // 2]  # read and written, it moves as many bytes as the cache has
        target = torch.empty_like(half)
        return lambda: target.copy_(half)

    rows = -(-place.flops // (2 * SIDE * SIDE))
    factors = normal(rows, SIDE), normal(SIDE, SIDE)
    found = Entrants()
    found.enter(
        OURS,
        lambda: replayed([ours(cache) for cache in caches], run.device),
        lambda results: hold(OURS, results[0][-1], exact, plain),
    )
    found.enter(COPY, lambda: replayed([copy(cache) for cache in caches], run.device))
    found.enter(PRODUCT, lambda: replayed([lambda: factors[0] @ factors[1]] * len(caches), run.device))

    def rates(timings: Timings) -> list[Figure]:
        if OURS not in timings.samples_ms:
            return []
        milliseconds = timings.median_ms(OURS)
        bandwidth, products = (x / milliseconds / 1e9 for x in (held.nbytes, place.flops))
        return [Figure("bandwidth", bandwidth, "TB/s"), Figure("rate of products", products, "TFLOP/s")]

    against, bound = BOUNDS[place.heads]
    pairs = [Pair(OURS, name, bound if name == against else None) for name in (COPY, PRODUCT)]
    notes = {"caches": count, "bytes": held.nbytes}
    yield found.case("latent decode", place, pairs, notes=notes, items=count, figures=rates)


def _formula(query: Tensor, held: Tensor, rank: int, scale: float) -> Tensor:
    """Compute one sequence: query [heads, 1, width], held [1, tokens, width]."""
    return (query @ held.transpose(-1, -2) * scale).softmax(-1) @ held[..., :rank]

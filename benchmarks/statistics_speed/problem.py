"""The tensors of one place of the benchmark."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.measuring.cases import Run
from benchmarks.statistics_speed.places import Shape
from polyhead import Mask


@dataclass(frozen=True, eq=False)
class Problem:
    """Random query [batch, heads, queries, head_dim] and keys and values [batch, kv_heads, tokens, head_dim]."""

    shape: Shape
    causal: bool
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def draw(
        cls, run: Run, shape: Shape, *, causal: bool = False, queries: int | None = None, salt: int = 0
    ) -> Problem:
        """Drawn on the device itself: a billion numbers from a CPU would take longer than the run."""
        generator = torch.Generator(run.device).manual_seed(1000 * run.seed + salt)

        def normal(heads: int, tokens: int) -> Tensor:
            size = (shape.batch, heads, tokens, shape.head_dim)
            return torch.randn(size, generator=generator, device=run.device, dtype=run.dtype)

        query = normal(shape.heads, shape.tokens if queries is None else queries)
        key, value = (normal(shape.kv_heads, shape.tokens) for _ in range(2))
        return cls(shape, causal, query, key, value)

    @functools.cached_property
    def mask(self) -> Mask | None:
        return Mask.causal() if self.causal else None

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    @property
    def first_query(self) -> int:
        """Position of the first query among the keys: the last query is the last token."""
        return self.key.shape[2] - self.query.shape[2]

    def shortened(self, tokens: int) -> Problem:
        """One sequence of so many tokens, which a float64 gradient has room for."""
        tokens = min(tokens, self.shape.tokens)
        query, key, value = (x[:1, :, :tokens].contiguous() for x in (self.query, self.key, self.value))
        return Problem(replace(self.shape, batch=1, tokens=tokens), self.causal, query, key, value)

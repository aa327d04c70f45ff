"""The tensors of one place, and who takes part there: a contender that is absent or wrong is never timed."""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.agreement import Disagreement
from benchmarks.statistics_speed.places import Shape
from polyhead import Mask
from polyhead.costs.measuring.runner import OUT_OF_MEMORY, Run, is_out_of_memory
from polyhead.errors import PolyheadError

OURS = "polyhead"


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


@dataclass
class Entrants:
    """Contenders at one shape."""

    calls: dict[str, Callable[[], object]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # of ours: another's absence is a fact, ours a fault

    def enter(self, name: str, build: Callable[[], Callable[[], Any]], check: Callable[[Any], object]) -> bool:
        """Build a contender and hold what it gives against the formula; one that cannot run says why."""
        reason = ""
        try:
            call = build()
            result = call()
        except _errors() as error:
            words = str(error).strip().partition("\n")[0] or type(error).__name__
            reason = OUT_OF_MEMORY if is_out_of_memory(error) else words
        if not reason:
            try:
                check(result)
            except Disagreement as error:
                reason = f"not timed: {error}"
        if reason:  # only now is the error gone, which held on to the memory
            self._leave(name, reason)
            return False
        self.calls[name] = call
        return True

    def _leave(self, name: str, reason: str) -> None:
        if name.startswith(OURS):
            self.failures.append(reason if name in reason else f"{name}: {reason}")
        else:
            self.absent[name] = reason
        tidy()

    @property
    def failed(self) -> str:
        return "; ".join(self.failures)


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    """Errors of a kernel that a machine cannot run; anything else is a bug of this program."""
    if importlib.util.find_spec("triton") is None:
        return PolyheadError, RuntimeError
    from triton.errors import TritonError

    return PolyheadError, RuntimeError, TritonError


def tidy() -> None:
    """Give back the memory of what is gone, so that the next place starts with all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

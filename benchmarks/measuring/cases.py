"""Cases of a benchmark as data: the contenders at one shape, which of them are compared, and the bounds."""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.agreement import Disagreement
from benchmarks.measuring.verdicts import Figure
from polyhead.costs.measuring.runner import ALTERNATIONS, FEWEST, OUT_OF_MEMORY, Timings
from polyhead.errors import PolyheadError
from polyhead.out_of_memory import is_out_of_memory

OURS = "polyhead"
REPETITIONS = 3  # of a row with an interval too wide for a verdict


@dataclass(frozen=True)
class Run:
    """Settings of one run of a benchmark."""

    device: torch.device
    dtype: torch.dtype
    alternations: int = ALTERNATIONS
    seed: int = 0
    seconds: float | None = None  # of one case, warming up apart
    fewest: int = FEWEST
    repetitions: int = REPETITIONS

    @classmethod
    def on(cls, device: torch.device | None, *, seed: int, quick: bool = False, **options: Any) -> Run:
        """Return a run in bfloat16 on a GPU, or in float32 on the CPU, also for None; a quick one repeats no row."""
        device = device or torch.device("cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return cls(device, dtype, seed=seed, repetitions=0 if quick else REPETITIONS, **options)

    def inputs(self, *size: int, salt: int = 0) -> Tensor:
        """Return random numbers; not zeros, on which some processors are faster.

        They are drawn on the CPU, so that a seed draws the same ones for every device.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(*size, generator=generator).to(self.device, self.dtype)


def masked_name(name: object, causal: bool) -> str:
    """Return the name of a benchmark or of a shape under a causal mask, or without one.

    >>> masked_name("forward", True), masked_name("forward", False)
    ('forward, causal', 'forward')
    """
    return f"{name}, causal" if causal else str(name)


@dataclass(frozen=True)
class Pair:
    """A contender, its baseline, or several of which the fastest is the baseline, and the bound on their ratio."""

    subject: str
    against: str | Sequence[str]
    bound: float | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """One benchmark at one shape, ready to be timed; of equal pairs the first counts."""

    bench: str
    shape: str
    calls: Mapping[str, Callable[[], object]]
    pairs: Sequence[Pair] = ()
    absent: Mapping[str, str] = field(default_factory=dict)  # contenders that cannot run, and the reasons
    failed: str = ""  # a contender of ours that cannot run or is wrong, or a broken promise beside the times
    notes: Mapping[str, object] = field(default_factory=dict)
    items: int = 1  # done by each call; times are of one
    figures: Callable[[Timings], Iterable[Figure]] = lambda timings: ()


@dataclass(frozen=True, eq=False)
class Step:
    """Cases that share their tensors, built when the step is reached."""

    part: str
    place: str
    run: Run
    cases: Callable[[], Iterator[Case]]


@dataclass
class Entrants:
    """Contenders at one shape; absent and wrong ones are not timed."""

    calls: dict[str, Callable[[], object]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # of ours: another's absence is a fact, ours a fault

    def enter(
        self, name: str, build: Callable[[], Callable[[], Any]], check: Callable[[Any], object] | None = None
    ) -> bool:
        """Build a contender and check its result; return False and record the reason if it cannot run or is wrong."""
        reason = ""
        try:
            call = build()
            result = call()
        except _errors() as error:
            words = str(error).strip().partition("\n")[0] or type(error).__name__
            reason = OUT_OF_MEMORY if is_out_of_memory(error) else words
        if not reason and check is not None:
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

    def case(self, bench: str, shape: object, pairs: Sequence[Pair] = (), **options: Any) -> Case:
        """Return the case of these contenders; `options` are its other fields."""
        failed = "; ".join(self.failures)
        return Case(bench, str(shape), self.calls, pairs, absent=self.absent, failed=failed, **options)


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    """Errors of a kernel that a machine cannot run; anything else is a bug of this program."""
    if importlib.util.find_spec("triton") is None:
        return PolyheadError, RuntimeError
    from triton.errors import TritonError

    return PolyheadError, RuntimeError, TritonError


def tidy() -> None:
    """Free the memory of dropped tensors, so that the next case starts with all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""Bounds of the errors of the random calls, with their derivation.

There are three kinds of error.

- Rounding to the dtype of the inputs. The plain formula rounds every intermediate to it, so its own error measures
  what is lost: an output may have `OUTPUT` times that, a gradient `GRADIENT` times. The library's tests have 2, with
  errors that are maxima over several draws and orders of one problem; a single draw leaves them to chance, hence 3 and
  4. Where the plain formula happens to be exact, `STEPS` units in the last place of the largest element remain, for the
  rounding of the result and of the operands of one product.
- Rounding of sums and exponentials, in float32 where the inputs have 32 bits or fewer. The plain formula is no measure
  of it: in float32 it sums in another order, in one block, and may happen to be better. A logit is a sum of products of
  magnitude S = |scale| max|q| max|k| (norms), to which biases are added: its error is about eps (S + |bias|), also in a
  base-2 logarithm. A weight is the exponential of a difference of two such numbers, so its relative error is twice
  that, and that of a sum of K weights has sqrt(K) eps more, as independent errors add. A result that sums weights times
  numbers of size A has `TERMS` times this times A; a sum over rows has that times the root of the sum of its squared
  weights, which is at most sqrt(N) for N rows.
- Statistics have absolute bounds, relative to the largest one of the call where it is above 1: `STATISTIC`, and
  `LOGSUMEXP`, which is also the error of the approximate exponentials of a GPU; and the errors of the weights, which
  exceed them where logits are large.

A row without visible keys has no error: its output and the gradient of its query are exactly 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.oracle import Scene

OUTPUT = 3.0
GRADIENT = 4.0
STEPS = 4.0
TERMS = 2.0
STATISTIC = 2e-4
LOGSUMEXP = 1e-4


@dataclass(frozen=True)
class Rounding:
    """Errors of the sums of one call: absolute of a logit, relative of a weight; and the sizes of its terms."""

    logit: float
    weight: float
    scale: float
    key: float
    query: float
    value: float
    size: float  # of a logit
    received: float  # root of the sum of the squared weights of a key, over the rows that share it

    @classmethod
    def of(cls, scene: Scene, weights: Tensor, dtype: torch.dtype) -> Rounding:
        """Return the errors of sums for a scene without NaN and Inf, in float64, if the inputs have this dtype."""
        eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
        scale = scene.scale if scene.scale is not None else scene.query.shape[-1] ** -0.5
        factor = _largest(scale) if isinstance(scale, Tensor) else abs(scale)
        size = factor * _largest(scene.query.norm(dim=-1)) * _largest(scene.key.norm(dim=-1))
        added = sum(_largest(x) for x in (scene.bias, scene.table, scene.sinks) if x is not None)
        logit = eps * (size + added + 2)
        weight = 2 * logit + eps * math.sqrt(scene.sizes[3])
        by_group = weights.detach().unflatten(1, (scene.key.shape[1], -1))
        return cls(
            logit=logit,
            weight=weight,
            scale=factor,
            key=_largest(scene.key),
            query=_largest(scene.query),
            value=_largest(scene.value),
            size=size + added,
            received=_largest(by_group.square().sum((2, 3)).sqrt()),
        )

    def statistic(self, exact: Tensor) -> float:
        return (STATISTIC + TERMS * self.weight) * (1 + _largest(exact))

    def logsumexp(self, exact: Tensor) -> float:
        return LOGSUMEXP * (1 + _largest(exact)) + TERMS * self.weight

    def output(self, exact: Tensor, plain: Tensor) -> float:
        return _of_dtype(exact, plain, OUTPUT) + TERMS * self.weight * self.value

    def gradient(self, name: str, exact: Tensor, plain: Tensor, scene: Scene, upstream: Upstream) -> float:
        """Return the bound of the gradient of an input, where `plain` has the input's own dtype or a narrower one."""
        return _of_dtype(exact, plain, GRADIENT) + TERMS * self.weight * self._terms(name, scene, upstream)

    def _terms(self, name: str, scene: Scene, upstream: Upstream) -> float:
        """Return the size of a sum of the gradients of logits, or of weights, of all rows that share an element."""
        batch, heads, queries, _ = scene.sizes
        of_logits = upstream.weight * math.sqrt(batch * heads * queries)
        return {
            "query": upstream.weight * self.scale * self.key,
            "key": upstream.weight * self.scale * self.query * self.received,
            "value": upstream.output * self.received,
            "scale": of_logits * self.size / max(self.scale, 1e-3),
        }.get(name, of_logits)


@dataclass(frozen=True)
class Upstream:
    """Largest gradient of the loss with respect to a weight, and to an element of the output."""

    weight: float
    output: float

    @classmethod
    def of(cls, directions: dict[str, Tensor], scene: Scene) -> Upstream:
        """Each statistic adds at most the size of its direction: its factors are normalised to 1."""
        rows = sum(_largest(x) for name, x in directions.items() if name != "output" and x.numel())
        rows *= 1 + (math.log(scene.sizes[3]) if "entropy" in directions else 0.0)
        if "output" not in directions:
            return cls(rows, 0.0)
        direction = directions["output"]
        value = scene.value.detach().repeat_interleave(scene.sizes[1] // scene.value.shape[1], 1)
        return cls(rows + _largest(direction @ value.mT), _largest(direction))


@dataclass(frozen=True)
class Problem:
    """A result that is wrong: its name, what is wrong, and the error in units of its bound."""

    name: str
    text: str
    ratio: float = math.inf

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def compare(name: str, actual: Tensor, exact: Tensor, bound: float) -> Problem | None:
    """Return the problem if a result differs from the exact one by more than the bound, or in its infinities."""
    if actual.shape != exact.shape:
        return Problem(name, f"shape {list(actual.shape)} is not {list(exact.shape)}")
    actual, exact = actual.detach().double(), exact.detach()
    finite = exact.isfinite()
    if not torch.equal(actual[~finite], exact[~finite]):
        return Problem(name, "infinities are elsewhere")
    actual, exact = actual[finite], exact[finite]
    if not actual.isfinite().all():
        return Problem(name, f"{int((~actual.isfinite()).sum())} elements are not finite")
    error = float((actual - exact).abs().max()) if exact.numel() else 0.0
    if error <= bound:
        return None
    ratio = error / bound if bound else math.inf
    text = f"error {error:.3e} exceeds {bound:.3e} ({ratio:.1f}x), largest element {_largest(exact):.3e}"
    return Problem(name, text, ratio)


def _of_dtype(exact: Tensor, plain: Tensor, factor: float) -> float:
    """Return the bound of rounding to the dtype of the plain formula, whose overflows count for nothing."""
    errors = (plain.detach().double() - exact.detach()).abs()
    return factor * _largest(errors) + STEPS * torch.finfo(plain.dtype).eps * _largest(exact)


def _largest(x: Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    x = x.detach()
    return float(torch.where(x.isfinite(), x, 0.0).abs().max()) if x.numel() else 0.0

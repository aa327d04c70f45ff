"""The formula of every result in any dtype, and its gradients; independent of the code of `polyhead`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.fuzz.bounds import Rounding
from tests.fuzz.scenes import VectorisedMask
from tests.ops.oracle import LEARNED, Scene

# Statistics at the one key of each row where another quantity is largest.
MAXIMA = {"max_logit": "logit", "max_abs_logit": "magnitude", "confidence": "logit"}


@dataclass(frozen=True)
class RowOptions:
    """Parameters of the statistics."""

    window: int
    sink_keys: int


@dataclass(frozen=True)
class Results:
    """Output, log-sum-exp and statistics by name, and the keys at which the maxima of each row are."""

    tensors: dict[str, Tensor]
    largest: dict[str, Tensor]  # [batch, heads, queries, 1] each
    weights: Tensor


def formula_results(scene: Scene, options: RowOptions, largest: Mapping[str, Tensor] | None = None) -> Results:
    """Return every result of the formula in the scene's dtype; statistics are summed in float32 at least.

    `largest` are the keys of the maxima in the exact formula: rounding must not select others, whose gradients differ.
    """
    formula = scene.formula()
    assert formula.logits is not None
    visible, filled = scene.visible(), scene.visible().any(-1)
    wide = torch.promote_types(scene.query.dtype, torch.float32)
    logits, weights, logsumexp = (x.to(wide) for x in (formula.logits, formula.weights, formula.logsumexp))
    if largest is None:
        largest = _largest_keys(logits.detach(), visible)
    statistics = _masses(scene, weights, options)
    at_maximum = {x: logits.gather(-1, largest[x]).squeeze(-1) for x in largest}
    statistics |= {
        "max_logit": torch.where(filled, at_maximum["logit"], -torch.inf),
        "max_abs_logit": torch.where(filled, at_maximum["magnitude"].abs(), 0.0),
        "confidence": torch.where(filled, weights.gather(-1, largest["logit"]).squeeze(-1), 0.0),
        "visible_keys": visible.sum(-1).to(wide),
    }
    # The entropy is the sum of p (L - s); a learned sink is one more logit.
    level = torch.where(logsumexp == -torch.inf, 0.0, logsumexp)
    entropy = (weights * torch.where(visible, level[..., None] - logits, 0.0)).sum(-1)
    if scene.sinks is not None:
        sink = scene.sinks.to(wide)[:, None]
        statistics["learned_sink_mass"] = torch.exp(sink - level)
        entropy = entropy + statistics["learned_sink_mass"] * (level - sink)
    statistics["entropy"] = entropy
    return Results({"output": formula.output, "logsumexp": logsumexp, **statistics}, dict(largest), weights)


def _largest_keys(logits: Tensor, visible: Tensor) -> dict[str, Tensor]:
    return {
        "logit": torch.where(visible, logits, -torch.inf).argmax(-1, keepdim=True),
        "magnitude": torch.where(visible, logits.abs(), -torch.inf).argmax(-1, keepdim=True),
    }


def _masses(scene: Scene, weights: Tensor, options: RowOptions) -> dict[str, Tensor]:
    """Return the statistics that are sums of weights times a factor of the key."""
    batch, _, queries, keys = scene.sizes
    who = scene.who
    assert isinstance(who, VectorisedMask)
    distance = who.distances(batch, queries, keys).to(weights.device)[:, None]
    ordinal = who.ordinals(batch, queries, keys).to(weights.device)[:, None]
    factors = {
        "mean_distance": distance.abs(),
        "mean_offset": distance,
        "mean_squared_distance": distance**2,
        "sink_mass": (ordinal >= 0) & (ordinal < options.sink_keys),
        "self_mass": distance == 0,
        "previous_mass": distance == -1,
        "next_mass": distance == 1,
        "window_mass": distance.abs() <= options.window,
    }
    return {name: (weights * factor).sum(-1) for name, factor in factors.items()}


# ---- gradients


@dataclass(frozen=True)
class Loss:
    """A random linear functional of some results: directions by the name of the result, and factors of their terms."""

    directions: dict[str, Tensor]
    factors: dict[str, float]

    def __call__(self, results: Mapping[str, Tensor]) -> Tensor:
        terms = []
        for name, direction in self.directions.items():
            x = results[name]
            finite = torch.where(x.detach() == -torch.inf, 0.0, x)
            terms.append((finite.double() * (self.factors.get(name, 1.0) * direction)).sum())
        return torch.stack(terms).sum()


def draw_loss(
    names: tuple[str, ...], exact: Results, scene: Scene, rounding: Rounding, seed: int, dtype: torch.dtype
) -> Loss:
    """Return a functional whose gradients are of the order of those of the output.

    Distances are divided by the largest one. A maximum counts only in rows where rounding cannot select another key.
    """
    generator = torch.Generator().manual_seed(seed)
    distance = 2.0 ** -math.ceil(math.log2(max(1.0, _largest_distance(scene))))
    factors = {"mean_distance": distance, "mean_offset": distance, "mean_squared_distance": distance**2}
    directions = {}
    for name in names:
        x = exact.tensors[name].detach()
        direction = torch.randn(x.shape, generator=generator).to(x.device)
        # Every dtype represents these numbers, so that the functional is the same one for all formulas.
        direction = direction.to(dtype if name == "output" else torch.bfloat16).double()
        if name in MAXIMA:
            direction = torch.where(_is_clear(exact, scene, MAXIMA[name], rounding), direction, 0.0)
        directions[name] = direction
    return Loss(directions, factors)


def _largest_distance(scene: Scene) -> float:
    batch, _, queries, keys = scene.sizes
    return float(scene.who.distances(batch, queries, keys).abs().max())


def _is_clear(exact: Results, scene: Scene, kind: str, rounding: Rounding) -> Tensor:
    """Return False in rows whose two largest logits, or magnitudes, are closer than rounding."""
    logits = scene.formula().logits
    assert logits is not None
    measure = logits.detach().abs() if kind == "magnitude" else logits.detach()
    measure = torch.where(scene.visible(), measure, -torch.inf)
    top = measure.topk(min(2, measure.shape[-1]), -1).values
    return top[..., 0] - top[..., -1] > 8 * rounding.logit if top.shape[-1] == 2 else torch.ones_like(top[..., 0]) > 0


def gradients(loss: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of every input, zero where the loss does not depend on it."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(x) for name, x in inputs.items()}
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(inputs.items(), found, strict=True)
    }


def with_leaves(scene: Scene, names: tuple[str, ...]) -> tuple[Scene, dict[str, Tensor]]:
    """Return the scene, with its strides, whose tensors of these names require gradients, and those tensors."""
    tensors = {x: getattr(scene, x) for x in LEARNED if isinstance(getattr(scene, x), Tensor)}
    leaves = {name: tensors[name].detach().requires_grad_() for name in tensors if name in names}
    return replace(scene, **leaves), leaves

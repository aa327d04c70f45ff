"""`gradient_scores`: gradients of the loss with respect to head gates, with one backward pass per batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.analysis.importance.head_importance import Importance, merged
from polyhead.analysis.importance.losses import Loss, RowLosses, as_loss
from polyhead.analysis.importance.measuring import (
    GatedSite,
    Heads,
    Layers,
    as_collection,
    batch_importance,
    checked_losses,
    find_gated_sites,
)
from polyhead.analysis.importance.overlap import GradientOverlap
from polyhead.errors import OptionError
from polyhead.observation import Session, observe
from polyhead.observation.evaluation_mode import evaluating
from polyhead.ops.attention.scaled_dot_product import without_cudnn

Plan = tuple[tuple[GatedSite, ...], RowLosses]


def gradient_scores(
    model: nn.Module,
    batches: Iterable[Any],
    loss: str | Loss | Callable[[nn.Module, Any], Tensor | RowLosses],
    *,
    layers: Layers = None,
    heads: Heads = None,
    overlap: bool = True,
    progress: Callable[[int, int | None], None] | None = None,
) -> Importance:
    """Return |dL/dgate| and -dL/dgate of every head, where a gate multiplies the head's output and is 1.

    `gradient` is the mean over rows of |dL/dgate| of the row's own loss (the head importance of Michel, Levy and
    Neubig, 2019), `taylor` is minus the mean of dL/dgate: the first-order estimate of the loss increase by ablation.
    With `overlap`, the cosine similarity over tokens of the gradients of the heads of each layer is computed as well.

    Arguments are those of `ablate`. Rows must be independent, as they are in a transformer. A scalar loss of a batch
    counts as one row. No `.grad` is modified.

    >>> from polyhead.layers.transformer import LanguageModel
    >>> model = LanguageModel(13, 8, 2, 1)
    >>> gradient_scores(model, [{"tokens": torch.tensor([[3, 5, 7, 11]])}], "language")
    Importance(2 heads for 'language' over 3 predictions in 1 documents: gradient, taylor)
    """
    requested, layers, heads = as_loss(loss), as_collection(layers), as_collection(heads)
    if requested.flat is not None:
        raise OptionError(f"gradient scores need a loss with a gradient, got {requested.name!r}: {requested.flat}")
    number = len(batches) if isinstance(batches, Sized) else None
    plans: dict[Hashable, Plan] = {}
    parts: list[Importance] = []
    with evaluating(model):
        for batch in batches:
            shape = requested.shape(batch)
            plan = plans.get(shape) if shape is not None else None
            if plan is None:
                plan = find_gated_sites(model, requested, batch, layers, heads)
                plans = {**plans, shape: plan} if shape is not None else plans
            with torch.enable_grad(), without_cudnn(), observe(model, statistics=False) as session:
                parts.append(_of_one(session, model, requested, batch, plan, overlap))
            if progress is not None:
                progress(len(parts), number)
    return merged(parts)


def _of_one(session: Session, model: nn.Module, loss: Loss, batch: Any, plan: Plan, overlap: bool) -> Importance:
    sites, plan_losses = plan
    rows = len(plan_losses.weights)
    gates = [_gate(gated, rows if plan_losses.by_row else None, overlap).requires_grad_() for gated in sites]
    session.gates.update({gated.key: gate for gated, gate in zip(sites, gates, strict=True)})
    losses = checked_losses(loss.prepare(model, batch))
    if not losses.totals.requires_grad:
        raise OptionError(
            f"gradient scores need a differentiable loss, got one without a gradient from {loss.name!r}; "
            "does it run the model under torch.no_grad, or detach its output?"
        )
    grads = torch.autograd.grad(losses.totals.sum(), gates, allow_unused=True)
    by_row, overlaps = [], {}
    for gated, gate, grad in zip(sites, gates, grads, strict=True):
        effects = torch.zeros_like(gate) if grad is None else grad.double()
        if overlap:
            empty = GradientOverlap.empty(gated.site.num_heads, effects.device)
            overlaps[gated.site] = GradientOverlap(empty.update(effects).products.cpu())
            effects = effects.sum(-1)
        effects = effects if plan_losses.by_row else effects.reshape(-1, gated.site.num_heads).sum(0, keepdim=True)
        by_row.append(effects[:, list(gated.heads)].to("cpu", torch.float64))
    grad = torch.cat(by_row, 1)
    return batch_importance(loss, batch, sites, losses, {"gradient": grad.abs(), "taylor": -grad}, overlaps=overlaps)


def _gate(gated: GatedSite, rows: int | None, overlap: bool) -> Tensor:
    """Return a gate per row if the loss is by row, and per token if overlaps are computed.

    `rows` is None for a scalar loss.
    """
    shapes = sorted(set(gated.shapes))
    heads = gated.site.num_heads
    if rows is not None and any(batch != rows for batch, _ in shapes):
        raise OptionError(
            f"a loss of {rows} rows needs a model that computes {rows} rows, got {gated.site.name!r}, which was called "
            f"with {', '.join(str(batch) for batch, _ in shapes)}; pass a scalar loss of the batch"
        )
    if not overlap:
        return gated.open_gate() if rows is None else gated.open_gate(rows, heads)
    if len(shapes) > 1:
        raise OptionError(
            "gradient overlap needs layers that are called with one shape, got "
            f"{gated.site.name!r} called with batch and queries {' and '.join(map(str, shapes))}; pass overlap=False"
        )
    ((batch, queries),) = shapes
    return gated.open_gate(batch, heads, queries)

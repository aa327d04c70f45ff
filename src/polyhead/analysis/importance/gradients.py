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

# Sites to gate and losses of a batch, from a forward without gates; reused for batches of the same shapes.
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
    """Return |dL/dgate| and -dL/dgate of every head, at gates of 1 that multiply the head outputs.

    `gradient` is the mean over rows of |dL/dgate| of the row's own loss (the head importance of Michel, Levy and
    Neubig, 2019), `taylor` is minus the mean of dL/dgate: the first-order estimate of the loss increase by ablation.
    Rows are weighted by their number of predictions. With `overlap`, the cosine similarity of two heads' gradients over
    tokens is computed as well, for all heads of each layer.

    Arguments are those of `ablate`. Rows must not affect each other, as in a transformer, so that one backward gives
    the gradient of every row's own loss. A scalar loss of a batch counts as one row. No `.grad` is modified.

    >>> from polyhead.layers.transformer import LanguageModel
    >>> model = LanguageModel(13, 8, 2, 1)
    >>> gradient_scores(model, [{"tokens": torch.tensor([[3, 5, 7, 11]])}], "language")
    Importance(2 heads for 'language' over 3 predictions in 1 documents: gradient, taylor)
    """
    requested, layers, heads = as_loss(loss), as_collection(layers), as_collection(heads)
    if requested.flat is not None:
        raise OptionError(f"gradient scores need a loss with a gradient, got {requested.name!r}: {requested.flat}")
    total = len(batches) if isinstance(batches, Sized) else None
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
                parts.append(_batch_scores(session, model, requested, batch, plan, overlap))
            if progress is not None:
                progress(len(parts), total)
    return merged(parts)


def _batch_scores(session: Session, model: nn.Module, loss: Loss, batch: Any, plan: Plan, overlap: bool) -> Importance:
    """Return the scores of one batch, by a forward with gates of 1 and a backward to them."""
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
        gate_grads = torch.zeros_like(gate) if grad is None else grad.double()
        if overlap:
            empty = GradientOverlap.empty(gated.site.num_heads, gate_grads.device)
            overlaps[gated.site] = GradientOverlap(empty.update(gate_grads).products.cpu())
            gate_grads = gate_grads.sum(-1)
        if not plan_losses.by_row:
            gate_grads = gate_grads.reshape(-1, gated.site.num_heads).sum(0, keepdim=True)
        by_row.append(gate_grads[:, list(gated.heads)].to("cpu", torch.float64))
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

"""`gradient_scores`: gradients of the loss with respect to head gates, with one backward pass per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.analysis.importance.head_importance import Importance, merged
from polyhead.analysis.importance.losses import Loss, RowLosses, as_loss
from polyhead.analysis.importance.measuring import (
    Heads,
    Layers,
    as_collection,
    batch_importance,
    called_sites,
    checked_losses,
)
from polyhead.analysis.importance.overlap import GradientOverlap
from polyhead.errors import OptionError
from polyhead.observation import AttentionSite, Session, observe
from polyhead.observation.evaluation_mode import evaluating, frozen
from polyhead.observation.rows import Tokens
from polyhead.ops.attention.scaled_dot_product import without_cudnn


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
    parts: list[Importance] = []
    with evaluating(model), frozen(model):
        for batch in batches:
            with (
                torch.enable_grad(),
                without_cudnn(),
                observe(model, layers=layers, heads=heads, statistics=False) as session,
            ):
                parts.append(_batch_scores(session, requested, batch, overlap))
            if progress is not None:
                progress(len(parts), total)
    return merged(parts)


class _RowGates:
    """Gates of 1, created as the loss calls a site: one per row and head, and per token for overlaps."""

    def __init__(self, model: nn.Module, overlap: bool) -> None:
        is_double = any(x.dtype is torch.float64 for x in model.parameters())
        self.dtype, self.overlap = torch.float64 if is_double else torch.float32, overlap
        self.by_site: dict[AttentionSite, dict[tuple[int, ...], Tensor]] = {}

    def __call__(self, site: AttentionSite, tokens: Tokens | Tensor | None) -> Tensor:
        assert tokens is not None
        batch, queries = (tokens.batch, tokens.queries) if isinstance(tokens, Tokens) else tokens.shape
        shape = (batch, site.num_heads, queries) if self.overlap else (batch, site.num_heads)
        gates = self.by_site.setdefault(site, {})
        if shape not in gates:
            gates[shape] = torch.ones(shape, dtype=self.dtype, device=tokens.device, requires_grad=True)
        return gates[shape]

    def check(self, losses: RowLosses) -> None:
        """Raise if calls of a site cannot be attributed to the rows of the loss, or their tokens to each other."""
        rows = len(losses.weights)
        for site, gates in self.by_site.items():
            if losses.by_row and any(shape[0] != rows for shape in gates):
                called = ", ".join(str(shape[0]) for shape in sorted(gates))
                raise OptionError(
                    f"a loss of {rows} rows needs a model that computes {rows} rows, got {site.name!r}, which was "
                    f"called with {called}; pass a scalar loss of the batch"
                )
            if self.overlap and len(gates) > 1:
                raise OptionError(
                    f"gradient overlap needs layers that are called with one shape, got {site.name!r} called with "
                    f"batch and queries {' and '.join(str(shape[::2]) for shape in sorted(gates))}; pass overlap=False"
                )


def _batch_scores(session: Session, loss: Loss, batch: Any, overlap: bool) -> Importance:
    """Return the scores of one batch, by a forward with gates of 1 and a backward to them."""
    gates = session.gates.create = _RowGates(session.model, overlap)
    losses = checked_losses(loss.prepare(session.model, batch))
    sites = called_sites(gates.by_site)
    gates.check(losses)
    if not losses.totals.requires_grad:
        raise OptionError(
            f"gradient scores need a differentiable loss, got one without a gradient from {loss.name!r}; "
            "does it run the model under torch.no_grad, or detach its output?"
        )
    leaves = [gate for site in sites for gate in gates.by_site[site].values()]
    grads = iter(torch.autograd.grad(losses.totals.sum(), leaves, allow_unused=True, materialize_grads=True))
    by_row, overlaps = [], {}
    for site in sites:
        gate_grads = [next(grads).double() for _ in gates.by_site[site]]
        if overlap:
            empty = GradientOverlap.empty(site.num_heads, gate_grads[0].device)
            overlaps[site] = GradientOverlap(empty.update(gate_grads[0]).products.cpu())
            gate_grads = [gate_grads[0].sum(-1)]
        grad = gate_grads[0] if losses.by_row else torch.cat(gate_grads).sum(0, keepdim=True)
        by_row.append(grad[:, list(session.heads_of(site))].cpu())
    heads = [(site, head) for site in sites for head in session.heads_of(site)]
    grad = torch.cat(by_row, 1)
    return batch_importance(loss, batch, heads, losses, {"gradient": grad.abs(), "taylor": -grad}, overlaps=overlaps)

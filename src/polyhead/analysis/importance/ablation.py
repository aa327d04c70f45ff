"""`ablate`: exact loss increase without each head, at the cost of one forward pass per head and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
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
from polyhead.observation import Session, observe
from polyhead.observation.evaluation_mode import evaluating


def ablate(
    model: nn.Module,
    batches: Iterable[Any],
    loss: str | Loss | Callable[[nn.Module, Any], Tensor | RowLosses],
    *,
    layers: Layers = None,
    heads: Heads = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Importance:
    """Return the increase of the loss when each head alone is ablated.

    Args:
        model: a model that `polyhead.observe` supports. It runs in evaluation mode, and its modes are restored.
        batches: mappings of model inputs, `Examples`, or batches of `polyhead.sources`; iterated once.
        loss: "language", "classification" or "representation", a `Loss` of `losses`, or a function
            `loss(model, batch)` that returns [rows] or a scalar.
        layers, heads: restrict the measurement, as in `observe`.
        progress: called after every ablated forward pass with the number done and the total, None if unknown.

    Ablation multiplies the head's output by 0 before the output projection, whose bias remains. This is
    zero ablation, not mean ablation: the head's mean output is removed as well.

    >>> from polyhead.layers.transformer import LanguageModel
    >>> model = LanguageModel(13, 8, 2, 1)
    >>> ablate(model, [{"tokens": torch.tensor([[3, 5, 7, 11]])}], "language")
    Importance(2 heads for 'language' over 3 predictions in 1 documents: ablation)
    """
    requested, layers, heads = as_loss(loss), as_collection(layers), as_collection(heads)
    number = len(batches) if isinstance(batches, Sized) else None
    sites: tuple[GatedSite, ...] = ()
    parts: list[Importance] = []
    done = 0
    with torch.no_grad(), evaluating(model):
        for batch in batches:
            if not len(sites):
                sites = find_gated_sites(model, requested, batch, layers, heads)
            count = sum(len(gated.heads) for gated in sites)

            def report(count: int = count) -> None:
                nonlocal done
                done += 1
                if progress is not None:
                    progress(done, None if number is None else number * count)

            with observe(model, statistics=False) as session:
                intact, changes = _changes(session, model, requested, batch, sites, report)
            rows = [(gated.site, head) for gated in sites for head in gated.heads]
            parts.append(batch_importance(requested, batch, rows, intact, {"ablation": torch.stack(changes, 1)}))
    return merged(parts)


def _changes(
    session: Session, model: nn.Module, loss: Loss, batch: Any, sites: tuple[GatedSite, ...], report: Callable[[], None]
) -> tuple[RowLosses, list[Tensor]]:
    """Return the intact model's losses, and their increase without each head, [rows] each."""
    # The intact model runs with open gates, so that a head without effect has a change of exactly 0.
    session.gates.update({gated.key: gated.open_gate() for gated in sites})
    compute_losses = loss.prepare(model, batch)
    intact = checked_losses(compute_losses)
    changes = []
    for gated in sites:
        for head in gated.heads:
            gate = gated.open_gate()
            gate[head] = 0.0
            session.gates[gated.key] = gate
            changes.append(checked_losses(compute_losses, intact).totals.double() - intact.totals.double())
            report()
        session.gates[gated.key] = gated.open_gate()
    return intact, changes

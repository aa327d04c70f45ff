"""Shared steps of importance scores: find the gated sites, evaluation mode, and sums by document."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.analysis.importance.head_importance import Importance
from polyhead.analysis.importance.losses import ComputeLosses, Loss, RowLosses
from polyhead.errors import NonFiniteError, OptionError, ShapeError
from polyhead.geometry import HeadId
from polyhead.observation import AttentionSite, BatchMetadata, observe
from polyhead.observation.collectors import CallRecorder
from polyhead.observation.statistics import stack_order
from polyhead.ops.attended import Attended

Layers = Iterable[int | str] | None
Heads = Iterable[int | HeadId] | None
Head = tuple[AttentionSite, int]


@dataclass(frozen=True, slots=True, eq=False)
class GatedSite:
    """A site of a forward pass, and the heads to measure."""

    site: AttentionSite
    heads: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype

    @property
    def key(self) -> tuple[str, str]:
        return self.site.name, self.site.kind

    def open_gate(self) -> Tensor:
        """Return ones, [heads]."""
        dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        return torch.ones(self.site.num_heads, dtype=dtype, device=self.device)


@torch.no_grad()
def find_gated_sites(model: nn.Module, loss: Loss, batch: Any, layers: Layers, heads: Heads) -> tuple[GatedSite, ...]:
    """Run the loss once, and return the sites that it calls."""
    sites: dict[AttentionSite, GatedSite] = {}

    def record(site: AttentionSite, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> None:
        sites[site] = GatedSite(site, session.heads_of(site), attended.query.device, attended.result.output.dtype)

    with observe(model, layers=layers, heads=heads, statistics=False, collect=[CallRecorder(record)]) as session:
        loss.prepare(model, batch)()
    return tuple(sites[site] for site in called_sites(sites))


def called_sites(sites: Collection[AttentionSite]) -> list[AttentionSite]:
    """Return the sites that a loss called in the order of their stacks; raise if there are none."""
    if not len(sites):
        raise OptionError("heads= and layers= must include a head that the loss computes, got none")
    return sorted(sites, key=stack_order(sites).__getitem__)


def as_collection(chosen: Any) -> Any:
    """Return an iterable as a collection, so that it can be iterated several times."""
    return chosen if chosen is None or isinstance(chosen, int | str | Collection) else tuple(chosen)


def checked_losses(compute_losses: ComputeLosses, intact: RowLosses | None = None) -> RowLosses:
    """Compute losses and check them: finite for the intact model, and with its row weights for ablated ones."""
    losses = compute_losses()
    if losses.totals.ndim != 1 or losses.totals.shape != losses.weights.shape:
        raise ShapeError(
            "losses and their weights must both be [rows], "
            f"got shapes {list(losses.totals.shape)} and {list(losses.weights.shape)}"
        )
    if intact is None:
        non_finite = (~losses.totals.detach().isfinite()).nonzero()
        if len(non_finite):
            row = int(non_finite[0])
            raise NonFiniteError(
                f"the intact model's loss must be finite, got {float(losses.totals[row].detach())} for row {row}"
            )
    elif not torch.equal(losses.weights, intact.weights):
        raise OptionError(
            "a loss must have the same row weights for every call on a batch, got others for an ablated model"
        )
    return losses


def batch_importance(
    loss: Loss, batch: Any, heads: Iterable[Head], losses: RowLosses, totals: Mapping[str, Tensor], **more: Any
) -> Importance:
    """Return the importance of one batch, from totals [rows, heads] summed by document."""
    rows = len(losses.weights)
    document_numbers = getattr(batch, "documents", None) if losses.by_row else None
    named = document_numbers is not None
    numbers = torch.as_tensor(document_numbers).to("cpu", torch.int64) if named else torch.arange(rows)
    if numbers.shape != (rows,):
        raise ShapeError(f"documents must be [{rows}], one number per row, got shape {list(numbers.shape)}")
    documents, document_of_row = numbers.unique(return_inverse=True)

    def by_document(x: Tensor) -> Tensor:
        x = x.detach().to("cpu", torch.float64)
        return x.new_zeros((len(documents), *x.shape[1:])).index_add_(0, document_of_row, x)

    sites, numbers_in_site = zip(*heads, strict=True)
    return Importance(
        loss.name,
        sites,
        numbers_in_site,
        documents,
        by_document(losses.weights),
        by_document(losses.totals),
        {name: by_document(values) for name, values in totals.items()},
        named,
        **more,
    )

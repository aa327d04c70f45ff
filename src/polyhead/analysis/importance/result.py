"""`Importance`: how much each head matters, kept by document, so that runs merge and every number has its error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.importance.overlap import GradientOverlap
from polyhead.errors import OptionError
from polyhead.observation import AttentionSite

MEASURES = ("ablation", "gradient", "taylor")


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """How much each head matters for a loss, one row a head.

    `found["ablation"]` is by how much the mean loss grows without the head: more than 0 for a head that helps.
    `found["taylor"]` is what the slope at the intact model predicts for that, -dL/dgate, and `found["gradient"]` the
    mean of |dL/dgate| over rows: how much a head is used, whether it helps or harms. Each has its standard error,
    `found["ablation_error"]`, by the jackknife over documents: the measure without each document in turn. It is NaN for
    a single document; the mean loss weighs rows by what they predict, and so do all of these.
    """

    loss: str
    sites: tuple[AttentionSite, ...]  # of each row
    heads: tuple[int, ...]  # of each row
    documents: Tensor  # [documents] their numbers
    weights: Tensor  # [documents] float64: how much was predicted
    intact: Tensor  # [documents] float64: the intact model's loss, summed
    totals: Mapping[str, Tensor]  # by measure, [documents, heads] float64, summed
    named: bool = True  # whether the numbers of documents were given; if not, those of another run are other documents
    overlaps: Mapping[AttentionSite, GradientOverlap] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for measure in self.totals for name in (measure, f"{measure}_error"))

    def __getitem__(self, column: str) -> Tensor:
        """[heads] float64, on the CPU."""
        measure = column.removesuffix("_error")
        if column not in self.columns:
            raise OptionError(f"a column is one of {', '.join(self.columns)}; got {column!r}")
        values, errors = _ratio(self.totals[measure], self.weights)
        return errors if column.endswith("_error") else values

    @property
    def intact_loss(self) -> float:
        """The mean loss of the intact model."""
        return float(_ratio(self.intact[:, None], self.weights)[0])

    @property
    def intact_loss_error(self) -> float:
        return float(_ratio(self.intact[:, None], self.weights)[1])

    def overlap(self, site: AttentionSite) -> Tensor:
        """The cosine, over tokens, of the effects of the heads of a site on the loss, [heads, heads]."""
        if site not in self.overlaps:
            raise OptionError(
                f"the overlap of gradients is known of {len(self.overlaps)} sites, got {site.name!r}; "
                "gradient_scores(..., overlap=True) gathers it"
            )
        return self.overlaps[site].compute()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row as a plain dict: what `pandas.DataFrame(found.rows())` or `pyarrow.Table.from_pylist` takes."""
        numbers = {name: self[name].tolist() for name in self.columns}
        for index, (site, head) in enumerate(zip(self.sites, self.heads, strict=True)):
            place = {"site": site.name, "kind": site.kind, "stack": site.stack, "layer": site.layer, "head": head}
            place["original_head"] = site.label(head)
            yield {**place, **{name: column[index] for name, column in numbers.items()}}

    def merge(self, other: Importance) -> Importance:
        """Of two runs over different rows: as if one had seen all of them."""
        return merged((self, other))

    def beside(self, other: Importance) -> Importance:
        """The measures of two runs over the same rows in one table."""
        self._check_like(other)
        same = torch.equal(self.documents, other.documents) and torch.equal(self.weights, other.weights)
        if not same or set(self.totals) & set(other.totals):
            raise OptionError(
                "side by side stand other measures of the same rows, got "
                f"{', '.join(self.totals)} of {self.weights.sum():g} predictions in {len(self.documents)} documents "
                f"and {', '.join(other.totals)} of {other.weights.sum():g} in {len(other.documents)}"
            )
        totals = {**self.totals, **other.totals}
        ordered = {name: totals[name] for name in MEASURES if name in totals}
        return replace(self, totals=ordered, overlaps={**self.overlaps, **other.overlaps})

    def state(self) -> dict[str, Tensor]:
        """What was gathered, as named tensors."""
        overlaps = {f"overlap.{site.name}.{site.kind}": x.products for site, x in self.overlaps.items()}
        own = {"documents": self.documents, "weights": self.weights, "intact": self.intact}
        return {**own, **self.totals, **overlaps}

    def with_state(self, state: Mapping[str, Tensor]) -> Importance:
        """The same value with what was saved of it."""
        missing = [name for name in self.state() if name not in state]
        if len(missing):
            raise OptionError(f"a saved importance of this model has {', '.join(missing)} as well, got {sorted(state)}")
        return replace(
            self,
            documents=state["documents"],
            weights=state["weights"],
            intact=state["intact"],
            totals={name: state[name] for name in self.totals},
            overlaps={
                site: GradientOverlap(state[f"overlap.{site.name}.{site.kind}"]) for site, x in self.overlaps.items()
            },
        )

    def _check_like(self, other: Importance) -> None:
        for what, own, theirs in (
            ("loss", self.loss, other.loss),
            ("heads", (self.sites, self.heads), (other.sites, other.heads)),
            ("way to number documents", self.named, other.named),
        ):
            if own != theirs:
                shown = f"{own!r} and {theirs!r}" if what != "heads" else f"{len(self)} and {len(other)} of them"
                raise OptionError(f"importance is joined with that of the same {what}, got {shown}")

    def __repr__(self) -> str:
        return (
            f"Importance({len(self)} heads for {self.loss!r} over {self.weights.sum():,.0f} predictions in "
            f"{len(self.documents):,} documents: {', '.join(self.totals)})"
        )


def merged(parts: Sequence[Importance]) -> Importance:
    """Many at once; the tables of documents are joined a single time."""
    first = parts[0]
    for part in parts[1:]:
        first._check_like(part)
        if set(part.totals) != set(first.totals) or set(part.overlaps) != set(first.overlaps):
            raise OptionError(
                f"runs that measured the same can be merged, got {', '.join(first.totals)} with {len(first.overlaps)} "
                f"overlaps and {', '.join(part.totals)} with {len(part.overlaps)}"
            )
    if first.named:
        documents, place = torch.cat([part.documents for part in parts]).unique(return_inverse=True)
    else:
        place = torch.arange(sum(len(part.documents) for part in parts))
        documents = place

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        rows = torch.cat(list(tensors))
        return rows.new_zeros((len(documents), *rows.shape[1:])).index_add_(0, place, rows)

    overlaps = dict(first.overlaps)
    for part in parts[1:]:
        overlaps = {site: overlaps[site].merge(part.overlaps[site]) for site in overlaps}
    return replace(
        first,
        documents=documents,
        weights=joined([part.weights for part in parts]),
        intact=joined([part.intact for part in parts]),
        totals={name: joined([part.totals[name] for part in parts]) for name in first.totals},
        overlaps=overlaps,
    )


def _ratio(totals: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of totals over that of weights, and its standard error by leaving out each document in turn."""
    counts = weights > 0
    totals, weights = totals[counts], weights[counts]
    values = totals.sum(0) / weights.sum()
    number = len(weights)
    if number < 2:
        return values, torch.full_like(values, torch.nan)
    others = (totals.sum(0) - totals) / (weights.sum() - weights)[:, None]
    spread = (others - others.mean(0)).square().sum(0)
    return values, (spread * (number - 1) / number).sqrt()

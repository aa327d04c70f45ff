"""`Importance`: importance scores of heads, stored by document, so that runs merge and have standard errors."""

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
    """Importance of each head for a loss, one row per head.

    `importance["ablation"]` is the increase of the mean loss without the head: above 0 for a head that helps.
    `importance["taylor"]` is its first-order estimate at the intact model, -dL/dgate, and `importance["gradient"]` the
    mean of |dL/dgate| over rows: the sensitivity to the head, whether it helps or harms. Each has a standard error,
    `importance["ablation_error"]`, by the jackknife over documents; NaN for a single document. Rows are weighted by
    their number of predictions, as in the mean loss.
    """

    loss: str
    sites: tuple[AttentionSite, ...]  # of each row
    heads: tuple[int, ...]  # of each row
    documents: Tensor  # [documents] their numbers
    weights: Tensor  # [documents] float64: how much was predicted
    intact: Tensor  # [documents] float64: the intact model's loss, summed
    totals: Mapping[str, Tensor]  # by measure, [documents, heads] float64, summed
    named: bool = True  # whether document numbers were passed; if not, the documents of two runs are distinct
    overlaps: Mapping[AttentionSite, GradientOverlap] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for measure in self.totals for name in (measure, f"{measure}_error"))

    def __getitem__(self, column: str) -> Tensor:
        """Return a column, [heads] float64 on the CPU."""
        measure = column.removesuffix("_error")
        if column not in self.columns:
            raise OptionError(f"column must be one of {', '.join(self.columns)}; got {column!r}")
        values, errors = _ratio(self.totals[measure], self.weights)
        return errors if column.endswith("_error") else values

    @property
    def intact_loss(self) -> float:
        """Mean loss of the intact model."""
        return float(_ratio(self.intact[:, None], self.weights)[0])

    def overlap(self, site: AttentionSite) -> Tensor:
        """Return the gradient overlap of the heads of a site, [heads, heads]."""
        if site not in self.overlaps:
            raise OptionError(
                f"gradient overlaps were computed for {len(self.overlaps)} sites, got {site.name!r}; "
                "gradient_scores(..., overlap=True) computes them"
            )
        return self.overlaps[site].compute()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield rows as plain dicts, for `pandas.DataFrame(importance.rows())` or `pyarrow.Table.from_pylist`."""
        numbers = {name: self[name].tolist() for name in self.columns}
        for index, (site, head) in enumerate(zip(self.sites, self.heads, strict=True)):
            yield {**site.location(head), **{name: column[index] for name, column in numbers.items()}}

    def merge(self, other: Importance) -> Importance:
        """Merge two runs over different rows; equal to one run over all of them."""
        return merged((self, other))

    def beside(self, other: Importance) -> Importance:
        """Return the measures of two runs over the same rows in one table."""
        self._check_like(other)
        same = torch.equal(self.documents, other.documents) and torch.equal(self.weights, other.weights)
        if not same or set(self.totals) & set(other.totals):
            raise OptionError(
                "combined runs must have different measures of the same rows, got "
                f"{', '.join(self.totals)} of {self.weights.sum():g} predictions in {len(self.documents)} documents "
                f"and {', '.join(other.totals)} of {other.weights.sum():g} in {len(other.documents)}"
            )
        totals = {**self.totals, **other.totals}
        ordered = {name: totals[name] for name in MEASURES if name in totals}
        return replace(self, totals=ordered, overlaps={**self.overlaps, **other.overlaps})

    def _check_like(self, other: Importance) -> None:
        for what, value, other_value in (
            ("loss", self.loss, other.loss),
            ("heads", (self.sites, self.heads), (other.sites, other.heads)),
            ("way to number documents", self.named, other.named),
        ):
            if value != other_value:
                shown = f"{value!r} and {other_value!r}" if what != "heads" else f"{len(self)} and {len(other)} of them"
                raise OptionError(f"joined importance must have the same {what}, got {shown}")

    def __repr__(self) -> str:
        return (
            f"Importance({len(self)} heads for {self.loss!r} over {self.weights.sum():,.0f} predictions in "
            f"{len(self.documents):,} documents: {', '.join(self.totals)})"
        )


def merged(parts: Sequence[Importance]) -> Importance:
    """Merge many at once, joining the tables of documents only once."""
    if not parts:
        raise OptionError("importance needs at least one batch, got none")
    first = parts[0]
    for part in parts[1:]:
        first._check_like(part)
        if set(part.totals) != set(first.totals) or set(part.overlaps) != set(first.overlaps):
            raise OptionError(
                f"merged runs must have the same measures, got {', '.join(first.totals)} with {len(first.overlaps)} "
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
    """Return the ratio of the sums of totals and weights, and its jackknife standard error over documents."""
    counts = weights > 0
    totals, weights = totals[counts], weights[counts]
    values = totals.sum(0) / weights.sum()
    number = len(weights)
    if number < 2:
        return values, torch.full_like(values, torch.nan)
    leave_one_out = (totals.sum(0) - totals) / (weights.sum() - weights)[:, None]
    squares = (leave_one_out - leave_one_out.mean(0)).square().sum(0)
    return values, (squares * (number - 1) / number).sqrt()

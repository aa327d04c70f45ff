"""Quality of a model on a text, relative to the unpruned model: perplexity, or fidelity to it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.analysis.importance.examples import Examples
from polyhead.analysis.importance.losses import Language
from polyhead.analysis.intervals import student_quantile
from polyhead.errors import OptionError
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.calibration.streams import in_float32
from polyhead.surgery.compensation.least_squares import OutputProjection, swapped_projections
from polyhead.surgery.selection.journal import Journal

Batch = Mapping[str, Any]
Projections = Mapping[str, OutputProjection]  # W_O of pruned layers, by path


@dataclass(frozen=True, slots=True)
class Measurement:
    """A quality value, and the standard error of its difference from the unpruned model's.

    `ratio_low` and `ratio_high` are the 95% prediction interval of its ratio to the unpruned model's value on other
    text of the same kind and length. It is over the groups of the text (documents, or stretches of them), and covers
    the text that was read and that to come, by Student's t; NaN if there is only one group.
    """

    value: float
    error: float
    ratio_low: float = math.nan
    ratio_high: float = math.nan


class Quality(ABC):
    """A quality of the model at the time of the call, relative to the model at construction.

    Measurements go through a journal, under the name of the role that this quality has in a run. `groups` are the
    groups of the rows of all batches, which are independent of each other; by default every row is. With `loss_only`,
    only `loss` can be called, for which perplexity does not evaluate the unpruned model.
    """

    name: str
    words: str  # name with a description of what it measures
    _absolute_loss = False  # whether the loss does not depend on the unpruned model

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        *,
        groups: Sequence[int] | None = None,
        journal: Journal | None = None,
        role: str = "",
        loss_only: bool = False,
    ) -> None:
        if not len(batches):
            raise OptionError(f"{self.name} needs some text, got no batch")
        self.model = model
        self.batches = batches
        self._layers = {layer.path: layer for layer in find_layers(model)}
        self._groups = None if groups is None else torch.tensor(groups)
        self._journal = Journal() if journal is None else journal
        self.role = role
        if not (loss_only and self._absolute_loss):
            with in_float32(model):
                self.original = self._evaluate_original()  # value of the unpruned model

    def measure(self, projections: Projections | None = None) -> Measurement:
        """Return the value, its standard error and its prediction interval, with output projections swapped in."""
        with self._swapped(projections), in_float32(self.model):
            return Measurement(*self._journal.numbers(f"{self.role} measure", self._measure))

    def loss(self, projections: Projections | None = None) -> float:
        """Return the quality as one number, lower is better, with output projections swapped in."""
        with self._swapped(projections), in_float32(self.model):
            return self._journal.numbers(f"{self.role} loss", lambda: (self._loss(),))[0]

    def _swapped(self, projections: Projections | None) -> AbstractContextManager[None]:
        return nullcontext() if projections is None else swapped_projections(self.model, self._layers, projections)

    def _spread(self, residuals: Tensor, total: float) -> tuple[float, float]:
        """Return the standard error of a mean over `total` tokens, and the half width of its prediction interval.

        `residuals` are those of each row, summed over its tokens.
        """
        if self._groups is not None:
            residuals = residuals.new_zeros(int(self._groups.max()) + 1).index_add(0, self._groups, residuals)
            residuals = residuals[self._groups.unique()]
        count = len(residuals)
        error = math.sqrt(float(residuals.square().sum()) * count / max(count - 1, 1)) / total
        # The mean over other text of this length has the same error as that over this text.
        return error, student_quantile(0.025, count - 1) * math.sqrt(2) * error if count > 1 else math.nan

    @abstractmethod
    def _evaluate_original(self) -> float:
        """Return the value of the unpruned model, and keep what measurements are compared with."""

    @abstractmethod
    def _measure(self) -> tuple[float, ...]:
        """Return the fields of a `Measurement`."""

    @abstractmethod
    def _loss(self) -> float: ...

    @staticmethod
    @abstractmethod
    def outputs(model: nn.Module, batch: Batch) -> Tensor:
        """Return the outputs of the model that this quality judges, of non-padding tokens, [tokens, channels]."""

    @staticmethod
    @abstractmethod
    def distance(outputs: Tensor, originals: Tensor) -> Tensor:
        """Return the mean distance of outputs to those of the unpruned model, which `distil` minimises."""


class Perplexity(Quality):
    """Next-token perplexity of a causal model."""

    name = "perplexity"
    words = "perplexity of the next token"
    _absolute_loss = True

    def _evaluate_original(self) -> float:
        self._totals, weights = self._rows()
        return math.exp(float(self._totals.sum() / weights.sum()))

    def _measure(self) -> tuple[float, ...]:
        totals, weights = self._rows()
        mean = float(totals.sum() / weights.sum())
        # Ratio estimator: rows have different numbers of tokens.
        change = float((totals - self._totals).sum() / weights.sum())
        error, half = self._spread(totals - self._totals - change * weights, float(weights.sum()))
        return math.exp(mean), math.exp(mean) * error, math.exp(change - half), math.exp(change + half)

    def _loss(self) -> float:
        totals, weights = self._rows()
        return float(totals.sum() / weights.sum())

    @staticmethod
    def outputs(model: nn.Module, batch: Batch) -> Tensor:
        """Return the logits."""
        logits: Tensor = model(**batch).logits
        real = Examples.of(batch).non_padding.to(logits.device)
        return (logits.flatten(0, 1) if bool(real.all()) else logits[real]).float()  # the former is no copy

    @staticmethod
    def distance(outputs: Tensor, originals: Tensor) -> Tensor:
        """Return the Kullback-Leibler divergence from the original's next-token distributions."""
        log_probs, original_log_probs = outputs.log_softmax(-1), originals.log_softmax(-1)
        return F.kl_div(log_probs, original_log_probs, reduction="batchmean", log_target=True)

    @torch.no_grad()
    def _rows(self) -> tuple[Tensor, Tensor]:
        losses = [Language().prepare(self.model, batch)() for batch in self.batches]
        totals, weights = (
            torch.cat([getattr(x, name).double().cpu() for x in losses]) for name in ("totals", "weights")
        )
        if not float(weights.sum()):
            raise OptionError("perplexity needs rows of two tokens or more, got none")
        return totals, weights


class Fidelity(Quality):
    """Mean cosine of final hidden states with those of the unpruned model; 1 is identical."""

    name = "fidelity"
    words = "fidelity, the mean cosine of final hidden states to those of the unpruned model"

    def _evaluate_original(self) -> float:
        self._states = self._rows()
        return 1.0

    def _measure(self) -> tuple[float, ...]:
        cosines = [(a * b).sum(-1).double().cpu() for a, b in zip(self._rows(), self._states, strict=True)]
        mean = float(torch.cat(cosines).mean())
        # Tokens of one row are not independent; rows are.
        residuals = torch.cat(
            [_sums(row_cosines - mean, batch) for row_cosines, batch in zip(cosines, self.batches, strict=True)]
        )
        error, half = self._spread(residuals, sum(map(len, cosines)))
        return mean, error, mean - half, min(1.0, mean + half)

    def _loss(self) -> float:
        return 1 - self._measure()[0]

    @staticmethod
    def outputs(model: nn.Module, batch: Batch) -> Tensor:
        """Return the normalised final hidden states."""
        return states(model, batch)

    @staticmethod
    def distance(outputs: Tensor, originals: Tensor) -> Tensor:
        """Return 1 - the cosine to the original's states."""
        return 1 - (outputs * originals).sum(-1).mean()

    @torch.no_grad()
    def _rows(self) -> list[Tensor]:
        """Return the normalised states of non-padding tokens, one tensor per batch."""
        return [states(self.model, batch) for batch in self.batches]


def _sums(tokens: Tensor, batch: Batch) -> Tensor:
    """Sum values of a batch's non-padding tokens over each row."""
    return torch.stack([row.sum() for row in tokens.split(Examples.of(batch).non_padding.sum(1).tolist())])


def states(model: nn.Module, batch: Batch) -> Tensor:
    """Return the normalised final hidden states of the non-padding tokens, [tokens, width]."""
    body = getattr(model, "base_model", model)
    hidden = getattr(body(**batch), "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise OptionError(
            f"fidelity needs the last hidden states, got {type(body).__name__}, which returns none; "
            "measure perplexity, or pass a transformers model"
        )
    real = Examples.of(batch).non_padding.to(hidden.device)
    return F.normalize(hidden.float(), dim=-1)[real]


class Probe:
    """Differentiable objective for fidelity, whose gradient is zero at the unpruned model.

    Sums the final hidden states along random directions. The squared gradients are, in expectation over directions, the
    curvature of 1 - cosine to the unpruned model.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        hidden = states(model, batch)
        return (hidden * torch.randn(hidden.shape, generator=self.generator).to(hidden)).sum()


def language_slope(model: nn.Module, batch: Batch) -> Tensor:
    """Return the next-token loss, summed over a batch."""
    return Language().prepare(model, batch)().totals.sum()

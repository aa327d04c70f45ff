"""What a model is worth on a text, beside what the whole model was: perplexity, or likeness to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.analysis.importance.examples import Examples
from polyhead.analysis.importance.losses import Language
from polyhead.errors import OptionError

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Worth:
    """A figure of a model, and the standard error, over rows, of how far it is from the whole model's."""

    value: float
    error: float


class Quality(Protocol):
    """A figure of the model as it is at the call, held to that of the model as it was when this was made."""

    @property
    def name(self) -> str: ...

    @property
    def words(self) -> str:
        """The name with what it measures."""

    @property
    def whole(self) -> float:
        """The whole model's."""

    def measure(self) -> Worth: ...

    def loss(self) -> float:
        """The same as one number of which less is better."""


class Perplexity:
    """Of the next token, by a causal model."""

    name = "perplexity"
    words = "perplexity of the next token"

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        if not len(batches):
            raise OptionError("perplexity is measured on some text, got no batch")
        self.model = model
        self.batches = batches
        self._totals, self._weights = self._rows()
        if not float(self._weights.sum()):
            raise OptionError("perplexity is measured on rows of two tokens or more, got none")

    @property
    def whole(self) -> float:
        return math.exp(float(self._totals.sum() / self._weights.sum()))

    def measure(self) -> Worth:
        totals, weights = self._rows()
        mean = float(totals.sum() / weights.sum())
        # The change of a mean over tokens, by rows that have different numbers of them.
        off = totals - self._totals - float((totals - self._totals).sum() / weights.sum()) * weights
        count = len(off)
        spread = math.sqrt(float(off.square().sum()) * count / max(count - 1, 1)) / float(weights.sum())
        return Worth(math.exp(mean), math.exp(mean) * spread)

    def loss(self) -> float:
        totals, weights = self._rows()
        return float(totals.sum() / weights.sum())

    @torch.no_grad()
    def _rows(self) -> tuple[Tensor, Tensor]:
        found = [Language().ask(self.model, batch)() for batch in self.batches]
        totals, weights = ([getattr(x, name).double().cpu() for x in found] for name in ("totals", "weights"))
        return torch.cat(totals), torch.cat(weights)


class Fidelity:
    """The mean cosine between a token's final hidden state and that of the whole model; 1 is the same."""

    name = "fidelity"
    words = "fidelity, the mean cosine of final hidden states to those of the whole model"
    whole = 1.0

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        if not len(batches):
            raise OptionError("fidelity is measured on some text, got no batch")
        self.model = model
        self.batches = batches
        self._states = self._rows()

    def measure(self) -> Worth:
        cosines = [(a * b).sum(-1).double().cpu() for a, b in zip(self._rows(), self._states, strict=True)]
        mean = float(torch.cat(cosines).mean())
        # Tokens of a row are not drawn apart from each other; rows are.
        off = torch.cat([_sums(own - mean, batch) for own, batch in zip(cosines, self.batches, strict=True)])
        count, tokens = len(off), sum(map(len, cosines))
        spread = math.sqrt(float(off.square().sum()) * count / max(count - 1, 1)) / tokens
        return Worth(mean, spread)

    def loss(self) -> float:
        return 1 - self.measure().value

    @torch.no_grad()
    def _rows(self) -> list[Tensor]:
        """Normalised states of real tokens, one tensor a batch."""
        return [states(self.model, batch) for batch in self.batches]


def _sums(tokens: Tensor, batch: Batch) -> Tensor:
    """Of numbers of a batch's real tokens, the sum over each row."""
    return torch.stack([own.sum() for own in tokens.split(Examples.of(batch).real.sum(1).tolist())])


def states(model: nn.Module, batch: Batch) -> Tensor:
    """The final hidden states of the tokens that are no padding, [tokens, width], each of length 1."""
    body = getattr(model, "base_model", model)
    found = getattr(body(**batch), "last_hidden_state", None)
    if not isinstance(found, Tensor):
        raise OptionError(
            f"fidelity reads the last hidden states, got {type(body).__name__}, which gives none; "
            "measure perplexity, or give a model of transformers"
        )
    real = Examples.of(batch).real.to(found.device)
    return F.normalize(found.float(), dim=-1)[real]


class Probe:
    """Final hidden states along random directions, summed: a slope for likeness, which is flat where a model is whole.

    Its squared gradients are, on average over directions, the curvature of 1 - cosine to the whole model.
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        found = states(model, batch)
        return (found * torch.randn(found.shape, generator=self.generator).to(found)).sum()


def language_slope(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the next token, summed over a batch."""
    return Language().ask(model, batch)().totals.sum()

"""Sentence embeddings on STS-B: Spearman correlation with human scores, and similarity to those of the whole model.

Calibrated on sentences of the train file, chosen on the dev file, reported on the test file. An embedding is the mean
of the last hidden states over all tokens but padding, normalised.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.surgery_quality.tasks import Batch, Figure, Split, spearman
from polyhead.errors import OptionError
from polyhead.surgery.selection.evidence import Objectives

LONGEST = 128
SENTENCES = 4096  # to calibrate on, of the ten thousand that there are
RESAMPLES = 200
SEARCH_SENTENCES = 512


@dataclass(frozen=True)
class Pairs:
    """Pairs of sentences, and the human scores of their similarity, from 0 to 5."""

    one: tuple[str, ...]
    other: tuple[str, ...]
    likeness: Tensor

    @classmethod
    def read(cls, path: Path) -> Pairs:
        """Read a file of STS-B: tab-separated, the score fifth, the sentences sixth and seventh."""
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line]
        if not rows or any(len(row) < 7 for row in rows):
            raise OptionError(f"a file of STS-B has seven columns with tabs between, got {path}")
        scores = torch.tensor([float(row[4]) for row in rows], dtype=torch.float64)
        return cls(tuple(row[5] for row in rows), tuple(row[6].rstrip("\r") for row in rows), scores)

    def some(self, count: int | None) -> Pairs:
        """Return so many of them, evenly spaced."""
        if count is None or count >= len(self.one):
            return self
        places = [index * len(self.one) // count for index in range(count)]
        return Pairs(tuple(self.one[i] for i in places), tuple(self.other[i] for i in places), self.likeness[places])

    @property
    def sentences(self) -> list[str]:
        return sorted({*self.one, *self.other})


class SentenceTask:
    """An encoder that embeds sentences."""

    name = "sentences"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        train: Pairs,
        splits: dict[Split, Pairs],
        *,
        calibration: int | None = None,
        rows: int | None = None,
        batch: int = 64,
    ) -> None:
        """At most `calibration` sentences are calibrated on, and `rows` evenly spaced pairs of a split measured on."""
        self.model = model
        self.tokenizer = tokenizer
        self.batch = batch
        self.device = next(model.parameters()).device
        drawn = train.sentences
        random.Random(0).shuffle(drawn)
        self.calibration: list[Batch] = [batch for _, batch in self._batches(drawn[: calibration or SENTENCES])]
        splits = {split: own.some(rows) for split, own in splits.items()}
        self.splits = splits
        self._read = {split: _Read(pairs, self._batches(pairs.sentences)) for split, pairs in splits.items()}
        self._whole = {split: self._embeddings(read.batches) for split, read in self._read.items()}
        chosen = splits["choose"].sentences
        part = chosen[:: max(1, len(chosen) // SEARCH_SENTENCES)]
        self._search = self._batches(part)
        self._search_whole = self._embeddings(self._search)
        self._generator = torch.Generator().manual_seed(0)
        self.objectives = Objectives(
            slope=self.probe, ablated="representation", gradient=pair_loss, labelled=self._labelled(train), ablations=1
        )

    @classmethod
    def read(cls, model: nn.Module, tokenizer: Any, folder: Path, **options: Any) -> SentenceTask:
        """Read a folder with sts-train.csv, sts-dev.csv and sts-test.csv."""
        missing = [name for name in ("train", "dev", "test") if not (folder / f"sts-{name}.csv").exists()]
        if missing:
            raise OptionError(
                f"STS-B is a folder with sts-train.csv, sts-dev.csv and sts-test.csv, got {folder} without "
                + ", ".join(f"sts-{name}.csv" for name in missing)
            )
        train, dev, test = (Pairs.read(folder / f"sts-{name}.csv") for name in ("train", "dev", "test"))
        return cls(model, tokenizer, train, {"choose": dev, "report": test}, **options)

    def figures(self, split: Split) -> dict[str, Figure]:
        read, whole = self._read[split], self._whole[split]
        found = self._embeddings(read.batches)
        cosine = (found * whole).sum(1)
        alike, before = (read.likeness(x) for x in (found, whole))
        gold = read.pairs.likeness
        return {
            "spearman": Figure(spearman(alike, gold), paired_error(alike, before, gold)),
            "cosine": Figure(float(cosine.mean()), float(cosine.std() / math.sqrt(len(cosine)))),
        }

    def loss(self) -> float:
        return 1 - float((self._embeddings(self._search) * self._search_whole).sum(1).mean())

    def probe(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return each embedding along a random direction, summed.

        Its squared slopes are, on average, those of the similarity to the embedding of the whole model.
        """
        found = embed(model, batch)
        drawn = torch.randn(found.shape, generator=self._generator)
        return (found * drawn.to(found)).sum()

    @torch.no_grad()
    def _embeddings(self, batches: Sequence[tuple[list[int], Batch]]) -> Tensor:
        """Return the embedding of every sentence, normalised, float64 on the CPU."""
        found = [embed(self.model, batch) for _, batch in batches]
        places = torch.tensor([place for order, _ in batches for place in order])
        rows = torch.cat(found).double().cpu()
        return torch.empty_like(rows).index_copy_(0, places, rows)

    def _batches(self, sentences: Sequence[str]) -> list[tuple[list[int], Batch]]:
        """Return batches of sentences of similar length, with their indices."""
        order = sorted(range(len(sentences)), key=lambda place: (len(sentences[place]), place))
        groups = [order[start : start + self.batch] for start in range(0, len(order), self.batch)]
        return [(group, self._encoded([sentences[place] for place in group])) for group in groups]

    def _encoded(self, sentences: list[str]) -> Batch:
        encoded = self.tokenizer(sentences, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        return {name: x.to(self.device) for name, x in encoded.items()}

    def _labelled(self, train: Pairs, pairs: int = 1024, size: int = 16) -> list[Batch]:
        drawn = random.Random(1).sample(range(len(train.one)), min(pairs, len(train.one)))
        found: list[Batch] = []
        for start in range(0, len(drawn), size):
            group = drawn[start : start + size]
            batch = self._encoded([train.one[i] for i in group] + [train.other[i] for i in group])
            found.append({**batch, "likeness": train.likeness[group].to(self.device) / 5})
        return found


@dataclass(frozen=True, eq=False)
class _Read:
    """The pairs of a split, and its sentences as the model reads them."""

    pairs: Pairs
    batches: list[tuple[list[int], Batch]]

    def likeness(self, embeddings: Tensor) -> Tensor:
        """Return the cosine of every pair."""
        places = {sentence: place for place, sentence in enumerate(self.pairs.sentences)}
        one, other = ([places[x] for x in side] for side in (self.pairs.one, self.pairs.other))
        return (embeddings[one] * embeddings[other]).sum(1)


def embed(model: nn.Module, batch: Batch) -> Tensor:
    """Return embeddings [sentences, width], normalised."""
    states = model(**batch).last_hidden_state.float()
    real = batch["attention_mask"][..., None].to(states)
    return F.normalize((states * real).sum(1) / real.sum(1).clamp_min(1), dim=1)


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared difference of cosines of pairs and human scores, both from 0 to 1."""
    found = embed(model, {name: x for name, x in batch.items() if name != "likeness"})
    one, other = found.chunk(2)
    return ((one * other).sum(1) - batch["likeness"].to(found)).square().mean()


def paired_error(found: Tensor, before: Tensor, gold: Tensor) -> float:
    """Return the bootstrap standard error of the difference of two rank correlations over the same pairs."""
    generator = torch.Generator().manual_seed(0)
    changes = []
    for _ in range(RESAMPLES):
        drawn = torch.randint(len(gold), (len(gold),), generator=generator)
        changes.append(spearman(found[drawn], gold[drawn]) - spearman(before[drawn], gold[drawn]))
    return float(torch.tensor(changes, dtype=torch.float64).std())

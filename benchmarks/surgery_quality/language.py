"""Perplexity of a causal model on a text: its first 60% to calibrate on, the next 20% to choose on, the last to report.

Rows of equal length without any token at their beginning; a row's loss is that of all its tokens but the first.
Computed in float32 without TF32.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.surgery_quality.tasks import Batch, Figure, Split
from polyhead.errors import OptionError
from polyhead.surgery.selection.evidence import Objectives

CONTEXT = 512
CHOOSING_ROWS = 64
SEARCH_ROWS = 16


class LanguageTask:
    """A causal language model on rows of one text."""

    name = "language"

    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        *,
        context: int | None = None,
        calibration: int | None = None,
        rows: int | None = None,
        batch: int = 16,
    ) -> None:
        """`tokens` are those of the whole text; at most `calibration` rows are calibrated on and `rows` measured on.

        `batch` is how many rows are read at a time.
        """
        context = CONTEXT if context is None else context
        self.model = model
        self.batch = batch
        device = next(model.parameters()).device
        first, second = int(0.6 * len(tokens)), int(0.8 * len(tokens))
        parts = (tokens[:first], tokens[first:second], tokens[second:])
        limits = (calibration, rows, rows)
        pieces = [_rows(part, context)[:most].to(device) for part, most in zip(parts, limits, strict=True)]
        self.calibration: list[Batch] = [{"input_ids": part} for part in pieces[0].split(batch)]
        self.splits: dict[Split, Tensor] = {"choose": pieces[1][:CHOOSING_ROWS], "report": pieces[2]}
        self.objectives = Objectives(slope=summed_loss, ablated="language", gradient="language", slopes=8, ablations=1)
        self._whole: dict[Split, Tensor] = {split: self._losses(rows) for split, rows in self.splits.items()}

    @classmethod
    def read(cls, model: nn.Module, tokenizer: Any, path: Path, **options: Any) -> LanguageTask:
        """Read a file of plain text."""
        encoded = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
        return cls(model, torch.tensor(encoded["input_ids"]), **options)

    def figures(self, split: Split) -> dict[str, Figure]:
        losses, whole = self._losses(self.splits[split]), self._whole[split]
        mean, off = float(losses.mean()), losses - whole
        error = float(off.std() / math.sqrt(len(off))) if len(off) > 1 else math.nan
        ratio = math.exp(float(off.mean()))
        return {
            "perplexity": Figure(math.exp(mean), math.exp(mean) * error),
            "ratio": Figure(ratio, ratio * error),
        }

    def loss(self) -> float:
        return float(self._losses(self.splits["choose"][:: max(1, len(self.splits["choose"]) // SEARCH_ROWS)]).mean())

    @torch.no_grad()
    def _losses(self, rows: Tensor) -> Tensor:
        """Return the mean loss of each row's tokens, float64 on the CPU."""
        found = []
        for part in rows.split(self.batch):
            logits = self.model(input_ids=part, use_cache=False).logits[:, :-1]
            each = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="none")
            found.append(each.view(len(part), -1).double().mean(1).cpu())
        return torch.cat(found)


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the next-token loss, summed over a batch."""
    ids = batch["input_ids"]
    logits = model(**batch).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")


def _rows(tokens: Tensor, context: int) -> Tensor:
    if len(tokens) < 2 * context:
        raise OptionError(
            f"each part of a text must hold two rows of {context} tokens, got one of {len(tokens)} tokens; give more"
        )
    return tokens[: len(tokens) // context * context].view(-1, context)

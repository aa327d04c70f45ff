"""A text as bytes, split into training and held-out parts, and the sequences of a step."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.sources.texts import default_documents

BYTES = 256
HELD_OUT = 0.1  # of the text, from its end


def english_text() -> str:
    """Return the English documents of the package, one after the other."""
    return "\n".join(document.text for document in default_documents() if document.name.startswith("en"))


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes to learn from and bytes held out, uint8 on the CPU."""

    learned: Tensor
    held_out: Tensor

    @classmethod
    def read(cls, path: Path, context: int) -> Text:
        """Read a plain or gzipped file."""
        packed = path.read_bytes()
        content = gzip.decompress(packed) if path.suffix == ".gz" else packed
        last = int(len(content) * HELD_OUT)
        if last < context + 1:
            raise OptionError(
                f"the last tenth of a text must hold a context of {context} bytes and one more, "
                f"got a text of {len(content):,} bytes in {str(path)!r}"
            )
        numbers = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
        return cls(numbers[:-last], numbers[-last:])

    def questions(self, context: int) -> Tensor:
        """Return the held-out text in pieces of context + 1 bytes, each once: [pieces, context + 1]."""
        pieces = (len(self.held_out) - 1) // context
        return self.held_out.unfold(0, context + 1, context)[:pieces]


class Batches:
    """Random pieces of the training text; a seed draws the same ones on every device and for every model."""

    def __init__(self, text: Text, *, batch: int, context: int, seed: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.pieces = text.learned.to(device).unfold(0, context + 1, 1)  # a view: every place a piece may begin
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Tensor:
        """Return pieces [batch, context + 1], int64."""
        places = torch.randint(len(self.pieces), (self.batch,), generator=self.generator)
        return self.pieces[places.to(self.device, non_blocking=True)].long()

"""`Examples`: a batch on which a loss is measured, and which of its tokens are text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError

ID_NAMES = ("decoder_input_ids", "input_ids", "tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """A batch: what the model is called with, and what is known of its rows besides."""

    inputs: Mapping[str, Any]
    documents: Tensor | None = None  # [rows]: the number of the document that each row is from
    special: Tensor | None = None  # [rows, tokens]: True for tokens that stand for no text
    labels: Tensor | None = None  # [rows] or [rows, tokens] classes, or [rows, classes] of zeros and ones

    @classmethod
    def of(cls, batch: Any) -> Examples:
        """Examples as they are; a mapping, whose `labels` are not handed to the model; or a batch of `sources`."""
        if isinstance(batch, cls):
            return batch
        if isinstance(batch, Mapping):
            return cls({name: x for name, x in batch.items() if name != "labels"}, labels=batch.get("labels"))
        if isinstance(getattr(batch, "ids", None), Tensor) and isinstance(getattr(batch, "mask", None), Tensor):
            inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
            return cls(inputs, getattr(batch, "documents", None), getattr(batch, "special", None))
        raise OptionError(
            "a batch is a mapping of what the model is called with, or Examples(inputs, documents=, special=, "
            f"labels=), got {type(batch).__name__}"
        )

    def to(self, device: torch.device) -> Examples:
        inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        special, labels = (None if x is None else x.to(device) for x in (self.special, self.labels))
        return Examples(inputs, self.documents, special, labels)

    @property
    def ids(self) -> Tensor:
        """[rows, tokens], of the decoder where there are two."""
        found = next((self.inputs[name] for name in ID_NAMES if isinstance(self.inputs.get(name), Tensor)), None)
        if found is None or found.ndim != 2:
            got = "none of them" if found is None else f"shape {list(found.shape)}"
            raise ShapeError(f"tokens are [rows, tokens] under one of the names {', '.join(ID_NAMES)}, got {got}")
        return found

    @property
    def real(self) -> Tensor:
        """[rows, tokens], False for padding."""
        ids = self.ids
        mask = self.inputs.get("decoder_attention_mask" if "decoder_input_ids" in self.inputs else "attention_mask")
        lengths = self.inputs.get("lengths")
        if mask is None and lengths is None:
            return torch.ones_like(ids, dtype=torch.bool)
        if mask is None:
            lengths = torch.as_tensor(lengths, device=ids.device)
            return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        if mask.shape != ids.shape:
            raise ShapeError(
                f"which tokens are padding is said by a mask of their own shape {list(ids.shape)}, "
                f"got one of {list(mask.shape)}"
            )
        return mask.to(torch.bool)

    @property
    def text(self) -> Tensor:
        """[rows, tokens], True for tokens that are neither padding nor special."""
        if self.special is None:
            return self.real
        if self.special.shape != self.ids.shape:
            raise ShapeError(
                f"special tokens are marked as [rows, tokens] {list(self.ids.shape)}, got {list(self.special.shape)}"
            )
        return self.real & ~self.special.to(torch.bool)

"""`Examples`: a batch on which a loss is measured, with its documents, special tokens and labels."""

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
    """A batch: the model's inputs, and metadata of its rows."""

    inputs: Mapping[str, Any]
    documents: Tensor | None = None  # [rows]: the document number of each row
    special: Tensor | None = None  # [rows, tokens]: True for special tokens
    labels: Tensor | None = None  # [rows] or [rows, tokens] classes, or [rows, classes] of zeros and ones

    @classmethod
    def of(cls, batch: Any) -> Examples:
        """Return Examples unchanged, or build them from a mapping (without its `labels`) or a batch of `sources`."""
        if isinstance(batch, cls):
            return batch
        if isinstance(batch, Mapping):
            return cls({name: x for name, x in batch.items() if name != "labels"}, labels=batch.get("labels"))
        if isinstance(getattr(batch, "ids", None), Tensor) and isinstance(getattr(batch, "mask", None), Tensor):
            inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
            return cls(inputs, getattr(batch, "documents", None), getattr(batch, "special", None))
        raise OptionError(
            "a batch must be a mapping of model inputs, or Examples(inputs, documents=, special=, labels=), "
            f"got {type(batch).__name__}"
        )

    def to(self, device: torch.device) -> Examples:
        inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        special, labels = (None if x is None else x.to(device) for x in (self.special, self.labels))
        return Examples(inputs, self.documents, special, labels)

    @property
    def ids(self) -> Tensor:
        """Token ids [rows, tokens]; those of the decoder for an encoder-decoder."""
        ids = next((self.inputs[name] for name in ID_NAMES if isinstance(self.inputs.get(name), Tensor)), None)
        if ids is None or ids.ndim != 2:
            got = "none of them" if ids is None else f"shape {list(ids.shape)}"
            raise ShapeError(f"token ids must be [rows, tokens] in one of {', '.join(ID_NAMES)}, got {got}")
        return ids

    @property
    def non_padding(self) -> Tensor:
        """Mask [rows, tokens], False for padding."""
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
                f"attention_mask must have the shape of the token ids, {list(ids.shape)}, got {list(mask.shape)}"
            )
        return mask.to(torch.bool)

    @property
    def text(self) -> Tensor:
        """Mask [rows, tokens], True for tokens that are neither padding nor special."""
        if self.special is None:
            return self.non_padding
        if self.special.shape != self.ids.shape:
            raise ShapeError(f"special must be [rows, tokens], {list(self.ids.shape)}, got {list(self.special.shape)}")
        return self.non_padding & ~self.special.to(torch.bool)

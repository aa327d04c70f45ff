"""Contexts of like length side by side in padded batches, in an order that depends on the contexts and nothing else.

A run that stopped after batch k goes on at batch k + 1 with the very batches that it would have seen, and the digest
of the batches before tells whether the text is still the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.sources.contexts import Context

Side = Literal["left", "right"]

# Contexts are sorted by length within a stretch of this many tokens, so that any corpus streams in bounded memory.
_STRETCH_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some contexts as tensors; where `mask` is 0 there is padding."""

    ids: Tensor  # [contexts, tokens] int64
    mask: Tensor  # [contexts, tokens] int64: 1 for a token, 0 for padding, as transformers takes it
    special: Tensor  # [contexts, tokens] bool: a token that stands for no text; False for padding
    documents: Tensor  # [contexts] int64: which document each context was cut from
    pieces: Tensor  # [contexts] int64: which piece of that document it is
    index: int  # the batch's number, from 0
    digest: str  # of this batch and all batches before it

    @property
    def tokens(self) -> int:
        """How many tokens there are, special ones included and padding left out."""
        return int(self.mask.sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on a device."""
        return replace(
            self,
            ids=self.ids.to(device),
            mask=self.mask.to(device),
            special=self.special.to(device),
            documents=self.documents.to(device),
            pieces=self.pieces.to(device),
        )


class Batches:
    """The padded batches of a stream of contexts; made by `batches`, made anew by each loop over it."""

    def __init__(
        self, contexts: Iterable[Context], pad_id: int, batch_tokens: int, side: Side, start: int, digest: str | None
    ) -> None:
        self._contexts = contexts
        self._pad_id = pad_id
        self._batch_tokens = batch_tokens
        self._side = side
        self._start = start
        self._digest = digest

    def __iter__(self) -> Iterator[Batch]:
        seen = hashlib.blake2b(digest_size=16)
        count = 0
        for index, group in enumerate(_groups(self._contexts, self._batch_tokens)):
            for context in group:
                seen.update(f"{context.document},{context.piece},{context.ids};".encode())
            seen.update(b"|")
            count = index + 1
            if count == self._start:
                self._compare(seen.hexdigest())
            if index >= self._start:
                yield _padded(group, self._pad_id, self._side, index, seen.hexdigest())
        if count < self._start:
            raise OptionError(
                f"a run that goes on after {self._start} batches must find them again, got {count} batches: "
                "the text or its cutting has changed"
            )

    def _compare(self, found: str) -> None:
        if self._digest is not None and found != self._digest:
            raise OptionError(
                f"a run goes on only with the text, tokenizer and batch size it began with, got other batches before "
                f"batch {self._start}: digest {found}, not {self._digest}"
            )


def batches(
    contexts: Iterable[Context],
    tokenizer: Any,
    *,
    batch_tokens: int = 4096,
    side: Side = "right",
    start: int = 0,
    digest: str | None = None,
) -> Batches:
    """Gather contexts of like length into batches of at most `batch_tokens` tokens, padding included.

    A context longer than that is a batch of its own. Padding stands on the `side` named: right for encoders, either for
    decoders. `start` passes over that many batches; `digest`, the `Batch.digest` of the last one of them, makes sure
    that they are the same as before.
    """
    if batch_tokens < 1:
        raise OptionError(f"batch_tokens must be at least 1, got {batch_tokens}")
    if side not in ("left", "right"):
        raise OptionError(f"padding stands on the side 'left' or 'right', got {side!r}")
    if start < 0:
        raise OptionError(f"start is a number of batches to pass over, at least 0, got {start}")
    # A masked token's id changes nothing, but models that count positions by it (RoBERTa) must see their own.
    pad_id = getattr(tokenizer, "pad_token_id", None)
    return Batches(contexts, 0 if pad_id is None else pad_id, batch_tokens, side, start, digest)


def digest_of(contexts: Iterable[Context]) -> str:
    """A text as a model reads it, in short; by it a run knows its text again."""
    seen = hashlib.blake2b(digest_size=16)
    for context in contexts:
        seen.update(f"{context.document},{context.piece},{context.ids},{context.special};".encode())
    return seen.hexdigest()


def _groups(contexts: Iterable[Context], batch_tokens: int) -> Iterator[list[Context]]:
    for stretch in _stretches(contexts):
        stretch.sort(key=lambda context: len(context.ids))  # stable: equals keep the order of the text
        group: list[Context] = []
        for context in stretch:
            if group and (len(group) + 1) * len(context.ids) > batch_tokens:
                yield group
                group = []
            group.append(context)
        yield group


def _stretches(contexts: Iterable[Context]) -> Iterator[list[Context]]:
    stretch: list[Context] = []
    tokens = 0
    for context in contexts:
        stretch.append(context)
        tokens += len(context.ids)
        if tokens >= _STRETCH_TOKENS:
            yield stretch
            stretch, tokens = [], 0
    if stretch:
        yield stretch


def _padded(group: Sequence[Context], pad_id: int, side: Side, index: int, digest: str) -> Batch:
    longest = max(len(context.ids) for context in group)
    ids = torch.full((len(group), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(group), longest, dtype=torch.int64)
    special = torch.zeros(len(group), longest, dtype=torch.bool)
    for row, context in enumerate(group):
        length = len(context.ids)
        place = slice(longest - length, None) if side == "left" else slice(length)
        ids[row, place] = torch.tensor(context.ids, dtype=torch.int64)
        mask[row, place] = 1
        special[row, place] = torch.tensor(context.special, dtype=torch.bool)
    documents = torch.tensor([context.document for context in group], dtype=torch.int64)
    pieces = torch.tensor([context.piece for context in group], dtype=torch.int64)
    return Batch(ids, mask, special, documents, pieces, index, digest)

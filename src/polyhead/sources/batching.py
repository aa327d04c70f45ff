"""Padded batches of contexts of similar length, in an order that is determined by the contexts alone.

A run that stopped after batch k resumes at batch k + 1 with the same batches, and a digest of the earlier batches
verifies that the text is unchanged.
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
from polyhead.sources.shards import WHOLE, Shard

Side = Literal["left", "right"]

# Contexts are sorted by length within stretches of this many tokens, so that any corpus streams in bounded memory.
_STRETCH_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A padded batch of contexts."""

    ids: Tensor  # [contexts, tokens] int64
    mask: Tensor  # [contexts, tokens] int64: 1 for a token, 0 for padding, as in transformers
    special: Tensor  # [contexts, tokens] bool: special tokens; False for padding
    documents: Tensor  # [contexts] int64: document index of each context
    pieces: Tensor  # [contexts] int64: index of the context within its document
    index: int  # index of the batch, from 0
    digest: str  # digest of this batch and all batches before it

    @property
    def tokens(self) -> int:
        """Number of tokens, including special tokens and excluding padding."""
        return int(self.mask.sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on a device.

        Args:
            device: device of the tensors.
        """
        names = ("ids", "mask", "special", "documents", "pieces")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Iterable of the padded batches of a stream of contexts; created by `batches`, recomputed by each iteration."""

    contexts: Iterable[Context]
    pad_id: int
    batch_tokens: int
    side: Side
    start: int
    digest: str | None
    shard: Shard = WHOLE

    @property
    def tokens(self) -> int:
        """Number of tokens in all batches of the shard, skipped ones included."""
        groups = enumerate(_groups(self.contexts, self.batch_tokens))
        return sum(len(context.ids) for index, group in groups if self.shard.has(index) for context in group)

    def __iter__(self) -> Iterator[Batch]:
        digest = hashlib.blake2b(digest_size=16)
        count = 0
        for index, group in enumerate(_groups(self.contexts, self.batch_tokens)):
            for context in group:
                digest.update(f"{context.document},{context.piece},{context.ids};".encode())
            digest.update(b"|")
            count = index + 1
            if count == self.start:
                self._compare(digest.hexdigest())
            if index >= self.start and self.shard.has(index):
                yield _pad(group, self.pad_id, self.side, index, digest.hexdigest())
        if count < self.start:
            raise OptionError(
                f"resuming after {self.start} batches needs the same text and contexts, got only {count} batches: "
                "the text or its splitting has changed"
            )

    def _compare(self, digest: str) -> None:
        if self.digest is not None and digest != self.digest:
            raise OptionError(
                f"a run can only be resumed with the text, tokenizer and batch size it was started with, got different "
                f"batches before batch {self.start}: digest {digest}, not {self.digest}"
            )


def batches(
    contexts: Iterable[Context],
    tokenizer: Any,
    *,
    batch_tokens: int = 4096,
    side: Side = "right",
    start: int = 0,
    digest: str | None = None,
    shard: Shard = WHOLE,
) -> Batches:
    """Group contexts of similar length into batches of at most `batch_tokens` tokens, including padding.

    A longer context forms a batch of its own. No context of a batch is over twice as long as another, so that less than
    half of a batch is padding. `side` is the padding side: right for encoders, either for decoders.
    `start` skips that many batches; `digest`, the `Batch.digest` of the last skipped one, verifies that they are
    unchanged.

    Args:
        contexts: contexts, as `cut_into_contexts` returns them.
        tokenizer: tokenizer of the model, for its padding token.
        batch_tokens: most tokens per batch.
        side: padding side.
        start: batches to skip.
        digest: digest of the last skipped batch.
        shard: the part of the batches to return; indices and digests are those of the whole text.

    Returns:
        An iterable of batches, computed while it is iterated.
    """
    if batch_tokens < 1:
        raise OptionError(f"batch_tokens must be at least 1, got {batch_tokens}")
    if side not in ("left", "right"):
        raise OptionError(f"the padding side must be 'left' or 'right', got {side!r}")
    if start < 0:
        raise OptionError(f"start is the number of batches to skip and must be at least 0, got {start}")
    # The id of padding is masked, but models that derive positions from it (RoBERTa) need their own pad id.
    pad_id = getattr(tokenizer, "pad_token_id", None)
    return Batches(contexts, 0 if pad_id is None else pad_id, batch_tokens, side, start, digest, shard)


def digest_of(contexts: Iterable[Context]) -> str:
    """Return a digest of tokenised contexts, which identifies the text of a run."""
    digest = hashlib.blake2b(digest_size=16)
    for context in contexts:
        digest.update(f"{context.document},{context.piece},{context.ids},{context.special};".encode())
    return digest.hexdigest()


def _groups(contexts: Iterable[Context], batch_tokens: int) -> Iterator[list[Context]]:
    for stretch in _stretches(contexts):
        stretch.sort(key=lambda context: len(context.ids))  # stable: equal lengths keep the order of the text
        group: list[Context] = []
        for context in stretch:
            length = len(context.ids)
            if group and ((len(group) + 1) * length > batch_tokens or length > 2 * len(group[0].ids)):
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


def _pad(group: Sequence[Context], pad_id: int, side: Side, index: int, digest: str) -> Batch:
    longest = max(len(context.ids) for context in group)
    ids = torch.full((len(group), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(group), longest, dtype=torch.int64)
    special = torch.zeros(len(group), longest, dtype=torch.bool)
    for row, context in enumerate(group):
        length = len(context.ids)
        columns = slice(longest - length, None) if side == "left" else slice(length)
        ids[row, columns] = torch.tensor(context.ids, dtype=torch.int64)
        mask[row, columns] = 1
        special[row, columns] = torch.tensor(context.special, dtype=torch.bool)
    documents = torch.tensor([context.document for context in group], dtype=torch.int64)
    pieces = torch.tensor([context.piece for context in group], dtype=torch.int64)
    return Batch(ids, mask, special, documents, pieces, index, digest)

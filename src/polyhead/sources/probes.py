"""Texts made to ask heads a question: random words twice over, where only a head that remembers knows what comes next.

A block of random words stands twice. In its second half each word has occurred once before: a duplicate-token head
looks there, an induction head at the word after it. Words are drawn anew for each text, so nothing that was learnt
about language helps, and the blocks of different batches differ in length, so that no fixed offset helps twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.sources.batching import Batch
from polyhead.sources.contexts import special_tokens
from polyhead.sources.token_classes import TokenClass, token_classes

BLOCKS = (23, 29, 37, 43)  # primes: no offset, and no multiple of one, fits two of them


def ordinary_words(tokenizer: Any) -> Tensor:
    """The ids that begin a word: no special token, no punctuation, no end of a word."""
    words = (token_classes(tokenizer) == TokenClass.WORD).nonzero().flatten()
    return words if len(words) else (token_classes(tokenizer) == TokenClass.CONTINUATION).nonzero().flatten()


def repeated_batch(
    words: Tensor,
    *,
    batch: int,
    block: int,
    seed: int = 0,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    index: int = 0,
    first_document: int = 0,
) -> Batch:
    """Texts of `before`, a random block of words twice, and `after`; each is a document of its own.

    No word occurs twice inside a block, so there is one answer to what followed it.

    >>> found = repeated_batch(torch.arange(5, 30), batch=2, block=7, before=(1,))
    >>> found.ids.shape, torch.equal(found.ids[:, 1:8], found.ids[:, 8:])
    (torch.Size([2, 15]), True)
    """
    if words.ndim != 1 or words.is_floating_point():
        raise OptionError(f"words must be ids, [words] integers, got {words.dtype} of shape {list(words.shape)}")
    if batch < 1 or not 1 <= block <= len(words):
        raise OptionError(
            f"a probe needs a batch of 1 or more and a block of 1 to {len(words)} words, as many as there are, "
            f"got batch {batch} and block {block}"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack(
        [words.cpu().long()[torch.randperm(len(words), generator=generator)[:block]] for _ in range(batch)]
    )
    ends = [torch.tensor(list(ids), dtype=torch.int64).expand(batch, -1) for ids in (before, after)]
    ids = torch.cat([ends[0], drawn, drawn, ends[1]], 1)
    special = torch.zeros_like(ids, dtype=torch.bool)
    special[:, : len(before)] = True
    special[:, ids.shape[1] - len(after) :] = True
    documents = torch.arange(first_document, first_document + batch)
    return Batch(ids, torch.ones_like(ids), special, documents, torch.zeros_like(documents), index, "")


def repeated_batches(
    tokenizer: Any,
    *,
    batch: int = 8,
    blocks: Iterable[int] = BLOCKS,
    seed: int = 0,
    context: int | None = None,
) -> Iterator[Batch]:
    """One `repeated_batch` a block length, of ordinary words, inside the special tokens the tokenizer puts around.

    Blocks that do not fit a `context` of so many tokens twice, or that the vocabulary has too few words for, are left
    out; if that leaves none, it is an error.
    """
    words, around = ordinary_words(tokenizer), special_tokens(tokenizer)
    wanted = list(blocks)
    room = len(words) if context is None else (context - len(around.before) - len(around.after)) // 2
    fitting = [block for block in wanted if block <= min(room, len(words))]
    if not len(fitting):
        raise OptionError(
            f"a probe repeats {min(wanted, default=0)} different words or more, "
            f"got room for {room} twice and {len(words)} words in the vocabulary"
        )
    for index, block in enumerate(fitting):
        yield repeated_batch(
            words,
            batch=batch,
            block=block,
            seed=seed + index,
            before=around.before,
            after=around.after,
            index=index,
            first_document=index * batch,
        )

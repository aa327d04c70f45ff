"""Repeated random sequences, which reveal induction and duplicate-token heads (Olsson et al., 2022).

Each text repeats a block of random words. In the second half, every word has occurred once before: a duplicate-token
head attends to that occurrence, an induction head to the word after it. Words are drawn independently for each text, so
that language statistics do not help, and block lengths differ between batches, so that no fixed offset fits twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.sources.batching import Batch
from polyhead.sources.contexts import special_tokens
from polyhead.sources.token_class import TokenClass

BLOCKS = (23, 29, 37, 43)  # block lengths; primes, so that no offset or multiple of one fits two of them


def ordinary_words(classes: Tensor) -> Tensor:
    """Return the token ids that begin a word, given the `token_classes`; without any, those that continue one."""
    words = (classes == TokenClass.WORD).nonzero().flatten()
    return words if len(words) else (classes == TokenClass.CONTINUATION).nonzero().flatten()


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
    """Return texts of `before`, a random block of words twice, and `after`; each is its own document.

    The words of a block are distinct, so that each has a unique successor.

    >>> probe = repeated_batch(torch.arange(5, 30), batch=2, block=7, before=(1,))
    >>> probe.ids.shape, torch.equal(probe.ids[:, 1:8], probe.ids[:, 8:])
    (torch.Size([2, 15]), True)
    """
    if words.ndim != 1 or words.is_floating_point():
        raise OptionError(f"words must be ids, [words] integers, got {words.dtype} of shape {list(words.shape)}")
    if batch < 1 or not 1 <= block <= len(words):
        raise OptionError(
            f"a probe needs a batch of at least 1 and a block of 1 to {len(words)} words, the size of the vocabulary, "
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
    classes: Tensor,
    *,
    batch: int = 8,
    blocks: Iterable[int] = BLOCKS,
    seed: int = 0,
    context: int | None = None,
) -> Iterator[Batch]:
    """Yield one `repeated_batch` of ordinary words per block length, with the tokenizer's special tokens.

    `classes` are the `token_classes` of the tokenizer, which take a while to compute.

    Block lengths that do not fit twice into a `context` of that many tokens, or exceed the number of words in the
    vocabulary, are skipped; raises if none remains.
    """
    words, special = ordinary_words(classes), special_tokens(tokenizer)
    lengths = list(blocks)
    room = len(words) if context is None else (context - len(special.before) - len(special.after)) // 2
    fitting = [block for block in lengths if block <= min(room, len(words))]
    if not len(fitting):
        raise OptionError(
            f"a probe needs at least {min(lengths, default=0)} distinct words that fit twice into the context, "
            f"got room for {room} twice and {len(words)} words in the vocabulary"
        )
    for index, block in enumerate(fitting):
        yield repeated_batch(
            words,
            batch=batch,
            block=block,
            seed=len(lengths) * seed + index,  # other seeds share no batch
            before=special.before,
            after=special.after,
            index=index,
            first_document=index * batch,
        )

"""Texts without meaning, so that whatever a head finds in them is its own doing."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.errors import OptionError

BEGIN = 0  # the token every text starts with; the words are 1, 2, ...


def random_tokens(seed: int, *, batch: int, length: int, vocab_size: int) -> Tensor:
    """[batch, length] tokens: `BEGIN`, then words drawn independently of each other.

    >>> random_tokens(3, batch=2, length=5, vocab_size=7).shape
    torch.Size([2, 5])
    """
    if batch < 1 or length < 1 or vocab_size < 2:
        raise OptionError(
            f"a text needs batch and length of at least 1 and a vocab_size of at least 2, "
            f"got {batch}, {length} and {vocab_size}"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab_size, (batch, length), generator=generator)
    tokens[:, 0] = BEGIN
    return tokens


def repeated_tokens(seed: int, *, batch: int, block: int, vocab_size: int) -> Tensor:
    """[batch, 1 + 2 * block] tokens: `BEGIN`, then a random block of words twice.

    No word occurs twice inside a block, so there is one answer to what followed it the first time.

    >>> tokens = repeated_tokens(3, batch=2, block=5, vocab_size=7)
    >>> torch.equal(tokens[:, 1:6], tokens[:, 6:])
    True
    """
    if batch < 1 or not 1 <= block < vocab_size:
        raise OptionError(
            f"batch must be at least 1 and a block has from 1 to vocab_size - 1 different words, "
            f"got batch {batch}, block {block} and vocab_size {vocab_size}"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, vocab_size - 1, generator=generator).argsort(-1)
    words = order[:, :block] + 1
    return torch.cat((torch.full((batch, 1), BEGIN), words, words), dim=1)

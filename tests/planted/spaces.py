"""The residual stream of a planted model, cut into subspaces whose axes point nowhere in particular."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from tests.planted.texts import BEGIN

# Words are drawn again until none is closer to another: matching heads rely on it to tell words apart.
MAX_COSINE = 0.5
_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a planted model. Width and head size follow from what a head must be able to read and write.

    >>> sizes = Sizes()
    >>> sizes.embed_dim, sizes.head_dim
    (384, 128)
    """

    vocab_size: int = 64
    max_length: int = 64
    token_dim: int = 64
    num_layers: int = 2
    num_heads: int = 10

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 2:
                raise ShapeError(f"{field.name} must be an integer of at least 2, got {size!r}")

    @property
    def head_dim(self) -> int:
        """As many channels as a head needs to compare two tokens and two places at once."""
        return self.max_length + self.token_dim

    @property
    def write_dim(self) -> int:
        """Number of token axes that one head passes on: half of them, so that no two heads write the same by chance."""
        return self.token_dim // 2

    @property
    def spare_dim(self) -> int:
        return 2 * self.token_dim

    @property
    def embed_dim(self) -> int:
        return self.max_length + 3 * self.token_dim + self.spare_dim


@dataclass(frozen=True, slots=True, eq=False)
class Spaces:
    """Orthonormal bases, one axis a row, and the words in the coordinates of a token subspace. All in float64."""

    position: Tensor  # [max_length, embed_dim], row i being where place i points
    token: Tensor  # [token_dim, embed_dim], as the two below
    previous: Tensor
    output: Tensor
    spare: Tensor  # [spare_dim, embed_dim]
    words: Tensor  # [vocab_size, token_dim], of length 1


def draw_spaces(sizes: Sizes, generator: torch.Generator) -> Spaces:
    basis = random_rotation(sizes.embed_dim, generator)
    widths = [sizes.max_length, sizes.token_dim, sizes.token_dim, sizes.token_dim, sizes.spare_dim]
    position, token, previous, output, spare = basis.split(widths)
    return Spaces(position, token, previous, output, spare, _draw_words(sizes, generator))


def gaussian(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_rotation(size: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix, all being equally likely; the signs are what QR leaves out of that."""
    q, r = torch.linalg.qr(gaussian(size, size, generator=generator))
    return q * r.diagonal().sign()


def _draw_words(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Random directions, with the last axis kept for `BEGIN`, which is therefore at right angles to every word."""
    words = torch.zeros(sizes.vocab_size, sizes.token_dim, dtype=torch.float64)
    words[BEGIN, -1] = 1.0
    for index in range(BEGIN + 1, sizes.vocab_size):
        for _ in range(_MAX_DRAWS):
            word = gaussian(sizes.token_dim - 1, generator=generator)
            words[index, :-1] = word / word.norm()
            if (words[:index] @ words[index]).max() <= MAX_COSINE:
                break
        else:
            raise OptionError(
                f"token_dim must leave room for words of pairwise cosine up to {MAX_COSINE}, "
                f"got token_dim {sizes.token_dim} for vocab_size {sizes.vocab_size}; widen it or take fewer words"
            )
    return words

"""Additive position embeddings: sinusoidal and learned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyhead.errors import ShapeError
from polyhead.layers.positions.position_encoding import (
    AddsToInput,
    check_count,
    check_offset,
    check_positions,
    check_positive,
)
from polyhead.layers.positions.row_tables import Recipe, materialise_rows, powers, row_table, sine_and_cosine


@dataclass(frozen=True)
class _Sinusoids(Recipe):
    embed_dim: int
    base: float

    def build(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        frequencies = powers(self.base, (self.embed_dim + 1) // 2, self.embed_dim, positions.device)
        sin, cos = sine_and_cosine(positions.to(frequencies.dtype).unsqueeze(-1) * frequencies, dtype)
        return (torch.stack((sin, cos), -1).flatten(-2)[..., : self.embed_dim],)


class Sinusoidal(AddsToInput):
    """Sinusoidal position embedding (Vaswani et al. 2017).

    Channel 2 i is sin(p / base ** (2 i / embed_dim)), channel 2 i + 1 its cosine. An odd width ends with a sine.
    There are no parameters and no maximum position.

    Args:
        embed_dim: width of the inputs.
        base: base of the wavelengths.

    >>> Sinusoidal(4)(torch.zeros(1, 1, 4)).tolist()
    [[[0.0, 1.0, 0.0, 1.0]]]
    """

    def __init__(self, embed_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        check_count("embed_dim", embed_dim)
        check_positive("base", base)
        self.embed_dim = embed_dim
        self._table = row_table(_Sinusoids(embed_dim, float(base)))

    def forward(self, x: Tensor, positions: int | Tensor = 0) -> Tensor:
        """Return x [batch, sequence, embed_dim] plus its sinusoids; positions as in `Rotary`."""
        self._check_input(x)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        count, device = x.shape[1], x.device
        if isinstance(positions, Tensor):
            check_positions(positions, x.shape[0], count, device)
            (encoding,) = materialise_rows(self._table.recipe.build(positions, dtype))
        else:
            check_offset(positions)
            if type(x) is Tensor or torch.compiler.is_compiling():
                (encoding,) = self._table.rows(positions, count, device, dtype)
            else:
                (encoding,) = self._table.recipe.build(torch.arange(positions, positions + count, device=device), dtype)
        return (x + encoding).to(x.dtype)

    @property
    def base(self) -> float:
        recipe = self._table.recipe
        assert isinstance(recipe, _Sinusoids)
        return recipe.base

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, base={self.base}"


class Learned(AddsToInput):
    """Learned position embedding, `weight` [max_length, embed_dim].

    Args:
        max_length: number of positions.
        embed_dim: width of the inputs.
    """

    def __init__(self, max_length: int, embed_dim: int) -> None:
        super().__init__()
        check_count("max_length", max_length)
        check_count("embed_dim", embed_dim)
        self.max_length = max_length
        self.embed_dim = embed_dim
        self.weight = nn.Parameter(torch.empty(max_length, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, positions: int | Tensor = 0) -> Tensor:
        """Return x [batch, sequence, embed_dim] plus the vectors of its positions; positions as in `Rotary`.

        Positions out of range raise where they can be read without a device synchronisation: integers and CPU tensors.
        """
        self._check_input(x)
        count = x.shape[1]
        if isinstance(positions, Tensor):
            check_positions(positions, x.shape[0], count, x.device)
            if positions.device.type == "cpu" and type(positions) is Tensor and not torch.compiler.is_compiling():
                self._check_values(positions)
            encoding = functional.embedding(positions.long(), self.weight)
        else:
            check_offset(positions)
            if positions + count > self.max_length:
                self._refuse(positions + count - 1)
            encoding = self.weight[positions : positions + count]
        return (x + encoding).to(x.dtype)

    def _check_values(self, positions: Tensor) -> None:
        if positions.numel():
            lowest, highest = (int(end) for end in positions.aminmax())
            if lowest < 0 or highest >= self.max_length:
                self._refuse(lowest if lowest < 0 else highest)

    def _refuse(self, position: int) -> None:
        remedy = f"build it with max_length={position + 1} or shorten the sequence" if position >= 0 else "count from 0"
        raise ShapeError(
            f"Learned(max_length={self.max_length}) has the positions 0 to {self.max_length - 1}, "
            f"got position {position}; {remedy}"
        )

    def extra_repr(self) -> str:
        return f"{self.max_length}, {self.embed_dim}"

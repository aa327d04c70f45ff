"""Rotary position embedding: rotated queries and keys make logits depend on relative positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.layers.positions.position_encoding import (
    RotatesHeads,
    Rotation,
    check_count,
    check_floating,
    check_offset,
    check_positions,
    check_positive,
)
from polyhead.layers.positions.rotary_scaling import DynamicNTKScaling, RotaryScaling, inverse_frequencies
from polyhead.layers.positions.row_tables import Recipe, materialise_rows, row_table, sine_and_cosine


@dataclass(frozen=True)
class RotaryRecipe(Recipe):
    """Parameters that determine the cos and sin of a position."""

    rotary_dim: int
    base: float
    interleaved: bool
    scaling: RotaryScaling | None

    def frequencies(self, device: torch.device, length: int | None = None) -> Tensor:
        if self.scaling is None:
            return inverse_frequencies(self.base, self.rotary_dim, device)
        return self.scaling.frequencies(self.base, self.rotary_dim, device, length)

    def build(self, positions: Tensor, dtype: torch.dtype, length: int | None = None) -> tuple[Tensor, Tensor]:
        frequencies = self.frequencies(positions.device, length)
        sin, cos = sine_and_cosine(positions.to(frequencies.dtype).unsqueeze(-1) * frequencies, dtype)
        if self.scaling is not None and self.scaling.magnitude != 1.0:
            sin, cos = sin * self.scaling.magnitude, cos * self.scaling.magnitude
        # The sign of the rotation is part of sin, so that the partner channel needs a roll or flip but no negation.
        if self.interleaved:
            return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class Rotary(RotatesHeads):
    """Rotary position embedding (Su et al. 2021) of queries and keys [batch, heads, sequence, head_dim].

    Channel pair i of a token at position p is rotated by p * base ** (-2 i / rotary_dim) radians. Pairs are channels
    (i, i + rotary_dim / 2), as in GPT-NeoX and Llama, or with `interleaved` (2 i, 2 i + 1), as in GPT-J. Only the first
    `rotary_dim` channels are rotated; the rest pass through. Angles are reduced in float64; cos, sin and products are
    float32 (float64 for float64 inputs) before the result is cast back, so large positions are accurate in any dtype.

    Args:
        head_dim: channels of a head.
        base: base of the wavelengths.
        rotary_dim: channels that are rotated; all by default.
        interleaved: pair neighbouring channels instead of halves.
        scaling: scaling of the frequencies for longer contexts.

    >>> rotary = Rotary(head_dim=4)
    >>> query = torch.ones(1, 1, 2, 4)
    >>> rotary(query)[0, 0, 0].tolist()                  # position 0 is not rotated
    [1.0, 1.0, 1.0, 1.0]
    >>> torch.equal(rotary(query, 5), rotary(query, torch.tensor([5, 6])))
    True
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__()
        check_count("head_dim", head_dim)
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_count("rotary_dim", rotary_dim)
        if rotary_dim % 2:
            raise ShapeError(f"rotary_dim must be even, since channels are rotated in pairs; got {rotary_dim}")
        if rotary_dim > head_dim:
            raise ShapeError(f"rotary_dim must not exceed head_dim, got {rotary_dim} and {head_dim}")
        check_positive("base", base)
        if scaling is not None:
            if not isinstance(scaling, RotaryScaling):
                raise OptionError(f"scaling must be a RotaryScaling such as LinearScaling(2.0), got {scaling!r}")
            scaling.check(base, rotary_dim)
        self.head_dim = head_dim
        self._recipe = RotaryRecipe(rotary_dim, float(base), bool(interleaved), scaling)
        self._table = row_table(self._recipe)

    # Read-only, because the shared table was built for these values.
    @property
    def rotary_dim(self) -> int:
        return self._recipe.rotary_dim

    @property
    def base(self) -> float:
        return self._recipe.base

    @property
    def interleaved(self) -> bool:
        return self._recipe.interleaved

    @property
    def scaling(self) -> RotaryScaling | None:
        return self._recipe.scaling

    def inverse_frequencies(self, length: int | None = None, *, device: torch.device | str = "cpu") -> Tensor:
        """Return radians per token of every channel pair after scaling, float64 [rotary_dim / 2].

        Args:
            length: current length, for a scaling that depends on it.
            device: device of the result.
        """
        return self._recipe.frequencies(torch.device(device), length)

    def rotation(self, x: Tensor, positions: int | Tensor = 0, *, length: int | None = None) -> Rotation:
        """Return the rotation of the tokens of x; self-attention computes it once for queries and keys.

        An integer is an offset: tokens are at positions .. positions + sequence - 1. A tensor [sequence] or
        [batch, sequence] contains the position of each token. `length` is the current sequence length, for a
        scaling that depends on it: an integer offset implies it, a tensor does not.
        """
        shape, dtype, device = x.shape, x.dtype, x.device
        if len(shape) != 4 or shape[3] != self.head_dim:
            raise ShapeError(
                f"Rotary takes [batch, heads, sequence, head_dim={self.head_dim}], got shape {list(shape)}"
            )
        count = shape[2]
        if dtype != torch.float32 and dtype != torch.float64:
            check_floating(dtype)
            dtype = torch.float32
        recipe = self._recipe
        if isinstance(positions, Tensor):
            check_positions(positions, shape[0], count, device)
            if length is None and isinstance(recipe.scaling, DynamicNTKScaling):
                raise OptionError(
                    "DynamicNTKScaling needs the current length with a tensor of positions, got length=None; "
                    "pass length= as an integer, since reading it from a tensor would synchronise with the device"
                )
            cos, sin = materialise_rows(recipe.build(positions, dtype, length))
            return Rotation(cos, sin) if positions.dim() == 1 else Rotation(cos.unsqueeze(1), sin.unsqueeze(1))
        check_offset(positions)
        stop = positions + count
        scaling = recipe.scaling
        length_dependent = scaling is not None and scaling.depends_on(stop if length is None else length)
        # Tensor subclasses (e.g. fake tensors) and rescaled frequencies do not use the shared table.
        if length_dependent or (type(x) is not Tensor and not torch.compiler.is_compiling()):
            tokens = torch.arange(positions, stop, device=device)
            return Rotation(*materialise_rows(recipe.build(tokens, dtype, stop if length is None else length)))
        return Rotation(*self._table.rows(positions, count, device, dtype))

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Apply a rotation to x [batch, heads, sequence, head_dim], with any number of heads."""
        cos, sin = rotation
        # A rotation of one token would silently broadcast over any number of them.
        if x.shape[-1] != self.head_dim or x.shape[-2] != cos.shape[-2]:
            raise ShapeError(
                f"this rotation is of {cos.shape[-2]} tokens of head_dim={self.head_dim}, got shape {list(x.shape)}; "
                "keys at other positions than the queries need a rotation of their own"
            )
        recipe = self._recipe
        rotary_dim = recipe.rotary_dim
        full = rotary_dim == self.head_dim
        rotary_channels = x if full else x[..., :rotary_dim]
        if recipe.interleaved:
            partner = rotary_channels.reshape(*rotary_channels.shape[:-1], rotary_dim // 2, 2).flip(-1).flatten(-2)
        else:
            partner = rotary_channels.roll(rotary_dim // 2, -1)
        rotated = torch.addcmul(rotary_channels * cos, partner, sin)
        if rotated.dtype != x.dtype:
            rotated = rotated.to(x.dtype)
        return rotated if full else torch.cat((rotated, x[..., rotary_dim:]), -1)

    def extra_repr(self) -> str:
        recipe = self._recipe
        return (
            f"{self.head_dim}, base={recipe.base}, rotary_dim={recipe.rotary_dim}, "
            f"interleaved={recipe.interleaved}, scaling={recipe.scaling}"
        )

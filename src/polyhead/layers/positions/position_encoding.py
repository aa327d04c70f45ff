"""Base classes of position modules: rotary, logit bias and additive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from polyhead.errors import DeviceError, DtypeError, OptionError, ShapeError
from polyhead.geometry import HeadLayout, checked_integer

if TYPE_CHECKING:
    from polyhead.masks import Mask

check_count = partial(checked_integer, at_least=1)
_OFFSETS = (int, torch.SymInt)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Positions(nn.Module, ABC):
    """Base class of position modules; a layer tests `isinstance` for one of the three kinds below."""

    kind: ClassVar[str]  # for error messages
    size: ClassVar[str]  # name of the size it is built with: an attribute of the module and of `HeadLayout`

    def check(self, layout: HeadLayout) -> None:
        """Raise a ShapeError unless the module was built for the layer's heads.

        Args:
            layout: head layout of the layer.
        """
        built, required = getattr(self, self.size), getattr(layout, self.size)
        if built != required:
            raise ShapeError(
                f"{self.kind} must have the layer's {self.size}, got {type(self).__name__}({self.size}={built}) "
                f"for a layer with {self.size} {required}; build them with {self.size}={required}"
            )


class Rotation(NamedTuple):
    """Rotation of a block of tokens: cos and signed sin, so that a rotated channel is x * cos + partner * sin.

    The partner is the other channel of its pair. Both are [sequence, rotary_dim] or [batch, 1, sequence, rotary_dim].
    """

    cos: Tensor
    sin: Tensor


class RotatesHeads(Positions):
    """Base of positions that rotate projected queries and keys.

    Self-attention calls `rotation` once and `rotate` for queries and keys; calling the module does both for one tensor.
    """

    kind = "rotary positions"
    size = "head_dim"
    head_dim: int

    @abstractmethod
    def rotation(self, x: Tensor, positions: int | Tensor = 0, *, length: int | None = None) -> Rotation:
        """Return the rotation of the tokens of x [batch, heads, sequence, head_dim] at `positions`.

        Args:
            x: queries or keys, whose shape and device are used.
            positions: position of the first token, or positions [sequence] or [batch, sequence].
            length: current length of the sequences, for a scaling that depends on it.
        """

    @abstractmethod
    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Apply a rotation to x [batch, heads, sequence, head_dim], keeping its dtype.

        Args:
            x: queries or keys.
            rotation: rotation of the same tokens.

        Returns:
            The rotated tensor, of the shape of x.
        """

    def forward(self, x: Tensor, positions: int | Tensor = 0, *, length: int | None = None) -> Tensor:
        """Return x rotated by its positions, in the dtype of x.

        Args:
            x: queries or keys [batch, heads, sequence, head_dim].
            positions: position of the first token, or positions [sequence] or [batch, sequence].
            length: current length of the sequences, for a scaling that depends on it.
        """
        return self.rotate(x, self.rotation(x, positions, length=length))


class BiasesLogits(Positions):
    """Base of positions that add a bias to the logits; `forward` of a subclass returns it as a Mask."""

    kind = "position biases"
    size = "num_heads"
    num_heads: int

    def mask(self, query_length: int, key_length: int, **options: Any) -> Mask:
        """Return the bias as a Mask; query i is at key position i + key_length - query_length.

        Options are `device` (that of the parameters by default), `dtype` (float32 by default, or float64 for float64
        parameters) and those of the class.

        Args:
            query_length: number of queries.
            key_length: number of keys.
            options: options of the class, `device` and `dtype`.
        """
        # Through __call__, so that hooks which gather sharded parameters run.
        mask: Mask = self(query_length, key_length, **options)
        return mask


class AddsToInput(Positions):
    """Base of positions that are added to the layer's input, before any projection."""

    kind = "additive positions"
    size = "embed_dim"
    embed_dim: int

    @abstractmethod
    def forward(self, x: Tensor, positions: int | Tensor = 0) -> Tensor:
        """Return x [batch, sequence, embed_dim] plus the encoding of its positions, in the dtype of x.

        Args:
            x: tokens [batch, sequence, embed_dim].
            positions: position of the first token, or positions [sequence] or [batch, sequence].
        """

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ShapeError(
                f"{type(self).__name__} takes [batch, sequence, embed_dim={self.embed_dim}], got {list(x.shape)}"
            )
        check_floating(x.dtype)


def check_positive(name: str, number: int | float) -> None:
    """Raise unless an option is a positive, finite number."""
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 < number < float("inf"):
        raise OptionError(f"{name} must be positive and finite, got {number!r}")


def check_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise DtypeError(f"positions require floating-point tensors, got {dtype}; embed or cast them first")


def check_offset(offset: int) -> None:
    if isinstance(offset, bool) or not isinstance(offset, _OFFSETS):
        raise DtypeError(f"positions must be an integer or an integer tensor, got {type(offset).__name__}")
    if offset < 0:
        raise OptionError(f"an offset must not be negative, got {offset}; pass a tensor for negative positions")


def check_positions(positions: Tensor, batch: int, count: int, device: torch.device) -> None:
    """Raise unless positions are integers [sequence] or [batch, sequence] on the device of the tokens."""
    if positions.dtype not in _INTEGERS:
        raise DtypeError(f"positions must be integers, got {positions.dtype}; cast with .long()")
    if positions.device != device:
        raise DeviceError(f"positions must be on the device of the tokens, got {positions.device} and {device}")
    shape = list(positions.shape)
    if len(shape) not in (1, 2) or shape[-1] != count:
        raise ShapeError(f"positions must be [sequence] or [batch, sequence] with a sequence of {count}, got {shape}")
    if len(shape) == 2 and shape[0] not in (1, batch):
        raise ShapeError(f"positions must have a row for each of the {batch} sequences of the batch, got {shape}")

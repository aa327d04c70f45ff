"""The steps that layers of every arrangement take, as a tape is told of them: linear maps, norms, positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from polyhead.costs.layer_work import CallOptions
from polyhead.costs.memory.tape import Block, Tape
from polyhead.layers.config import AttentionConfig
from polyhead.layers.positions.config import (
    ALiBiConfig,
    QuadraticRelative1DConfig,
    QuadraticRelative2DConfig,
    T5BiasConfig,
)

Form = Literal["fused", "materialised"]
Device = Literal["cuda", "cpu"]
Bias = Literal["fixed", "learned"] | None
BIASES = (ALiBiConfig, T5BiasConfig, QuadraticRelative1DConfig, QuadraticRelative2DConfig)
INDEX = 8  # bytes of an index


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads queries have, and keys and values; and how many channels."""

    queries: int
    keys: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Recorder:
    """One call of a layer on a device, with attention in one form; `x` is its input."""

    requested: CallOptions
    form: Form
    device: Device
    tape: Tape
    x: Block
    bias: Bias = None  # whether positions add to the logits, and learn to
    is_dense: bool = False  # whether that is written down for every pair, and not by distance
    farthest: int | None = None  # the distance from which on what is added by distance stays the same
    special: bool = False  # whether there is what PyTorch's kernels do not have: sinks, a softcap, dropout on a CPU
    written: list[int] = field(default_factory=list)  # bytes of the weights of each attention that writes them down

    @classmethod
    def of(cls, config: AttentionConfig, requested: CallOptions, form: Form, device: Device) -> Recorder:
        tape, width = Tape(requested.work.training), config.layout.embed_dim  # type: ignore[attr-defined]
        positions, bias = getattr(config, "positions", None), cast(Bias, None)
        if isinstance(positions, BIASES):
            bias = "learned" if getattr(positions, "learnable", True) else "fixed"
        special = bool(getattr(config, "sinks", False)) or getattr(config, "softcap", None) is not None
        special |= device == "cpu" and requested.work.training and getattr(config, "dropout", 0.0) > 0
        x = tape.given(requested.tokens * width * requested.dtype.itemsize)
        is_dense = isinstance(positions, QuadraticRelative2DConfig)
        farthest = positions.max_distance if isinstance(positions, T5BiasConfig) else None
        return cls(requested, form, device, tape, x, bias, is_dense, farthest, special)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def tokens(self) -> int:
        return self.requested.tokens

    @property
    def is_narrow(self) -> bool:
        """Whether numbers have 16 bits, so that some steps widen them."""
        return self.requested.dtype.itemsize < 4

    def size(self, numbers: int) -> int:
        return numbers * self.requested.dtype.itemsize

    def wide(self, numbers: int) -> int:
        """In float32, or float64 for float64."""
        return numbers * max(4, self.requested.dtype.itemsize)

    def linear(
        self, given: Block, outputs: int, inputs: int, *, rows: int | None = None, joined: bool = False
    ) -> Block:
        """A linear map. Several that are `joined` are laid side by side on a GPU in training, a copy that is kept."""
        rows, weights = self.tokens if rows is None else rows, self.size(outputs * inputs)
        own = weights if joined and self.on_gpu and self.tape.training else 0
        return self.tape.step(given, gives=self.size(rows * outputs), keeps=(given,), own=own, gradient_work=weights)

    def normed(
        self,
        block: Block,
        numbers: int,
        width: int,
        *,
        kind: str = "rms",
        by_head: bool = False,
        has_weight: bool = True,
        gradient_copies: int = 1,
    ) -> Block:
        """A norm over `width` channels; of heads that lie token by token it gives them head by head.

        A GPU keeps what it reads and a number a row. The root mean square of a CPU is made of plain operators, which
        keep the normed rows as well where they are multiplied by a weight. `gradient_copies` are made of what does not
        lie head by head in a backward on a GPU: of what was read, of the gradient that arrives.
        """
        size, rows = self.size(numbers), 4 * (numbers // width)
        plain = kind == "rms" and not self.on_gpu
        own = rows * (1 if kind == "rms" else 2) + (self.wide(numbers) if plain and has_weight else 0)
        work = size if by_head or (plain and has_weight) else 0
        found = self.tape.step(
            block,
            gives=size,
            keeps=(block,),
            own=own,
            work=work,
            gradient_work=3 * self.wide(numbers) if plain else gradient_copies * size,
        )
        found.is_apart = by_head
        return found

    def rotation(self, channels: int) -> None:
        """The tables of rotary positions, which a layer keeps."""
        self.tape.last(2 * self.wide((self.requested.work.past + self.requested.work.queries) * channels))

    def turned(self, block: Block, numbers: int) -> Block:
        """Heads turned by rotary positions: rolled, multiplied, added in float32 and rounded."""
        # The partners, the product and the sum; in 16 bits the result comes when the product has gone.
        work = self.wide(numbers) + (self.wide(numbers) if self.is_narrow else self.size(numbers))
        gradient_work = 2 * self.wide(numbers) if self.is_narrow else self.size(numbers)
        found = self.tape.step(block, gives=self.size(numbers), work=work, gradient_work=gradient_work)
        found.is_apart = block.is_apart
        return found

    def flattened(self, heads: Block, size: int) -> Block:
        """The heads of a token side by side: a copy where they lie apart."""
        return self.tape.step(heads, gives=size, is_passed_on=heads.size == size) if heads.is_apart else heads

    @property
    def reads_cache(self) -> bool:
        """Whether the decode kernels read a cache where it lies."""
        return self.on_gpu and self.requested.decodes

    @property
    def is_guarded(self) -> bool:
        """Whether hidden keys are to be kept from spreading NaN and Inf; a bias on the logits counts as a mask.

        The formula takes a bias by distance for what it is: it hides nothing.
        """
        biased = self.bias is not None and (self.form == "fused" or self.is_dense)
        return (self.requested.mask is not None or biased) and not self.requested.finite and not self.reads_cache

    def copied(self, block: Block, numbers: int) -> Block:
        """A copy of so many numbers."""
        return self.tape.step(block, gives=self.size(numbers))

"""Recording of the operations that all variants share: linear layers, norms, positions."""

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
    """Numbers of query heads and KV heads, and their channels."""

    queries: int
    keys: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Recorder:
    """Recorder of one call of a layer on a device, with one form of attention; `x` is the layer's input."""

    requested: CallOptions
    form: Form
    device: Device
    tape: Tape
    x: Block
    bias: Bias = None  # bias that positions add to the logits, if any
    is_dense: bool = False  # whether the bias is stored per pair rather than per distance
    max_distance: int | None = None  # distance beyond which the bias is constant
    special: bool = False  # whether the layer needs what PyTorch's kernels lack: sinks, softcap, dropout on a CPU
    weight_sizes: list[int] = field(default_factory=list)  # bytes of the materialised weights of each attention call

    @classmethod
    def of(cls, config: AttentionConfig, requested: CallOptions, form: Form, device: Device) -> Recorder:
        tape, width = Tape(requested.work.training), config.layout.embed_dim  # type: ignore[attr-defined]
        positions, bias = getattr(config, "positions", None), cast(Bias, None)
        if isinstance(positions, BIASES):
            bias = "learned" if getattr(positions, "learnable", True) else "fixed"
        special = bool(getattr(config, "sinks", False)) or getattr(config, "softcap", None) is not None
        special |= device == "cpu" and requested.work.training and getattr(config, "dropout", 0.0) > 0
        x = tape.external(requested.tokens * width * requested.dtype.itemsize)
        is_dense = isinstance(positions, QuadraticRelative2DConfig)
        max_distance = positions.max_distance if isinstance(positions, T5BiasConfig) else None
        return cls(requested, form, device, tape, x, bias, is_dense, max_distance, special)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def tokens(self) -> int:
        return self.requested.tokens

    @property
    def is_narrow(self) -> bool:
        """True for 16-bit dtypes, which some operations widen."""
        return self.requested.dtype.itemsize < 4

    def size(self, numbers: int) -> int:
        return numbers * self.requested.dtype.itemsize

    def wide(self, numbers: int) -> int:
        """Return the bytes of `numbers` elements in float32, or float64 for a float64 layer."""
        return numbers * max(4, self.requested.dtype.itemsize)

    def linear(self, x: Block, outputs: int, inputs: int, *, rows: int | None = None, joined: bool = False) -> Block:
        """Record a linear layer; `joined` weights are concatenated on a GPU in training, and the copy is saved."""
        rows, weights = self.tokens if rows is None else rows, self.size(outputs * inputs)
        saved_bytes = weights if joined and self.on_gpu and self.tape.training else 0
        return self.tape.step(
            x, output_size=self.size(rows * outputs), saves=(x,), saved_bytes=saved_bytes, backward_workspace=weights
        )

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
        """Record a norm over `width` channels; `by_head` turns token-major heads into head-major ones.

        A GPU saves its input and one number per row. RMSNorm on a CPU is made of PyTorch operators, which also save the
        normalised rows if a weight multiplies them. `gradient_copies` is the number of contiguous copies that the
        backward on a GPU makes of strided tensors: of the input, of the incoming gradient.
        """
        size, rows = self.size(numbers), 4 * (numbers // width)
        plain = kind == "rms" and not self.on_gpu
        saved_bytes = rows * (1 if kind == "rms" else 2) + (self.wide(numbers) if plain and has_weight else 0)
        workspace = size if by_head or (plain and has_weight) else 0
        normed = self.tape.step(
            block,
            output_size=size,
            saves=(block,),
            saved_bytes=saved_bytes,
            workspace=workspace,
            backward_workspace=3 * self.wide(numbers) if plain else gradient_copies * size,
        )
        normed.is_strided = by_head
        return normed

    def rotation(self, channels: int) -> None:
        """Record the cos and sin tables of RoPE, which the layer keeps."""
        self.tape.last(2 * self.wide((self.requested.work.past + self.requested.work.queries) * channels))

    def rotated(self, block: Block, numbers: int) -> Block:
        """Record RoPE on heads: roll, multiply, add in float32, round."""
        # The rolled tensor, the product and the sum; in 16 bits the product is freed before the output is allocated.
        workspace = self.wide(numbers) + (self.wide(numbers) if self.is_narrow else self.size(numbers))
        backward_workspace = 2 * self.wide(numbers) if self.is_narrow else self.size(numbers)
        output = self.tape.step(
            block, output_size=self.size(numbers), workspace=workspace, backward_workspace=backward_workspace
        )
        output.is_strided = block.is_strided
        return output

    def flattened(self, heads: Block, size: int) -> Block:
        """Record the concatenated heads of each token: a copy if they are strided."""
        return (
            self.tape.step(heads, output_size=size, passes_gradient=heads.size == size) if heads.is_strided else heads
        )

    @property
    def reads_cache(self) -> bool:
        """True if the decode kernels read the cache in place."""
        return self.on_gpu and self.requested.decodes

    @property
    def is_guarded(self) -> bool:
        """True if masked keys must be kept from spreading NaN and Inf; a bias on the logits counts as a mask.

        The formula does not treat a bias by distance as a mask, since it masks nothing.
        """
        biased = self.bias is not None and (self.form == "fused" or self.is_dense)
        return (self.requested.mask is not None or biased) and not self.requested.finite and not self.reads_cache

    def copied(self, block: Block, numbers: int) -> Block:
        """Record a copy of `numbers` elements."""
        return self.tape.step(block, output_size=self.size(numbers))

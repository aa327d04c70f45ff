"""Recording of the operations that all variants share: linear layers, norms, positions, attention cores."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from polyhead.costs.recording.tape import Block, Tape
from polyhead.costs.work import AttentionCore, Device, Direction, Piece, Product, Stage, Traffic
from polyhead.costs.workload import Workload
from polyhead.errors import OptionError
from polyhead.layers.config import AttentionConfig
from polyhead.layers.positions.config import (
    ALiBiConfig,
    QuadraticRelative1DConfig,
    QuadraticRelative2DConfig,
    RotaryConfig,
    T5BiasConfig,
)
from polyhead.layers.positions.row_tables import FIRST_CAPACITY, MAX_CAPACITY
from polyhead.masks import Mask
from polyhead.ops.attention.fused import LARGEST_DIM
from polyhead.ops.attention.mask_rule import is_window_too_large
from polyhead.ops.decode.fused import MOST_QUERIES

Form = Literal["fused", "materialised"]
BIASES = (ALiBiConfig, T5BiasConfig, QuadraticRelative1DConfig, QuadraticRelative2DConfig)
INDEX = 8  # bytes of an index


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads and KV heads, and their channels."""

    queries: int
    keys: int
    head_dim: int
    value_dim: int


def rotated_part(positions: RotaryConfig, head_dim: int, numbers: int) -> int:
    """Return how many of `numbers` elements of heads RoPE rotates."""
    assert positions.rotary_dim is not None  # which the config of the layer has filled in
    return numbers * positions.rotary_dim // head_dim


class Recorder:
    """Recording of one call of a layer: its pieces of work, and its tensors on a device with one form of attention."""

    def __init__(
        self,
        config: AttentionConfig,
        work: Workload,
        *,
        mask: Mask | None,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None,
        cached: bool,
        form: Form = "fused",
        device: Device = "cuda",
    ) -> None:
        if form not in get_args(Form):
            raise OptionError(f"form must be 'fused' or 'materialised', got {form!r}")
        self.work, self.form, self.device, self.on_gpu = work, form, device, device == "cuda"
        self.dtype, self.cache_dtype, self.cached = dtype, cache_dtype or dtype, cached
        self.mask = config.mask if mask is None else mask if config.mask is None else config.mask & mask
        self.finite: bool = getattr(config, "finite", False)
        self.positions = positions = getattr(config, "positions", None)
        self.bias: Literal["fixed", "learned"] | None = None  # bias that positions add to the logits
        if isinstance(positions, BIASES):
            self.bias = "learned" if getattr(positions, "learnable", True) else "fixed"
        # Whether the bias is stored per pair rather than per distance, and the distance beyond which it is constant.
        self.is_dense = isinstance(positions, QuadraticRelative2DConfig)
        self.max_distance = positions.max_distance if isinstance(positions, T5BiasConfig) else None
        # Whether the layer needs what PyTorch's kernels lack: sinks, softcap, dropout on a CPU.
        self.special = bool(getattr(config, "sinks", False)) or getattr(config, "softcap", None) is not None
        self.special |= not self.on_gpu and work.training and getattr(config, "dropout", 0.0) > 0
        self.tape = Tape(work.training)
        self.x = self.tape.external(self.size(self.tokens * config.embed_dim))  # type: ignore[attr-defined]
        self.pieces: list[Piece] = []  # of the forward, in execution order
        self.weight_sizes: list[int] = []  # bytes of the materialised weights of each attention call
        # Kernels and tile sizes selected for the call. While they stay the same, memory grows with batch and tokens.
        self.kernel_choices: list[Hashable] = [self.decodes]
        # Bytes of the tables by position, which outlive the call and are shared by layers of equal positions.
        self.tables: dict[str, int] = {}

    # ---- pieces of work

    @property
    def tokens(self) -> int:
        return self.work.batch * self.work.queries

    @property
    def new_keys(self) -> int:
        return self.work.batch * self.work.new_keys

    @property
    def decodes(self) -> bool:
        """True if the decode kernels serve the call: a few new tokens over a non-empty cache."""
        return self.cached and self.work.past > 0 and self.work.queries <= MOST_QUERIES

    def product(self, stage: Stage, rows: int, columns: int, inner: int, count: int = 1) -> None:
        """Add `count` matrix products in one kernel."""
        self.pieces.append(Product(stage, rows, columns, inner, self.dtype, count))

    def passes(
        self, stage: Stage, numbers: int, *, transfers: int = 2, launches: int = 1, gradient_bytes: int | None = None
    ) -> None:
        """Add elementwise passes that read and write `numbers` elements of the layer's dtype `transfers` times."""
        self.pieces.append(Traffic(stage, self.size(transfers * numbers), launches, gradient_bytes))

    def core(self, heads: Heads, *, cached: bool | None = None, **options: Any) -> None:
        """Add the attention of these heads, and the passes around it that keep NaN and Inf from spreading.

        `cached` is False where keys and values are freshly projected although the layer has a cache. Attention with
        materialised weights computes every pair.
        """
        work, cached = self.work, self.cached if cached is None else cached
        mask = self.mask if self.form == "fused" else None
        decodes = cached and self.decodes
        is_guarded = not (decodes or self.finite or mask is None)
        outputs = self.tokens * heads.queries * heads.value_dim
        recomputes = is_guarded and self.recomputes_rows(heads)
        if is_guarded and not recomputes:  # the gradient passes through unchanged
            source = work.batch * work.keys * heads.keys * (heads.head_dim + heads.value_dim)
            self.passes("attention", source, gradient_bytes=0)
        if mask is not None:
            options |= {"left": mask.left, "right": mask.right, "first_keys": mask.sinks}
        direction: Direction = "decode" if decodes else "forward"
        sizes = (work.batch, heads.queries, heads.keys, work.queries, work.keys, heads.head_dim, heads.value_dim)
        cache_dtype = self.cache_dtype if cached else None
        self.pieces.append(AttentionCore(direction, *sizes, self.dtype, cache_dtype=cache_dtype, **options))
        if recomputes:
            self.passes("attention", outputs, transfers=1, gradient_bytes=0)
        elif is_guarded:
            self.passes("attention", outputs, launches=2, gradient_bytes=0)

    def cache_writes(self, numbers: int) -> None:
        """Add the writes of `numbers` elements per token to the cache: one pass for keys, one for values."""
        if self.cached:
            sizes = self.dtype.itemsize + self.cache_dtype.itemsize
            self.pieces.append(Traffic("cache", self.new_keys * numbers * sizes, 2))

    def rotary_passes(self, numbers: int, positions: object, head_dim: int) -> None:
        """Add the passes of RoPE over heads of `numbers` elements: roll, multiply, add in float32, round.

        Where RoPE rotates a part of each head, a last pass concatenates it with the rest.
        """
        if isinstance(positions, RotaryConfig) and numbers:
            size, wide = self.dtype.itemsize, max(4, self.dtype.itemsize)
            passes = [2 * size, size + wide, wide + size + wide] + ([wide + size] if wide > size else [])
            moved, launches = rotated_part(positions, head_dim, numbers) * sum(passes), len(passes)
            if positions.rotary_dim != head_dim:
                moved, launches = moved + 2 * size * numbers, launches + 1
            self.pieces.append(Traffic("positions", moved, launches))

    # ---- tensors

    @property
    def is_narrow(self) -> bool:
        """True for 16-bit dtypes, which some operations widen."""
        return self.dtype.itemsize < 4

    def size(self, numbers: int) -> int:
        return numbers * self.dtype.itemsize

    def wide(self, numbers: int) -> int:
        """Return the bytes of `numbers` elements in float32, or float64 for a float64 layer."""
        return numbers * max(4, self.dtype.itemsize)

    def linear(
        self, stage: Stage, x: Block, outputs: int, inputs: int, *, rows: int | None = None, joined: bool = False
    ) -> Block:
        """Record a linear layer; `joined` weights are concatenated on a GPU in training, and the copy is saved."""
        rows, weights = self.tokens if rows is None else rows, self.size(outputs * inputs)
        self.product(stage, rows, outputs, inputs)
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

        A kernel saves its input and one number per row (two in LayerNorm). `gradient_copies` is the number of
        contiguous copies that the backward on a GPU makes of strided tensors: of the input, of the incoming gradient.
        """
        size, rows = self.size(numbers), 4 * (numbers // width)
        if kind == "rms" and not self.on_gpu:
            return self._normed_by_operators(block, numbers, rows, by_head=by_head, has_weight=has_weight)
        return self.tape.step(
            block,
            output_size=size,
            saves=(block,),
            saved_bytes=rows * (1 if kind == "rms" else 2),
            workspace=size if by_head else 0,
            backward_workspace=gradient_copies * size,
            is_strided=by_head,
        )

    def _normed_by_operators(self, block: Block, numbers: int, rows: int, *, by_head: bool, has_weight: bool) -> Block:
        """Record RMSNorm on a CPU, which is made of PyTorch operators that compute in float32.

        They save the normalised rows if a weight multiplies them, and in 16 bits a float32 copy of the input in place
        of the input.
        """
        size, wide, narrow = self.size(numbers), self.wide(numbers), self.is_narrow
        saved_bytes, is_cloned = rows, by_head or block.is_strided  # the result is contiguous in any case
        if self.tape.training:
            saved_bytes += wide * (has_weight + narrow)
            workspace = (wide if narrow else 0) + (size if is_cloned else 0)
        else:
            # Squares of the input, or the rows before the weight; in 16 bits beside the float32 copy of the input.
            is_copied = is_cloned or has_weight
            workspace = wide * (1 + is_copied) + size if narrow else size * is_copied
        return self.tape.step(
            block,
            output_size=size,
            saves=() if narrow else (block,),
            saved_bytes=saved_bytes,
            workspace=workspace,
            backward_workspace=(2 if has_weight else 3) * wide + (2 * size if narrow else 0) - rows,
            is_strided=by_head,
        )

    def rotary_tables(self, positions: RotaryConfig) -> None:
        """Record the cos and sin tables of RoPE: they grow by powers of two; very long ones have the new rows alone."""
        assert positions.rotary_dim is not None  # which the config of the layer has filled in
        work = self.work
        rows = max(work.keys, work.queries)  # a source has positions of its own
        self.kernel_choices.append(rows <= MAX_CAPACITY)
        if rows <= MAX_CAPACITY:
            rows = max(FIRST_CAPACITY, 1 << (rows - 1).bit_length())
        else:
            rows = max(work.queries, work.new_keys)
        self.tables[repr(positions)] = 2 * self.wide(rows * positions.rotary_dim)

    def rotated(self, block: Block, numbers: int, positions: object, head_dim: int) -> Block:
        """Record RoPE on heads: roll, multiply, add in float32, round; concatenate a rotated part with the rest."""
        assert isinstance(positions, RotaryConfig)
        size, part = self.size(numbers), rotated_part(positions, head_dim, numbers)
        rolled, wide = self.size(part), self.wide(part)
        # The rolled tensor, the product and the sum; in 16 bits the product is freed before the output exists.
        workspace = 2 * wide if self.is_narrow else wide + rolled
        backward_workspace = 2 * wide if self.is_narrow else rolled
        if part < numbers:
            # The rotated part exists beside the output; in the backward, gradients of both parts have the full size.
            workspace = max(rolled + 2 * wide, 2 * rolled + size) - size
            backward_workspace = size + max(2 * wide, size) if self.is_narrow else size + max(rolled, size)
        return self.tape.step(
            block,
            output_size=size,
            workspace=max(0, workspace),
            backward_workspace=backward_workspace,
            is_strided=block.is_strided or part < numbers,
        )

    def flattened(self, heads: Block, size: int) -> Block:
        """Record the concatenated heads of each token: a copy if they are strided."""
        if not heads.is_strided:
            return heads
        return self.tape.step(heads, output_size=size, passes_gradient=heads.size == size)

    @property
    def reads_cache(self) -> bool:
        """True if the decode kernels read the cache in place."""
        return self.on_gpu and self.decodes

    @property
    def is_guarded(self) -> bool:
        """True if masked keys must be kept from spreading NaN and Inf; a bias on the logits counts as a mask.

        The formula does not treat a bias by distance as a mask, since it masks nothing.
        """
        biased = self.bias is not None and (self.form == "fused" or self.is_dense)
        return (self.mask is not None or biased) and not self.finite and not self.reads_cache

    def recomputes_rows(self, heads: Heads) -> bool:
        """True if rows that are not finite are recomputed after the kernel, which reads keys and values as they are.

        These are forwards in 16 bits under nothing but a causal mask, or a window that our kernel computes.
        """
        mask, work, dims = self.mask, self.work, (heads.head_dim, heads.value_dim)
        is_fused = self.on_gpu and self.form == "fused" and self.is_narrow and not self.special
        if mask is None or not is_fused or self.bias is not None or self.tape.training:
            return False
        if mask.is_just_causal:
            return work.queries == work.keys > 1 and heads.head_dim == heads.value_dim <= LARGEST_DIM
        sizes = (work.batch, heads.queries, work.queries, work.keys, heads.head_dim)
        is_window = mask.left is not None and not mask.sinks and all(32 < dim <= 128 for dim in dims)
        return is_window and is_window_too_large(self.device, self.dtype, *sizes)

    def copied(self, block: Block, numbers: int, *, frees: Iterable[Block] = ()) -> Block:
        """Record a copy of `numbers` elements."""
        return self.tape.step(block, output_size=self.size(numbers), frees=frees)

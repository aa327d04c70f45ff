"""Work of one phase of one layer: matrix products, attention cores and elementwise traffic, with their sizes.

`timing.predict` turns a `Work` into seconds. A `Work` contains sizes and dtypes and is independent of any machine; all
its counts are exact integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, get_args

import torch

from polyhead.costs.options import PHASES, Phase
from polyhead.costs.quantities import check_count
from polyhead.costs.workload import visible_pairs
from polyhead.errors import DtypeError, OptionError
from polyhead.masks import Mask

Device = Literal["cuda", "cpu"]
Stage = Literal["projection", "positions", "cache", "attention", "mixing", "output"]
Direction = Literal["forward", "backward", "decode"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts by purpose, which are added and multiplied field by field."""

    def __iter__(self) -> Iterator[int]:
        return (getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def total(self) -> int:
        return sum(self)

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, layers: int) -> Self:
        """Return the amounts of that many equal layers.

        Args:
            layers: number of layers.
        """
        return type(self)(*(layers * amount for amount in self))


@dataclass(frozen=True, slots=True)
class MatrixFlops(Amounts):
    """FLOPs of matrix products by purpose; a multiply-add counts as two."""

    projection: int = 0  # input to queries, keys, values and gates
    scores: int = 0  # queries by keys
    values: int = 0  # attention weights by values
    mixing: int = 0  # linear maps over heads, in variants that mix them
    output: int = 0  # heads to output


@dataclass(frozen=True, slots=True)
class Product:
    """`count` matrix products of one size, [rows, inner] by [inner, columns], in one kernel.

    For a linear layer `rows` is the number of tokens of all sequences, `inner` the input channels and `columns` the
    output channels. The backward products are separate: `gradients`. `count` above 1 is a batched product with distinct
    factors.
    """

    stage: Stage
    rows: int  # m
    columns: int  # n
    inner: int  # k
    dtype: torch.dtype
    count: int = 1
    exponentials: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _check(self, ("rows", "columns", "inner", "count"))

    @property
    def flops(self) -> int:
        """FLOPs; a multiply-add counts as two."""
        return 2 * self.count * self.rows * self.columns * self.inner

    @property
    def matrix_flops(self) -> MatrixFlops:
        return MatrixFlops(**{self.stage: self.flops})

    @property
    def bytes(self) -> int:
        """Bytes moved if both factors are read once and the result is written once, the minimum for any kernel."""
        numbers = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.count * numbers * self.dtype.itemsize

    @property
    def launches(self) -> int:
        return 1 if self.flops else 0

    @property
    def gradients(self) -> tuple[Product, Product]:
        """Products of the backward pass: the gradient of the left factor, then of the right."""
        left = dataclasses.replace(self, columns=self.inner, inner=self.columns)
        right = dataclasses.replace(self, rows=self.inner, inner=self.rows)
        return left, right


# Number of products over all (query, key) pairs, by (backward, mixing): with head_dim channels (scores), with value_dim
# channels (values), and over heads (mixes of logits or weights). A forward counts each product once; the kernels of
# talking heads compute the scores and their mix a second time, for the log-sum-exp.
_PRODUCTS = {
    (False, False): (1, 1, 0),
    (True, False): (3, 2, 0),
    (False, True): (1, 1, 2),
}
# The backward of talking heads counts the passes of their kernels, each of which recomputes the scores and their mix:
# delta, queries, keys with values, of 2, 4 and 4 mixes; and if all heads together are wide, delta, queries, keys,
# values, of 3, 4, 3 and 2.
_TALKING_BACKWARD = (5, 4, 10)
_WIDE_TALKING_BACKWARD = (6, 4, 12)
_WIDE = 16 * 64  # padded heads times channels above which talking heads are wide (ops/talking_heads/kernels/launch.py)


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """Softmax attention of all heads in one fused call: scores, exponentials and values; no weights are stored.

    `queries` and `keys` are tokens per sequence, aligned at the last query and the last key. `left` and `right` bound
    the band of keys that a query sees, as in `Mask.window(left=, right=)`: None is unbounded, `right` 0 is causal.
    "backward" computes all gradients and recomputes scores and exponentials; a training step has one "forward" and one
    "backward". "decode" is a forward of a few queries over a cache of `cache_dtype`. `shared`: values are channels of
    the keys (latents), so both are read once. `sinks`: every row has one extra logit. `mixing`: logits and weights
    are mixed over heads in the same call (talking heads). `first_keys` are visible at any distance, as in
    `Mask.window(sinks=)`.
    """

    direction: Direction
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    left: int | None = None
    right: int | None = None
    cache_dtype: torch.dtype | None = None  # None: `dtype`
    shared: bool = False
    sinks: bool = False
    mixing: bool = False
    stage: Stage = "attention"
    first_keys: int = 0

    def __post_init__(self) -> None:
        _check(self, ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "first_keys"))
        if self.direction not in get_args(Direction):
            raise OptionError(f"direction must be one of {', '.join(get_args(Direction))}; got {self.direction!r}")

    @property
    def mask(self) -> Mask | None:
        if self.left is None and self.right is None:
            return None
        return Mask.window(left=self.left, right=self.right, sinks=self.first_keys)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head over all sequences; kernel tiles also compute some masked pairs."""
        return self.batch * visible_pairs(self.queries, self.keys, self.mask)

    @property
    def visible_keys(self) -> int:
        """Keys of one sequence that at least one query sees, and that must therefore be read."""
        if not self.queries:
            return 0
        first = self.keys - self.queries  # position of the first query
        lowest = 0 if self.left is None else max(0, first - self.left)
        highest = self.keys if self.right is None else min(self.keys, self.keys + self.right)
        return max(0, highest - lowest) + min(lowest, self.first_keys)

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    def matrix_flops(self) -> MatrixFlops:
        """FLOPs over the visible pairs: two products forward, five backward with the recomputed scores.

        Talking heads add two mixes over heads, of logits and of weights, and their backward makes three passes over the
        pairs, or four if they are wide. A core of the stage "mixing" is attention among the mixed heads of each token,
        as in `HeadMix`.
        """
        is_backward = self.direction == "backward"
        if is_backward and self.mixing:
            per_pair = _WIDE_TALKING_BACKWARD if self._is_wide else _TALKING_BACKWARD
        else:
            per_pair = _PRODUCTS[is_backward, self.mixing]
        channels = (self.head_dim, self.value_dim, self.heads)
        flops = [2 * self.pairs * self.heads * products * x for products, x in zip(per_pair, channels, strict=True)]
        return MatrixFlops(0, *flops) if self.stage == "attention" else MatrixFlops(mixing=sum(flops))

    @property
    def _is_wide(self) -> bool:
        """True if the tiles of all heads are wide; heads and channels are padded to powers of two of at least 16."""
        heads, channels = (max(16, 1 << (x - 1).bit_length()) for x in (self.heads, max(self.head_dim, self.value_dim)))
        return heads * channels > _WIDE

    @property
    def flops(self) -> int:
        return self.matrix_flops.total

    @property
    def exponentials(self) -> int:
        """One exponential per pair and head, plus one per row with sinks; the same number in the backward."""
        return self.heads * (self.pairs + (self.batch * self.queries if self.sinks else 0))

    @property
    def bytes(self) -> int:
        """Bytes moved if every operand is read once and every result is written once, the minimum for any kernel.

        Keys shared by a group of heads count once. A backward reads queries, keys, values, the output, its gradient
        and a float32 log-sum-exp per row, and writes three gradients.
        """
        size, rows = self.dtype.itemsize, self.batch * self.heads * self.queries
        cached = (self.cache_dtype or self.dtype).itemsize
        key_rows = self.batch * self.kv_heads * self.visible_keys
        source = key_rows * (self.head_dim + (0 if self.shared else self.value_dim))  # elements of keys and values
        if self.direction == "backward":
            return size * rows * (2 * self.head_dim + 2 * self.value_dim) + 2 * size * source + 4 * rows
        return size * rows * (self.head_dim + self.value_dim) + cached * source

    @property
    def launches(self) -> int:
        """Minimum number of kernels of one call; decoding splits the keys and then combines the parts."""
        return {"forward": 1, "backward": 2, "decode": 2}[self.direction] if self.pairs else 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elementwise, memory-bound work: positions, norms, gates, cache writes.

    `bytes` is the sum of reads and writes over all `launches` kernels. `gradient_bytes` is the traffic of the backward:
    by default twice `bytes`; 0 for no backward pass. Arithmetic is not counted.
    """

    stage: Stage
    bytes: int
    launches: int = 1
    gradient_bytes: int | None = None
    flops: ClassVar[int] = 0
    exponentials: ClassVar[int] = 0
    matrix_flops: ClassVar[MatrixFlops] = MatrixFlops()

    def __post_init__(self) -> None:
        _check(self, ("bytes", "launches"))
        if self.gradient_bytes is not None:
            _check(self, ("gradient_bytes",))


Piece = Product | AttentionCore | Traffic


@dataclass(frozen=True, slots=True)
class Work:
    """Pieces of one phase in execution order.

    `phase` is a "training" step (forward and backward), the "prefill" of a prompt or one "decode" step. `layers` is the
    number of layers that do the same work; all totals cover all of them.
    """

    phase: Phase
    pieces: tuple[Piece, ...]
    layers: int = 1

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise OptionError(f"phase must be one of {', '.join(PHASES)}; got {self.phase!r}")
        _check(self, ("layers",))

    @property
    def matrix_flops(self) -> MatrixFlops:
        return total_flops(self.pieces).times(self.layers)

    @property
    def flops(self) -> int:
        """FLOPs of matrix products."""
        return self.layers * sum(piece.flops for piece in self.pieces)

    @property
    def exponentials(self) -> int:
        return self.layers * sum(piece.exponentials for piece in self.pieces)

    @property
    def bytes(self) -> int:
        """Minimum bytes moved between memory and chip, if each piece reads its operands from memory."""
        return self.layers * sum(piece.bytes for piece in self.pieces)

    @property
    def launches(self) -> int:
        return self.layers * sum(piece.launches for piece in self.pieces)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: matrix FLOPs per byte moved; 0 if nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    def only(self, *stages: Stage) -> Work:
        """Return the work of these stages alone.

        Args:
            stages: names of the stages to keep.
        """
        return dataclasses.replace(self, pieces=tuple(piece for piece in self.pieces if piece.stage in stages))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages that occur, in the order of `STAGES`."""
        return tuple(stage for stage in STAGES if any(piece.stage == stage for piece in self.pieces))


def total_flops(pieces: Iterable[Piece]) -> MatrixFlops:
    """Return the FLOPs of all matrix products, by purpose."""
    return sum((piece.matrix_flops for piece in pieces), MatrixFlops())


def backward_pieces(forward: Sequence[Piece]) -> list[Piece]:
    """Return the pieces of the backward of these pieces, in reverse order."""
    backward: list[Piece] = []
    for piece in reversed(forward):
        if isinstance(piece, Product):
            backward += piece.gradients
        elif isinstance(piece, AttentionCore):
            backward.append(dataclasses.replace(piece, direction="backward"))
        else:
            moved = 2 * piece.bytes if piece.gradient_bytes is None else piece.gradient_bytes
            if moved:
                backward.append(Traffic(piece.stage, moved, piece.launches))
    return backward


def _check(value: object, names: tuple[str, ...]) -> None:
    for name in names:
        check_count(name, getattr(value, name))
    dtype = getattr(value, "dtype", torch.float32)
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")

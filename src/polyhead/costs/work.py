"""What one phase of one layer makes a machine do: matrix products, attention cores and plain traffic, with their sizes.

A `Work` is what `timing.predict` turns into seconds. It knows sizes and types of numbers and nothing of any machine;
all its counts are exact integers that follow from the sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from polyhead.costs.workload import visible_pairs
from polyhead.errors import DtypeError, OptionError
from polyhead.masks import Mask

Phase = Literal["training", "prefill", "decode"]
Stage = Literal["projection", "positions", "cache", "attention", "mixing", "output"]
Direction = Literal["forward", "backward", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, slots=True)
class Product:
    """`count` matrix products of one size, [rows, inner] by [inner, columns], made in one kernel.

    For a linear map of tokens `rows` are the tokens of all sequences, `inner` the channels that go in and `columns`
    those that come out. A gradient is a product of its own: `gradients`. `count` above 1 is a batched product whose
    factors are all different.
    """

    stage: Stage
    rows: int  # m
    columns: int  # n
    inner: int  # k
    dtype: torch.dtype
    count: int = 1

    def __post_init__(self) -> None:
        _check(self, ("rows", "columns", "inner", "count"))

    @property
    def flops(self) -> int:
        """A multiplication with its addition is two."""
        return 2 * self.count * self.rows * self.columns * self.inner

    @property
    def exponentials(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        """Both factors read once, the result written once: the least that any kernel can move."""
        numbers = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.count * numbers * self.dtype.itemsize

    @property
    def kept(self) -> int:
        """Bytes of the result."""
        return self.count * self.rows * self.columns * self.dtype.itemsize

    @property
    def launches(self) -> int:
        return 1 if self.flops else 0

    @property
    def gradients(self) -> tuple[Product, Product]:
        """The products that a backward makes of this one: the gradient of the left factor, then of the right."""
        left = dataclasses.replace(self, columns=self.inner, inner=self.columns)
        right = dataclasses.replace(self, rows=self.inner, inner=self.rows)
        return left, right


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """Softmax attention of all heads in one fused call: scores, exponentials and values, and no weights kept.

    `queries` and `keys` are tokens of each of `batch` sequences, the last query beside the last key. `left` and `right`
    are the edges of the band that a query sees, as in `Mask.window(left=, right=)`: None is no edge, `right` 0 is
    causal. "backward" is the whole gradient, which computes the scores and exponentials once more; a training step has
    one "forward" and one "backward". "decode" is a forward of few queries over keys in a cache, whose numbers have
    `cache_dtype`. `shared` says that values are channels of the keys (latents), which are then read once for both,
    `sinks` that every row has one logit more, and `mixing` that maps are mixed over the heads before and after the
    softmax inside the same call (talking heads).
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
    cache_dtype: torch.dtype | None = None  # as `dtype` where it is None
    shared: bool = False
    sinks: bool = False
    mixing: bool = False
    stage: Stage = "attention"

    def __post_init__(self) -> None:
        _check(self, ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim"))
        if self.direction not in get_args(Direction):
            raise OptionError(f"direction must be one of {', '.join(get_args(Direction))}; got {self.direction!r}")

    @property
    def mask(self) -> Mask | None:
        if self.left is None and self.right is None:
            return None
        return Mask.window(left=self.left, right=self.right)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that one head meets in all sequences; tiles of a kernel also compute some hidden ones."""
        return self.batch * visible_pairs(self.queries, self.keys, self.mask)

    @property
    def visible_keys(self) -> int:
        """Keys of one sequence that some query sees: what must be read of them, and of the values."""
        if not self.queries:
            return 0
        first = self.keys - self.queries  # where the first query stands
        lowest = 0 if self.left is None else max(0, first - self.left)
        highest = self.keys if self.right is None else min(self.keys, self.keys + self.right)
        return max(0, highest - lowest)

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    def flops(self) -> int:
        """Of the visible pairs: scores and values; backward five products, that of the scores made again among them.

        Two mixes of the maps make it more, and their backward walks over the pairs three times.
        """
        backward, heads = self.direction == "backward", self.heads if self.mixing else 0
        if backward and self.mixing:
            per_pair = 5 * self.head_dim + 4 * self.value_dim + 11 * heads
        elif backward:
            per_pair = 3 * self.head_dim + 2 * self.value_dim
        else:
            per_pair = self.head_dim + self.value_dim + 2 * heads
        return 2 * self.pairs * self.heads * per_pair

    @property
    def exponentials(self) -> int:
        """One a pair and head, and one a row where there are sinks; as many again in the backward."""
        return self.heads * (self.pairs + (self.batch * self.queries if self.sinks else 0))

    @property
    def bytes(self) -> int:
        """Every operand read once and every result written once, with a float32 log-sum-exp for each row in training.

        The least that any kernel can move: keys that a group of heads shares count once. A backward reads queries,
        keys, values, the output, its gradient and the log-sum-exp, and writes three gradients.
        """
        size, rows = self.dtype.itemsize, self.batch * self.heads * self.queries
        cached = (self.cache_dtype or self.dtype).itemsize
        seen = self.batch * self.kv_heads * self.visible_keys
        of_source = seen * (self.head_dim + (0 if self.shared else self.value_dim))
        if self.direction == "backward":
            return size * rows * (2 * self.head_dim + 2 * self.value_dim) + 2 * size * of_source + 4 * rows
        return size * rows * (self.head_dim + self.value_dim) + cached * of_source

    @property
    def kept(self) -> int:
        """Bytes of the heads' outputs, and of a float32 log-sum-exp for each row, which a backward needs."""
        rows = self.batch * self.heads * self.queries
        return rows * self.value_dim * self.dtype.itemsize + 4 * rows

    @property
    def launches(self) -> int:
        """Kernels of one call at the least; decoding splits the keys and then joins the parts."""
        return {"forward": 1, "backward": 2, "decode": 2}[self.direction] if self.pairs else 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Numbers that are read, changed one by one and written: positions, norms, gates, copies into a cache.

    `bytes` are those read plus those written, in `launches` kernels together; `kept` are those of the result, where it
    takes memory of its own that a backward would find again. `gradient_bytes` are what its backward reads and writes:
    twice as much unless given, and no pass at all where they are 0. What is computed on the way hardly matters.
    """

    stage: Stage
    bytes: int
    launches: int = 1
    kept: int = 0
    gradient_bytes: int | None = None

    def __post_init__(self) -> None:
        _check(self, ("bytes", "launches", "kept"))
        if self.gradient_bytes is not None:
            _check(self, ("gradient_bytes",))

    @property
    def flops(self) -> int:
        return 0

    @property
    def exponentials(self) -> int:
        return 0


Piece = Product | AttentionCore | Traffic


@dataclass(frozen=True, slots=True)
class Work:
    """The pieces of one phase in the order in which they run, one after another.

    `phase` is a "training" step (forward and backward), the "prefill" of a prompt or one step of "decode". `layers` is
    how many layers in a row do just this; every total below is of all of them.
    """

    phase: Phase
    pieces: tuple[Piece, ...]
    layers: int = 1

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise OptionError(f"phase must be one of {', '.join(PHASES)}; got {self.phase!r}")
        _check(self, ("layers",))

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products."""
        return self.layers * sum(piece.flops for piece in self.pieces)

    @property
    def exponentials(self) -> int:
        return self.layers * sum(piece.exponentials for piece in self.pieces)

    @property
    def bytes(self) -> int:
        """Moved between memory and the chip when each piece reads its operands from memory, the least possible."""
        return self.layers * sum(piece.bytes for piece in self.pieces)

    @property
    def launches(self) -> int:
        return self.layers * sum(piece.launches for piece in self.pieces)

    @property
    def intensity(self) -> float:
        """FLOPs of matrix products a byte moved; 0 where nothing moves."""
        return self.flops / self.bytes if self.bytes else 0.0

    def only(self, *stages: Stage) -> Work:
        """The part of it that belongs to these stages."""
        return dataclasses.replace(self, pieces=tuple(piece for piece in self.pieces if piece.stage in stages))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that occur, in the order of `STAGES`."""
        return tuple(stage for stage in STAGES if any(piece.stage == stage for piece in self.pieces))


def with_gradients(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The pieces of a forward followed by those of its backward, last first."""
    forward = tuple(pieces)
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
    return (*forward, *backward)


def _check(value: object, names: tuple[str, ...]) -> None:
    for name in names:
        size = getattr(value, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise OptionError(f"{name} must be an integer of at least 0, got {size!r}")
    dtype = getattr(value, "dtype", torch.float32)
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")

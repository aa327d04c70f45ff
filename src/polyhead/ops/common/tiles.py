"""How one attention is cut into tiles of logits, for every backend that goes tile by tile.

The query heads that share a KV head are folded into its rows: queries are [pairs, group, queries, head_dim] and keys
[pairs, keys, head_dim], where a pair is one (batch, KV head). No key is ever repeated. Many pairs are cut into parts
first, so that a tile keeps enough rows to fill a matrix product: below some 500 it runs at half its speed on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.ops.common.dropout import draw_seed, keep_tile
from polyhead.ops.common.nonfinite import without_broken, without_broken_queries
from polyhead.ops.common.request import AttentionRequest
from polyhead.ops.common.visibility import Span, Visibility

# Logits of one tile, all heads together: with their exponentials they stay in a CPU's cache.
TILE_ELEMENTS = 1 << 21
TILE_COLUMNS = 512
_FULL_ROWS = 512  # from here on a matrix product of a tile runs at full speed
_FEW_ROWS = 64  # below, turning the keys costs more than the product gains from it
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Sequences and heads that are worked through together, as slices of [batch, heads, ...] and [batch, kv_heads]."""

    batch: slice
    heads: slice
    kv_heads: slice


class Workspace:
    """Memory for a few tiles, used again for the next: fresh pages cost a CPU more than the pass that fills them."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def tile(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = like.new_empty(size)
        return held[:size].view(shape)


def tile_sizes(pairs: int, group: int, queries: int, keys: int, *, in_parts: bool = True) -> tuple[int, int, int]:
    """The rows and columns of a tile, and how many pairs of a sequence and a KV head it holds; all, or a part."""
    columns = min(TILE_COLUMNS, max(keys, 1))
    height = TILE_ELEMENTS // max(pairs * group * columns, 1)
    wanted = min(queries, _FULL_ROWS // group)
    if height < wanted and in_parts:
        height = max(16, min(wanted, TILE_ELEMENTS // (columns * group)))
        pairs = max(1, min(pairs, TILE_ELEMENTS // (height * columns * group)))
    return max(16, min(1024, height)), columns, pairs


class Tiling:
    """What is fixed for one call: sizes, options, and how the work is cut into tiles."""

    def __init__(
        self,
        request: AttentionRequest,
        *,
        seed: Tensor | None = None,
        query_poison: Tensor | None = None,
        poison: Tensor | None = None,
    ) -> None:
        self.batch, self.heads, self.kv_heads, self.queries, self.keys = request.sizes
        self.group = self.heads // self.kv_heads
        self.visibility = request.visibility
        self.statistics = request.statistics
        self.softcap = request.softcap
        self.dropout = request.dropout if seed is not None else 0.0
        self.seed = seed
        self.query_poison = query_poison  # [batch, heads, queries]
        self.poison = poison  # [batch, kv_heads, keys]
        self.bias_tensors = [] if self.visibility is None else self.visibility.bias_tensors
        # The dropout of a part would need the numbers of its sequences.
        self.rows, self.columns, self.pairs = tile_sizes(
            self.batch * self.kv_heads, self.group, self.queries, self.keys, in_parts=not self.dropout
        )
        self.workspace: Workspace | None = None

    def working(self) -> Tiling:
        """The same with memory for its tiles, to be let go with it. None on the tape, which keeps every tile, and none
        for a compiler, which plans memory by itself."""
        own = self._copied()
        own.workspace = None if torch.is_grad_enabled() or torch.compiler.is_compiling() else Workspace()
        return own

    def _copied(self) -> Tiling:
        """What `copy.copy` gives, in steps that Dynamo follows."""
        own = Tiling.__new__(Tiling)
        own.batch, own.heads, own.kv_heads, own.group = self.batch, self.heads, self.kv_heads, self.group
        own.queries, own.keys = self.queries, self.keys
        own.visibility, own.statistics, own.bias_tensors = self.visibility, self.statistics, self.bias_tensors
        own.softcap, own.dropout, own.seed = self.softcap, self.dropout, self.seed
        own.query_poison, own.poison = self.query_poison, self.poison
        own.columns, own.rows, own.pairs = self.columns, self.rows, self.pairs
        own.workspace = self.workspace
        return own

    def versions(self) -> list[int]:
        """Versions of the tensors that the mask and the seed hold and that no input of the function is."""
        if torch.compiler.is_compiling():
            return []
        mask = self.visibility
        held = [self.seed]
        if mask is not None:
            held += [
                mask.allowed,
                mask.query_positions,
                mask.key_positions,
                *(x for ids in mask.documents for x in ids),
            ]
        return [x._version for x in held if x is not None and not x.is_inference()]

    def check_versions(self, before: list[int]) -> None:
        """Refuse a backward that would compute the tiles again from another mask or seed than the forward had."""
        if self.versions() != before:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "a tensor of the mask, or the seed, was written to between the forward and the backward"
            )

    def room(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """Memory of that name for a tile, to be given as `out`."""
        return None if self.workspace is None else self.workspace.tile(name, shape, like)

    # ---- parts

    def parts(self) -> list[Part]:
        """Sequences and heads that fit into one tile together, one after the other."""
        heads = min(self.pairs, self.kv_heads)
        sequences = max(1, self.pairs // max(self.kv_heads, 1))
        return [
            Part(
                slice(first, min(first + sequences, self.batch)),
                slice(head * self.group, min(head + heads, self.kv_heads) * self.group),
                slice(head, min(head + heads, self.kv_heads)),
            )
            for first in range(0, self.batch, sequences)
            for head in range(0, self.kv_heads, heads)
        ]

    def of(self, part: Part) -> Tiling:
        """The tiling of a part alone."""
        if part.batch == slice(0, self.batch) and part.kv_heads == slice(0, self.kv_heads):
            return self
        own = self._copied()
        own.batch = part.batch.stop - part.batch.start
        own.heads, own.kv_heads = part.heads.stop - part.heads.start, part.kv_heads.stop - part.kv_heads.start
        own.query_poison = None if self.query_poison is None else self.query_poison[part.batch, part.heads]
        own.poison = None if self.poison is None else self.poison[part.batch, part.kv_heads]
        own.visibility = None if self.visibility is None else visibility_of(self.visibility, part)
        own.bias_tensors = [] if own.visibility is None else own.visibility.bias_tensors
        if self.statistics is not None:
            own.statistics = replace(self.statistics, places=visibility_of(self.statistics.places, part))
        return own

    # ---- tiles

    def row_blocks(self) -> Iterator[Span]:
        for start in range(0, self.queries, self.rows):
            yield start, min(start + self.rows, self.queries)

    def column_blocks(self, rows: Span) -> Iterator[Span]:
        spans = [(0, self.keys)] if self.visibility is None else self.visibility.spans(rows)
        for first, last in spans:
            for start in range(first, last, self.columns):
                yield start, min(start + self.columns, last)

    def fold(self, x: Tensor) -> Tensor:
        """[batch, heads, queries, ...] to [pairs, group, queries, ...]."""
        return x.reshape(self.batch * self.kv_heads, self.group, *x.shape[2:])

    def rows_of(self, x: Tensor, rows: Span) -> Tensor:
        """Some rows of a folded tensor, [pairs, group * rows, ...]."""
        return x[:, :, rows[0] : rows[1]].flatten(1, 2)

    def by_head(self, tile: Tensor) -> Tensor:
        """[pairs, group * rows, columns] as [batch, heads, rows, columns], the same memory; what is so stays so."""
        rows = tile.shape[-2] if tile.ndim == 4 else tile.shape[1] // self.group
        return tile.view(self.batch, self.heads, rows, tile.shape[-1])

    def turned(self, x: Tensor) -> Tensor:
        """Keys or values [batch, kv_heads, keys, dim] as [pairs, dim, keys], laid out for the products to come."""
        x = x.flatten(0, 1).transpose(1, 2)
        return x.contiguous() if self.queries * self.group >= _FEW_ROWS else x

    def logits(
        self, query_rows: Tensor, key_columns: Tensor, visibility: Visibility | None, rows: Span, columns: Span
    ) -> tuple[Tensor, Tensor | None, bool]:
        """One tile of logits with hidden ones at -inf, [pairs, group * rows, columns]; the tanh in its softcap; and
        whether any may be hidden."""
        taped = torch.is_grad_enabled()
        key_columns = key_columns[:, :, columns[0] : columns[1]]
        shape = (*query_rows.shape[:2], key_columns.shape[2])
        tile = torch.bmm(query_rows, key_columns, out=self.room("logits", shape, query_rows))
        bent: Tensor | None = None
        if self.softcap is not None:
            bent = torch.tanh(tile / self.softcap)
            tile = self.softcap * bent
        if visibility is None:
            return tile, bent, False
        bias = visibility.bias_tile(rows, columns, tile.dtype)
        if bias is not None:
            bias = self._spread(bias, rows, columns)
            tile = tile + bias if taped else tile.add_(bias)
        if self.poison is not None:
            tile = tile + self.poison.flatten(0, 1)[:, None, columns[0] : columns[1]]
        if self.query_poison is not None:
            tile = tile + self.rows_of(self.fold(self.query_poison)[..., None], rows)
        allowed = visibility.allowed_tile(rows, columns)
        if allowed is None:
            return tile, bent, bias is not None
        is_broken = self.poison is not None or self.query_poison is not None
        if taped or is_broken or not tile.is_cpu:
            return tile.masked_fill(~self._spread(allowed, rows, columns), -torch.inf), bent, True
        # On a CPU, selecting by a boolean takes as long as a matrix product; a ceiling of -inf takes a quarter of that.
        ceiling = (allowed.to(tile.dtype) - 0.5).mul_(torch.inf)
        return torch.fmin(tile, self._spread(ceiling, rows, columns), out=tile), bent, True

    def _spread(self, tile: Tensor, rows: Span, columns: Span) -> Tensor:
        """[batch or 1, heads or 1, rows or 1, columns] spread over the rows of a tile."""
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        if tile.shape[0] == tile.shape[1] == 1 and self.group == 1:
            return tile[0]
        spread = tile.expand(self.batch, self.heads, height, width)
        return spread.reshape(self.batch * self.kv_heads, self.group * height, width)

    def exponential(self, x: Tensor, *, keep: bool) -> Tensor:
        """exp(x) of a tile, in the memory of `x` unless that is to be kept or is on the tape.

        On a CPU through a power of two, which PyTorch computes in two thirds of the time.
        """
        if torch.is_grad_enabled():
            return torch.exp(x)
        target = self.room("exponentials", x.shape, x) if keep else x
        if not x.is_cpu:
            return torch.exp(x, out=target)
        return torch.mul(x, _LOG2_E, out=target).exp2_()

    def keep(self, rows: Span, columns: Span) -> Tensor | None:
        if not self.dropout or self.seed is None:
            return None
        keep = keep_tile(self.seed, self.dropout, self.batch, self.heads, rows, columns)
        return keep.view(self.batch * self.kv_heads, self.group * (rows[1] - rows[0]), columns[1] - columns[0])

    def dropped(self, tile: Tensor, keep: Tensor | None) -> Tensor:
        return tile if keep is None else torch.where(keep, tile / (1 - self.dropout), 0.0)

    def weights(self, query: Tensor, key: Tensor, logsumexp: Tensor) -> Tensor:
        """The weights themselves, [batch, heads, queries, keys], from the log-sum-exp; on the tape."""
        everything = (0, self.queries), (0, self.keys)
        tile, _, _ = self.logits(self.fold(query).flatten(1, 2), self.turned(key), self.visibility, *everything)
        tile = tile.view(self.batch, self.heads, self.queries, self.keys)
        return torch.exp(tile - torch.where(logsumexp == -torch.inf, torch.inf, logsumexp)[..., None])


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The tensors of a request in the accumulation dtype, free of NaN where a mask may hide some, and their tiling."""

    tiling: Tiling
    query: Tensor  # scaled
    key: Tensor
    value: Tensor
    sinks: Tensor | None


def prepare(request: AttentionRequest, *, dropout: bool = True) -> Prepared:
    dtype = request.accumulation_dtype
    scale = request.scale
    query, key, value = (x.to(dtype) for x in (request.query, request.key, request.value))
    query_poison, poison = None, None
    if request.visibility is not None and not request.finite:
        query, query_poison = without_broken_queries(query)
        key, value, poison = without_broken(key, value)
    # The scale is folded into the queries here, on the tape, so that a learned scale has its gradient.
    query = query * (scale.to(dtype)[:, None, None] if isinstance(scale, Tensor) else scale)
    seed = None
    if dropout and request.dropout:
        seed = draw_seed(query.device) if request.seed is None else request.seed
    tiling = Tiling(request, seed=seed, query_poison=query_poison, poison=poison)
    return Prepared(tiling, query, key, value, None if request.sinks is None else request.sinks.to(dtype))


def visibility_of(visibility: Visibility, part: Part) -> Visibility:
    """The mask of a part: of every tensor the sequences and heads that are its own."""

    def cut(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[part.batch]

    documents = [(cut(mine), cut(theirs)) for mine, theirs in visibility.documents]
    tensors = [slice_of(x, part) for x in visibility.biases]
    tensors += [slice_of(term.table, part, table=True) for term in visibility.relative_biases]
    own = replace(
        visibility,
        query_positions=cut(visibility.query_positions),
        key_positions=cut(visibility.key_positions),
        key_ordinals=cut(visibility.key_ordinals),
        query_real=cut(visibility.query_real),
        key_real=cut(visibility.key_real),
        documents=tuple(documents),  # type: ignore[arg-type]
        allowed=None if visibility.allowed is None else slice_of(visibility.allowed, part),
    )
    return own.with_bias_tensors(tensors)


def slice_of(x: Tensor, part: Part, *, table: bool = False) -> Tensor:
    """What belongs to a part of [batch or 1, heads or 1, ...], or of a table [heads or 1, distances]; a view."""
    if table:
        return x if x.shape[0] == 1 else x[part.heads]
    x = x if x.shape[0] == 1 else x[part.batch]
    return x if x.shape[1] == 1 else x[:, part.heads]


def slices_of_biases(
    visibility: Visibility | None, tensors: Sequence[Tensor | None], part: Part
) -> list[Tensor | None]:
    """What belongs to a part of tensors that stand for `bias_tensors`."""
    count = 0 if visibility is None else len(visibility.biases)
    return [None if x is None else slice_of(x, part, table=index >= count) for index, x in enumerate(tensors)]

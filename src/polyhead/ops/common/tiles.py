"""Tiling of one attention call into tiles of logits, for backends that work tile by tile.

The query heads that share a KV head are folded into its rows: queries are [pairs, group, queries, head_dim] and keys
[pairs, keys, head_dim], where a pair is one (sequence, KV head). No key is repeated. Calls with many pairs are split
into parts first, so that a tile keeps enough rows for an efficient matrix product: below about 500 rows a CPU runs at
half speed.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.ops.common.dropout import draw_seed, keep_tile
from polyhead.ops.common.nonfinite import without_nonfinite, without_nonfinite_queries
from polyhead.ops.common.request import AttentionRequest
from polyhead.ops.common.tracing import may_overwrite
from polyhead.ops.common.visibility import Span, Visibility, select_heads

# Logits of one tile over all heads: together with their exponentials they fit into a CPU's cache.
TILE_ELEMENTS = 1 << 21
TILE_COLUMNS = 512
_REUSED_ELEMENTS = 1 << 14  # buffers are reused in calls with at least this many logits; smaller ones need no new pages
_FULL_ROWS = 512  # rows from which a tile's matrix product runs at full speed
_MIN_TRANSPOSE_ROWS = 64  # with fewer rows, transposing the keys costs more than the product gains
_LOG2_E = math.log2(math.e)
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Sequences and heads processed together, as slices of [batch, heads] and [batch, kv_heads]."""

    batch: slice
    heads: slice
    kv_heads: slice


class Workspace:
    """Reusable buffers for tiles: on a CPU, fresh pages cost more than the pass that fills them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def tile(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialised tensor; calls with the same name share its memory."""
        memory = self._buffers.get(name)
        if memory is not None and memory.shape == shape:
            return memory
        size = math.prod(shape)
        if memory is None or memory.numel() < size:
            memory = self._buffers[name] = like.new_empty(shape)
            return memory
        return memory.view(-1)[:size].view(shape)


def tile_sizes(pairs: int, group: int, queries: int, keys: int, *, in_parts: bool = True) -> tuple[int, int, int]:
    """Return the rows and columns of a tile, and its number of (sequence, KV head) pairs.

    A tile has all `pairs` of the call, or fewer if `in_parts` is set and it would otherwise have too few rows.
    """
    columns = min(TILE_COLUMNS, max(keys, 1))
    height = TILE_ELEMENTS // max(pairs * group * columns, 1)
    target_rows = min(queries, _FULL_ROWS // group)
    if height < target_rows and in_parts:
        height = max(16, min(target_rows, TILE_ELEMENTS // (columns * group)))
        pairs = max(1, min(pairs, TILE_ELEMENTS // (height * columns * group)))
    return max(16, min(1024, height)), columns, pairs


class Tiling:
    """Sizes and options of one call, its division into parts and tiles, and the logits and weights of a tile."""

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
        self.query_poison = query_poison  # [batch, heads, queries], from `without_nonfinite_queries`
        self.poison = poison  # [batch, kv_heads, keys], from `without_nonfinite`: NaN for non-finite keys, else 0
        self.bias_tensors = [] if self.visibility is None else self.visibility.bias_tensors
        # Sizes of a tile. No parts with dropout: it hashes batch and head indices, which a part would have to offset.
        self.rows, self.columns, self.pairs = tile_sizes(
            self.batch * self.kv_heads, self.group, self.queries, self.keys, in_parts=not self.dropout
        )
        self.workspace: Workspace | None = None

    def with_workspace(self) -> Tiling:
        """Return a copy with a workspace, which is freed with the copy; or `self`, without one, if it would not help.

        That is the case while autograd or selective checkpointing may save every tile, under a compiler, which plans
        memory itself, and in small calls.
        """
        if not may_overwrite() or torch.compiler.is_compiling():
            return self
        if self.batch * self.heads * self.queries * self.keys < _REUSED_ELEMENTS:
            return self
        copy = self._copy()
        copy.workspace = Workspace()
        return copy

    def _copy(self) -> Tiling:
        """Return a shallow copy like `copy.copy`, in steps that Dynamo can trace."""
        copy = Tiling.__new__(Tiling)
        copy.batch, copy.heads, copy.kv_heads, copy.group = self.batch, self.heads, self.kv_heads, self.group
        copy.queries, copy.keys = self.queries, self.keys
        copy.visibility, copy.statistics, copy.bias_tensors = self.visibility, self.statistics, self.bias_tensors
        copy.softcap, copy.dropout, copy.seed = self.softcap, self.dropout, self.seed
        copy.query_poison, copy.poison = self.query_poison, self.poison
        copy.columns, copy.rows, copy.pairs = self.columns, self.rows, self.pairs
        copy.workspace = self.workspace
        return copy

    def versions(self) -> list[int]:
        """Return the version counters of the mask's tensors and the seed, which autograd does not check."""
        if torch.compiler.is_compiling():
            return []
        mask = self.visibility
        tensors = [self.seed]
        if mask is not None:
            tensors += [
                mask.allowed,
                mask.query_positions,
                mask.key_positions,
                *(x for ids in mask.documents for x in ids),
            ]
        return [x._version for x in tensors if x is not None and not x.is_inference()]

    def check_versions(self, saved_versions: list[int]) -> None:
        """Raise RuntimeError if the mask or the seed was modified since the forward.

        The backward recomputes the tiles from them.
        """
        if self.versions() != saved_versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "a tensor of the mask, or the seed, was written to between the forward and the backward"
            )

    def buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """Return the workspace buffer of that name, to pass as `out`; None without a workspace."""
        return None if self.workspace is None else self.workspace.tile(name, shape, like)

    # ---- parts

    def parts(self) -> list[Part]:
        """Return the parts of the call, each with as many sequences and heads as fit into one tile."""
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
        """Return the tiling of one part."""
        if part.batch == slice(0, self.batch) and part.kv_heads == slice(0, self.kv_heads):
            return self
        copy = self._copy()
        copy.batch = part.batch.stop - part.batch.start
        copy.heads, copy.kv_heads = part.heads.stop - part.heads.start, part.kv_heads.stop - part.kv_heads.start
        copy.query_poison = None if self.query_poison is None else self.query_poison[part.batch, part.heads]
        copy.poison = None if self.poison is None else self.poison[part.batch, part.kv_heads]
        copy.visibility = None if self.visibility is None else self.visibility.select(part.batch, part.heads)
        copy.bias_tensors = [] if copy.visibility is None else copy.visibility.bias_tensors
        if self.statistics is not None:
            copy.statistics = replace(self.statistics, places=self.statistics.places.select(part.batch, part.heads))
        return copy

    # ---- tiles

    def row_blocks(self) -> Iterator[Span]:
        """Yield the spans of queries that are processed together."""
        for start in range(0, self.queries, self.rows):
            yield start, min(start + self.rows, self.queries)

    def column_blocks(self, rows: Span) -> Iterator[Span]:
        """Yield the spans of keys that some of these rows may see, each of at most one tile."""
        spans = [(0, self.keys)] if self.visibility is None else self.visibility.spans(rows)
        for first, last in spans:
            for start in range(first, last, self.columns):
                yield start, min(start + self.columns, last)

    def fold(self, x: Tensor) -> Tensor:
        """Reshape [batch, heads, queries, ...] to [pairs, group, queries, ...]."""
        return x.reshape(self.batch * self.kv_heads, self.group, *x.shape[2:])

    def rows_of(self, x: Tensor, rows: Span) -> Tensor:
        """Return some rows of a folded tensor, [pairs, group * rows, ...]."""
        return x[:, :, rows[0] : rows[1]].flatten(1, 2)

    def by_head(self, tile: Tensor) -> Tensor:
        """View [pairs, group * rows, columns] as [batch, heads, rows, columns]; no-op for four axes."""
        rows = tile.shape[-2] if tile.ndim == 4 else tile.shape[1] // self.group
        return tile.view(self.batch, self.heads, rows, tile.shape[-1])

    def transposed(self, x: Tensor) -> Tensor:
        """Transpose keys or values [batch, kv_heads, keys, dim] to [pairs, dim, keys].

        The result is contiguous if there are enough rows for that to pay off.
        """
        x = x.flatten(0, 1).transpose(1, 2)
        return x.contiguous() if self.queries * self.group >= _MIN_TRANSPOSE_ROWS else x

    def logits(
        self, query_rows: Tensor, key_columns: Tensor, visibility: Visibility | None, rows: Span, columns: Span
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Return a tile of logits [pairs, group * rows, columns], tanh(logits / softcap), and whether it is masked.

        The tanh is None without a softcap. Masked logits are -inf; the third value is False if no logit of the tile can
        be -inf. It is True for every tile with a bias, which may contain -inf.
        """
        overwrites = may_overwrite()
        key_columns = key_columns[:, :, columns[0] : columns[1]]
        shape = (*query_rows.shape[:2], key_columns.shape[2])
        tile = torch.bmm(query_rows, key_columns, out=self.buffer("logits", shape, query_rows))
        tanh_logits: Tensor | None = None
        if self.softcap is not None:
            tanh_logits = torch.tanh(tile / self.softcap)
            tile = self.softcap * tanh_logits
        if visibility is None:
            return tile, tanh_logits, False
        bias = visibility.bias_tile(rows, columns, tile.dtype)
        if bias is not None:
            bias = self._expand(bias, rows, columns)
            tile = tile.add_(bias) if overwrites else tile + bias
        if self.poison is not None:
            tile = tile + self.poison.flatten(0, 1)[:, None, columns[0] : columns[1]]
        if self.query_poison is not None:
            tile = tile + self.rows_of(self.fold(self.query_poison)[..., None], rows)
        allowed = visibility.allowed_tile(rows, columns)
        if allowed is None:
            return tile, tanh_logits, bias is not None
        has_poison = self.poison is not None or self.query_poison is not None
        if not overwrites or has_poison or not tile.is_cpu or tile.numel() < _REUSED_ELEMENTS:
            return tile.masked_fill(~self._expand(allowed, rows, columns), -torch.inf), tanh_logits, True
        # On a CPU, masked_fill takes as long as a matrix product; a minimum with +inf (visible) or -inf takes a quarter
        # of that, but more operators. It ignores NaN, so it cannot be used if there is poison.
        ceiling = (allowed.to(tile.dtype) - 0.5).mul_(torch.inf)
        return torch.fmin(tile, self._expand(ceiling, rows, columns), out=tile), tanh_logits, True

    def _expand(self, tile: Tensor, rows: Span, columns: Span) -> Tensor:
        """Expand [batch or 1, heads or 1, rows or 1, columns] to a tile [pairs, group * rows, columns]."""
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        if tile.shape[0] == tile.shape[1] == 1 and self.group == 1:
            return tile[0]
        expanded = tile.expand(self.batch, self.heads, height, width)
        return expanded.reshape(self.batch * self.kv_heads, self.group * height, width)

    def exponential(self, x: Tensor, *, keep: bool) -> Tensor:
        """Return exp(x) of a tile, computed in place unless x is still needed: `keep`, or a backward.

        On an Arm CPU it is computed by exp2, which takes PyTorch two thirds of the time; on x86 both take the same.
        """
        if not may_overwrite():
            return torch.exp(x)
        target = self.buffer("exponentials", x.shape, x) if keep else x
        if not x.is_cpu or _IS_X86:
            return torch.exp(x, out=target)
        return torch.mul(x, _LOG2_E, out=target).exp2_()

    def keep(self, rows: Span, columns: Span) -> Tensor | None:
        """Return the dropout mask of a tile (True: keep), [pairs, group * rows, columns]; None without dropout."""
        if not self.dropout or self.seed is None:
            return None
        keep = keep_tile(self.seed, self.dropout, self.batch, self.heads, rows, columns)
        return keep.view(self.batch * self.kv_heads, self.group * (rows[1] - rows[0]), columns[1] - columns[0])

    def apply_dropout(self, tile: Tensor, keep: Tensor | None) -> Tensor:
        """Zero the dropped elements of a tile and rescale the others; `keep` is from `Tiling.keep`."""
        return tile if keep is None else torch.where(keep, tile / (1 - self.dropout), 0.0)

    def weights(self, query: Tensor, key: Tensor, logsumexp: Tensor) -> Tensor:
        """Return the attention weights [batch, heads, queries, keys] from the log-sum-exp, differentiably."""
        everything = (0, self.queries), (0, self.keys)
        tile, _, _ = self.logits(self.fold(query).flatten(1, 2), self.transposed(key), self.visibility, *everything)
        tile = tile.view(self.batch, self.heads, self.queries, self.keys)
        return torch.exp(tile - torch.where(logsumexp == -torch.inf, torch.inf, logsumexp)[..., None])


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Tensors of a request in the accumulation dtype, without NaN and Inf if there is a mask, and their tiling."""

    tiling: Tiling
    query: Tensor  # scaled
    key: Tensor
    value: Tensor
    sinks: Tensor | None


def prepare(request: AttentionRequest, *, dropout: bool = True) -> Prepared:
    """Cast, scale and clean the tensors of a request; `dropout=False` ignores its dropout."""
    dtype = request.accumulation_dtype
    scale = request.scale
    query, key, value = request.query, request.key, request.value
    if query.dtype is not dtype:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    query_poison, poison = None, None
    if request.visibility is not None and not request.finite:
        query, query_poison = without_nonfinite_queries(query)
        key, value, poison = without_nonfinite(key, value)
    # The scale is folded into the queries here, under autograd, so that a learned scale receives its gradient.
    query = query * (scale.to(dtype)[:, None, None] if isinstance(scale, Tensor) else scale)
    seed = None
    if dropout and request.dropout:
        seed = draw_seed(query.device) if request.seed is None else request.seed
    tiling = Tiling(request, seed=seed, query_poison=query_poison, poison=poison)
    return Prepared(tiling, query, key, value, None if request.sinks is None else request.sinks.to(dtype))


def slices_of_biases(
    visibility: Visibility | None, tensors: Sequence[Tensor | None], part: Part
) -> list[Tensor | None]:
    """Return views of one part of tensors shaped like `bias_tensors` (biases, then tables), such as their gradients."""
    count = 0 if visibility is None else len(visibility.biases)

    def view(x: Tensor, is_table: bool) -> Tensor:
        if not is_table:
            return select_heads(x, part.batch, part.heads)
        return x if x.shape[0] == 1 else x[part.heads]

    return [None if x is None else view(x, index >= count) for index, x in enumerate(tensors)]

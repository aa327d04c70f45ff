"""The tokens that each rank holds, and the whole sequence from its shards.

A contiguous layout gives each rank one chunk. A zigzag layout cuts the sequence into two chunks per rank and gives rank
r the chunks r and 2 * ranks - 1 - r, so that under a causal mask every rank computes equally many pairs. It is the
order of PyTorch's head-tail load balancer (`torch.distributed.tensor.experimental.context_parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead.errors import OptionError, ShapeError
from polyhead.ops.common.visibility import Span
from polyhead.parallel.groups import RankGroup, rank_group

Layout = Literal["zigzag", "contiguous"]


def check_layout(layout: str) -> None:
    if layout not in ("zigzag", "contiguous"):
        raise OptionError(f"layout must be 'zigzag' or 'contiguous', got {layout!r}")


def chunk_spans(tokens: int, rank: int, ranks: int, layout: Layout) -> list[Span]:
    """Return the chunks of a rank as spans of the whole sequence, in the order in which its shard has them.

    The two chunks of the last rank of a zigzag layout are neighbours, and one span.

    Args:
        tokens: tokens of the shard of each rank.
        rank: the rank.
        ranks: number of ranks.
        layout: "zigzag" or "contiguous".
    """
    if layout == "contiguous":
        return [(rank * tokens, (rank + 1) * tokens)]
    if tokens % 2:
        raise ShapeError(
            f"a zigzag layout has two chunks on each rank, so that a shard must have an even number of tokens, "
            f"got {tokens}; pad the sequence and hide the padding with Mask.lengths, or use layout='contiguous'"
        )
    size = tokens // 2
    if rank == ranks - 1:
        return [(rank * size, (rank + 2) * size)]
    return [(i * size, (i + 1) * size) for i in (rank, 2 * ranks - 1 - rank)]


def shard_sequence(
    x: Tensor,
    *,
    dim: int,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    dimension: str | None = None,
    layout: Layout = "zigzag",
) -> Tensor:
    """Return the tokens of this rank from a tensor that holds the whole sequence.

    Args:
        x: a tensor of the whole sequence, the same on every rank: embeddings, token ids, labels, heads.
        dim: its axis of tokens.
        mesh, dimension: the ranks, as in `context_attention`.
        layout: "zigzag" (two chunks on each rank, balanced under a causal mask) or "contiguous".

    Returns:
        The shard, a copy. Nothing is sent.

    Raises:
        ShapeError: the sequence does not split into equal chunks.
    """
    group = rank_group(mesh, dimension)
    check_layout(layout)
    length = x.shape[dim]
    chunks = group.size * (2 if layout == "zigzag" else 1)
    if length % chunks:
        padded = length + -length % chunks
        raise ShapeError(
            f"a {layout} layout over {group.size} ranks needs a multiple of {chunks} tokens, got {length}; pad the "
            f"sequence to {padded} and hide the padding with Mask.lengths([{length}, ...]), which is exact"
        )
    spans = chunk_spans(length // group.size, group.rank, group.size, layout)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans], dim)


def shard_positions(
    tokens: int,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    dimension: str | None = None,
    layout: Layout = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions in the whole sequence of this rank's tokens, int64 [tokens].

    Rotary and other position encodings of a shard need them.

    Args:
        tokens: tokens of the shard of each rank.
        mesh, dimension, layout: as in `shard_sequence`.
        device: device of the result.
    """
    group = rank_group(mesh, dimension)
    check_layout(layout)
    spans = chunk_spans(tokens, group.rank, group.size, layout)
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def gather_sequence(
    shard: Tensor,
    *,
    dim: int,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    dimension: str | None = None,
    layout: Layout = "zigzag",
) -> Tensor:
    """Return the whole sequence, in its order, from the shards of all ranks: the inverse of `shard_sequence`.

    It is differentiable, also twice: the gradient of a shard is the sum over the ranks of the gradients of its tokens.

    Args:
        shard: the tokens of this rank; the same shape and dtype on every rank.
        dim: its axis of tokens.
        mesh, dimension, layout: as in `shard_sequence`.

    Raises:
        CommunicationError: a rank did not answer.
    """
    group = rank_group(mesh, dimension)
    check_layout(layout)
    return gathered([shard], dim % shard.ndim, group, layout)[0]


def gathered(shards: Sequence[Tensor], dim: int, group: RankGroup, layout: Layout) -> list[Tensor]:
    """Return the whole sequences of several tensors; see `gather_sequence`.

    They are one node of autograd, whose backward runs if one of them has a gradient: ranks whose losses use different
    ones still make the same calls.
    """
    for shard in shards:
        chunk_spans(shard.shape[dim], group.rank, group.size, layout)  # before anything is sent
    return list(shards) if group.size == 1 else list(_Gather.apply(dim, group, layout, *shards))


def sum_of_shards(shards: Tensor, group: RankGroup) -> Tensor:
    """Return the sum of what all ranks have for this rank's shard, from [ranks, ...] on each of them.

    An all-to-all and a local sum move the bytes of a reduce-scatter, but add half precision in float32.
    """
    if group.size == 1:
        return shards[0]
    received = torch.empty_like(shards)
    try:
        dist.all_to_all_single(received, shards, group=group.process_group)
    except RuntimeError as error:
        group.fail(error)
    dtype = torch.float32 if shards.dtype in (torch.float16, torch.bfloat16) else shards.dtype
    return received.sum(0, dtype=dtype).to(shards.dtype)


def _gather(shard: Tensor, dim: int, group: RankGroup, layout: Layout) -> Tensor:
    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(group.size)]
    try:
        dist.all_gather(shards, shard, group.process_group)
    except RuntimeError as error:
        group.fail(error)
    chunks = []
    for rank, other in enumerate(shards):
        spans = chunk_spans(shard.shape[dim], rank, group.size, layout)
        pieces = other.split([stop - start for start, stop in spans], dim)
        chunks += [(start, piece) for (start, _), piece in zip(spans, pieces, strict=True)]
    return torch.cat([piece for _, piece in sorted(chunks, key=lambda chunk: chunk[0])], dim)


def _scatter_sum(x: Tensor, dim: int, group: RankGroup, layout: Layout) -> Tensor:
    tokens = x.shape[dim] // group.size
    by_rank = [chunk_spans(tokens, rank, group.size, layout) for rank in range(group.size)]
    shards = [torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans], dim) for spans in by_rank]
    return sum_of_shards(torch.stack(shards), group)


class _Gather(torch.autograd.Function):
    """Whole sequences from shards; the gradient is the sum over ranks, of which each has its shard."""

    @staticmethod
    def forward(ctx: Any, dim: int, group: RankGroup, layout: Layout, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.options = dim, group, layout
        return tuple(_gather(x, *ctx.options) for x in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = [grad for grad, need in zip(grads, ctx.needs_input_grad[3:], strict=True) if need]
        results = iter(_ScatterSum.apply(*ctx.options, *needed))
        return None, None, None, *(next(results) if need else None for need in ctx.needs_input_grad[3:])


class _ScatterSum(torch.autograd.Function):
    """The shards of sums over ranks (a reduce-scatter), the transpose of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, dim: int, group: RankGroup, layout: Layout, *sequences: Tensor) -> tuple[Tensor, ...]:
        ctx.options = dim, group, layout
        return tuple(_scatter_sum(x, *ctx.options) for x in sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_Gather.apply(*ctx.options, *grads)

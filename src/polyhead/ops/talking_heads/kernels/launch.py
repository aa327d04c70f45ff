"""Launches of the kernels of talking heads: forward, backward and statistics, and how each is cut."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.attention.kernels.outputs import output_like
from polyhead.ops.common.kernels.availability import multiprocessors
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two
from polyhead.ops.talking_heads.kernels.backward import delta_kernel, query_kernel
from polyhead.ops.talking_heads.kernels.backward_columns import key_value_kernel
from polyhead.ops.talking_heads.kernels.forward import logsumexp_kernel, output_kernel
from polyhead.ops.talking_heads.kernels.statistics import Results, statistics_kernel
from polyhead.ops.talking_heads.kernels.tiles import Poison, Shape

Pass = Literal["logsumexp", "output", "statistics", "delta", "query", "key_value", "key", "value"]

# Every program holds all heads, so there is room for one on a multiprocessor, and its tiles are small; rows are worth
# more than columns, because keys and values are fetched again for every block of rows. Up to 16 heads of 64:
_BLOCKS: dict[Pass, Blocks] = {
    "logsumexp": Blocks(64, 16, 16, 3),
    "output": Blocks(32, 16, 8, 3),
    "statistics": Blocks(16, 16, 16, 3),
    "delta": Blocks(32, 16, 16, 2),
    "query": Blocks(16, 16, 8, 3),
    "key_value": Blocks(16, 16, 8, 3),
}
# Up to twice that, where the sums of keys and of values do not fit beside each other.
_WIDE_BLOCKS: dict[Pass, Blocks] = {
    "logsumexp": Blocks(32, 16, 16, 2),
    "output": Blocks(16, 16, 16, 2),
    "statistics": Blocks(16, 16, 16, 2),
    "delta": Blocks(16, 8, 16, 2),
    "query": Blocks(8, 16, 16, 1),
    "key": Blocks(16, 8, 16, 2),
    "value": Blocks(16, 16, 16, 2),
}
# The same with half the rows, where there are so few that multiprocessors would be left without any.
_LOW_BLOCKS: dict[Pass, Blocks] = {"output": Blocks(16, 16, 8, 3), "delta": Blocks(16, 16, 8, 3)}
_WIDE = 16 * 64
_SMALLEST = 8  # rows or columns of a tile
_WAVES = 2  # programs for each multiprocessor that the log-sum-exp is cut into, where keys allow it
_SHORTEST_PART = 256  # keys: what a program brings of its rows is as much as 64 keys


class Problem(NamedTuple):
    """One attention of talking heads as every kernel takes it."""

    query: Tensor  # [batch, heads, queries, head_dim], the last axis dense, as in the others
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    logits_mix: Tensor  # [heads, heads]
    weights_mix: Tensor  # [heads, heads]
    scale: float
    mask: MaskArguments
    poison: Poison

    @property
    def shape(self) -> Shape:
        heads = self.query.shape[1]
        return Shape(heads, heads // self.key.shape[1], self.query.shape[2], self.key.shape[2])

    @property
    def heads(self) -> int:
        """Heads of a tile."""
        return max(16, power_of_two(self.query.shape[1]))

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of keys and of values in a tile."""
        key, value = (max(16, power_of_two(x.shape[3])) for x in (self.query, self.value))
        return key, value

    @property
    def is_wide(self) -> bool:
        return self.heads * max(self.widths) > _WIDE

    @property
    def mixes(self) -> tuple[Tensor, Tensor]:
        """Both mixes with zeros for the heads that only fill a tile."""
        more = self.heads - self.query.shape[1]
        logits, weights = (
            F.pad(x.detach(), (0, more, 0, more)).contiguous() for x in (self.logits_mix, self.weights_mix)
        )
        return logits, weights


def _chosen_blocks(problem: Problem, name: Pass) -> Blocks:
    if problem.is_wide:
        return _WIDE_BLOCKS[name]
    blocks = _BLOCKS[name]
    if name not in _LOW_BLOCKS:
        return blocks
    programs = problem.query.shape[0] * blocks_of(problem.query.shape[2], blocks.rows)
    # Of unequal programs that all start together, as under a causal edge, the longest is the time of all.
    unequal = problem.mask.right is not None and problem.mask.left is None
    fits = programs * (1 if unequal else 2) <= multiprocessors(problem.query.get_device())
    return _LOW_BLOCKS[name] if fits else blocks


def _launch(
    kernel: Any,
    name: Pass,
    problem: Problem,
    count: int,
    by_column: bool,
    *arguments: Any,
    parts: int = 1,
    **sizes: Any,
) -> int:
    """Start a kernel over `count` rows or columns of each sequence; how many blocks of them a sequence has.

    Each block is as many programs as there are `parts`.
    """
    key_width, value_width = problem.widths
    first = _chosen_blocks(problem, name)
    batch, device = problem.query.shape[0], problem.query.get_device() if problem.query.is_cuda else None
    widths = {"BLOCK_KEY": key_width, "BLOCK_VALUE": value_width}
    widths |= {"DIM_KEY": problem.query.shape[3], "DIM_VALUE": problem.value.shape[3]}
    constants = {name: size for name, size in {**widths, **sizes}.items() if name in kernel.arg_names}

    def launch(blocks: Blocks) -> None:
        if "PARTS" in kernel.arg_names:
            constants["PARTS"] = max(1, min(blocks.warps, blocks.rows * blocks.columns // 16))
        kernel[(parts * batch * blocks_of(count, blocks.columns if by_column else blocks.rows),)](
            *arguments,
            HEADS=problem.heads,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            **constants,
            **blocks.options,
        )

    def kind() -> Hashable:
        there = tuple(x is not None for x in (*problem.mask, *problem.poison))
        return "talking", name, device, problem.query.dtype, problem.heads, problem.widths, there

    with torch.cuda.device_of(problem.query):
        taken = launch_fitting(launch, first, Blocks.smaller, kind)
    return blocks_of(count, taken.columns if by_column else taken.rows)


def forward(problem: Problem, *, split: bool) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, queries, value_dim] and log-sum-exp [batch, heads, queries].

    `split` mixes the scores in twice the precision of the inputs, for who reads the log-sum-exp.
    """
    query, key, value, _, _, scale, mask, poison = problem
    output = output_like(query, value.shape[3])
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    if not logsumexp.numel():
        return output, logsumexp
    logits_mix, weights_mix = problem.mixes
    rest = (mask, poison, problem.shape)
    strides = (query.stride()[:3], key.stride()[:3])
    queries, parts = query.shape[2], _parts(problem)
    of_parts = logsumexp.new_empty(parts, *logsumexp.shape)
    _launch(
        logsumexp_kernel,
        "logsumexp",
        problem,
        queries,
        False,
        *(query, key, logits_mix, of_parts, parts, of_parts.stride(0)),
        *rest,
        *strides,
        scale,
        SPLIT=split,
        parts=parts,
    )
    _launch(
        output_kernel,
        "output",
        problem,
        queries,
        False,
        *(query, key, value, logits_mix, weights_mix, of_parts, parts, of_parts.stride(0), logsumexp, output),
        *rest,
        *strides,
        *(value.stride()[:3], output.stride()[:3]),
        scale,
        SPLIT=split,
    )
    return output, logsumexp


def _parts(problem: Problem) -> int:
    """How many programs share the keys of a block of rows while their log-sum-exp is found."""
    batch, _, queries, _ = problem.query.shape
    rows = _chosen_blocks(problem, "logsumexp").rows
    left, right = problem.mask.left, problem.mask.right
    span = problem.key.shape[2]
    if left is not None and right is not None:
        span = min(span, left + right + rows)
    wanted = _WAVES * multiprocessors(problem.query.get_device()) // (batch * blocks_of(queries, rows))
    return max(1, min(wanted, span // _SHORTEST_PART))


def statistics(
    problem: Problem, logsumexp: Tensor, names: tuple[str, ...], sink_keys: int, window: int
) -> dict[str, Tensor]:
    """What `names` asks for, fields of `Results`, each float32 [batch, heads, queries]."""
    found = {name: torch.empty_like(logsumexp) for name in names}
    if logsumexp.numel():
        query, key, *_ = problem
        _launch(
            statistics_kernel,
            "statistics",
            problem,
            query.shape[2],
            False,
            *(query, key, *problem.mixes, logsumexp, Results(**found)),
            *(problem.mask, problem.poison, problem.shape),
            *(query.stride()[:3], key.stride()[:3]),
            problem.scale,
            sink_keys,
            window,
        )
    return found


def backward(problem: Problem, grad: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and both mixes, the last two in float32."""
    query, key, value, _, _, scale, mask, poison = problem
    batch, heads, queries, _ = query.shape
    keys, wide = key.shape[2], problem.heads
    delta = torch.empty_like(logsumexp)
    logits_mix, weights_mix = problem.mixes
    inputs = (query, key, value, grad, logits_mix, weights_mix, logsumexp, delta)
    rest = (mask, poison, problem.shape)
    strides = (query.stride()[:3], key.stride()[:3], value.stride()[:3], grad.stride()[:3])
    grad_query = torch.empty_like(query)
    grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
    if heads != key.shape[1]:
        # Every query head has a share in the gradient of its keys and values; those of a group are added up wide.
        sizes = (batch, heads, keys)
        grad_key, grad_value = (query.new_empty(*sizes, x.shape[3], dtype=torch.float32) for x in (key, value))
    if not (logsumexp.numel() and keys):
        zeros = query.new_zeros(heads, heads, dtype=torch.float32)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), zeros, zeros
    # Smaller tiles than the chosen may be all that fits, and then there are more of them.
    most = batch * blocks_of(queries, _SMALLEST)
    shares = [query.new_empty(most, wide, wide, dtype=torch.float32) for _ in range(2)]
    count = _launch(delta_kernel, "delta", problem, queries, False, *inputs, shares[0], *rest, *strides, scale)
    of_weights = shares[0][: batch * count].sum(0)
    into_query = (*inputs, grad_query, shares[1], *rest, *strides, grad_query.stride()[:3], scale)
    count = _launch(query_kernel, "query", problem, queries, False, *into_query)
    of_logits = shares[1][: batch * count].sum(0)
    into_keys = (*inputs, grad_key, grad_value, *rest, *strides, grad_key.stride()[:3], grad_value.stride()[:3], scale)
    launches: tuple[tuple[Pass, bool, bool], ...] = (("key_value", True, True),)
    if problem.is_wide:
        launches = (("key", True, False), ("value", False, True))
    for name, of_key, of_value in launches:
        options = {"OF_KEY": of_key, "OF_VALUE": of_value, "TURNED": not problem.is_wide}
        _launch(key_value_kernel, name, problem, keys, True, *into_keys, **options)
    if heads != key.shape[1]:
        groups = (key.shape[1], heads // key.shape[1])
        grad_key, grad_value = (x.unflatten(1, groups).sum(2).to(query.dtype) for x in (grad_key, grad_value))
    return grad_query, grad_key, grad_value, of_logits[:heads, :heads], of_weights[:heads, :heads]

"""Launches of the talking-heads kernels (forward, backward, statistics) and their tile sizes."""

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
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.talking_heads.kernels.backward import delta_kernel, query_kernel
from polyhead.ops.talking_heads.kernels.backward_columns import key_value_kernel
from polyhead.ops.talking_heads.kernels.forward import logsumexp_kernel, output_kernel
from polyhead.ops.talking_heads.kernels.statistics import Results, statistics_kernel
from polyhead.ops.talking_heads.kernels.tiles import Poison, Shape

Pass = Literal["logsumexp", "output", "statistics", "delta", "query", "key_value", "key", "value"]

# Every program keeps all heads on chip, so a multiprocessor has one resident program, and its tiles are small. Rows are
# worth more than columns, because keys and values are loaded again for every block of rows. Up to 16 heads of 64:
_BLOCKS: dict[Pass, Blocks] = {
    "logsumexp": Blocks(64, 16, 16, 3),
    "output": Blocks(32, 16, 8, 3),
    "statistics": Blocks(16, 16, 16, 3),
    "delta": Blocks(32, 16, 16, 2),
    "query": Blocks(16, 16, 8, 3),
    "key_value": Blocks(16, 16, 8, 3),
}
# Up to twice that, where the accumulators of keys and of values do not fit together.
_WIDE_BLOCKS: dict[Pass, Blocks] = {
    "logsumexp": Blocks(32, 16, 16, 2),
    "output": Blocks(16, 16, 16, 2),
    "statistics": Blocks(16, 16, 16, 2),
    "delta": Blocks(16, 8, 16, 2),
    "query": Blocks(8, 16, 16, 1),
    "key": Blocks(16, 8, 16, 2),
    "value": Blocks(16, 16, 16, 2),
}
# Instead of `_BLOCKS`, if there are so few rows that multiprocessors would be idle.
_FEW_ROWS_BLOCKS: dict[Pass, Blocks] = {"output": Blocks(16, 16, 8, 3), "delta": Blocks(16, 16, 8, 3)}
_WIDE = 16 * 64  # heads times channels beyond which `_WIDE_BLOCKS` are used
_MIN_TILE = 8  # rows or columns of a tile
_WAVES = 2  # programs per multiprocessor for the log-sum-exp, if there are enough keys
_MIN_PART_KEYS = 256  # loading the rows of a program costs as much as loading 64 keys


class Problem(NamedTuple):
    """Arguments of one talking-heads attention, common to all kernels."""

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
        """Heads of a tile, padded."""
        return padded_dim(self.query.shape[1])

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of keys and of values in a tile."""
        key, value = (padded_dim(x.shape[3]) for x in (self.query, self.value))
        return key, value

    @property
    def is_wide(self) -> bool:
        return self.heads * max(self.widths) > _WIDE

    @property
    def mixes(self) -> tuple[Tensor, Tensor]:
        """Both mixes, padded with zeros to the heads of a tile."""
        padding = self.heads - self.query.shape[1]
        logits, weights = (
            F.pad(x.detach(), (0, padding, 0, padding)).contiguous() for x in (self.logits_mix, self.weights_mix)
        )
        return logits, weights


def _choose_blocks(problem: Problem, name: Pass) -> Blocks:
    """Return the tile sizes of a kernel, before they are reduced to what fits."""
    if problem.is_wide:
        return _WIDE_BLOCKS[name]
    blocks = _BLOCKS[name]
    if name not in _FEW_ROWS_BLOCKS:
        return blocks
    programs = problem.query.shape[0] * blocks_of(problem.query.shape[2], blocks.rows)
    # With unbalanced programs that all start together, as under a causal mask, the longest determines the time.
    is_unbalanced = problem.mask.right is not None and problem.mask.left is None
    has_few_programs = programs * (1 if is_unbalanced else 2) <= multiprocessors(problem.query.get_device())
    return _FEW_ROWS_BLOCKS[name] if has_few_programs else blocks


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
    """Launch a kernel over the `count` rows, or columns, of each sequence; returns the blocks per sequence.

    Each block is processed by `parts` programs.
    """
    key_width, value_width = problem.widths
    chosen_blocks = _choose_blocks(problem, name)
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

    def compile_key() -> Hashable:
        present = tuple(x is not None for x in (*problem.mask, *problem.poison))
        return "talking", name, device, problem.query.dtype, problem.heads, problem.widths, present

    with torch.cuda.device_of(problem.query):
        launched = launch_fitting(launch, chosen_blocks, Blocks.smaller, compile_key)
    return blocks_of(count, launched.columns if by_column else launched.rows)


def forward(problem: Problem, *, split: bool) -> tuple[Tensor, Tensor]:
    """Return output [batch, heads, queries, value_dim] and log-sum-exp [batch, heads, queries].

    `split` mixes the scores in twice the precision of the inputs, for an accurate log-sum-exp.
    """
    query, key, value, _, _, scale, mask, poison = problem
    output = output_like(query, value.shape[3])
    logsumexp = query.new_empty(query.shape[:3], dtype=torch.float32)
    if not logsumexp.numel():
        return output, logsumexp
    logits_mix, weights_mix = problem.mixes
    mask_arguments = (mask, poison, problem.shape)
    strides = (query.stride()[:3], key.stride()[:3])
    queries, parts = query.shape[2], _num_key_parts(problem)
    logsumexp_parts = logsumexp.new_empty(parts, *logsumexp.shape)
    _launch(
        logsumexp_kernel,
        "logsumexp",
        problem,
        queries,
        False,
        *(query, key, logits_mix, logsumexp_parts, parts, logsumexp_parts.stride(0)),
        *mask_arguments,
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
        *(
            query,
            key,
            value,
            logits_mix,
            weights_mix,
            logsumexp_parts,
            parts,
            logsumexp_parts.stride(0),
            logsumexp,
            output,
        ),
        *mask_arguments,
        *strides,
        *(value.stride()[:3], output.stride()[:3]),
        scale,
        SPLIT=split,
    )
    return output, logsumexp


def _num_key_parts(problem: Problem) -> int:
    """Return the number of programs that share the keys of a block of rows in the log-sum-exp kernel."""
    batch, _, queries, _ = problem.query.shape
    rows = _choose_blocks(problem, "logsumexp").rows
    left, right = problem.mask.left, problem.mask.right
    span = problem.key.shape[2]
    if left is not None and right is not None:
        span = min(span, left + right + rows)
    max_parts = _WAVES * multiprocessors(problem.query.get_device()) // (batch * blocks_of(queries, rows))
    return max(1, min(max_parts, span // _MIN_PART_KEYS))


def statistics(
    problem: Problem, logsumexp: Tensor, names: tuple[str, ...], sink_keys: int, window: int
) -> dict[str, Tensor]:
    """Return the statistics in `names`, fields of `Results`, each float32 [batch, heads, queries]."""
    row_stats = {name: torch.empty_like(logsumexp) for name in names}
    if logsumexp.numel():
        query, key, *_ = problem
        _launch(
            statistics_kernel,
            "statistics",
            problem,
            query.shape[2],
            False,
            *(query, key, *problem.mixes, logsumexp, Results(**row_stats)),
            *(problem.mask, problem.poison, problem.shape),
            *(query.stride()[:3], key.stride()[:3]),
            problem.scale,
            sink_keys,
            window,
        )
    return row_stats


def backward(problem: Problem, grad: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and both mixes, the last two in float32."""
    query, key, value, _, _, scale, mask, poison = problem
    batch, heads, queries, _ = query.shape
    keys, padded_heads = key.shape[2], problem.heads
    delta = torch.empty_like(logsumexp)
    logits_mix, weights_mix = problem.mixes
    inputs = (query, key, value, grad, logits_mix, weights_mix, logsumexp, delta)
    mask_arguments = (mask, poison, problem.shape)
    strides = (query.stride()[:3], key.stride()[:3], value.stride()[:3], grad.stride()[:3])
    grad_query = torch.empty_like(query)
    grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
    if heads != key.shape[1]:
        # Gradients of keys and values are computed per query head and summed over each group in float32.
        sizes = (batch, heads, keys)
        grad_key, grad_value = (query.new_empty(*sizes, x.shape[3], dtype=torch.float32) for x in (key, value))
    if not (logsumexp.numel() and keys):
        zeros = query.new_zeros(heads, heads, dtype=torch.float32)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), zeros, zeros
    # Tiles may be reduced at launch if they do not fit, and then there are more of them.
    max_programs = batch * blocks_of(queries, _MIN_TILE)
    mix_grads = [query.new_empty(max_programs, padded_heads, padded_heads, dtype=torch.float32) for _ in range(2)]
    count = _launch(
        delta_kernel, "delta", problem, queries, False, *inputs, mix_grads[0], *mask_arguments, *strides, scale
    )
    grad_weights_mix = mix_grads[0][: batch * count].sum(0)
    query_arguments = (*inputs, grad_query, mix_grads[1], *mask_arguments, *strides, grad_query.stride()[:3], scale)
    count = _launch(query_kernel, "query", problem, queries, False, *query_arguments)
    grad_logits_mix = mix_grads[1][: batch * count].sum(0)
    key_arguments = (
        *inputs,
        grad_key,
        grad_value,
        *mask_arguments,
        *strides,
        grad_key.stride()[:3],
        grad_value.stride()[:3],
        scale,
    )
    launches: tuple[tuple[Pass, bool, bool], ...] = (("key_value", True, True),)
    if problem.is_wide:
        launches = (("key", True, False), ("value", False, True))
    for name, needs_key, needs_value in launches:
        options = {"GRAD_KEY": needs_key, "GRAD_VALUE": needs_value, "TRANSPOSED": not problem.is_wide}
        _launch(key_value_kernel, name, problem, keys, True, *key_arguments, **options)
    if heads != key.shape[1]:
        groups = (key.shape[1], heads // key.shape[1])
        grad_key, grad_value = (x.unflatten(1, groups).sum(2).to(query.dtype) for x in (grad_key, grad_value))
    return grad_query, grad_key, grad_value, grad_logits_mix[:heads, :heads], grad_weights_mix[:heads, :heads]

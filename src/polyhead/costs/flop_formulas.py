"""FLOP formulas of polyhead's operators for `torch.utils.flop_counter`.

As PyTorch does for its own fused kernels, every (query, key) pair counts, including those that a causal mask, a window
or document boundaries hide. Absent queries and keys do not count: empty cache slots, padding among new tokens, rows
that no head selected. Their number is read from tensors (lengths, positions, offsets), which synchronises with the
device; for tensors without data (meta device, fake tensors) every slot and every row counts.

Import this module to register the formulas; `import polyhead` does not, since the counter loads Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polyhead.costs.work import AttentionCore, Direction

# Imported for the operators that they define.
from polyhead.ops.attention import fused as _attention_operators  # noqa: F401
from polyhead.ops.common.combined_weights import COMBINED
from polyhead.ops.decode import fused as _decode_operators  # noqa: F401
from polyhead.ops.selected_rows import fused as _selected_rows_operators  # noqa: F401
from polyhead.ops.selected_rows import row_products as _row_product_operators  # noqa: F401
from polyhead.ops.talking_heads import fused as _talking_heads_operators  # noqa: F401

_OPERATORS = torch.ops.polyhead
Shape = tuple[int, ...]


def _register_core(operator: Any, direction: Direction, *, mixing: bool = False) -> None:
    @register_flop_formula(operator)
    def core(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
        batch, heads, queries, head_dim = query
        sizes = (batch, heads, key[1], queries, key[2], head_dim, value[3])
        return AttentionCore(direction, *sizes, torch.float32, mixing=mixing).flops


_register_core(_OPERATORS.attention_forward, "forward")
_register_core(_OPERATORS.attention_backward, "backward")
_register_core(_OPERATORS.talking_forward, "forward", mixing=True)
_register_core(_OPERATORS.talking_backward, "backward", mixing=True)


@register_flop_formula(_OPERATORS.talking_statistics)
def _talking_statistics(query: Shape, key: Shape, *args: Any, **kwargs: Any) -> int:
    """Count scores and their mix, and the second mix if a statistic needs mixed weights; values are never read."""
    batch, heads, queries, head_dim = query
    names = args[-3].split(",")
    mixes = 2 if any(name in COMBINED for name in names) else 1
    return 2 * batch * queries * key[2] * heads * (head_dim + mixes * heads)


# ---- formulas that read sizes from tensors


def _is_readable(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta


@register_flop_formula(_OPERATORS.decode, get_raw=True)
def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None = None,
    new_lengths: Tensor | None = None,
    key_position: Tensor | None = None,
    query_position: Tensor | None = None,
    block_table: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Count new tokens by the cached tokens of their sequence."""
    batch, heads, queries, head_dim = query.shape
    slots = key.shape[2] if block_table is None else block_table.shape[1] * key.shape[1]
    num_keys, num_queries = [slots] * batch, [queries] * batch
    if key_position is not None and _is_readable(key_position):
        num_keys = (key_position >= 0).sum(1).expand(batch).tolist()
    elif lengths is not None and _is_readable(lengths):
        num_keys = lengths.tolist()
    if new_lengths is not None and _is_readable(new_lengths):
        num_queries = new_lengths.tolist()
    pairs = sum(tokens * keys for tokens, keys in zip(num_queries, num_keys, strict=True))
    return 2 * pairs * heads * (head_dim + value.shape[3])


def _register_selected_rows(operator: Any, scores: int, values: int) -> None:
    """Register an operator with so many products of head_dim and of value_dim channels per pair."""

    @register_flop_formula(operator, get_raw=True)
    def selected_rows(
        positions: Tensor, offsets: Tensor, num_queries: int, by_head: bool, query: Tensor, key: Tensor, value: Tensor,
        *args: Any, **kwargs: Any,
    ) -> int:  # fmt: skip
        # Rows after the last offset are padding.
        rows = int(offsets[-1]) if _is_readable(offsets) else positions.shape[0]
        return 2 * rows * key.shape[2] * (scores * key.shape[3] + values * value.shape[3])


_register_selected_rows(_OPERATORS.ragged_attention_forward, scores=1, values=1)
_register_selected_rows(_OPERATORS.ragged_attention_backward, scores=3, values=2)


def _grouped_matmul(order: Tensor, ends: Tensor, inputs: int, outputs: int) -> int:
    """Return the FLOPs of a grouped matmul: every row by one [inputs, outputs] matrix."""
    rows = int(ends[-1]) if ends.shape[0] and _is_readable(ends) else order.shape[0]
    return 2 * rows * inputs * outputs


@register_flop_formula([_OPERATORS.spread_product, _OPERATORS.summed_product], get_raw=True)
def _row_product(x: Tensor, matrices: Tensor, order: Tensor, ends: Tensor, *args: Any, **kwargs: Any) -> int:
    return _grouped_matmul(order, ends, matrices.shape[1], matrices.shape[2])


@register_flop_formula(_OPERATORS.row_outer_product, get_raw=True)
def _row_outer_product(x: Tensor, rows: Tensor, order: Tensor, ends: Tensor, *args: Any, **kwargs: Any) -> int:
    return _grouped_matmul(order, ends, x.shape[1], rows.shape[1])

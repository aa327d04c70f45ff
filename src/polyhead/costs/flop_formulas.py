"""What our operators cost, told to `torch.utils.flop_counter`, so that its totals hold with our kernels as well.

As PyTorch does for its own fused kernels, every pair of a query and a key counts, whatever an edge, a window or
documents hide. Queries and keys that are not there do not: slots of a cache without a token, padding among new tokens,
rows that no head chose. Those stand in tensors (lengths, positions, offsets), which are read, so that a device is
waited for; of tensors without content (a meta device, fake tensors) every slot and every row counts.

Importing this module is enough; `polyhead` does not do it by itself, since the counter loads Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polyhead.costs.work import AttentionCore

# Imported for the operators that they define.
from polyhead.ops.attention import fused as _attention_operators  # noqa: F401
from polyhead.ops.common.combined_weights import COMBINED
from polyhead.ops.decode import fused as _decode_operators  # noqa: F401
from polyhead.ops.selected_rows import fused as _selected_rows_operators  # noqa: F401
from polyhead.ops.selected_rows import row_products as _row_product_operators  # noqa: F401
from polyhead.ops.talking_heads import fused as _talking_heads_operators  # noqa: F401

_OPERATORS = torch.ops.polyhead
Shape = tuple[int, ...]


def _core(query: Shape, key: Shape, value: Shape, **options: Any) -> int:
    batch, heads, queries, head_dim = query
    sizes = (batch, heads, key[1], queries, key[2], head_dim, value[3])
    return AttentionCore(options.pop("direction", "forward"), *sizes, torch.float32, **options).flops


@register_flop_formula(_OPERATORS.attention_forward)
def _attention_forward(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return _core(query, key, value)


@register_flop_formula(_OPERATORS.attention_backward)
def _attention_backward(grad_output: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return _core(query, key, value, direction="backward")


@register_flop_formula(_OPERATORS.talking_forward)
def _talking_forward(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return _core(query, key, value, mixing=True)


@register_flop_formula(_OPERATORS.talking_backward)
def _talking_backward(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return _core(query, key, value, direction="backward", mixing=True)


@register_flop_formula(_OPERATORS.talking_statistics)
def _talking_statistics(query: Shape, key: Shape, *args: Any, **kwargs: Any) -> int:
    """Scores and their mix; where the mixed weights are asked for, the second mix as well. Values are never touched."""
    batch, heads, queries, head_dim = query
    names = args[-3].split(",")
    mixes = 2 if any(name in COMBINED for name in names) else 1
    return 2 * batch * queries * key[2] * heads * (head_dim + mixes * heads)


# ---- what tensors say


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
    """New tokens with the tokens of their sequence that the cache holds."""
    batch, heads, queries, head_dim = query.shape
    slots = key.shape[2] if block_table is None else block_table.shape[1] * key.shape[1]
    held, new = [slots] * batch, [queries] * batch
    if key_position is not None and _is_readable(key_position):
        held = (key_position >= 0).sum(1).expand(batch).tolist()
    elif lengths is not None and _is_readable(lengths):
        held = lengths.tolist()
    if new_lengths is not None and _is_readable(new_lengths):
        new = new_lengths.tolist()
    pairs = sum(tokens * keys for tokens, keys in zip(new, held, strict=True))
    return 2 * pairs * heads * (head_dim + value.shape[3])


def _rows_and_keys(key: Tensor, positions: Tensor, offsets: Tensor) -> int:
    """Pairs of all chosen rows; padding stands behind the last offset."""
    rows = int(offsets[-1]) if _is_readable(offsets) else positions.shape[0]
    return rows * key.shape[2]


@register_flop_formula(_OPERATORS.ragged_attention_forward, get_raw=True)
def _ragged_forward(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, offsets: Tensor, *args: Any, **kwargs: Any
) -> int:
    return 2 * _rows_and_keys(key, positions, offsets) * (key.shape[3] + value.shape[3])


@register_flop_formula(_OPERATORS.ragged_attention_backward, get_raw=True)
def _ragged_backward(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, offsets: Tensor, *args: Any, **kwargs: Any
) -> int:
    return 2 * _rows_and_keys(key, positions, offsets) * (3 * key.shape[3] + 2 * value.shape[3])


def _grouped(order: Tensor, ends: Tensor, wide: int, high: int) -> int:
    """Rows that meet a matrix of so many numbers."""
    rows = int(ends[-1]) if ends.shape[0] and _is_readable(ends) else order.shape[0]
    return 2 * rows * wide * high


@register_flop_formula([_OPERATORS.spread_product, _OPERATORS.summed_product], get_raw=True)
def _row_product(given: Tensor, matrices: Tensor, order: Tensor, ends: Tensor, *args: Any, **kwargs: Any) -> int:
    return _grouped(order, ends, matrices.shape[1], matrices.shape[2])


@register_flop_formula(_OPERATORS.row_outer_product, get_raw=True)
def _row_outer_product(x: Tensor, rows: Tensor, order: Tensor, ends: Tensor, *args: Any, **kwargs: Any) -> int:
    return _grouped(order, ends, x.shape[1], rows.shape[1])

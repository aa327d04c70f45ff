"""What our operators cost, told to `torch.utils.flop_counter`, so that its totals hold with our kernels as well.

As PyTorch does for its own fused kernels, every pair of query and key counts, masked or not. Importing this module is
enough; `polyhead` does not do it by itself, since the counter loads Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

# Imported for the operators that they define.
from polyhead.functional import fused as fused
from polyhead.functional import talking_fused as talking_fused
from polyhead.plan.work import AttentionCore

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

"""Per-head weight matrices as views of a layer's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadLayout


@dataclass(frozen=True, slots=True, eq=False)
class HeadMatrices:
    """Matrices of one head: softmax((X Wq + bq) (X Wk + bk)^T / sqrt(head_dim)) (X Wv + bv) Wo.

    `query` and `key` are [embed_dim, head_dim], `value` is [embed_dim, value_dim], `output` is
    [value_dim, embed_dim]; biases have one entry per column, or are None. The scale 1 / sqrt(head_dim), which `scale=`
    of the layer replaces, is not part of the matrices, and the bias of the output projection belongs to no head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None

    def shares_key_and_value(self, other: HeadMatrices) -> bool:
        """Return True if both heads have the same key and value matrices and biases.

        Args:
            other: matrices of another head.
        """
        return all(
            a is b or (a is not None and b is not None and torch.equal(a, b))
            for a, b in (
                (self.key, other.key),
                (self.value, other.value),
                (self.key_bias, other.key_bias),
                (self.value_bias, other.value_bias),
            )
        )


class Heads(Sequence[HeadMatrices]):
    """Heads of a layer (`layer.heads`) as views of its parameters; writes change the layer.

    Heads that share a KV head (GQA, MQA) have the same key and value matrices.

    Args:
        layout: head layout of the layer.
        q_proj, k_proj, v_proj, out_proj: projections of the layer.
    """

    def __init__(
        self, layout: HeadLayout, q_proj: nn.Linear, k_proj: nn.Linear, v_proj: nn.Linear, out_proj: nn.Linear
    ):
        self._layout = layout
        self._projections = q_proj, k_proj, v_proj, out_proj

    def __len__(self) -> int:
        return self._layout.num_heads

    @overload
    def __getitem__(self, index: int) -> HeadMatrices: ...
    @overload
    def __getitem__(self, index: slice) -> list[HeadMatrices]: ...
    def __getitem__(self, index: int | slice) -> HeadMatrices | list[HeadMatrices]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"the layer has heads 0 to {len(self) - 1}, got {index}")
        layout = self._layout
        q_proj, k_proj, v_proj, out_proj = self._projections
        head = index % len(self)
        kv_head = layout.key_head(head)

        def rows(parameter: Tensor | None, block: int, size: int) -> Tensor | None:
            return None if parameter is None else parameter[block * size : (block + 1) * size]

        def columns(linear: nn.Linear, block: int, size: int) -> Tensor:
            return linear.weight[block * size : (block + 1) * size].T

        return HeadMatrices(
            query=columns(q_proj, head, layout.head_dim),
            key=columns(k_proj, kv_head, layout.head_dim),
            value=columns(v_proj, kv_head, layout.value_dim),
            output=out_proj.weight[:, head * layout.value_dim : (head + 1) * layout.value_dim].T,
            query_bias=rows(q_proj.bias, head, layout.head_dim),
            key_bias=rows(k_proj.bias, kv_head, layout.head_dim),
            value_bias=rows(v_proj.bias, kv_head, layout.value_dim),
        )


@torch.no_grad()
def write_heads(target: Heads, heads: Sequence[HeadMatrices]) -> None:
    """Copy per-head matrices into a layer's parameters."""
    for index, (view, head) in enumerate(zip(target, heads, strict=True)):
        for name in HeadMatrices.__slots__:
            source, destination = getattr(head, name), getattr(view, name)
            if destination is None and source is None:
                continue
            if source is None or destination is None:
                raise OptionError(f"either all heads or none must have a {name}, got head {index} without one")
            if source.shape != destination.shape:
                raise ShapeError(f"{name} of head {index} must be {list(destination.shape)}, got {list(source.shape)}")
            destination.copy_(source)


def check_head_matrices(heads: Any, output_bias: Tensor | None) -> None:
    """Check per-head matrices that a layer is to be built from."""
    if not heads:
        raise ShapeError("a layer needs at least one head, got an empty list")
    for index, head in enumerate(heads):
        if not isinstance(head, HeadMatrices):
            raise OptionError(f"heads must be HeadMatrices, got {type(head).__name__} for head {index}")
        for name in ("query", "key", "value", "output"):
            matrix = getattr(head, name)
            if matrix.ndim != 2:
                raise ShapeError(f"{name} of head {index} must be a matrix, got shape {list(matrix.shape)}")
    width = heads[0].output.shape[1]
    if output_bias is not None and output_bias.shape != (width,):
        raise ShapeError(f"output_bias must be [{width}], got {list(output_bias.shape)}")

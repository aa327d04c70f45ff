"""Base class of layers whose heads can be read, written and built as separate matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from polyhead.errors import OptionError
from polyhead.layers.head_matrices import HeadMatrices, Heads, check_head_matrices, write_heads
from polyhead.layers.joint_projection import is_plain_linear
from polyhead.layers.multi_head.projected import ProjectedHeads


class SeparateHeads(ProjectedHeads):
    """Base class of layers whose heads have matrices W_Q, W_K, W_V and W_O; a group may share W_K and W_V."""

    @property
    def heads(self) -> Heads:
        """Matrices of each head as views: `layer.heads[3].query` is [embed_dim, head_dim]."""
        self._check_concatenates("a head's own output matrix")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear = getattr(self, name)
            if not is_plain_linear(linear):
                reason = "a parametrization" if is_parametrized(linear) else type(linear).__name__
                raise OptionError(
                    f"matrices of heads are views of projections that compute nothing but their weight and bias, got "
                    f"{name} with {reason}; merge adapters and remove parametrizations first"
                )
        return Heads(self.layout, self.q_proj, self.k_proj, self.v_proj, self.out_proj)

    def _check_concatenates(self, what: str) -> None:
        if self.combine is not None:
            raise OptionError(
                f"{what} exists only if the output projection reads Concat(heads), got a layer whose heads are "
                f"combined by {type(self.combine).__name__}; its weights are in q_proj, k_proj, v_proj, combine and "
                "out_proj"
            )

    @classmethod
    def from_heads(
        cls,
        heads: Sequence[HeadMatrices],
        *,
        num_kv_heads: int | None = None,
        output_bias: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """Build a layer from per-head matrices; `options` are those of the constructor.

        With fewer `num_kv_heads` than heads, or with `key_heads`, the heads of a group must have the same key and value
        matrices.

        Args:
            heads: matrices of each head, in order.
            num_kv_heads: number of KV heads; one per head by default.
            output_bias: bias of the output projection; none by default.
            options: options of the constructor.

        Returns:
            The layer, with copies of the matrices.
        """
        check_head_matrices(heads, output_bias)
        first = heads[0]
        kv_heads = len(heads) if num_kv_heads is None and options.get("key_heads") is None else num_kv_heads
        options.setdefault("device", first.query.device)
        options.setdefault("dtype", first.query.dtype)
        layer = cls(
            first.output.shape[1],
            len(heads),
            num_kv_heads=kv_heads,
            head_dim=first.query.shape[1],
            value_dim=first.value.shape[1],
            key_input_dim=first.key.shape[0],
            value_input_dim=first.value.shape[0],
            bias=first.query_bias is not None,
            output_bias=output_bias is not None,
            **options,
        )
        leaders: dict[int, int] = {}
        for index, head in enumerate(heads):
            leader = leaders.setdefault(layer.layout.key_head(index), index)
            if not head.shares_key_and_value(heads[leader]):
                raise OptionError(
                    f"heads that share a KV head must have the same key and value matrices and biases, "
                    f"got different ones in heads {leader} and {index}"
                )
        write_heads(layer.heads, heads)
        if output_bias is not None:
            with torch.no_grad():
                layer.out_proj.bias.copy_(output_bias)
        return layer

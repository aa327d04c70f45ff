"""Grouped heads: each group of heads is mixed by a matrix of its own, and an MLP takes the place of W_O."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.combining import CombinesHeads
from polyhead.layers.multi_head.layer import MultiHeadAttention


def hidden_dim_at_parity(layout: HeadLayout, num_groups: int) -> int:
    """The widest hidden layer with which a grouped layer has at most the 4 * embed_dim**2 weights of plain attention.

    Query, key and value projections and the group matrices take their weights first; a hidden channel costs
    num_heads * value_dim + embed_dim of what is left. So the layer has fewer weights than 4 * embed_dim**2 by the
    remainder of that division, which is less than one channel. Biases are left out on both sides. With heads of the
    usual width this is embed_dim * (num_groups - 1) / (2 * num_groups), rounded down.

    >>> hidden_dim_at_parity(HeadLayout(512, 8), num_groups=4)
    192
    """
    _check_groups(layout.num_heads, num_groups)
    budget = 4 * layout.embed_dim**2
    joined = layout.num_heads * layout.value_dim
    used = layout.num_parameters - joined * layout.embed_dim + joined**2 // num_groups
    hidden_dim = (budget - used) // (joined + layout.embed_dim)
    if hidden_dim < 1:
        raise ShapeError(
            f"hidden_dim is chosen so that the layer has 4 * embed_dim**2 = {budget} weights, got {used} in the "
            f"projections and the group matrices alone with num_groups {num_groups}; give hidden_dim, or more groups"
        )
    return hidden_dim


class HeadGroups(CombinesHeads):
    """GELU(W_1 Concat(Group_1 .. Group_g)) with Group_i = Concat(the heads of group i) A_i.

    `group_weight[i]` is A_i as the formula has it, [inputs, outputs]; `up` is W_1. The output projection of the layer
    that holds this module is W_2.
    """

    def __init__(
        self,
        layout: HeadLayout,
        num_groups: int,
        hidden_dim: int | None = None,
        *,
        activation: Literal["gelu", "linear"] = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_groups(layout.num_heads, num_groups)
        checks.check_size("hidden_dim", hidden_dim)
        checks.check_one_of("activation", activation, ("gelu", "linear"))
        checks.check_dtype(dtype)
        self.num_heads = layout.num_heads
        self.value_dim = layout.value_dim
        self.num_groups = num_groups
        self.activation = activation
        self.width = hidden_dim_at_parity(layout, num_groups) if hidden_dim is None else hidden_dim
        joined = layout.num_heads * layout.value_dim
        inside = joined // num_groups
        self.group_weight = nn.Parameter(torch.empty(num_groups, inside, inside, device=device, dtype=dtype))
        self.up = nn.Linear(joined, self.width, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform matrices, each A_i by itself; zero biases."""
        for matrix in (*self.group_weight.detach(), self.up.weight):
            nn.init.xavier_uniform_(matrix)
        if self.up.bias is not None:
            nn.init.zeros_(self.up.bias)

    def forward(self, heads: Tensor) -> Tensor:
        """heads [batch, queries, num_heads, value_dim] to [batch, queries, hidden_dim]."""
        groups = heads.reshape(*heads.shape[:2], *self.group_weight.shape[:2])
        mixed = torch.einsum("bngi,gio->bngo", groups, self.group_weight)
        hidden: Tensor = self.up(mixed.flatten(2))
        return F.gelu(hidden) if self.activation == "gelu" else hidden

    def extra_repr(self) -> str:
        return f"{self.num_groups} groups of {self.num_heads // self.num_groups} heads, activation={self.activation!r}"


class GroupedHeads(MultiHeadAttention):
    """Multi-head attention whose heads work in groups, with an MLP in place of W_O.

    The h heads stand in g groups of m = h / g, group i holding heads i m to (i + 1) m - 1:

        Group_i = Concat(the m heads of group i) A_i                 A_i dense, [m value_dim, m value_dim]
        output  = W_2 GELU(W_1 Concat(Group_1 .. Group_g))

    The heads are those of Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2; what follows them is defined
    here. With one group, A is the W_O of plain attention and an MLP follows it. With a group for each head, A_i only
    turns that head's values. With activation="linear" the layer is plain attention with W_O = A W_1 W_2.

    Everything else is as in `MultiHeadAttention`: masks, caches, positions, statistics and gates, which act on a head
    before it meets its group. A row that attends to nothing gives the MLP of zero: W_2 GELU(b_1) + b_2.

    Args:
        embed_dim, num_heads: as in `MultiHeadAttention`.
        num_groups: groups of heads; it divides num_heads.
        hidden_dim: width of the MLP's hidden layer. By default the layer has the 4 * embed_dim**2 weights of plain
            attention, less a remainder; see `hidden_dim_at_parity`. One group leaves nothing for it: give one then.
        activation: "gelu" (exact, by the error function), or "linear" for none.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether W_1 and W_2 have one; as `bias` by default. The group matrices have none.
        options: those of `MultiHeadAttention`.

    >>> layer = GroupedHeads(512, 8, num_groups=4, causal=True, bias=False)
    >>> layer(torch.randn(2, 10, 512)).output.shape, layer.hidden_dim
    (torch.Size([2, 10, 512]), 192)
    >>> sum(p.numel() for p in layer.parameters()) == 4 * 512**2
    True
    """

    combine: HeadGroups

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_groups: int,
        hidden_dim: int | None = None,
        activation: Literal["gelu", "linear"] = "gelu",
        bias: bool = True,
        output_bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        combine = HeadGroups(
            checks.layout_of(embed_dim, num_heads, options),
            num_groups,
            hidden_dim,
            activation=activation,
            bias=bias if output_bias is None else output_bias,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            embed_dim,
            num_heads,
            combine=combine,
            bias=bias,
            output_bias=output_bias,
            device=device,
            dtype=dtype,
            **options,
        )

    @property
    def num_groups(self) -> int:
        return self.combine.num_groups

    @property
    def hidden_dim(self) -> int:
        return self.combine.width


def _check_groups(num_heads: int, num_groups: int) -> None:
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise ShapeError(f"num_groups must be a positive integer, got {num_groups!r}")
    if num_heads % num_groups:
        raise ShapeError(f"num_heads must be a multiple of num_groups, got {num_heads} and {num_groups}")

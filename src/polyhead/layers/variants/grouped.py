"""Grouped heads with an MLP instead of W_O (defined here): 1.1 times the time of MHA, no gain seen.

Each group of heads is mixed by its own matrix, with as many parameters as multi-head attention in total. Against it
(2 x 4,096 causal tokens of width 2,048, 16 heads, bfloat16, H200) the forward takes 0.73 instead of 0.67 ms and a
training step 2.46 instead of 2.30 ms. At equal tokens, the loss of byte-level models of 11M parameters is 0.044 bits
per byte higher than with multi-head attention, which is not significant over three seeds. Figures from
docs/variants.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import ShapeError
from polyhead.geometry import HeadLayout, checked_integer
from polyhead.layers import checks
from polyhead.layers.combining import HeadCombiner
from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.multi_head.projected import ProjectedHeads
from polyhead.layers.steps import init_linear


def hidden_dim_at_parity(layout: HeadLayout, num_groups: int) -> int:
    """Return the largest hidden width at which a grouped layer has at most 4 * embed_dim**2 weights.

    From the budget of plain attention, 4 * embed_dim**2, the query, key and value projections and the group matrices
    are subtracted; a hidden channel takes num_heads * value_dim + embed_dim of the rest. Biases are not counted. With
    head_dim = value_dim = embed_dim / num_heads this is embed_dim * (num_groups - 1) / (2 * num_groups), rounded down.

    >>> hidden_dim_at_parity(HeadLayout(512, 8), num_groups=4)
    192
    """
    _check_groups(layout.num_heads, num_groups)
    budget = 4 * layout.embed_dim**2
    concat_dim = layout.num_heads * layout.value_dim
    used = layout.num_parameters - concat_dim * layout.embed_dim + concat_dim**2 // num_groups
    hidden_dim = (budget - used) // (concat_dim + layout.embed_dim)
    if hidden_dim < 1:
        raise ShapeError(
            f"the default hidden_dim gives the layer at most 4 * embed_dim**2 = {budget} weights, got {used} in the "
            f"projections and group matrices alone with num_groups {num_groups}; pass hidden_dim, or use more groups"
        )
    return hidden_dim


class HeadGroups(HeadCombiner):
    """Combine heads as GELU(Concat(Group_1 .. Group_g) W_1), Group_i = Concat(heads of group i) A_i.

    `group_weight[i]` is A_i, [inputs, outputs]; `up` applies W_1. The layer's output projection applies W_2.
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
        self.output_dim = hidden_dim_at_parity(layout, num_groups) if hidden_dim is None else hidden_dim
        concat_dim = layout.num_heads * layout.value_dim
        group_dim = concat_dim // num_groups
        self.group_weight = nn.Parameter(torch.empty(num_groups, group_dim, group_dim, device=device, dtype=dtype))
        self.up = nn.Linear(concat_dim, self.output_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise matrices Glorot-uniformly, each A_i separately; biases with zeros."""
        for matrix in self.group_weight.detach():
            nn.init.xavier_uniform_(matrix)
        init_linear(self.up)

    def forward(self, heads: Tensor) -> Tensor:
        """Map heads [batch, queries, num_heads, value_dim] to [batch, queries, hidden_dim]."""
        groups = heads.reshape(*heads.shape[:2], *self.group_weight.shape[:2])
        mixed = torch.einsum("bngi,gio->bngo", groups, self.group_weight)
        hidden: Tensor = self.up(mixed.flatten(2))
        return F.gelu(hidden) if self.activation == "gelu" else hidden

    def extra_repr(self) -> str:
        return f"{self.num_groups} groups of {self.num_heads // self.num_groups} heads, activation={self.activation!r}"


class GroupedHeads(ProjectedHeads):
    """Multi-head attention whose heads are mixed in groups, with an MLP instead of W_O.

    The h heads form g groups of m = h / g; group i contains heads i m to (i + 1) m - 1:

        Group_i = Concat(the m heads of group i) A_i                 A_i dense, [m value_dim, m value_dim]
        output  = GELU(Concat(Group_1 .. Group_g) W_1) W_2

    The heads are those of Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2; what follows them is defined
    here. With one group, A_1 is the W_O of plain attention, followed by an MLP. With one group per head, A_i is only a
    change of basis of that head's values. With activation="linear" the layer is
    plain attention with W_O = A W_1 W_2, A block-diagonal with blocks A_i.

    Everything else is as in `MultiHeadAttention`: masks, caches, positions, statistics and gates, which act on a head
    before its group is mixed. The output of a fully masked row is the MLP of zero: GELU(b_1) W_2 + b_2.

    Args:
        embed_dim, num_heads: as in `MultiHeadAttention`.
        num_groups: number of groups; must divide num_heads.
        hidden_dim: width of the MLP's hidden layer. By default the layer has at most the 4 * embed_dim**2 weights of
            plain attention; see `hidden_dim_at_parity`. Required with one group, which uses up that budget.
        activation: "gelu" (exact, not the tanh approximation), or "linear" for none.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether W_1 and W_2 have one; same as `bias` by default. The group matrices have none.
        options: those of `MultiHeadAttention`.
        device: device of the parameters.
        dtype: dtype of the parameters.

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
        return self.combine.output_dim


def _check_groups(num_heads: int, num_groups: int) -> None:
    checked_integer("num_groups", num_groups, at_least=1)
    if num_heads % num_groups:
        raise ShapeError(f"num_heads must be a multiple of num_groups, got {num_heads} and {num_groups}")


@register_config("grouped_heads", GroupedHeads)
@dataclass(frozen=True)
class GroupedHeadsConfig(HeadsConfig):
    """Config of `GroupedHeads`.

    Args:
        num_groups, hidden_dim, activation: as in `GroupedHeads`.

    >>> GroupedHeadsConfig(512, 8, num_groups=4).hidden_dim
    192
    """

    _: KW_ONLY
    num_groups: int
    hidden_dim: int | None = None
    activation: Literal["gelu", "linear"] = "gelu"

    _parts = ("layout", "combine")

    def _check_and_fill(self) -> None:
        super()._check_and_fill()
        groups = HeadGroups(self.layout, self.num_groups, self.hidden_dim, activation=self.activation, device="meta")
        self._fill(hidden_dim=groups.output_dim)

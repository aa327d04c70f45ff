"""Multi-head attention layer; multi-query and grouped-query attention are values of `num_kv_heads`."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from polyhead.layers.multi_head.separate_heads import SeparateHeads
from polyhead.layers.multi_head.torch_weights import from_torch, to_torch


class MultiHeadAttention(SeparateHeads):
    """Multi-head self- and cross-attention over [batch, sequence, embed_dim], with any head layout.

        head_i = softmax(X W_Q_i (Y W_K_g(i))^T / sqrt(head_dim)) Y W_V_g(i)
        output = Concat(head_1 .. head_h) W_O

    with Y = X in self-attention, and g(i) the KV head that head i reads: i itself in multi-head attention (Vaswani et
    al. 2017, "Attention Is All You Need"), the only one in multi-query (Shazeer 2019, "Fast Transformer Decoding: One
    Write-Head Is All You Need"), that of its group in grouped-query (Ainslie et al. 2023, "GQA: Training Generalized
    Multi-Query Transformer Models from Multi-Head Checkpoints"), any with `key_heads`.

    Args:
        embed_dim: width of the queries' input and of the output.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads: num_heads by default (multi-head), 1 (multi-query), between (grouped-query).
        key_heads: KV head of each query head, for uneven groups: (0, 0, 0, 1) for a group of 3 and a group of 1. Even
            groups in order by default.
        head_dim: channels of a query and key; embed_dim / num_heads by default.
        value_dim: channels of a value; head_dim by default.
        key_input_dim, value_input_dim: widths of the keys' and values' input; embed_dim by default.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether the output projection has one; same as `bias` by default.
        positions: a module of `polyhead.layers.positions` (Rotary, ALiBi, T5Bias, Sinusoidal, Learned, ...).
        causal, window: causal mask and sliding window (in keys) of the layer, combined with the mask passed to
            `forward`.
        qk_norm: "rms" or "layer" normalises each head's queries and keys.
        output_gate: "head" (one factor per head) or "channel" multiplies the heads' outputs by sigmoid(X Wg + b), as in
            Qiu et al. 2025, "Gated Attention for Large Language Models".
        combine: a module that combines the heads' outputs before the output projection; Concat(heads) by default.
        softcap, scale: as in `polyhead.attention`.
        sinks: whether every head has a learned sink logit.
        dropout: attention dropout rate in training.
        finite, backend: as in `polyhead.attention`.
        init: initialisation: "xavier", or "conv" for a freshly initialised convolution with one head per tap. "conv"
            requires quadratic relative positions, value_dim=embed_dim, and no mask, gate or combine module; 2D
            positions require K * K heads. See `polyhead.layers.variants.convolutional_heads`.

    >>> import torch
    >>> layer = MultiHeadAttention(512, 8, num_kv_heads=2, causal=True)
    >>> layer(torch.randn(2, 10, 512)).output.shape
    torch.Size([2, 10, 512])
    >>> layer.heads[3].query.shape, layer.heads[3].output.shape
    (torch.Size([512, 64]), torch.Size([64, 512]))
    """

    _may_be_plain = True  # `forward_plain` computes the same, where no option rules it out

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> Self:
        """Build the equivalent of a `torch.nn.MultiheadAttention` (batch first), copying its weights.

        Args:
            module: the layer to copy.
            options: options of the constructor, such as `backend`, that PyTorch's layer does not have.

        Returns:
            The layer, in the dtype and on the device of `module`.
        """
        return from_torch(cls, module, options)

    def to_torch(self) -> nn.MultiheadAttention:
        """Return an equivalent `torch.nn.MultiheadAttention` (batch first), or raise if there is none."""
        return to_torch(self)

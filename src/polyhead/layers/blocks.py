"""Transformer blocks: attention and a feed-forward network with residual connections."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers.base_attention import Memory
from polyhead.layers.checks import check_one_of
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.steps import layer_forward
from polyhead.masks import Mask

_NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
# Options of the rest of a block, and of its self-attention alone.
_OF_BLOCK = ("hidden_dim", "activation", "norm", "norm_first", "dropout", "attention_dropout")
_NOT_OF_CROSS_ATTENTION = (*_OF_BLOCK, "positions", "window", "key_input_dim", "value_input_dim")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """Position-wise feed-forward network: down(act(up(x))), or down(silu(gate(x)) * up(x)) for "swiglu".

    "swiglu" is from Shazeer 2020, "GLU Variants Improve Transformer". `hidden_dim` is 4 * embed_dim by default, two
    thirds of that with "swiglu", which has a third matrix.

    Args:
        embed_dim: width of the inputs and outputs.
        hidden_dim: width between the matrices.
        activation: name of an activation, or "swiglu".
        dropout: dropout after the activation.
    """

    def __init__(
        self, embed_dim: int, hidden_dim: int | None = None, *, activation: str = "gelu", dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_one_of("activation", activation, tuple(_ACTIVATIONS))
        gated = activation == "swiglu"
        hidden_dim = hidden_dim or (8 * embed_dim // 3 if gated else 4 * embed_dim)
        self.activation = activation
        self.up = nn.Linear(embed_dim, hidden_dim)
        self.gate = nn.Linear(embed_dim, hidden_dim) if gated else None
        self.down = nn.Linear(hidden_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for x [..., embed_dim], of the same shape.

        Args:
            x: the inputs.
        """
        activated = _ACTIVATIONS[self.activation](self.up(x) if self.gate is None else self.gate(x))
        output: Tensor = self.down(self.dropout(activated if self.gate is None else activated * self.up(x)))
        return output


class Block(nn.Module):
    """Base of encoder and decoder blocks: self-attention, feed-forward network and residuals.

    Args:
        embed_dim: width of the inputs and outputs.
        num_heads: heads of the self-attention.
        hidden_dim: width of the feed-forward network; see `FeedForward`.
        activation: activation of the feed-forward network; see `FeedForward`.
        norm: "layer" or "rms".
        norm_first: normalise before each part (pre-norm) or after its residual (post-norm).
        dropout: dropout of residuals and of the feed-forward network.
        attention_dropout: dropout of attention weights.
        attention: options of `MultiHeadAttention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        hidden_dim: int | None = None,
        activation: str = "gelu",
        norm: Literal["layer", "rms"] = "layer",
        norm_first: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_one_of("norm", norm, tuple(_NORMS))
        self.norm_first = norm_first
        self.attention = MultiHeadAttention(embed_dim, num_heads, dropout=attention_dropout, **attention)
        self.attention_norm = _NORMS[norm](embed_dim)
        self.feed_forward = FeedForward(embed_dim, hidden_dim, activation=activation, dropout=dropout)
        self.feed_forward_norm = _NORMS[norm](embed_dim)
        self.dropout = nn.Dropout(dropout)

    def _residual(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + self.dropout(part(norm(x)))
        normed: Tensor = norm(x + self.dropout(part(x)))
        return normed


class EncoderBlock(Block):
    """Self-attention, then a feed-forward network, each with a residual and pre-norm (or post-norm).

    `attention` options are passed to `MultiHeadAttention`; `dropout` applies to residuals and feed-forward network.
    """

    def forward(self, x: Tensor, *, mask: Mask | None = None) -> Tensor:
        """Map x [batch, sequence, embed_dim] to the same shape.

        Args:
            x: tokens [batch, sequence, embed_dim].
            mask: mask of the self-attention.

        Returns:
            [batch, sequence, embed_dim].
        """
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, mask=mask).output)
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderBlock(Block):
    """Causal self-attention, cross-attention if `source_dim` is given, and a feed-forward network.

    Cross-attention has the options of the self-attention, except for positions, causal mask and window. A `combine`
    module is copied for it.

    Args:
        source_dim: width of the source of the cross-attention; None for a block without one.
        options: options of `EncoderBlock` and of `MultiHeadAttention`.
    """

    cross_attention: MultiHeadAttention | None

    def __init__(self, embed_dim: int, num_heads: int, *, source_dim: int | None = None, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, causal=True, **options)
        self.cross_attention = None
        if source_dim is not None:
            shared = {name: option for name, option in options.items() if name not in _NOT_OF_CROSS_ATTENTION}
            shared["combine"] = copy.deepcopy(options.get("combine"))
            self.cross_attention = MultiHeadAttention(
                embed_dim, num_heads, key_input_dim=source_dim, dropout=self.attention.dropout, **shared
            )
            self.cross_attention_norm = _NORMS[options.get("norm", "layer")](embed_dim)

    @layer_forward
    def forward(
        self, x: Tensor, source: Tensor | Memory | None = None, *, source_mask: Mask | None = None, **attention: Any
    ) -> Tensor:
        """Map x [batch, sequence, embed_dim] to the same shape.

        `source` is [batch, keys, source_dim], or the `Memory` returned by `cross_attention.remember`. `attention`
        (mask, cache, lengths, token_positions, ...) is passed to the self-attention.

        Args:
            x: tokens [batch, sequence, embed_dim].
            source: [batch, keys, source_dim], or what `cross_attention.remember` returned.
            source_mask: mask of the cross-attention.
            attention: arguments of the self-attention: mask, cache, lengths, token_positions, ...

        Returns:
            [batch, sequence, embed_dim].
        """
        cross = self.cross_attention
        if (cross is None) != (source is None):
            built, got = ("with", "none") if source is None else ("without", "one")
            raise OptionError(
                f"a source is required by blocks built with source_dim and by no other, got {got} "
                f"for a block built {built} it"
            )
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, **attention).output)
        if cross is not None:
            x = self._residual(x, self.cross_attention_norm, lambda y: cross(y, source, mask=source_mask).output)
        return self._residual(x, self.feed_forward_norm, self.feed_forward)

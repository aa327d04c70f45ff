"""The blocks of a transformer: attention and a feed-forward network, each around a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers.multi_head.layer import Memory, MultiHeadAttention
from polyhead.layers.steps import keeps_cache
from polyhead.masks import Mask

_NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """The network every token passes by itself: down(act(up(x))), with "swiglu" down(silu(gate(x)) * up(x)).

    `hidden_dim` is 4 * embed_dim by default, two thirds of that with "swiglu", whose third matrix makes up for it.
    """

    def __init__(
        self, embed_dim: int, hidden_dim: int | None = None, *, activation: str = "gelu", dropout: float = 0.0
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise OptionError(f"activation must be 'gelu', 'relu' or 'swiglu', got {activation!r}")
        gated = activation == "swiglu"
        hidden_dim = hidden_dim or (8 * embed_dim // 3 if gated else 4 * embed_dim)
        self.activation = activation
        self.up = nn.Linear(embed_dim, hidden_dim)
        self.gate = nn.Linear(embed_dim, hidden_dim) if gated else None
        self.down = nn.Linear(hidden_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        bent = _ACTIVATIONS[self.activation](self.up(x) if self.gate is None else self.gate(x))
        output: Tensor = self.down(self.dropout(bent if self.gate is None else bent * self.up(x)))
        return output


class Block(nn.Module):
    """What encoder and decoder blocks share: self-attention, a feed-forward network, and residuals around them."""

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
        if norm not in _NORMS:
            raise OptionError(f"norm must be 'layer' or 'rms', got {norm!r}")
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
    """Self-attention, then a feed-forward network, each with a residual and a norm before (or after) it.

    `attention` options go to `MultiHeadAttention`; `dropout` is that of the residuals and the feed-forward network.
    """

    def forward(self, x: Tensor, *, mask: Mask | None = None) -> Tensor:
        """x [batch, sequence, embed_dim]."""
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, mask=mask).output)
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


class DecoderBlock(Block):
    """Causal self-attention, attention to a source if `source_dim` says how wide that is, a feed-forward network.

    Attention to the source has the same heads, dropout and backend; positions and window are of the self-attention.
    """

    cross_attention: MultiHeadAttention | None

    def __init__(self, embed_dim: int, num_heads: int, *, source_dim: int | None = None, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, causal=True, **options)
        self.cross_attention = None
        if source_dim is not None:
            heads = ("num_kv_heads", "key_heads", "head_dim", "value_dim", "bias", "output_bias", "qk_norm", "backend")
            self.cross_attention = MultiHeadAttention(
                embed_dim,
                num_heads,
                key_input_dim=source_dim,
                dropout=self.attention.dropout,
                **{name: options[name] for name in heads if name in options},
            )
            self.cross_attention_norm = _NORMS[options.get("norm", "layer")](embed_dim)

    @keeps_cache
    def forward(
        self,
        x: Tensor,
        source: Tensor | Memory | None = None,
        *,
        source_mask: Mask | None = None,
        **attention: Any,
    ) -> Tensor:
        """x [batch, sequence, embed_dim]; `source` [batch, keys, source_dim] or what `cross_attention.remember` gave.

        `attention` (mask, cache, lengths, token_positions, ...) is what the self-attention's forward takes.
        """
        cross = self.cross_attention
        if (cross is None) != (source is None):
            built, got = ("with", "none") if source is None else ("without", "one")
            raise OptionError(
                f"a source is given to blocks built with source_dim and to no other, got {got} "
                f"for a block built {built} it"
            )
        x = self._residual(x, self.attention_norm, lambda y: self.attention(y, **attention).output)
        if cross is not None:
            x = self._residual(x, self.cross_attention_norm, lambda y: cross(y, source, mask=source_mask).output)
        return self._residual(x, self.feed_forward_norm, self.feed_forward)

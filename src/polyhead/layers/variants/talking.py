"""Talking-heads attention (Shazeer et al. 2020): 3.6 times the forward of MHA, no gain seen.

Logits are mixed over heads before the softmax and weights after it. Against multi-head attention of the same width
(2 x 4,096 causal tokens of width 2,048, 16 heads, bfloat16, H200) the forward takes 2.41 instead of 0.67 ms and a
training step 17.1 instead of 2.30 ms. At equal tokens, the loss of byte-level models of 11M parameters is 0.008 bits
per byte higher than with multi-head attention, less than the standard deviation over seeds. Figures from
docs/variants.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers import checks
from polyhead.layers.base_attention import CallOptions, Memory, in_order
from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.multi_head.separate_heads import SeparateHeads
from polyhead.layers.multi_head.torch_weights import from_torch
from polyhead.layers.positions import BiasesLogits, Positions
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput
from polyhead.ops.common.combined_weights import COMBINED, CombinedWeights, checked_names
from polyhead.ops.common.nonfinite import over_heads
from polyhead.ops.talking_heads.api import TALKING_BACKENDS, mixed_weights, talking_attention


class TalkingHeads(SeparateHeads):
    """Talking-heads attention: logits are mixed over heads before the softmax, weights after it.

    With queries, keys and values as in `MultiHeadAttention`, h heads, and A = logits_mix and B = weights_mix,
    h x h and learned:

        L_g    = sum_i A[i, g] Q_i K_i^T / sqrt(head_dim)
        W_g    = softmax(L_g)
        U_g    = sum_i B[i, g] W_i
        output = Concat(U_1 V_1 .. U_h V_h) W_O

    Shazeer et al. 2020, "Talking-Heads Attention", with its h_k = h = h_v. Both mixes are initialised to the identity,
    so that the layer starts as multi-head attention. Nothing of size n² is materialised, in the forward or the
    backward.

    Everything else is as in `MultiHeadAttention`, except that softcap, sinks, dropout, uneven groups and positions that
    bias logits are not supported, and masks are the same for all heads. Weights, statistics and log-sum-exp are those
    of the softmax W; `combined_weights` returns statistics of U. Statistics and log-sum-exp have no gradient.

    Args:
        embed_dim: width of the inputs and outputs.
        num_heads: number of heads.
        device: device of the parameters.
        dtype: dtype of the parameters.
        options: options of `MultiHeadAttention`.

    >>> layer = TalkingHeads(512, 8, causal=True)
    >>> layer(torch.randn(2, 10, 512)).output.shape, layer.logits_mix.shape
    (torch.Size([2, 10, 512]), torch.Size([8, 8]))
    """

    # List to which a call appends the statistics of U, for `combined_weights`; None otherwise.
    _mixed_listener: list[CombinedWeights] | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if options.get("combine") is not None:
            raise OptionError("TalkingHeads does not support combine, got a module; leave it out")
        check_talking(
            softcap=options.get("softcap"),
            sinks=options.get("sinks", False),
            dropout=options.get("dropout", 0.0),
            key_heads=options.get("key_heads"),
            backend=options.get("backend", "auto"),
        )
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        if self.positions is not None:
            check_talking_positions(type(self.positions))
        self.logits_mix = nn.Parameter(torch.eye(num_heads, device=device, dtype=dtype))
        self.weights_mix = nn.Parameter(torch.eye(num_heads, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Initialise as `MultiHeadAttention`, with both mixes the identity."""
        super().reset_parameters()
        for name in ("logits_mix", "weights_mix"):
            if name in self._parameters:  # absent while the base constructor runs
                nn.init.eye_(self.get_parameter(name))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: CallOptions) -> AttentionOutput:
        if call.seed is not None:
            raise OptionError(f"a seed is for dropout, which talking heads do not support; got {call.seed!r}")
        k, v = call.keys_and_values(k, v)
        options: dict[str, Any] = {
            "logits_mix": self.logits_mix,
            "weights_mix": self.weights_mix,
            "mask": call.mask,
            "scale": self.scale,
            "backend": call.backend,
            "finite": self.finite,
        }
        result = talking_attention(
            q, k, v, weights=call.weights, statistics=call.statistics, logsumexp=call.logsumexp, **options
        )
        if self._mixed_listener is not None:
            self._mixed_listener.append(mixed_weights(q, k, **options))
        if self._listener is not None:
            self._listener(self._attended(q, k, v, result, call.mask))
        return in_order(result, call)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, result: AttentionOutput, mask: Mask | None) -> Attended:
        """Return the softmax W as ordinary attention for observers: each head has the concatenated channels of all.

        sum_i A[i, g] q_i . k_i is one product of [A[1, g] q_1 .. A[h, g] q_h] and [k_1 .. k_h].
        """
        heads = self.layout.num_heads
        queries = torch.einsum("bhqd,hg->bgqhd", q, self.logits_mix.to(q.dtype)).flatten(3)
        keys = over_heads(k, heads).transpose(1, 2).flatten(2)[:, None]
        scale = self.layout.head_dim**-0.5 if self.scale is None else self.scale
        return Attended(queries, keys, v, result, mask, scale)

    def combined_weights(
        self,
        query: Tensor,
        key: Tensor | Memory | None = None,
        *,
        statistics: str | Sequence[str] = COMBINED,
        **options: Any,
    ) -> CombinedWeights:
        """Return signed mass, absolute mass and largest `|weight|` of the rows of U; all three by default.

        The other arguments are those of `forward`. This runs `forward` and a second pass over all weights in tiles. The
        result has no gradient.

        Args:
            query: [batch, queries, embed_dim].
            key: [batch, keys, embed_dim], or what `remember` returned; `query` by default.
            statistics: names of the statistics.
            options: other arguments of `forward`.
        """
        names = checked_names(statistics)
        collected: list[CombinedWeights] = []
        self._mixed_listener = collected
        try:
            with torch.no_grad():
                self(query, key, **options)
        finally:
            del self._mixed_listener
        return CombinedWeights(**{name: getattr(collected[0], name) for name in names})

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> Self:
        """Build the layer from a `torch.nn.MultiheadAttention` (batch first), with identity mixes.

        Args:
            module: the layer to copy.
            options: options of the constructor.

        Returns:
            The layer.
        """
        return from_torch(cls, module, options)


def check_talking(*, softcap: float | None, sinks: bool, dropout: float, key_heads: object, backend: str) -> None:
    """Raise an OptionError for options that talking heads do not support."""
    unsupported = {"softcap": softcap, "sinks": sinks or None, "dropout": dropout or None, "key_heads": key_heads}
    for name, value in unsupported.items():
        if value is not None:
            raise OptionError(f"talking heads do not support {name}, got {value!r}; leave it out")
    checks.check_one_of("backend of talking heads", backend, ("auto", *TALKING_BACKENDS))


def check_talking_positions(positions: type[Positions]) -> None:
    if issubclass(positions, BiasesLogits):
        raise OptionError(
            f"talking heads do not support positions that bias logits, which could be added before or after the mix; "
            f"got {positions.__name__}; use rotary, sinusoidal or learned positions"
        )


@register_config("talking_heads", TalkingHeads)
@dataclass(frozen=True)
class TalkingHeadsConfig(HeadsConfig):
    """Config of `TalkingHeads`; unsupported options must keep their defaults.

    >>> TalkingHeadsConfig(512, 8, causal=True).head_dim
    64
    """

    def _check_and_fill(self) -> None:
        super()._check_and_fill()
        check_talking(
            softcap=self.softcap, sinks=self.sinks, dropout=self.dropout, key_heads=self.key_heads, backend=self.backend
        )
        if self.positions is not None:
            check_talking_positions(self.positions.module)

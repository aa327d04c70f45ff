"""Differential attention: heads as differences of two softmax maps, with a per-head norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadLayout, checked_integer
from polyhead.layers import checks
from polyhead.layers.base_attention import CallOptions
from polyhead.layers.config import register_config
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.multi_head.separate_heads import SeparateHeads
from polyhead.layers.positions.position_encoding import Rotation
from polyhead.layers.variants.differential.weights import combined_weights
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, RowStatistics
from polyhead.ops.common.combined_weights import COMBINED, CombinedWeights, checked_names
from polyhead.ops.common.dropout import draw_seed
from polyhead.ops.common.gates import gate_factors
from polyhead.ops.decode.fused import CacheArguments
from polyhead.ops.uneven_groups import select_heads

_LAMBDA_STD = 0.1


def initial_lambda(layer_index: int) -> float:
    """Return lambda_init = 0.8 - 0.6 exp(-0.3 layer_index), with layers counted from 0.

    >>> round(initial_lambda(0), 3), round(initial_lambda(11), 3)
    (0.2, 0.778)
    """
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


class DifferentialAttention(SeparateHeads):
    """Differential attention (Ye et al. 2024, "Differential Transformer", section 2.1).

    The channels of a head's query and key are two halves with a softmax map each; both maps weight the same values:

        head_i = (softmax(q1_i k1_i^T / sqrt(d)) - lambda softmax(q2_i k2_i^T / sqrt(d))) v_i       d = head_dim / 2
        output = Concat((1 - lambda_init) RMSNorm(head_i)) W_O

        lambda      = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init         one for the layer
        lambda_init = 0.8 - 0.6 exp(-0.3 layer_index)

    Each map is a call of `polyhead.attention` without a copy of the values. With the same weights it equals
    `DiffLlamaAttention` of transformers.

    Statistics, weights and log-sum-exp are those of the 2 * num_heads maps: the first map of every head, then the
    second of every head. `combined_weights` returns statistics of their difference. A gate has a factor per head,
    applied after its norm, or per map, applied before the difference. Dropout drops the same weights in both maps, and
    therefore weights of the difference.

    Args:
        embed_dim, num_heads: as in `MultiHeadAttention`. With the same sizes both have the same projections; a model
            of plain heads is matched by half as many heads, each twice as wide.
        layer_index: index of the layer in its model, from 0; it determines lambda_init.
        head_dim: channels of a head's query and key, both halves together; embed_dim / num_heads by default.
        value_dim: channels of a value; head_dim by default.
        positions: rotary positions rotate each half separately: `Rotary(head_dim // 2)`.
        norm_eps: epsilon of the heads' RMS norm.
        sinks: whether every map has a learned sink logit.
        options: those of `MultiHeadAttention` except `qk_norm`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    >>> layer = DifferentialAttention(512, 4, layer_index=3, causal=True)
    >>> result = layer(torch.randn(2, 10, 512), statistics="entropy")
    >>> result.output.shape, result.statistics.entropy.shape
    (torch.Size([2, 10, 512]), torch.Size([2, 8, 10]))
    """

    lambda_q1: Tensor
    lambda_k1: Tensor
    lambda_q2: Tensor
    lambda_k2: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        layer_index: int = 0,
        norm_eps: float = 1e-5,
        sinks: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        layout = checks.layout_of(embed_dim, num_heads, options)
        check_differential(layout, layer_index, norm_eps, options.get("qk_norm"))
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.layer_index = layer_index
        self.lambda_init = initial_lambda(layer_index)
        self.norm_eps = norm_eps
        half = self.layout.head_dim // 2
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(half, device=device, dtype=dtype)))
        self.sinks = nn.Parameter(torch.empty(self.num_maps, device=device, dtype=dtype)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `MultiHeadAttention`; the vectors of lambda are drawn from N(0, 0.1²)."""
        super().reset_parameters()
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("lambda_"):
                nn.init.normal_(parameter, std=_LAMBDA_STD)

    @property
    def num_maps(self) -> int:
        return 2 * self.layout.num_heads

    @property
    def _position_layout(self) -> HeadLayout:
        return replace(self.layout, head_dim=self.layout.head_dim // 2)

    @property
    def lambda_full(self) -> Tensor:
        """The factor lambda of the second map, a scalar in float32 (float64 for float64 parameters)."""
        dtype = torch.float64 if self.lambda_q1.dtype is torch.float64 else torch.float32
        first, second = (
            torch.exp((q.to(dtype) * k.to(dtype)).sum())
            for q, k in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        return first - second + self.lambda_init

    # ---- the computation

    def _apply_rotary(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Rotate both halves of every head separately; [batch, heads, tokens, 2 * half] in and out."""
        halves = x.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)  # [batch, heads * 2, tokens, half]
        return super()._apply_rotary(halves, rotation).unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: CallOptions) -> AttentionOutput:
        if call.dropout and call.seed is None:
            call = call._replace(seed=draw_seed(q.device))
        maps = self._maps(q, k, v, call)
        if self._listener is not None:
            result = _concat_maps(maps, torch.cat([x.output for x in maps], 1))
            self._notify_maps(q, *call.keys_and_values(k, v), result, call.mask)
        first, second = self._gated_maps([x.output for x in maps], call.head_gate)
        heads = torch.addcmul(first, second, -self.lambda_full.to(first.dtype))
        # In the kernels' token-major layout: with any other the norm and Concat would copy.
        normed = F.rms_norm(heads.transpose(1, 2), (heads.shape[-1],), eps=self.norm_eps).transpose(1, 2)
        return _concat_maps(maps, (1 - self.lambda_init) * normed)

    def _maps(self, q: Tensor, k: Tensor, v: Tensor, call: CallOptions) -> list[AttentionOutput]:
        """Return the outputs of the first and of the second maps, each [batch, heads, queries, value_dim].

        Two calls, because the values cannot be expanded over both maps of a KV head by a view.
        """
        sinks = (None, None) if self.sinks is None else self.sinks.chunk(2)
        results = []
        # Chunks, whose gradients are concatenated once; those of slices are padded and added.
        for number, (query, key, map_sinks) in enumerate(zip(q.chunk(2, -1), k.chunk(2, -1), sinks, strict=True)):
            options: dict[str, Any] = {"scale": self.scale, "sinks": map_sinks, "key_heads": self.layout.key_heads}
            results.append(self._attend_heads(query, key, v, call, **options, by_head=partial(_half_of_keys, number)))
        return results

    def _notify_maps(self, q: Tensor, k: Tensor, v: Tensor, maps: AttentionOutput, mask: Mask | None) -> None:
        """Notify the observer of the maps as 2 * num_heads heads, with copies of their inputs."""
        if self.layout.key_heads is not None:
            k, v = (select_heads(x, self.layout.key_heads) for x in (k, v))
        q, k = (torch.cat(x.chunk(2, -1), 1) for x in (q, k))
        self._notify(q, k, torch.cat((v, v), 1), maps, _over_maps(mask), self.scale)

    def _gated_maps(self, maps: Sequence[Tensor], head_gate: Tensor | None) -> Sequence[Tensor]:
        batch, _, queries, _ = maps[0].shape
        for gate in (self.head_gate, head_gate):
            if gate is not None and not self._is_of_heads(gate):
                factors = gate_factors(gate, batch, self.num_maps, queries).to(maps[0].dtype).chunk(2, 1)
                maps = [x * factor for x, factor in zip(maps, factors, strict=True)]
        return maps

    def _is_of_heads(self, gate: Tensor) -> bool:
        """Return False for a gate of the maps, which `_gated_maps` applies before the difference."""
        if not isinstance(gate, Tensor) or not 1 <= gate.ndim <= 3:
            return True  # invalid, for which `gate_factors` raises
        return gate.shape[0 if gate.ndim == 1 else 1] != self.num_maps

    # ---- the weights of the difference

    def combined_weights(
        self, query: Tensor, key: Tensor | None = None, *, statistics: str | Sequence[str] = COMBINED, **options: Any
    ) -> CombinedWeights:
        """Return signed mass, absolute mass and largest `|weight|` of each row of the difference.

        The other arguments are those of `forward`. This runs `forward` and a second pass over all weights in windows of
        `polyhead.profile`, so that memory is O(n). The result has no gradient.

        Args:
            query: [batch, queries, embed_dim].
            key: [batch, keys, embed_dim]; `query` by default.
            statistics: names of the statistics.
            options: other arguments of `forward`.
        """
        names = checked_names(statistics)
        collected: list[Attended] = []
        before, self._listener = self._listener, collected.append
        try:
            with torch.no_grad():
                self(query, key, **{**options, "logsumexp": True})
        finally:
            if before is None:
                del self._listener
            else:
                self._listener = before
        (attended,) = collected
        return combined_weights(attended, self.lambda_full.detach(), names)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layer_index={self.layer_index}"


def check_differential(layout: HeadLayout, layer_index: int, norm_eps: float, qk_norm: str | None) -> None:
    """Raise for options that differential heads do not support."""
    if layout.head_dim % 2:
        raise ShapeError(f"head_dim must be even, a half for each of the two maps, got {layout.head_dim}")
    checked_integer("layer_index", layer_index, error=OptionError)  # 0 for the first layer
    checks.check_positive("norm_eps", norm_eps)
    if qk_norm is not None:
        raise OptionError(f"differential heads do not support qk_norm, got {qk_norm!r}")


def _over_maps(mask: Mask | None) -> Mask | None:
    """Return the mask of the maps of both halves, whose terms by head are those of the heads, twice."""
    if mask is None:
        return None

    def twice(x: Tensor, axis: int) -> Tensor:
        return x if x.shape[axis] == 1 else torch.cat((x, x), axis)

    return mask.with_head_terms(twice)


def _half_of_keys(number: int, storage: CacheArguments) -> CacheArguments:
    """Return the storage of a cache with the channels of the first or second half of every key."""
    return storage._replace(key=storage.key.chunk(2, -1)[number])


def _concat_maps(maps: Sequence[AttentionOutput], output: Tensor) -> AttentionOutput:
    """Return `output` with the weights, statistics and log-sum-exp of both maps concatenated over heads."""
    first, second = maps

    def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.cat((a, b), 1)

    statistics = None
    if first.statistics is not None and second.statistics is not None:
        pairs = zip(first.statistics.items(), second.statistics.items(), strict=True)
        statistics = RowStatistics(**{name: torch.cat((a, b), 1) for (name, a), (_, b) in pairs})
    logsumexp, weights = both(first.logsumexp, second.logsumexp), both(first.weights, second.weights)
    return AttentionOutput(output, logsumexp, weights, statistics, first.backend)


@register_config("differential", DifferentialAttention)
@dataclass(frozen=True)
class DifferentialConfig(HeadsConfig):
    """Config of `DifferentialAttention`.

    Args:
        layer_index, norm_eps: as in `DifferentialAttention`.

    >>> config = DifferentialConfig(512, 4, layer_index=3)
    >>> config.head_dim, config.position_layout.head_dim
    (128, 64)
    """

    _: KW_ONLY
    layer_index: int = 0
    norm_eps: float = 1e-5

    def _check_and_fill(self) -> None:
        super()._check_and_fill()
        check_differential(self.layout, self.layer_index, self.norm_eps, self.qk_norm)

    @property
    def position_layout(self) -> HeadLayout:
        return replace(self.layout, head_dim=self.layout.head_dim // 2)

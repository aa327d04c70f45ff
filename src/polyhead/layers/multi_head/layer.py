"""Multi-head attention layer; multi-query and grouped-query attention are values of `num_kv_heads`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.combining import CombinesHeads
from polyhead.layers.head_matrices import HeadMatrices, Heads, write_heads
from polyhead.layers.joint_projection import JointProjection, hooks_of, is_plain_linear
from polyhead.layers.kv_cache import CacheView, KVCache
from polyhead.layers.kv_cache.tokens import longest
from polyhead.layers.multi_head.conv_init import check_conv_layer, init_conv_heads
from polyhead.layers.multi_head.torch_weights import copy_from, options_of, to_torch
from polyhead.layers.positions import AddsToInput, BiasesLogits, Positions, RotatesHeads
from polyhead.layers.positions.base import Rotation
from polyhead.layers.steps import (
    CallOptions,
    apply_norm,
    decode_over_cache,
    first_position,
    layer_mask,
    position_bias,
    restores_cache_on_error,
    split_heads,
)
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, Statistics, attention, straight
from polyhead.ops.decode.fused import decode_runs_on
from polyhead.ops.uneven_groups import select_heads, uneven_attention

# Options that disable the fast path `_forward_plain` unless they are None.
_EXTRAS = ("positions", "q_norm", "k_norm", "gate_proj", "combine", "softcap", "sinks")


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Projected keys and values of a source, for repeated cross-attention to it."""

    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]


class MultiHeadAttention(nn.Module):
    """Multi-head self- and cross-attention over [batch, sequence, embed_dim], with any head layout.

        head_i = softmax(X W_Q_i (Y W_K_g(i))^T / sqrt(head_dim)) Y W_V_g(i),  output = Concat(head_1 .. head_h) W_O

    with Y = X in self-attention, and g(i) the KV head that head i reads: i itself in multi-head attention (Vaswani et
    al. 2017, "Attention Is All You Need"), 1 in multi-query (Shazeer 2019, "Fast Transformer Decoding: One Write-Head
    Is All You Need"), one per group in grouped-query (Ainslie et al. 2023, "GQA: Training Generalized Multi-Query
    Transformer Models from Multi-Head Checkpoints"), any with `key_heads`.

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
        causal, window: mask of the layer, combined with the one passed to `forward`.
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

    >>> layer = MultiHeadAttention(512, 8, num_kv_heads=2, causal=True)
    >>> layer(torch.randn(2, 10, 512)).output.shape
    torch.Size([2, 10, 512])
    >>> layer.heads[3].query.shape, layer.heads[3].output.shape
    (torch.Size([512, 64]), torch.Size([64, 512]))
    """

    q_norm: nn.Module | None
    k_norm: nn.Module | None
    gate_proj: nn.Linear | None
    head_gate: Tensor | None
    init: Literal["xavier", "conv"] = "xavier"
    _may_be_plain = True  # False in subclasses that compute another attention
    # Called with every attention while the model is observed, otherwise None.
    _listener: Callable[[Attended], None] | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        key_heads: Sequence[int] | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        key_input_dim: int | None = None,
        value_input_dim: int | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        positions: Positions | None = None,
        causal: bool = False,
        window: int | None = None,
        qk_norm: Literal["rms", "layer"] | None = None,
        output_gate: Literal["head", "channel"] | None = None,
        combine: CombinesHeads | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        finite: bool = False,
        backend: str = "auto",
        init: Literal["xavier", "conv"] = "xavier",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        sizes |= {"key_input_dim": key_input_dim, "value_input_dim": value_input_dim, "key_heads": key_heads}
        self.layout = layout = checks.layout_of(embed_dim, num_heads, sizes)
        checks.check_rate("dropout", dropout)
        checks.check_positive("softcap", softcap)
        checks.check_finite("scale", scale)
        checks.check_one_of("qk_norm", qk_norm, ("rms", "layer", None))
        checks.check_one_of("output_gate", output_gate, ("head", "channel", None))
        checks.check_one_of("init", init, ("xavier", "conv"))
        checks.check_backend(backend)
        checks.check_dtype(dtype)
        if positions is not None:
            if not isinstance(positions, Positions):
                raise OptionError(
                    f"positions must be a module of polyhead.layers.positions, got {type(positions).__name__}"
                )
            positions.check(self._position_layout)
        if combine is not None:
            if not isinstance(combine, CombinesHeads):
                raise OptionError(
                    f"combine must be a polyhead.layers.combining.CombinesHeads, got {type(combine).__name__}"
                )
            combine.check(layout)
        self.dropout = dropout
        self.softcap = softcap
        self.scale = scale
        self.backend = backend
        self.finite = finite
        self.init = init
        self.mask = layer_mask(causal, window)
        self.positions = positions
        self.combine = combine

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        queries, keys, values = self._widths
        self.q_proj = linear(embed_dim, queries, bias)
        self.k_proj = linear(layout.key_input_dim, keys, bias)
        self.v_proj = linear(layout.value_input_dim, values, bias)
        combined = num_heads * layout.value_dim if combine is None else combine.width
        self.out_proj = linear(combined, embed_dim, bias if output_bias is None else output_bias)
        norms: dict[str | None, Callable[..., nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
        self.q_norm = norms[qk_norm](layout.head_dim, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = norms[qk_norm](layout.head_dim, device=device, dtype=dtype) if qk_norm else None
        gates = {None: 0, "head": num_heads, "channel": num_heads * layout.value_dim}
        self.gate_proj = linear(embed_dim, gates[output_gate], True) if output_gate else None
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sinks else None
        self.register_buffer("head_gate", None, persistent=False)
        self._choose_path()
        self.reset_parameters()
        self._join_projections()

    def reset_parameters(self) -> None:
        """Initialise projections Glorot-uniformly, biases and sinks with zeros; gates start at 1/2.

        With init="conv" everything but the key projection, positions included, is set to compute a fresh convolution.
        """
        if self.init == "conv":
            check_conv_layer(self, MultiHeadAttention)
            init_conv_heads(self)
            return
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.gate_proj):
            if linear is None:
                continue
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.combine is not None:
            self.combine.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if (name in _EXTRAS or name in ("mask", "layout")) and "_has_plain_heads" in self.__dict__:
            self._choose_path()

    def _choose_path(self) -> None:
        """Set the flags of the fast path `_forward_plain`; called again when an option changes."""
        mask, layout = self.mask, self.layout
        self._is_causal = mask is not None and mask.is_just_causal
        extras = (None if self._is_causal else mask, layout.key_heads, *(getattr(self, name) for name in _EXTRAS))
        is_plain = all(x is None for x in extras) and layout.value_dim == layout.head_dim
        self._has_plain_heads = self._may_be_plain and is_plain

    # ---- the computation

    @restores_cache_on_error
    def forward(
        self,
        query: Tensor,
        key: Tensor | Memory | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        lengths: Sequence[int] | None = None,
        token_positions: Tensor | None = None,
        head_gate: Tensor | None = None,
        seed: int | Tensor | None = None,
        weights: bool = False,
        statistics: bool | str | Sequence[str] | Statistics | None = None,
        logsumexp: bool = False,
        backend: str | None = None,
    ) -> AttentionOutput:
        """Attend from `query` to `key` (to itself by default) and project the concatenated heads.

        Args:
            query: [batch, queries, embed_dim], or a jagged nested tensor of sequences.
            key, value: [batch, keys, ...], for cross-attention; `value` is `key` by default. `key` may be a `Memory`
                returned by `remember`.
            mask: combined with the layer's causal mask or window.
            cache: a `KVCache` of earlier tokens, to which this call appends its own.
            lengths: with a cache, the number of non-padding tokens of each sequence in the new block, which is padded
                on the right.
            token_positions: positions of the queries, [queries] or [batch, queries]; by default they continue from the
                cache, or start at 0. Used by rotary and additive positions; a relative bias uses the mask's positions.
            head_gate: multiplies each head's output before the output projection: [heads], [batch, heads] or
                [batch, heads, queries]. `layer.head_gate` applies to every call.
            statistics: as in `polyhead.attention`, of every head before the gates. With a `key`, queries and keys are
                different sequences, and statistics that compare their positions are absent.
            seed, weights, logsumexp, backend: as in `polyhead.attention`.
        """
        if (
            self._has_plain_heads
            and isinstance(query, Tensor)
            and key is None
            and cache is None
            and head_gate is None
            and not (weights or logsumexp or statistics or lengths is not None or value is not None)
            and (backend or self.backend) == "auto"
            and (mask is None or (isinstance(mask, Mask) and mask.is_just_causal))
            and (output := self._forward_plain(query, self._is_causal or mask is not None)) is not None
        ):
            return AttentionOutput(output, backend="sdpa")
        if isinstance(query, Tensor) and query.is_nested:
            if cache is not None or lengths is not None or token_positions is not None or value is not None:
                raise OptionError("a jagged nested query takes no cache, lengths, token_positions or value; pad it")
            if weights or logsumexp or statistics:
                raise OptionError("weights, log-sum-exp and statistics have no jagged form; pad and use Mask.lengths")
            return self._forward_jagged(query, key, mask=mask, head_gate=head_gate, seed=seed, backend=backend)
        checks.check_input("query", query, self.layout.embed_dim, self.q_proj)
        if cache is not None and not isinstance(cache, KVCache):
            raise OptionError(f"cache must be a polyhead.KVCache, got {type(cache).__name__}")
        batch, queries, _ = query.shape
        start = first_position(cache, queries, query.device) if token_positions is None else token_positions
        if isinstance(self.positions, AddsToInput):
            query = self.positions(query, start)
        if key is None:
            if value is not None:
                raise OptionError("got a value without a key; pass both, or neither for self-attention")
            q, k, v = self._project_self(query)
        else:
            if cache is not None:
                raise OptionError(
                    "a cache is for self-attention, got a key as well; for cross-attention use layer.remember(key)"
                )
            q = self._query_heads(self.q_proj(query))
            if isinstance(key, Memory):
                if value is not None:
                    raise OptionError("a memory contains values, got a value as well; use layer.remember(key, value)")
                checks.check_memory(key.key, key.value, batch, self.cache_layout)
                k, v = key.key, key.value
            else:
                k, v = self._project_source(key, value)
        if self.q_norm is not None and self.k_norm is not None:
            q = apply_norm(self.q_norm, q)
            k = k if isinstance(key, Memory) else apply_norm(self.k_norm, k)
        if isinstance(self.positions, RotatesHeads):
            q, k = self._rotate(q, k, start, cache, key)
        if self.mask is not None:
            mask = self.mask if mask is None else self.mask & mask
        span, view, caller_mask = k.shape[2], None, mask
        if cache is not None:
            view = cache.append(k, v, lengths=lengths)
            mask = view.masked(mask)
            span = longest(cache.lengths, otherwise=span)
        elif lengths is not None:
            raise OptionError(
                "lengths require a cache, whose new tokens they count; without one use mask=Mask.lengths(...)"
            )
        if isinstance(self.positions, BiasesLogits):
            bias = position_bias(self.positions, queries, span, q, caller_mask)
            mask = bias if mask is None else mask & bias
        requested = CallOptions(
            self.dropout if self.training else 0.0,
            seed,
            self.backend if backend is None else backend,
            weights,
            checks.resolve_statistics(statistics, cross=key is not None),
            logsumexp,
            head_gate,
        )
        result = self._attend(q, k, v, view, mask, requested)
        heads = result.output.transpose(1, 2)  # [batch, queries, heads, value_dim]
        if head_gate is not None or self.head_gate is not None or self.gate_proj is not None:
            heads = self._gated(heads, query, head_gate)
        output = self.out_proj(heads.flatten(2) if self.combine is None else self.combine(heads))
        return AttentionOutput(output, result.logsumexp, result.weights, result.statistics, result.backend)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: CacheView | None, mask: Mask | None, requested: CallOptions
    ) -> AttentionOutput:
        """Attend per head and notify the observer; returns [batch, heads, queries, value_dim].

        k and v are those of the new tokens; a `view` of a cache already contains them.
        """
        result = None
        if view is not None:
            if decode_runs_on(q) and requested.is_plain:
                options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
                options["key_heads"] = self.layout.key_heads
                result = decode_over_cache(q, view, mask, statistics=requested.statistics, **options)
            if result is None or self._listener is not None:
                k, v = view.key, view.value
        if result is None:
            result = self._attention(q, k, v, mask, requested, scale=self.scale, sinks=self.sinks)
        if self._listener is not None:
            if self.layout.key_heads is not None:  # observers assume even groups
                k, v = (select_heads(x, self.layout.key_heads) for x in (k, v))
            self._listener(Attended(q, k, v, result, mask, self.scale, self.softcap, self.sinks))
        return result

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        requested: CallOptions,
        *,
        scale: float | None,
        sinks: Tensor | None,
    ) -> AttentionOutput:
        """Call `attention`, or `uneven_attention` where groups are uneven."""
        options: dict[str, Any] = {
            "mask": mask,
            "scale": scale,
            "softcap": self.softcap,
            "sinks": sinks,
            "dropout": requested.dropout,
            "seed": requested.seed,
            "backend": requested.backend,
            "weights": requested.weights,
            "statistics": requested.statistics,
            "logsumexp": requested.logsumexp,
            "finite": self.finite,
        }
        if self.layout.key_heads is not None:
            return uneven_attention(q, k, v, self.layout.key_heads, **options)
        return attention(q, k, v, **options)

    def _forward_plain(self, x: Tensor, causal: bool) -> Tensor | None:
        """Fast path of plain self-attention with less Python overhead; None where it does not apply.

        At short sequences the checks that it skips cost more than the matrix products.
        """
        modules = self._modules
        joint, out_proj = self._of_self, modules["out_proj"]
        layout = self.layout
        gated = self._buffers.get("head_gate", self) is not None  # also True if a parameter replaced the buffer
        if joint is None or x.ndim != 3 or x.is_nested or gated or (self.training and self.dropout):
            return None
        batch, length, width = x.shape
        last, hooks = self._last
        if width != layout.embed_dim or not (batch and length) or out_proj is not last or any(hooks):
            return None
        if not is_plain_linear(out_proj):
            return None
        if joint.linears != (modules["q_proj"], modules["k_proj"], modules["v_proj"]) or not joint.is_one_product(x):
            return None
        joined = joint.joined(x)
        if joined.requires_grad and not joined.is_cpu:
            # On a device the gradients of three column blocks are concatenated faster than those of one stack.
            parts = joined.split_with_sizes(joint.sizes, -1)
            q, k, v = (part.view(batch, length, -1, layout.head_dim).transpose(1, 2) for part in parts)
        elif layout.group_size == 1:
            stacked = joined.view(batch, length, 3, layout.num_heads, layout.head_dim)
            q, k, v = stacked.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            stacked = joined.view(batch, length, -1, layout.head_dim).transpose(1, 2)
            q, k, v = stacked.split_with_sizes((layout.num_heads, layout.num_kv_heads, layout.num_kv_heads), 1)
        heads = straight(q, k, v, self.scale, causal, self.finite)
        if heads is None:
            return None
        out_params = out_proj._parameters  # attribute access to `out_proj.weight` takes as long as a small product
        return F.linear(heads.transpose(1, 2).reshape(batch, length, -1), out_params["weight"], out_params["bias"])  # type: ignore[arg-type]

    def remember(self, key: Tensor, value: Tensor | None = None) -> Memory:
        """Project a source once, so that `forward(query, memory)` can attend to it many times."""
        k, v = self._project_source(key, value)
        k = k if self.k_norm is None else apply_norm(self.k_norm, k)
        return Memory(self._apply_rotary(k) if isinstance(self.positions, RotatesHeads) else k, v)

    def _project_self(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layout = self.layout
        if layout.key_input_dim != layout.embed_dim or layout.value_input_dim != layout.embed_dim:
            raise ShapeError(
                "self-attention requires equal input widths, got a layer for queries, keys and values of width "
                f"{layout.embed_dim}, {layout.key_input_dim} and {layout.value_input_dim}; pass a key to forward"
            )
        joint = self._of_self
        current = joint is not None and joint.linears == (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = joint(x) if joint is not None and current else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return self._query_heads(q), *self._source_heads(k, v)

    def _project_source(self, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
        layout = self.layout
        checks.check_input("key", key, layout.key_input_dim, self.k_proj)
        if value is None:
            if layout.value_input_dim != layout.key_input_dim:
                raise ShapeError(
                    "the key is used as the value only if both inputs are equally wide, "
                    f"got {layout.key_input_dim} and {layout.value_input_dim}; pass a value to forward"
                )
            joint = self._of_source
            current = joint is not None and joint.linears == (self.k_proj, self.v_proj)
            k, v = joint(key) if joint is not None and current else (self.k_proj(key), self.v_proj(key))
        else:
            checks.check_input("value", value, layout.value_input_dim, self.v_proj)
            if value.shape[:2] != key.shape[:2]:
                raise ShapeError(
                    "key and value must have the same batch and sequence, "
                    f"got {list(key.shape[:2])} and {list(value.shape[:2])}"
                )
            k, v = self.k_proj(key), self.v_proj(value)
        return self._source_heads(k, v)

    # Head layouts and reshapes, overridden by subclasses.

    @property
    def cache_layout(self) -> HeadLayout:
        """Head layout of the keys and values in a cache or a `Memory`."""
        return self.layout

    @property
    def num_maps(self) -> int:
        """Number of softmax maps: the size of the head axis of statistics, weights and log-sum-exp."""
        return self.layout.num_heads

    @property
    def _position_layout(self) -> HeadLayout:
        """Head layout that the position module applies to."""
        return self.layout

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Output widths of the query, key and value projections."""
        layout = self.layout
        keys, values = layout.num_kv_heads * layout.head_dim, layout.num_kv_heads * layout.value_dim
        return layout.num_heads * layout.head_dim, keys, values

    def _query_heads(self, q: Tensor) -> Tensor:
        return split_heads(q, self.layout.num_heads)

    def _source_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return split_heads(k, self.layout.num_kv_heads), split_heads(v, self.layout.num_kv_heads)

    def _rotate(
        self, q: Tensor, k: Tensor, start: int | Tensor, cache: KVCache | None, key: Tensor | Memory | None
    ) -> tuple[Tensor, Tensor]:
        rotary = self.positions
        assert isinstance(rotary, RotatesHeads)
        length = q.shape[2] + (longest(cache.lengths, otherwise=0) if cache is not None else 0)
        rotation = rotary.rotation(q[..., : rotary.head_dim], start, length=length)
        q = self._apply_rotary(q, rotation)
        if key is None:
            return q, self._apply_rotary(k, rotation)
        return q, k if isinstance(key, Memory) else self._apply_rotary(k)

    def _apply_rotary(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Apply rotary positions to heads; without a `rotation`, to tokens at positions 0, 1, ..."""
        rotary = self.positions
        assert isinstance(rotary, RotatesHeads)
        return rotary(x) if rotation is None else rotary.rotate(x, rotation)

    def _gated(self, heads: Tensor, x: Tensor, head_gate: Tensor | None) -> Tensor:
        """Multiply the heads' outputs [batch, queries, heads, value_dim] by the output and head gates."""
        if self.gate_proj is not None:
            heads = heads * torch.sigmoid(self.gate_proj(x)).unflatten(-1, (self.layout.num_heads, -1))
        for gate in (self.head_gate, head_gate):
            if gate is not None:
                heads = heads * self._gate_by_token(gate, heads)
        return heads

    def _gate_by_token(self, gate: Tensor, heads: Tensor) -> Tensor:
        batch, queries, count, _ = heads.shape
        checks.check_gate(gate, batch, count, queries)
        gate = gate.to(heads.dtype)
        if gate.ndim == 3:
            return gate.transpose(1, 2)[..., None]
        return gate[..., None] if gate.ndim == 1 else gate[:, None, :, None]

    def _forward_jagged(
        self, query: Tensor, key: Tensor | Memory | None, *, mask: Mask | None, **options: Any
    ) -> AttentionOutput:
        """Pad a jagged nested tensor of sequences, attend, and return a jagged output."""
        if key is not None:
            raise OptionError("a jagged nested query attends to itself; for cross-attention pad and use Mask.lengths")
        offsets: Tensor = query.offsets()  # type: ignore[attr-defined]
        total = query.values().shape[0]
        padded = torch.nested.to_padded_tensor(query, 0.0)
        lengths = Mask.lengths(offsets.diff())
        result = self(padded, mask=lengths if mask is None else mask & lengths, **options)
        # Indices of known length; a boolean mask would synchronise with the device to count.
        row = torch.repeat_interleave(offsets.diff(), output_size=total)
        place = torch.arange(total, device=offsets.device) - offsets[row]
        output = torch.nested.nested_tensor_from_jagged(result.output[row, place], offsets)
        return AttentionOutput(output, backend=result.backend)

    # ---- heads

    @property
    def heads(self) -> Heads:
        """Matrices of each head as views: `layer.heads[3].query` is [embed_dim, head_dim]."""
        self._check_concatenates("a head's own output matrix")
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
        """
        checks.check_heads(heads, output_bias)
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

    # ---- to and from torch.nn

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> Self:
        """Build the equivalent of a `torch.nn.MultiheadAttention` (batch first), copying its weights."""
        layer = cls(**options_of(module, options))
        layer._check_concatenates("a counterpart of torch.nn.MultiheadAttention")
        copy_from(layer, module)
        return layer.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """Return an equivalent `torch.nn.MultiheadAttention` (batch first), or raise if there is none."""
        return to_torch(self)

    # ---- checkpoints and memory layout

    def get_extra_state(self) -> Tensor:
        """Return the head layout, which weight shapes do not determine: 8 heads of 64 look like 16 of 32."""
        return torch.tensor(list(checks.layout_integers(self.layout).values()), device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        checks.check_saved_layout(state, self.layout)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = prefix + "_extra_state"
        if key in state_dict:
            checks.check_saved_layout(state_dict[key], self.layout)  # before a single weight is touched
        else:
            state_dict[key] = self.get_extra_state()  # checkpoints of other libraries have no layout
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _join_projections(self) -> None:
        layout = self.layout
        linears = [self.q_proj, self.k_proj, self.v_proj]
        self._last = (self.out_proj, hooks_of(self.out_proj))  # a tuple, so that it is not registered as a submodule
        if not all(type(linear) is nn.Linear for linear in linears):
            self._of_self = self._of_source = None
            return
        same_input_dim = layout.embed_dim == layout.key_input_dim == layout.value_input_dim
        self._of_self = JointProjection(linears) if same_input_dim else None
        self._of_source = JointProjection(linears[1:]) if layout.key_input_dim == layout.value_input_dim else None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._join_projections()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_of_self", "_of_source", "_last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join_projections()  # parameters of copies and pickles are no longer contiguous

    def extra_repr(self) -> str:
        layout = self.layout
        parts = [f"{layout.embed_dim}, {layout.num_heads}"]
        parts += [f"num_kv_heads={layout.num_kv_heads}"] if layout.num_kv_heads != layout.num_heads else []
        parts += [f"key_heads={layout.key_heads}"] if layout.key_heads is not None else []
        parts += [f"head_dim={layout.head_dim}"] if layout.head_dim * layout.num_heads != layout.embed_dim else []
        parts += [f"value_dim={layout.value_dim}"] if layout.value_dim != layout.head_dim else []
        parts += [repr(self.mask)] if self.mask is not None else []
        return ", ".join(parts)

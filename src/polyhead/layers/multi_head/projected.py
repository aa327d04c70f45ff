"""Attention of heads with query, key, value and output projections: base of `MultiHeadAttention` and its variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.base_attention import BaseAttention, CallOptions, Memory
from polyhead.layers.combining import HeadCombiner
from polyhead.layers.joint_projection import JointProjection, apply_linears, hooks_of
from polyhead.layers.kv_cache import KVCache
from polyhead.layers.multi_head.conv_init import init_conv_heads
from polyhead.layers.multi_head.plain_path import forward_plain
from polyhead.layers.positions import Positions, RotatesHeads
from polyhead.layers.steps import apply_norm, init_linear, layer_forward, qk_norms, reset_norms, split_heads
from polyhead.masks import Mask
from polyhead.ops.attention import AttentionOutput, Statistics
from polyhead.ops.uneven_groups import select_heads

# Options that disable the fast path `forward_plain` unless they are None.
_EXTRAS = ("positions", "q_norm", "k_norm", "gate_proj", "combine", "softcap", "sinks")


class ProjectedHeads(BaseAttention):
    """Base class of layers whose heads have query, key, value and output projections.

    Options are those of `MultiHeadAttention`. Subclasses override the widths of the projections, the reshapes to heads
    and `_attend`.

    Args:
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    layout: HeadLayout
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    gate_proj: nn.Linear | None
    init: Literal["xavier", "conv"] = "xavier"
    _may_be_plain = False  # True if `_attend` is softmax attention of each head, which `forward_plain` computes too

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
        combine: HeadCombiner | None = None,
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
        checks.check_one_of("output_gate", output_gate, ("head", "channel", None))
        checks.check_one_of("init", init, ("xavier", "conv"))
        self._set_options(
            positions=positions,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            dropout=dropout,
            finite=finite,
            backend=backend,
            dtype=dtype,
        )
        if positions is not None:
            positions.check(self._position_layout)
        if combine is not None:
            if not isinstance(combine, HeadCombiner):
                raise OptionError(
                    f"combine must be a polyhead.layers.combining.HeadCombiner, got {type(combine).__name__}"
                )
            combine.check(layout)
        self.init = init
        self.positions = positions
        self.combine = combine

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        queries, keys, values = self._widths
        self.q_proj = linear(embed_dim, queries, bias)
        self.k_proj = linear(layout.key_input_dim, keys, bias)
        self.v_proj = linear(layout.value_input_dim, values, bias)
        combined = num_heads * layout.value_dim if combine is None else combine.output_dim
        self.out_proj = linear(combined, embed_dim, bias if output_bias is None else output_bias)
        self.q_norm, self.k_norm = qk_norms(qk_norm, layout.head_dim, device=device, dtype=dtype)
        gates = {None: 0, "head": num_heads, "channel": num_heads * layout.value_dim}
        self.gate_proj = linear(embed_dim, gates[output_gate], True) if output_gate else None
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sinks else None
        self._choose_path()
        self.reset_parameters()
        self._join_projections()

    def reset_parameters(self) -> None:
        """Initialise projections Glorot-uniformly, biases and sinks with zeros, norms with ones; gates start at 1/2.

        The position module is left unchanged. With init="conv" everything but the key projection, positions included,
        is set to compute a fresh convolution.
        """
        reset_norms(self.q_norm, self.k_norm)
        if self.init == "conv":
            init_conv_heads(self)
            return
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.gate_proj):
            init_linear(linear)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.combine is not None:
            self.combine.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if (name in _EXTRAS or name in ("mask", "layout")) and "_has_plain_heads" in self.__dict__:
            self._choose_path()

    def _choose_path(self) -> None:
        """Set the flags of the fast path `forward_plain`; called again when an option changes."""
        mask, layout = self.mask, self.layout
        self._is_causal = mask is not None and mask.is_just_causal
        extras = (None if self._is_causal else mask, layout.key_heads, *(getattr(self, name) for name in _EXTRAS))
        is_plain = all(x is None for x in extras) and layout.value_dim == layout.head_dim
        self._has_plain_heads = self._may_be_plain and is_plain

    # ---- the computation

    @layer_forward
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

        Returns:
            The output [batch, queries, embed_dim], with weights, statistics and log-sum-exp if requested.
        """
        if (
            self._has_plain_heads
            and self._operator is None
            and isinstance(query, Tensor)
            and key is None
            and cache is None
            and head_gate is None
            and not (weights or logsumexp or statistics or lengths is not None or value is not None)
            and (backend or self.backend) == "auto"
            and (mask is None or (isinstance(mask, Mask) and mask.is_just_causal))
            and (output := forward_plain(self, query, self._is_causal or mask is not None)) is not None
        ):
            return AttentionOutput(output, backend="sdpa")
        if isinstance(query, Tensor) and query.is_nested:
            if cache is not None or lengths is not None or token_positions is not None or value is not None:
                raise OptionError("a jagged nested query takes no cache, lengths, token_positions or value; pad it")
            if weights or logsumexp or statistics:
                raise OptionError("weights, log-sum-exp and statistics have no jagged form; pad and use Mask.lengths")
            return self._forward_jagged(query, key, mask=mask, head_gate=head_gate, seed=seed, backend=backend)
        checks.check_input("query", query, self.layout.embed_dim, self.q_proj)
        query, start = self._begin(query, key, cache, lengths, token_positions)
        if key is None:
            if value is not None:
                raise OptionError("got a value without a key; pass both, or neither for self-attention")
            q, k, v = self._project_self(query)
        else:
            q = self._query_heads(self.q_proj(query))
            if isinstance(key, Memory):
                if value is not None:
                    raise OptionError("a memory contains values, got a value as well; use layer.remember(key, value)")
                checks.check_memory(key.key, key.value, query.shape[0], self.cache_layout)
                k, v = key.key, key.value
            else:
                k, v = self._project_source(key, value)
        q = apply_norm(self.q_norm, q)
        k = k if isinstance(key, Memory) else apply_norm(self.k_norm, k)
        q, k = self._rotate(q, k, start, cache, key)
        call = self._call_options(
            q,
            k,
            v,
            self._combined_mask(mask),
            cache,
            lengths,
            cross=key is not None,
            seed=seed,
            weights=weights,
            statistics=statistics,
            logsumexp=logsumexp,
            backend=backend,
            head_gate=head_gate,
        )
        result = self._attend(q, k, v, call)
        heads = result.output
        if self.gate_proj is not None:
            by_head = (self.layout.num_heads, -1)
            heads = heads * torch.sigmoid(self.gate_proj(query)).unflatten(-1, by_head).transpose(1, 2)
        heads = self._gated(heads, head_gate).transpose(1, 2)  # [batch, queries, heads, value_dim]
        return replace(result, output=self.out_proj(heads.flatten(2) if self.combine is None else self.combine(heads)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: CallOptions) -> AttentionOutput:
        """Attend per head and notify the observer; returns [batch, heads, queries, value_dim].

        k and v are those of the new tokens; a view of a cache already contains them.
        """
        key_heads = self.layout.key_heads
        result = self._attend_heads(q, k, v, call, scale=self.scale, sinks=self.sinks, key_heads=key_heads)
        if self._listener is not None:
            k, v = call.keys_and_values(k, v)
            if key_heads is not None:  # observers assume even groups
                k, v = (select_heads(x, key_heads) for x in (k, v))
            self._notify(q, k, v, result, call.mask, self.scale)
        return result

    def remember(self, key: Tensor, value: Tensor | None = None) -> Memory:
        """Project a source once, so that `forward(query, memory)` can attend to it many times.

        Args:
            key: source [batch, keys, key_input_dim].
            value: source of the values; `key` by default.

        Returns:
            Keys and values, which `forward` takes as `key`.
        """
        k, v = self._project_source(key, value)
        # Views of the joint projection keep all of it in memory.
        is_view = self.k_norm is None and not isinstance(self.positions, RotatesHeads)
        return self._memory(self._apply_rotary(apply_norm(self.k_norm, k)), v if is_view else v.clone())

    def _project_self(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layout = self.layout
        if layout.key_input_dim != layout.embed_dim or layout.value_input_dim != layout.embed_dim:
            raise ShapeError(
                "self-attention requires equal input widths, got a layer for queries, keys and values of width "
                f"{layout.embed_dim}, {layout.key_input_dim} and {layout.value_input_dim}; pass a key to forward"
            )
        q, k, v = apply_linears(self._of_self, (self.q_proj, self.k_proj, self.v_proj), x)
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
            k, v = apply_linears(self._of_source, (self.k_proj, self.v_proj), key)
        else:
            checks.check_input("value", value, layout.value_input_dim, self.v_proj)
            if value.shape[:2] != key.shape[:2]:
                raise ShapeError(
                    "key and value must have the same batch and sequence, "
                    f"got {list(key.shape[:2])} and {list(value.shape[:2])}"
                )
            k, v = self.k_proj(key), self.v_proj(value)
        return self._source_heads(k, v)

    @property
    def output_gate(self) -> Literal["head", "channel"] | None:
        """Kind of the output gate; "head" if heads have one channel, where both kinds are the same."""
        if self.gate_proj is None:
            return None
        return "head" if self.gate_proj.out_features == self.layout.num_heads else "channel"

    # Head layouts and reshapes, overridden by subclasses.

    @property
    def cache_layout(self) -> HeadLayout:
        """Head layout of the keys and values in a cache or a `Memory`."""
        return self.layout

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

    # ---- memory layout

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

    def extra_repr(self) -> str:
        layout = self.layout
        defaults: dict[str, Any] = {"num_kv_heads": layout.num_heads, "key_heads": None}
        defaults |= {"head_dim": layout.embed_dim / layout.num_heads, "value_dim": layout.head_dim}
        sizes = {name: getattr(layout, name) for name in defaults}
        return self._described(
            f"{layout.embed_dim}, {layout.num_heads}",
            *(f"{name}={size}" for name, size in sizes.items() if size != defaults[name]),
        )

"""Base of polyhead's attention layers: common options, the shared steps of a call, and checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers import checks
from polyhead.layers.kv_cache import CacheView, KVCache
from polyhead.layers.kv_cache.tokens import longest
from polyhead.layers.positions import AddsToInput, BiasesLogits, Positions, RotatesHeads
from polyhead.layers.positions.position_encoding import Rotation
from polyhead.layers.steps import (
    check_hides_masked_keys,
    check_no_padding,
    first_position,
    hides_keys,
    layer_mask,
    position_bias,
)
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, Statistics, attention
from polyhead.ops.common.gates import gate_factors
from polyhead.ops.common.validation import check_mask
from polyhead.ops.decode.api import cached_attention, cached_reasons
from polyhead.ops.decode.fused import CacheArguments, decode_runs_on
from polyhead.ops.uneven_groups import uneven_attention, uneven_cached_attention

# Attributes set by `_join_projections`. They refer to the memory of the layer's own parameters, so copies and pickles
# leave them out and set them anew.
_JOINED = ("_of_self", "_of_source", "_last")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Memory:
    """Projected keys and values of a source, for repeated cross-attention to it.

    Only the layer that has projected them takes them, and only until its heads are edited; compiled code does not check
    this. A `Memory` that is built of tensors is taken by every layer.
    """

    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]


# The layer that has projected a memory, and the number of edits of its heads by then.
_projected_by: weakref.WeakKeyDictionary[Memory, tuple[weakref.ref[Any], int]] = weakref.WeakKeyDictionary()


class CallOptions(NamedTuple):
    """Options of one attention call besides its tensors; a `view` of a cache contains the new tokens."""

    mask: Mask | None
    view: CacheView | None
    dropout: float
    seed: int | Tensor | None
    backend: str
    weights: bool
    statistics: Statistics | None
    logsumexp: bool
    head_gate: Tensor | None

    @property
    def is_plain(self) -> bool:
        """True if the decode kernels support every option."""
        return self.backend in ("auto", "fused") and not (self.weights or self.dropout or self.seed is not None)

    def keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values to attend to: those of the cache, or k and v without one."""
        return (k, v) if self.view is None else (self.view.key, self.view.value)


def in_order(result: AttentionOutput, call: CallOptions) -> AttentionOutput:
    """Return `result` with the columns of its weights in the order of the tokens, which slots of a cache may not be."""
    if result.weights is None or call.view is None:
        return result
    return replace(result, weights=call.view.in_order(result.weights))


class AttentionOperator(Protocol):
    """Replacement of `attention` in the calls of a layer, such as attention over the tokens of all ranks."""

    def check_call(
        self, layer: BaseAttention, key: Tensor | Memory | None, cache: KVCache | None, token_positions: Tensor | None
    ) -> None:
        """Raise an error of `polyhead.errors` if the operator does not support a call of the layer."""

    def attend(
        self, layer: BaseAttention, q: Tensor, k: Tensor, v: Tensor, call: CallOptions, **options: Any
    ) -> AttentionOutput:
        """Return the attention of every head; `options` are scale, sinks and key_heads."""


class BaseAttention(nn.Module):
    """Base class of attention layers over [batch, sequence, embed_dim].

    A `forward` checks the call and adds positions to the input with `_begin`, projects, rotates queries and keys with
    `_rotate`, appends to the cache and completes the mask with `_call_options`, and attends with `_attend_heads`. An
    observer is notified with `_notify`.
    """

    layout: Any  # head layout, stored in checkpoints
    positions: Positions | None
    mask: Mask | None
    sinks: nn.Parameter | None
    head_gate: Tensor | None
    kv_edits = 0  # edits of the heads that changed keys or values: the layer refuses caches from before
    is_head_parallel = False  # True if the heads are distributed over ranks, and the parameters are DTensors
    # Called with every attention while the model is observed, otherwise None.
    _listener: Callable[[Attended], None] | None = None
    # Called in place of `attention` while it is set, otherwise None.
    _operator: AttentionOperator | None = None

    def _set_options(
        self,
        *,
        positions: Positions | None,
        causal: bool,
        window: int | None,
        softcap: float | None,
        scale: float | None,
        dropout: float,
        finite: bool,
        backend: str,
        dtype: torch.dtype | None,
    ) -> None:
        """Check the options that all layers have, and set all but `positions`, whose order among submodules varies."""
        checks.check_options(dropout=dropout, softcap=softcap, scale=scale, backend=backend)
        checks.check_dtype(dtype)
        if positions is not None and not isinstance(positions, Positions):
            raise OptionError(
                f"positions must be a module of polyhead.layers.positions, got {type(positions).__name__}"
            )
        self.dropout = dropout
        self.softcap = softcap
        self.scale = scale
        self.backend = backend
        self.finite = finite
        self.mask = layer_mask(causal, window)
        self.register_buffer("head_gate", None, persistent=False)

    @property
    def num_maps(self) -> int:
        """Number of softmax maps: the size of the head axis of statistics, weights and log-sum-exp."""
        heads: int = self.layout.num_heads
        return heads

    # ---- steps of a call

    def _memory(self, key: Tensor, value: Tensor) -> Memory:
        """Return keys and values as a memory of this layer."""
        memory = Memory(key, value)
        if not torch.compiler.is_compiling():
            _projected_by[memory] = weakref.ref(self), self.kv_edits
        return memory

    def _check_memory(self, memory: Memory) -> None:
        """Raise `OptionError` for a memory of another layer, or of this one before its heads were edited."""
        if torch.compiler.is_compiling():
            return
        reference, edits = _projected_by.get(memory, (None, 0))
        if reference is None:
            return
        layer: Any = reference()
        if layer is not self:
            other = "layer, which is gone" if layer is None else type(layer).__name__
            raise OptionError(
                f"a memory has the keys and values of one layer, got a {type(self).__name__} with a memory of another "
                f"{other}; call remember of this layer, or pass Memory(memory.key, memory.value) if their projections "
                "are the same"
            )
        if edits != self.kv_edits:
            raise OptionError(
                f"a memory must have the keys and values of a layer's current heads, got one of {type(self).__name__} "
                "before its heads were edited; call remember again"
            )

    def _begin(
        self,
        query: Tensor,
        key: Tensor | Memory | None,
        cache: KVCache | None,
        lengths: Sequence[int] | None,
        token_positions: Tensor | None,
    ) -> tuple[Tensor, int | Tensor]:
        """Check the cache of a call; return the query with additive positions, and its first or all positions."""
        if self._operator is not None:
            self._operator.check_call(self, key, cache, token_positions)
        if isinstance(key, Memory):
            self._check_memory(key)
        if cache is not None and not isinstance(cache, KVCache):
            raise OptionError(f"cache must be a polyhead.KVCache, got {type(cache).__name__}")
        if cache is not None and key is not None:
            raise OptionError(
                "a cache is for self-attention, got a key as well; for cross-attention use layer.remember(key)"
            )
        if cache is None and lengths is not None:
            raise OptionError(
                "lengths require a cache, whose new tokens they count; without one use mask=Mask.lengths(...)"
            )
        start = first_position(cache, query.shape[1], query.device) if token_positions is None else token_positions
        return self.positions(query, start) if isinstance(self.positions, AddsToInput) else query, start

    def _rotation(
        self, q: Tensor, start: int | Tensor, cache: KVCache | None, source: Tensor | None
    ) -> Rotation | None:
        """Return the rotation of the queries' positions; None unless the layer has rotary positions.

        `source` are the keys of a cross-attention, [batch, kv_heads, keys, dim], whose number is the current length.
        """
        rotary = self.positions
        if not isinstance(rotary, RotatesHeads):
            return None
        if source is not None:
            length = source.shape[2]
        else:
            length = q.shape[2] + (longest(cache.lengths, otherwise=0) if cache is not None else 0)
        return rotary.rotation(q[..., : rotary.head_dim], start, length=length)

    def _apply_rotary(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Apply rotary positions, if any, to heads; without a `rotation`, to tokens at positions 0, 1, ..."""
        rotary = self.positions
        if not isinstance(rotary, RotatesHeads):
            return x
        return rotary(x) if rotation is None else rotary.rotate(x, rotation)

    def _rotate(
        self, q: Tensor, k: Tensor, start: int | Tensor, cache: KVCache | None, key: Tensor | Memory | None
    ) -> tuple[Tensor, Tensor]:
        """Apply rotary positions, if any, to queries and keys; those of a `Memory` have them already."""
        rotation = self._rotation(q, start, cache, None if key is None else k)
        if rotation is None:
            return q, k
        q = self._apply_rotary(q, rotation)
        return q, k if isinstance(key, Memory) else self._apply_rotary(k, rotation if key is None else None)

    def _combined_mask(self, mask: Mask | None) -> Mask | None:
        """Return the conjunction of the layer's mask and that of a call."""
        if mask is not None:
            check_mask(mask)
        return mask if self.mask is None else self.mask if mask is None else self.mask & mask

    def _call_options(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        mask: Mask | None,
        cache: KVCache | None,
        lengths: Sequence[int] | None,
        *,
        cross: bool,
        seed: int | Tensor | None,
        weights: bool,
        statistics: bool | str | Sequence[str] | Statistics | None,
        logsumexp: bool,
        backend: str | None,
        head_gate: Tensor | None = None,
    ) -> CallOptions:
        """Append k and v to the cache and complete the mask with that of the cache and the position bias."""
        view, span, caller_mask = None, k.shape[2], mask
        if cache is not None:
            cache.check_layer(self)
            if mask is not None and mask.left is not None:
                cache.check_window(mask.left + 1, mask.sinks)
            if mask is not None and lengths is None:
                check_no_padding(mask, cache, k.shape[2])
            if cache.holds_masked_keys:
                check_hides_masked_keys(mask)
            view = cache.append(k, v, lengths=lengths)  # type: ignore[arg-type]  # a latent cache takes no values
            cache.holds_masked_keys |= mask is not None and hides_keys(mask)
            mask = view.masked(mask)
            span = longest(cache.lengths, otherwise=span)
        if isinstance(self.positions, BiasesLogits):
            bias = position_bias(self.positions, q.shape[2], span, q, caller_mask)
            mask = bias if mask is None else mask & bias
        return CallOptions(
            mask,
            view,
            self.dropout if self.training else 0.0,
            seed,
            self.backend if backend is None else backend,
            weights,
            checks.resolve_statistics(statistics, cross=cross),
            logsumexp,
            head_gate,
        )

    def _attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: CallOptions,
        *,
        scale: float | None,
        sinks: Tensor | None,
        key_heads: tuple[int, ...] | None = None,
        by_head: Callable[[CacheArguments], CacheArguments] | None = None,
    ) -> AttentionOutput:
        """Attend to k and v, or to all tokens of the call's cache, with the decode kernels where they apply.

        `by_head` maps the storage of a cache to the heads of q, where the cache stores them in another form.
        """
        result = self._decode(q, call, scale=scale, sinks=sinks, key_heads=key_heads, by_head=by_head)
        if result is not None:
            return result
        if call.view is not None:
            stored = CacheArguments(call.view.key, call.view.value)
            k, v = (stored if by_head is None else by_head(stored))[:2]
        return self._attention(q, k, v, call, scale=scale, sinks=sinks, key_heads=key_heads)

    def _decode(
        self,
        q: Tensor,
        call: CallOptions,
        *,
        scale: float | None,
        sinks: Tensor | None,
        key_heads: tuple[int, ...] | None = None,
        by_head: Callable[[CacheArguments], CacheArguments] | None = None,
    ) -> AttentionOutput | None:
        """Attend over the cache's storage with the decode kernels; None without a cache or where they do not apply."""
        view = call.view
        if view is None or not (decode_runs_on(q) and call.is_plain):
            return None
        arguments = (q, view.storage if by_head is None else by_head(view.storage), view.num_keys)
        options: dict[str, Any] = {"mask": call.mask, "scale": scale, "sinks": sinks, "statistics": call.statistics}
        if key_heads is not None:
            return uneven_cached_attention(*arguments, key_heads, softcap=self.softcap, **options)
        if len(cached_reasons(*arguments, **options)):
            return None
        return cached_attention(*arguments, softcap=self.softcap, **options)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: CallOptions,
        *,
        scale: float | None,
        sinks: Tensor | None,
        key_heads: tuple[int, ...] | None = None,
    ) -> AttentionOutput:
        """Call `attention`, `uneven_attention` where groups are uneven, or the operator that replaces them."""
        if self._operator is not None:
            return self._operator.attend(self, q, k, v, call, scale=scale, sinks=sinks, key_heads=key_heads)
        options: dict[str, Any] = {
            "mask": call.mask,
            "scale": scale,
            "softcap": self.softcap,
            "sinks": sinks,
            "dropout": call.dropout,
            "seed": call.seed,
            "backend": call.backend,
            "weights": call.weights,
            "statistics": call.statistics,
            "logsumexp": call.logsumexp,
            "finite": self.finite,
        }
        result = attention(q, k, v, **options) if key_heads is None else uneven_attention(q, k, v, key_heads, **options)
        return in_order(result, call)

    def _gated(self, heads: Tensor, head_gate: Tensor | None) -> Tensor:
        """Multiply the outputs of heads [batch, heads, queries, value_dim] by the head gates of layer and call."""
        batch, count, queries, _ = heads.shape
        for gate in (self.head_gate, head_gate):
            if gate is not None and self._is_of_heads(gate):
                heads = heads * gate_factors(gate, batch, count, queries).to(heads.dtype)
        return heads

    def _is_of_heads(self, gate: Tensor) -> bool:
        """Return True if a gate is to be applied to the outputs of the heads."""
        return True

    def _notify(
        self, q: Tensor, k: Tensor, v: Tensor, result: AttentionOutput, mask: Mask | None, scale: float | None
    ) -> None:
        """Pass one attention to the observer, if there is one."""
        if self._listener is not None:
            self._listener(Attended(q, k, v, result, mask, scale, self.softcap, self.sinks))

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
        """Store projections of the same input contiguously, in layers that apply them as one product."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._join_projections()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _JOINED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join_projections()  # parameters of copies and pickles are no longer contiguous

    def _described(self, *parts: str) -> str:
        """Return `parts`, and the layer's mask if it has one, for `extra_repr`."""
        return ", ".join(parts if self.mask is None else (*parts, repr(self.mask)))

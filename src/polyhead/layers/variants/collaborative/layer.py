"""Collaborative heads: queries and keys of all heads lie in one shared space, whose channels each head weighs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.kv_cache import CacheView
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.positions import RotatesHeads
from polyhead.layers.steps import CallOptions, decoded
from polyhead.layers.variants.collaborative.factors import shared_factors
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput
from polyhead.ops.decode.fused import CacheArguments, decode_runs_on


class CollaborativeAttention(MultiHeadAttention):
    """Heads that share their queries and keys (Cordonnier, Loukas, Jaggi 2020, "Multi-Head Attention: Collaborate
    Instead of Concatenate", section 3), with values of their own:

        head_i = softmax((X W_Q diag(m_i)) (X W_K)^T / sqrt(head_dim)) X W_V_i          m_i is `mixing[i]`
        output = Concat(head_1 .. head_h) W_O

    W_Q and W_K are shared_dim wide. With shared_dim = num_heads * head_dim and m_i one in the block of head i, zero
    elsewhere, this is plain multi-head attention, and so it starts; `from_multi_head` makes that of a trained layer.

    The one key is seen by all heads without a copy, and a cache keeps shared_dim + num_heads * value_dim numbers a
    token. What it costs: a pair of query and key takes num_heads * shared_dim multiply-adds, and the gradient of the
    key is summed over heads after each has made its own. Beyond 256 channels our own kernels do not serve.

    Args:
        embed_dim, num_heads: as in `MultiHeadAttention`.
        shared_dim: channels of the shared queries and keys; num_heads * head_dim by default.
        head_dim: what a head of its own would have, which sets the scale and the default of `shared_dim`; embed_dim /
            num_heads by default.
        value_dim: channels of a value; head_dim by default.
        positions: rotary positions turn the shared space, `Rotary(shared_dim)`, after the queries are mixed.
        options: those of `MultiHeadAttention`, but `num_kv_heads`, `key_heads` and `qk_norm`.

    >>> layer = CollaborativeAttention(512, 8, shared_dim=128, causal=True)
    >>> layer(torch.randn(2, 10, 512)).output.shape, layer.cache_layout.head_dim
    (torch.Size([2, 10, 512]), 128)
    """

    _may_be_plain = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        shared_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        layout = checks.layout_of(embed_dim, num_heads, options)
        check_collaborative(layout, shared_dim, options.get("qk_norm"))
        # Before all else: the base asks how wide its projections are.
        self.shared_dim = layout.num_heads * layout.head_dim if shared_dim is None else shared_dim
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.mixing = nn.Parameter(torch.empty(num_heads, self.shared_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `MultiHeadAttention`. The mixing takes blocks of head_dim channels where there is one for each head; else
        it is drawn from a normal distribution, so wide that logits have the size that those of plain heads have."""
        super().reset_parameters()
        if "mixing" not in self._parameters:
            return  # the base is still at work
        with torch.no_grad():
            if self.shared_dim == self.layout.num_heads * self.layout.head_dim:
                blocks = torch.eye(self.layout.num_heads, device=self.mixing.device, dtype=self.mixing.dtype)
                self.mixing.copy_(blocks.repeat_interleave(self.layout.head_dim, 1))
            else:
                self.mixing.normal_(std=math.sqrt(self.layout.head_dim / self.shared_dim))

    # ---- the heads

    @property
    def cache_layout(self) -> HeadLayout:
        """One head to a cache: the shared key, and the values of all heads side by side."""
        layout = self.layout
        return replace(layout, num_kv_heads=1, head_dim=self.shared_dim, value_dim=layout.num_heads * layout.value_dim)

    @property
    def _turning(self) -> HeadLayout:
        return replace(self.layout, head_dim=self.shared_dim)

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.shared_dim, self.shared_dim, self.layout.num_heads * self.layout.value_dim

    def _query_heads(self, q: Tensor) -> Tensor:
        return q.unsqueeze(1) * self.mixing.unsqueeze(1).to(q.dtype)

    def _source_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.unsqueeze(1), v.unsqueeze(1)

    def _seen_by_heads(self, x: Tensor, axis: int) -> Tensor:
        """The one head of a cache at `axis`, as each of the heads sees it; nothing is copied."""
        shape = list(x.shape)
        shape[axis] = self.layout.num_heads
        return x.expand(shape)

    def _values_of_heads(self, v: Tensor, axis: int) -> Tensor:
        """[.., 1 at `axis`, .., num_heads * value_dim] to [.., num_heads, .., value_dim]; nothing is copied."""
        return v.squeeze(axis).unflatten(-1, (self.layout.num_heads, -1)).movedim(-2, axis)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: CacheView | None, mask: Mask | None, requested: CallOptions
    ) -> AttentionOutput:
        scale = self.layout.head_dim**-0.5 if self.scale is None else self.scale
        result = None
        if view is not None:
            if decode_runs_on(q) and requested.is_plain:
                options: dict[str, Any] = {"scale": scale, "softcap": self.softcap, "sinks": self.sinks}
                storage = self._stored(view.storage)
                result = decoded(q, view, mask, statistics=requested.statistics, storage=storage, **options)
            if result is None or self._listener is not None:
                k, v = view.key, view.value
        k, v = self._seen_by_heads(k, 1), self._values_of_heads(v, 1)
        if result is None:
            result = self._attention(q, k, v, mask, requested, scale=scale, sinks=self.sinks)
        if self._listener is not None:
            self._listener(Attended(q, k, v, result, mask, scale, self.softcap, self.sinks))
        return result

    def _stored(self, cache: CacheArguments) -> CacheArguments:
        """The memory of a cache, slots or pages, as the heads see it."""
        axis = 1 if cache.block_table is None else 2
        scales = (None if x is None else self._seen_by_heads(x, axis) for x in (cache.key_scale, cache.value_scale))
        key, value = self._seen_by_heads(cache.key, axis), self._values_of_heads(cache.value, axis)
        return cache._replace(key=key, value=value, key_scale=next(scales), value_scale=next(scales))

    # ---- from plain heads

    @classmethod
    def from_multi_head(cls, layer: MultiHeadAttention, *, shared_dim: int | None = None) -> Self:
        """The same function as a trained `MultiHeadAttention`: its heads' queries and keys side by side, and a mixing
        of one block a head. Heads that share a key have it repeated, since a block belongs to one head.

        With a smaller `shared_dim` it is the nearest that `polyhead.layers.shared_factors` finds, which also tells how
        far that is: nearest in the heads' W_Q W_K^T, as if the channels of the input were independent.
        """
        if type(layer) is not MultiHeadAttention:
            raise OptionError(f"from_multi_head takes a plain MultiHeadAttention, got {type(layer).__name__}")
        found = {
            "rotary positions, which turn every head by the same angles": isinstance(layer.positions, RotatesHeads),
            "qk_norm": layer.q_norm is not None,
            "a combination of heads": layer.combine is not None,
        }
        if any(found.values()):
            words = " and ".join(name for name, there in found.items() if there)
            raise OptionError(f"shared queries and keys cannot stand for those of a layer with {words}")
        layout, weight = layer.layout, layer.out_proj.weight
        gate = layer.gate_proj
        made = cls(
            layout.embed_dim,
            layout.num_heads,
            shared_dim=shared_dim,
            head_dim=layout.head_dim,
            value_dim=layout.value_dim,
            key_input_dim=layout.key_input_dim,
            value_input_dim=layout.value_input_dim,
            bias=layer.q_proj.bias is not None,
            output_bias=layer.out_proj.bias is not None,
            positions=layer.positions,
            output_gate=None if gate is None else "head" if gate.out_features == layout.num_heads else "channel",
            softcap=layer.softcap,
            scale=layer.scale,
            sinks=layer.sinks is not None,
            dropout=layer.dropout,
            finite=layer.finite,
            backend=layer.backend,
            device=weight.device,
            dtype=weight.dtype,
        )
        made.mask = layer.mask
        state = {name: x for name, x in layer.state_dict().items() if name != "_extra_state"}
        readers = [layout.key_head(i) for i in range(layout.num_heads)]
        for name in state:
            if name.startswith(("k_proj.", "v_proj.")):
                state[name] = state[name].unflatten(0, (layout.num_kv_heads, -1))[readers].flatten(0, 1)
        if shared_dim is not None:
            state |= _shared_state(state, layout.num_heads, shared_dim)
        made.load_state_dict({"mixing": made.mixing.detach(), **state})
        return made.train(layer.training)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> Self:
        """`from_multi_head` of a `torch.nn.MultiheadAttention` (batch first)."""
        return cls.from_multi_head(MultiHeadAttention.from_torch(module, **options))

    def to_torch(self) -> NoReturn:
        raise OptionError("torch.nn.MultiheadAttention has no counterpart for collaborative heads")

    def _check_concatenates(self, what: str) -> NoReturn:
        raise OptionError(
            f"{what} exists where every head has queries and keys of its own, got heads that share them; q_proj, "
            "k_proj, mixing, v_proj and out_proj hold their weights"
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shared_dim={self.shared_dim}"


def _shared_state(state: dict[str, Tensor], num_heads: int, shared_dim: int) -> dict[str, Tensor]:
    """Query and key projections and the mixing of fewer channels, for those of a state dict."""

    def matrices(name: str) -> Tensor:
        """[heads, inputs, head_dim]; a bias is what an input that is always 1 is multiplied by."""
        inputs = [state[f"{name}.weight"].mT]
        inputs += [state[f"{name}.bias"][None]] if f"{name}.bias" in state else []
        return torch.cat(inputs).unflatten(1, (num_heads, -1)).transpose(0, 1)

    found = shared_factors(matrices("q_proj"), matrices("k_proj"), shared_dim)
    made = {"mixing": found.mixing}
    for name, factor in (("q_proj", found.query), ("k_proj", found.key)):
        width = state[f"{name}.weight"].shape[1]
        made[f"{name}.weight"] = factor[:width].mT
        made |= {f"{name}.bias": factor[width]} if f"{name}.bias" in state else {}
    return made


def check_collaborative(layout: HeadLayout, shared_dim: int | None, qk_norm: str | None) -> None:
    """What collaborative heads ask beside what all heads ask."""
    checks.check_size("shared_dim", shared_dim)
    if layout.num_kv_heads != layout.num_heads or layout.key_heads is not None:
        raise OptionError(
            "collaborative heads have one key and as many values as heads, got num_kv_heads "
            f"{layout.num_kv_heads} and key_heads {layout.key_heads}; leave both out"
        )
    if qk_norm is not None:
        raise OptionError(f"a norm would undo what a head's mixing weighs, got qk_norm {qk_norm!r}")

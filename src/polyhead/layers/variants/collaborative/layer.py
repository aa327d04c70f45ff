"""Collaborative attention: all heads share queries and keys, with per-head weights of their channels."""

from __future__ import annotations

import copy
import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.base_attention import CallOptions
from polyhead.layers.config import register_config
from polyhead.layers.joint_projection import is_plain_linear
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.multi_head.projected import ProjectedHeads
from polyhead.layers.positions import RotatesHeads
from polyhead.layers.variants.collaborative.factors import shared_factors
from polyhead.ops.attention import AttentionOutput
from polyhead.ops.decode.fused import CacheArguments


class CollaborativeAttention(ProjectedHeads):
    """Attention with shared queries and keys and per-head values, after Cordonnier, Loukas, Jaggi 2020.

    "Multi-Head Attention: Collaborate Instead of Concatenate", section 3:

        head_i = softmax((X W_Q diag(m_i)) (X W_K)^T / sqrt(head_dim)) X W_V_i          m_i is `mixing[i]`
        output = Concat(head_1 .. head_h) W_O

    W_Q and W_K have shared_dim columns. With shared_dim = num_heads * head_dim and m_i one in the block of head i and
    zero elsewhere, this is plain multi-head attention; the layer is initialised so, and `from_multi_head` converts a
    trained layer.

    The shared key is expanded over heads without a copy, and a cache stores shared_dim + num_heads * value_dim numbers
    per token. Costs: a query-key pair takes num_heads * shared_dim multiply-adds, and the key's gradient is computed
    per head before it is summed. polyhead's own kernels support up to 256 channels.

    Args:
        embed_dim, num_heads: as in `MultiHeadAttention`.
        shared_dim: channels of the shared queries and keys; num_heads * head_dim by default.
        head_dim: channels of an equivalent plain head, which sets the scale and the default of `shared_dim`; embed_dim
            / num_heads by default.
        value_dim: channels of a value; head_dim by default.
        positions: rotary positions rotate the shared channels, `Rotary(shared_dim)`, after the queries are mixed.
        options: those of `MultiHeadAttention` except `num_kv_heads`, `key_heads` and `qk_norm`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    >>> layer = CollaborativeAttention(512, 8, shared_dim=128, causal=True)
    >>> layer(torch.randn(2, 10, 512)).output.shape, layer.cache_layout.head_dim
    (torch.Size([2, 10, 512]), 128)
    """

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
        # Set first, because the base constructor reads the widths of the projections.
        self.shared_dim = layout.num_heads * layout.head_dim if shared_dim is None else shared_dim
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.mixing = nn.Parameter(torch.empty(num_heads, self.shared_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `MultiHeadAttention`; the mixing is one block per head if shared_dim allows.

        Otherwise the mixing is drawn from a normal distribution scaled so that logits have the variance of plain heads.
        """
        super().reset_parameters()
        if "mixing" not in self._parameters:
            return  # called by the base constructor
        with torch.no_grad():
            if self.shared_dim == self.layout.num_heads * self.layout.head_dim:
                blocks = torch.eye(self.layout.num_heads, device=self.mixing.device, dtype=self.mixing.dtype)
                self.mixing.copy_(blocks.repeat_interleave(self.layout.head_dim, 1))
            else:
                self.mixing.normal_(std=math.sqrt(self.layout.head_dim / self.shared_dim))

    # ---- the heads

    @property
    def cache_layout(self) -> HeadLayout:
        """Head layout of a cache: one KV head with the shared key and the concatenated values of all heads."""
        layout = self.layout
        return replace(layout, num_kv_heads=1, head_dim=self.shared_dim, value_dim=layout.num_heads * layout.value_dim)

    @property
    def _position_layout(self) -> HeadLayout:
        return replace(self.layout, head_dim=self.shared_dim)

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.shared_dim, self.shared_dim, self.layout.num_heads * self.layout.value_dim

    def _query_heads(self, q: Tensor) -> Tensor:
        return q.unsqueeze(1) * self.mixing.unsqueeze(1).to(q.dtype)

    def _source_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.unsqueeze(1), v.unsqueeze(1)

    def _expand_heads(self, x: Tensor, axis: int) -> Tensor:
        """Expand the single KV head at `axis` to all heads, without a copy."""
        shape = list(x.shape)
        shape[axis] = self.layout.num_heads
        return x.expand(shape)

    def _split_values(self, v: Tensor, axis: int) -> Tensor:
        """View [.., 1 at `axis`, .., num_heads * value_dim] as [.., num_heads, .., value_dim]."""
        return v.squeeze(axis).unflatten(-1, (self.layout.num_heads, -1)).movedim(-2, axis)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: CallOptions) -> AttentionOutput:
        scale = self.layout.head_dim**-0.5 if self.scale is None else self.scale
        heads = self._expand_heads(k, 1), self._split_values(v, 1)
        result = self._attend_heads(q, *heads, call, scale=scale, sinks=self.sinks, by_head=self._expand_storage)
        if self._listener is not None:
            k, v = call.keys_and_values(k, v)
            self._notify(q, self._expand_heads(k, 1), self._split_values(v, 1), result, call.mask, scale)
        return result

    def _expand_storage(self, cache: CacheArguments) -> CacheArguments:
        """Return the storage of a cache, slots or pages, expanded to the heads."""
        axis = 1 if cache.block_table is None else 2
        key_scale, value_scale = (
            None if scale is None else self._expand_heads(scale, axis) for scale in (cache.key_scale, cache.value_scale)
        )
        key, value = self._expand_heads(cache.key, axis), self._split_values(cache.value, axis)
        return cache._replace(key=key, value=value, key_scale=key_scale, value_scale=value_scale)

    # ---- from plain heads

    @classmethod
    def from_multi_head(cls, layer: MultiHeadAttention, *, shared_dim: int | None = None) -> Self:
        """Convert a `MultiHeadAttention`; exact by default, with its heads' queries and keys concatenated.

        The mixing has one block per head, so KV heads shared by a group are repeated. With a smaller `shared_dim`,
        projections and mixing approximate the heads' W_Q W_K^T by `polyhead.layers.variants.shared_factors`, which also
        returns the error and weights all input channels equally.

        Args:
            layer: the layer to convert.
            shared_dim: channels of the shared queries and keys; those of all heads by default.

        Returns:
            The converted layer.
        """
        if type(layer) is not MultiHeadAttention:
            raise OptionError(f"from_multi_head takes a plain MultiHeadAttention, got {type(layer).__name__}")
        unsupported = {
            "rotary positions, which rotate every head by the same angles": isinstance(layer.positions, RotatesHeads),
            "qk_norm": layer.q_norm is not None,
            "a combine module": layer.combine is not None,
            "a projection that is not a plain nn.Linear, such as an adapter": not all(
                linear is None or is_plain_linear(linear)
                for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj, layer.gate_proj)
            ),
        }
        if any(unsupported.values()):
            names = " and ".join(name for name, present in unsupported.items() if present)
            raise OptionError(f"from_multi_head does not support a layer with {names}")
        layout, weight = layer.layout, layer.out_proj.weight
        converted = cls(
            layout.embed_dim,
            layout.num_heads,
            shared_dim=shared_dim,
            head_dim=layout.head_dim,
            value_dim=layout.value_dim,
            key_input_dim=layout.key_input_dim,
            value_input_dim=layout.value_input_dim,
            bias=layer.q_proj.bias is not None,
            output_bias=layer.out_proj.bias is not None,
            positions=copy.deepcopy(layer.positions),
            output_gate=layer.output_gate,
            softcap=layer.softcap,
            scale=layer.scale,
            sinks=layer.sinks is not None,
            dropout=layer.dropout,
            finite=layer.finite,
            backend=layer.backend,
            device=weight.device,
            dtype=weight.dtype,
        )
        converted.mask = layer.mask
        if layer.head_gate is not None:
            converted.head_gate = layer.head_gate.detach().clone()
        state = {name: x for name, x in layer.state_dict().items() if name not in ("_extra_state", "head_gate")}
        kv_heads = [layout.key_head(i) for i in range(layout.num_heads)]
        for name in state:
            if name.startswith(("k_proj.", "v_proj.")):
                state[name] = state[name].unflatten(0, (layout.num_kv_heads, -1))[kv_heads].flatten(0, 1)
        if shared_dim is not None:
            state |= _shared_state(state, layout.num_heads, shared_dim)
        converted.load_state_dict({"mixing": converted.mixing.detach(), **state})
        return converted.train(layer.training)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, shared_dim: int | None = None, **options: Any) -> Self:
        """Convert a `torch.nn.MultiheadAttention` (batch first); see `from_multi_head`.

        Args:
            module: the layer to convert.
            shared_dim: channels of the shared queries and keys; those of all heads by default.
            options: options of `MultiHeadAttention.from_torch`.

        Returns:
            The converted layer.
        """
        return cls.from_multi_head(MultiHeadAttention.from_torch(module, **options), shared_dim=shared_dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shared_dim={self.shared_dim}"


def _shared_state(state: dict[str, Tensor], num_heads: int, shared_dim: int) -> dict[str, Tensor]:
    """Return query and key projections with shared_dim channels, and their mixing, for a state dict."""

    def matrices(name: str) -> Tensor:
        """Return the heads' matrices [heads, inputs, head_dim], with a bias as the row of a constant input 1."""
        inputs = [state[f"{name}.weight"].mT]
        inputs += [state[f"{name}.bias"][None]] if f"{name}.bias" in state else []
        return torch.cat(inputs).unflatten(1, (num_heads, -1)).transpose(0, 1)

    factors = shared_factors(matrices("q_proj"), matrices("k_proj"), shared_dim)
    shared_state = {"mixing": factors.mixing}
    for name, factor in (("q_proj", factors.query), ("k_proj", factors.key)):
        width = state[f"{name}.weight"].shape[1]
        shared_state[f"{name}.weight"] = factor[:width].mT
        shared_state |= {f"{name}.bias": factor[width]} if f"{name}.bias" in state else {}
    return shared_state


def check_collaborative(layout: HeadLayout, shared_dim: int | None, qk_norm: str | None) -> None:
    """Raise for options that collaborative heads do not support."""
    checks.check_size("shared_dim", shared_dim)
    if layout.num_kv_heads != layout.num_heads or layout.key_heads is not None:
        raise OptionError(
            "collaborative heads have one key and as many values as heads, got num_kv_heads "
            f"{layout.num_kv_heads} and key_heads {layout.key_heads}; leave both out"
        )
    if qk_norm is not None:
        raise OptionError(f"collaborative heads do not support qk_norm, which would undo the mixing, got {qk_norm!r}")


@register_config("collaborative", CollaborativeAttention)
@dataclass(frozen=True)
class CollaborativeConfig(HeadsConfig):
    """Config of `CollaborativeAttention`.

    Args:
        shared_dim: as in `CollaborativeAttention`.

    >>> CollaborativeConfig(512, 8).shared_dim
    512
    """

    _: KW_ONLY
    shared_dim: int | None = None

    def _check_and_fill(self) -> None:
        super()._check_and_fill()
        check_collaborative(self.layout, self.shared_dim, self.qk_norm)
        self._fill(shared_dim=self.shared_dim or self.layout.num_heads * self.layout.head_dim)

    @property
    def position_layout(self) -> HeadLayout:
        """Head layout that the position module applies to: queries and keys of a head have all shared channels."""
        assert self.shared_dim is not None
        return replace(self.layout, head_dim=self.shared_dim)

"""Drop-in replacement for `torch.nn.MultiheadAttention`.

PyTorch's class is the base class, so constructor, initial weights, state dict and instance checks are the same by
construction. A call that PyTorch would reject is passed to PyTorch, so that errors are PyTorch's on every version.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.layers.torch_compat.forward_steps import (
    is_finite,
    is_mask,
    is_overridden,
    is_readable,
    is_traced,
    masked_keys,
    torch_bias,
    torch_mask,
    with_weights,
)
from polyhead.ops.attention import attention
from polyhead.ops.attention.scaled_dot_product import scaled_dot_product, without_cudnn
from polyhead.ops.common.validation import is_autocast

# PyTorch's inference operator has less overhead for short sequences; beyond this a kernel without weights is faster.
_SHORT = 64
_NATIVE_DEVICES = ("cpu", "cuda", "xpu", torch._C._get_privateuse1_backend_name())
_ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _renamed(function: Any, name: str) -> types.FunctionType:
    """Return a copy of a function under another name, by which TorchScript compiles a method."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__annotations__ = dict(function.__annotations__)
    return copy


def _keep_forward(module: nn.Module, inputs: tuple[Tensor]) -> None:
    """Do nothing; a hook whose presence matters, see `MultiheadAttention.__init__`."""


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with attention that is defined for every mask.

    Arguments, results, initial weights, state dict and errors are those of `torch.nn.MultiheadAttention`, with these
    exceptions:

    - A fully masked row, for which PyTorch may return NaN, has zero weights and the output `out_proj.bias`.
    - NaN and Inf in keys that are masked for every query affect no output and no gradient. A non-finite padding token
      of a self-attention, which is also a query, is replaced by zeros.
    - Attention weights are not materialised, so long sequences need no O(n²) memory, unless weights are returned (or
      dropped, on the CPU).

    Dropout uses PyTorch's random numbers, so a seed drops the weights that PyTorch would drop. Inside
    `nn.TransformerEncoderLayer` the encoder's inference fast path, which bypasses the attention module, is not taken.
    `torch.jit.script` compiles PyTorch's forward: a scripted layer has PyTorch's behaviour for masks, NaN included.
    Nested tensors are supported where PyTorch supports them, and passed to PyTorch.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: those
            of `torch.nn.MultiheadAttention`.

    >>> import torch
    >>> layer = MultiheadAttention(8, 2, batch_first=True)
    >>> tokens = torch.randn(2, 3, 8)
    >>> padding = torch.tensor([[False, False, True], [True, True, True]])
    >>> output, weights = layer(tokens, tokens, tokens, key_padding_mask=padding)
    >>> output.shape, weights.shape, weights[1].abs().max().item()
    (torch.Size([2, 3, 8]), torch.Size([2, 3, 3]), 0.0)
    """

    _scripted_forward = _renamed(nn.MultiheadAttention.forward, "_scripted_forward")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # nn.TransformerEncoderLayer bypasses our forward unless a submodule has a hook. This one never runs, because
        # out_proj is never called, only its weights are read.
        self.out_proj.register_forward_pre_hook(_keep_forward)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `torch.nn.MultiheadAttention.forward`; see there for every argument.

        query is [batch, queries, embed_dim] with `batch_first`, [queries, batch, embed_dim] without, [queries,
        embed_dim] unbatched; key and value likewise. Masks: True masks, floats are added. `is_causal` asserts that
        `attn_mask` is the causal mask.

        Args:
            query, key, value: inputs, of the layout above.
            key_padding_mask: padding of the keys, [batch, keys] or [keys].
            need_weights: return the weights, too.
            attn_mask: [queries, keys] or [batch * num_heads, queries, keys].
            average_attn_weights: return the mean of the weights over heads.
            is_causal: assert that `attn_mask` is the causal mask.

        Returns:
            The output, and the weights or None.
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self._scripted_forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        return self._eager_forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    @torch.jit.unused
    def _eager_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dims = query.dim()
        native = dims == 3 and self._native_supports(query, key, value, key_padding_mask, attn_mask)
        masked = attn_mask is not None or key_padding_mask is not None
        native_is_fast = native and not query.is_nested and (need_weights or query.shape[1] <= _SHORT)
        if native_is_fast and not masked and not is_traced():
            return self._native(query, None, None, need_weights, average_attn_weights)
        # PyTorch trusts the hint and ignores the mask where its kernel supports is_causal.
        causal = is_causal and not native and key_padding_mask is None and not need_weights
        if not self._fits(query, key, value, key_padding_mask, attn_mask, is_causal and not native, causal):
            # Of these calls only those with tensor subclasses record gradients; the others raise or run without.
            with without_cudnn() if torch.is_grad_enabled() and not query.is_nested else nullcontext():
                return super().forward(
                    query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
                )
        if causal:
            attn_mask, masked = None, False
        if attn_mask is not None and key_padding_mask is not None and attn_mask.dtype is not key_padding_mask.dtype:
            # PyTorch's helper, for its warning.
            key_padding_mask = F._canonical_mask(
                key_padding_mask, "key_padding_mask", attn_mask.dtype, "attn_mask", query.dtype
            )
        readable = is_readable(query)
        if native_is_fast and masked and readable:
            output, weights = self._native(query, key_padding_mask, attn_mask, need_weights, average_attn_weights)
            # It multiplies masked values by zero and returns NaN for fully masked rows: both would be non-finite.
            if is_finite(output):
                return output, weights

        hides = masked or causal
        finite = readable and (not hides or (is_finite(key) and (value is key or is_finite(value))))
        if masked and not finite:
            query, key, value = self._zero_nonfinite_padding(query, key, value, key_padding_mask, attn_mask)
        q, k, v = self._project(query, key, value)
        if self.bias_k is not None or self.add_zero_attn:
            k, v, attn_mask, key_padding_mask = self._with_extra_keys(k, v, attn_mask, key_padding_mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        # PyTorch's CPU kernels have no dropout without materialised weights, and a seed must drop the same ones.
        if need_weights or (dropout and (q.device.type == "cpu" or dropout == 1.0)):
            bias = torch_bias(q, k, attn_mask, key_padding_mask, causal)
            output, weights = with_weights(q, k, v, bias, dropout, finite)
        elif finite:
            # The kernel that `attention` would call, without its handling of non-finite values, which was done above.
            bias = torch_bias(q, k, attn_mask, key_padding_mask, False) if masked else None
            output = scaled_dot_product(q, k, v, bias, 0.0, causal)
        else:
            mask = torch_mask(q, k, attn_mask, key_padding_mask, causal)
            output = attention(q, k, v, mask=mask, dropout=dropout).output

        if dims == 2:
            output = output.squeeze(0).transpose(0, 1).flatten(1)  # [queries, embed_dim]
        elif self.batch_first and not dropout:
            output = output.transpose(1, 2).flatten(2)  # [batch, queries, embed_dim]
        else:
            output = output.permute(2, 0, 1, 3).flatten(2)  # [queries, batch, embed_dim]
        output = F.linear(output, self.out_proj.weight, self.out_proj.bias)
        if dropout and dims == 3 and self.batch_first:
            # In PyTorch's memory layout: a dropout after this one draws random numbers in memory order.
            output = output.transpose(0, 1)
        if not need_weights or weights is None:
            return output, None
        if average_attn_weights:
            weights = weights.mean(dim=1)
        return output, weights if dims == 3 else weights.squeeze(0)

    # ---- PyTorch's dispatch conditions

    def _fits(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        needs_mask: bool,
        mask_unread: bool,
    ) -> bool:
        """Return True for a call with plain tensors that PyTorch would accept."""
        weight = self.in_proj_weight if self._qkv_same_embed_dim else self.q_proj_weight
        if weight is None or (self.bias_k is None) != (self.bias_v is None) or not 0.0 <= self.dropout <= 1.0:
            return False
        if query.is_nested or key.is_nested or value.is_nested or is_overridden(query, key, value, weight):
            return False
        dims = query.dim()
        if not 2 <= dims <= 3 or key.dim() != dims or value.dim() != dims:
            return False
        batch = 1
        queries, keys = query.shape[0], key.shape[0]
        if dims == 3:
            if self.batch_first:
                batch, queries, keys = queries, query.shape[1], key.shape[1]
            else:
                batch = query.shape[1]
            if key.shape[0 if self.batch_first else 1] != batch:
                return False
        if (
            key.shape[:-1] != value.shape[:-1]
            or query.shape[-1] != self.embed_dim
            or key.shape[-1] != self.kdim
            or value.shape[-1] != self.vdim
        ):
            return False
        dtype, device, bias = query.dtype, query.device, self.in_proj_bias
        if not is_autocast(device.type) and (
            not (key.dtype is dtype and value.dtype is dtype and weight.dtype is dtype)
            or dtype not in _ATTENTION_DTYPES
            or (bias is not None and bias.dtype is not dtype)
        ):
            return False
        if not (key.device == device and value.device == device and weight.device == device):
            return False
        if needs_mask and attn_mask is None:
            return False
        if attn_mask is not None:
            if not is_mask(attn_mask, dtype):
                return False
            per_head = (batch * self.num_heads, queries, keys)
            any_shape = attn_mask.dim() == 2 or (attn_mask.dim() == 3 and dims == 3)
            fits = attn_mask.shape == (queries, keys) or attn_mask.shape == per_head
            if not (fits or (mask_unread and any_shape)):
                return False
        if key_padding_mask is not None:
            return is_mask(key_padding_mask, dtype) and key_padding_mask.shape == (
                (batch, keys) if dims == 3 else (keys,)
            )
        return True

    def _native_supports(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> bool:
        """Return True if PyTorch would use its inference operator, which reads masks and ignores `is_causal`."""
        if self.training or query is not key or key is not value or not self.batch_first:
            return False
        weight, bias, out = self.in_proj_weight, self.in_proj_bias, self.out_proj
        if weight is None or bias is None or query.dtype is not weight.dtype or bias.dtype is not query.dtype:
            return False
        if self.num_heads % 2 or self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            return False
        for mask in (attn_mask, key_padding_mask):
            if mask is not None and (not isinstance(mask, Tensor) or mask.is_floating_point()):
                return False
        if torch.is_grad_enabled() and (
            query.requires_grad
            or weight.requires_grad
            or bias.requires_grad
            or out.weight.requires_grad
            or out.bias.requires_grad
        ):
            return False
        return (
            torch.backends.mha.get_fastpath_enabled()
            and not torch.is_autocast_enabled()
            and query.device.type in _NATIVE_DEVICES
            and not torch.overrides.has_torch_function((query, weight, bias, out.weight, out.bias))
        )

    # ---- the computation

    def _native(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Call PyTorch's inference operator with boolean masks."""
        hidden, kind = key_padding_mask, None if key_padding_mask is None else 1
        if attn_mask is not None:
            per_head = (tokens.shape[0], self.num_heads)
            hidden, kind = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, per_head), 2
            if key_padding_mask is not None:
                hidden = hidden | key_padding_mask[:, None, None]
            hidden = hidden.expand(*per_head, -1, -1)
        out = self.out_proj
        return torch._native_multi_head_attention(
            tokens,
            tokens,
            tokens,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            out.weight,
            out.bias,
            hidden,
            need_weights,
            average_attn_weights,
            kind,
        )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of every head, [batch, heads, sequence, head_dim], as views."""
        width, bias = self.embed_dim, self.in_proj_bias
        by_head = (self.num_heads, self.head_dim)
        if not self._qkv_same_embed_dim or key is not value:
            if self._qkv_same_embed_dim:
                matrices = self.in_proj_weight.chunk(3)
            else:
                matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            projected = [
                F.linear(x, w, b).view(*x.shape[:-1], *by_head)
                for x, w, b in zip((query, key, value), matrices, biases, strict=True)
            ]
        elif query is key:
            packed = F.linear(query, self.in_proj_weight, bias).view(*query.shape[:-1], 3, *by_head)
            projected = list(packed.unbind(-3))
        else:
            w_q, w_kv = self.in_proj_weight.split((width, 2 * width))
            b_q, b_kv = (None, None) if bias is None else bias.split((width, 2 * width))
            projected = [F.linear(query, w_q, b_q).view(*query.shape[:-1], *by_head)]
            projected += F.linear(key, w_kv, b_kv).view(*key.shape[:-1], 2, *by_head).unbind(-3)
        if query.dim() == 2:
            q, k, v = (x.transpose(0, 1)[None] for x in projected)
        elif self.batch_first:
            q, k, v = (x.transpose(1, 2) for x in projected)
        else:
            q, k, v = (x.permute(1, 2, 0, 3) for x in projected)
        return q, k, v

    def _with_extra_keys(
        self, k: Tensor, v: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Append the learned key of `add_bias_kv` and the zeros of `add_zero_attn`, visible to every query."""
        keys, values = [k], [v]
        shape = (k.shape[0], self.num_heads, 1, self.head_dim)
        if self.bias_k is not None and self.bias_v is not None:
            keys.append(self.bias_k.view(1, *shape[1:]).expand(shape))
            values.append(self.bias_v.view(1, *shape[1:]).expand(shape))
        if self.add_zero_attn:
            keys.append(k.new_zeros(shape))
            values.append(v.new_zeros(shape))
        extra = (0, len(keys) - 1)
        attn_mask = None if attn_mask is None else F.pad(attn_mask, extra)
        key_padding_mask = None if key_padding_mask is None else F.pad(key_padding_mask, extra)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask, key_padding_mask

    def _zero_nonfinite_padding(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Zero non-finite tokens masked for every query, which would enter the projections' gradients."""
        if not is_readable(key) and (key_padding_mask is None or not torch.is_grad_enabled()):
            return query, key, value  # the attention itself keeps them out of the output
        fully_masked = masked_keys(attn_mask, key_padding_mask, self.num_heads)  # [batch or 1, keys]
        if key.dim() == 2:
            fully_masked = fully_masked.squeeze(0)
        elif not self.batch_first:
            fully_masked = fully_masked.transpose(0, 1)

        def cleaned(x: Tensor) -> Tensor:
            return torch.where(fully_masked[..., None], torch.nan_to_num(x, 0.0, 0.0, 0.0), x)

        clean_key = cleaned(key)
        return clean_key if query is key else query, clean_key, clean_key if value is key else cleaned(value)

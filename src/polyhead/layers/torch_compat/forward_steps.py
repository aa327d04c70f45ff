"""Functions of the `torch.nn.MultiheadAttention` replacement: weights, masks, tensor predicates."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.masks import Mask
from polyhead.ops.common.nonfinite import without_nonfinite
from polyhead.ops.common.validation import is_autocast


def with_weights(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, finite: bool
) -> tuple[Tensor, Tensor]:
    """Return output and weights [batch, heads, queries, keys] as PyTorch does, weights after dropout.

    `finite` asserts that keys and values contain no NaN or Inf, and that the values of a mask can be read.
    """
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    empty = None
    if bias is not None and not (finite and _has_no_empty_rows(bias)):
        hidden = bias.detach() == -torch.inf
        if not finite:
            k, v, poison = without_nonfinite(k, v)
            if poison is not None:
                bias = torch.where(hidden, bias, bias + poison[:, :, None])
        empty = hidden.all(-1, keepdim=True)
        bias = bias.masked_fill(empty, 0.0)
    scaled = (q * math.sqrt(1.0 / head_dim)).reshape(batch * heads, queries, head_dim)
    transposed = k.reshape(batch * heads, keys, head_dim).transpose(1, 2)
    if bias is None:
        logits = torch.bmm(scaled, transposed)
    else:
        shared = bias.shape[0] == bias.shape[1] == 1
        bias = bias[0] if shared else bias.expand(batch, heads, -1, -1).reshape(batch * heads, bias.shape[2], keys)
        logits = torch.baddbmm(bias, scaled, transposed)
    weights = logits.softmax(-1)
    if empty is not None:
        weights = weights.view(batch, heads, queries, keys).masked_fill(empty, 0.0).view(weights.shape)
    if dropout:
        weights = F.dropout(weights, dropout)
    output = torch.bmm(weights, v.reshape(batch * heads, keys, head_dim))
    return output.view(batch, heads, queries, head_dim), weights.view(batch, heads, queries, keys)


# ---- masks


def _has_no_empty_rows(bias: Tensor) -> bool:
    """Return True if no row is fully masked; reads the values."""
    return bool(bias.numel()) and bias.detach().amax(-1).amin().item() > -math.inf


def torch_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, causal: bool
) -> Mask | None:
    """Return both masks, or the causal mask instead of them, as a `Mask`."""
    if causal:
        # PyTorch aligns the first query with the first key, so with more keys than queries the mask must be dense.
        return Mask.causal() if q.shape[2] == k.shape[2] else Mask.dense(_causal_mask(q, k))
    if attn_mask is None and key_padding_mask is None:
        return None
    return Mask.from_torch(attn_mask, key_padding_mask, num_heads=q.shape[1])


def torch_bias(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, causal: bool
) -> Tensor | None:
    """Return the masks as one additive bias, [batch or 1, heads or 1, queries or 1, keys]; -inf masks."""
    bias = None
    if causal:
        attn_mask = ~_causal_mask(q, k)
    if attn_mask is not None:
        bias = _as_bias(attn_mask, q)
        bias = bias[None, None] if bias.dim() == 2 else bias.unflatten(0, (q.shape[0], q.shape[1]))
    if key_padding_mask is not None:
        rows = _as_bias(key_padding_mask, q).view(q.shape[0], 1, 1, k.shape[2])
        bias = rows if bias is None else bias + rows
    return bias


def _as_bias(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


def masked_keys(attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int) -> Tensor:
    """Return True for keys masked for every query of every head, [batch or 1, keys]."""

    def hidden(mask: Tensor) -> Tensor:
        return mask if mask.dtype is torch.bool else mask.detach() == -torch.inf

    fully_masked = None
    if attn_mask is not None:
        per_head = hidden(attn_mask).all(-2)
        fully_masked = per_head[None] if per_head.dim() == 1 else per_head.unflatten(0, (-1, num_heads)).all(1)
    if key_padding_mask is not None:
        rows = hidden(key_padding_mask)
        rows = rows[None] if rows.dim() == 1 else rows
        fully_masked = rows if fully_masked is None else fully_masked | rows
    assert fully_masked is not None
    return fully_masked


def is_mask(mask: Tensor, dtype: torch.dtype) -> bool:
    """Return True if PyTorch accepts this mask with inputs of `dtype`; autocast casts float masks."""
    if not isinstance(mask, Tensor) or mask.is_nested:
        return False
    if mask.dtype is torch.bool or mask.dtype is dtype:
        return True
    return mask.is_floating_point() and is_autocast(mask.device.type)


# ---- predicates


def is_overridden(*tensors: Tensor) -> bool:
    """Return True if a tensor subclass overrides `__torch_function__`; modes do not count."""
    if not torch.overrides.has_torch_function(tensors):
        return False
    plain = torch._C._disabled_torch_function_impl
    return any(type(x) is not Tensor and type(x).__torch_function__ is not plain for x in tensors)


def is_traced() -> bool:
    """Return True while tracing, compiling or under a functional transform or dispatch mode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def is_readable(x: Tensor) -> bool:
    """Return True if values can be read without a device synchronisation or a graph break."""
    return x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter) and not is_traced()


def is_finite(x: Tensor) -> bool:
    """Return True only if all elements are finite, by their sum; an overflow gives a harmless False."""
    return math.isfinite(x.detach().sum().item())

"""Stand-ins for flash-attn and xformers: their signatures, with the formula in plain PyTorch.

Their operators are hidden from sessions, as those of a kernel are, unless `shown` is set.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType

import torch
from torch import Tensor

INTERFACE, FMHA, MASKS = "flash_attn.flash_attn_interface", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias"
shown = False


def _attend(query, key, value, allowed=None, bias=None, scale=None, dropout=0.0):
    """The formula over [batch, sequence, heads, head_dim]; returns the output, the log-sum-exp and the weights."""
    with nullcontext() if shown else torch._C.DisableTorchFunction():
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        if bias is not None:
            logits = logits + bias
        weights = logits.softmax(-1).nan_to_num(0.0)
        output = torch.dropout(weights, dropout, True) @ value
        return output.transpose(1, 2), logits.logsumexp(-1), weights


def _band(queries: int, keys: int, causal: bool, window: tuple[int, int]) -> Tensor:
    left, right = window[0], 0 if causal else window[1]
    offset = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        allowed &= offset >= -left
    if right >= 0:
        allowed &= offset <= right
    return allowed


def _flash(q, k, v, dropout_p, softmax_scale, causal, window_size, return_attn_probs):
    allowed = _band(q.shape[1], k.shape[1], causal, window_size)
    result = _attend(q, k, v, allowed, scale=softmax_scale, dropout=dropout_p)
    return result if return_attn_probs else result[0]


def _flash_varlen(q, k, v, offsets_q, offsets_k, dropout_p, softmax_scale, causal, window_size, return_attn_probs):
    parts = [
        _attend(
            *(x[None, start:stop] for x, start, stop in ((q, *of_q), (k, *of_k), (v, *of_k))),
            _band(of_q[1] - of_q[0], of_k[1] - of_k[0], causal, window_size),
            scale=softmax_scale,
            dropout=dropout_p,
        )[0][0]
        for of_q, of_k in zip(
            zip(offsets_q.tolist()[:-1], offsets_q.tolist()[1:], strict=True),
            zip(offsets_k.tolist()[:-1], offsets_k.tolist()[1:], strict=True),
            strict=True,
        )
    ]
    with torch._C.DisableTorchFunction():
        output = torch.cat([*parts, q.new_zeros(len(q) - int(offsets_q[-1]), *v.shape[1:-2], q.shape[1], v.shape[-1])])
    return (output, None, None) if return_attn_probs else output


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return _flash(q, k, v, dropout_p, softmax_scale, causal, window_size, return_attn_probs)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return _flash(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    # As in a package whose functions call each other: a call is counted once.
    q, k, v = qkv.unbind(2)
    module = sys.modules[INTERFACE]
    return module.flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, return_attn_probs=return_attn_probs
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    return _flash_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, softmax_scale, causal, window_size, return_attn_probs
    )


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    k, v = kv.unbind(1)
    return _flash_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, softmax_scale, causal, window_size, return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    q, k, v = qkv.unbind(1)
    return _flash_varlen(
        q, k, v, cu_seqlens, cu_seqlens, dropout_p, softmax_scale, causal, window_size, return_attn_probs
    )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    return _flash(q, k_cache, v_cache, 0.0, softmax_scale, causal, window_size, return_softmax_lse)


class AttentionBias:
    pass


class LowerTriangularMask(AttentionBias):
    pass


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    pass


class LowerTriangularFromBottomRightMask(AttentionBias):
    pass


class BlockDiagonalMask(AttentionBias):
    pass


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    allowed, bias = None, attn_bias
    if isinstance(attn_bias, AttentionBias):
        is_at_the_end = isinstance(attn_bias, LowerTriangularFromBottomRightMask)
        offset = key.shape[1] - query.shape[1] if is_at_the_end else 0
        allowed, bias = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(offset), None
    if query.ndim == 3:
        return memory_efficient_attention(*(x[:, :, None] for x in (query, key, value)), attn_bias, p, scale)[:, :, 0]
    return _attend(query, key, value, allowed, bias, scale, p)[0]


_FLASH = [
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
]
_MASK_CLASSES = [
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    LowerTriangularFromBottomRightMask,
    BlockDiagonalMask,
]
for _function in _FLASH:
    _function.__module__ = INTERFACE
memory_efficient_attention.__module__ = FMHA


def modules() -> dict[str, ModuleType]:
    """Return new modules of both packages, by name."""
    found = {x: ModuleType(x) for x in ("flash_attn", INTERFACE, "xformers", "xformers.ops", FMHA, MASKS)}
    for name, module in found.items():
        parent, _, attribute = name.rpartition(".")
        if parent:
            setattr(found[parent], attribute, module)
    for function in _FLASH:
        for name in ("flash_attn", INTERFACE):
            setattr(found[name], function.__name__, function)
    for name in ("xformers.ops", FMHA):
        found[name].memory_efficient_attention = memory_efficient_attention
    for kind in _MASK_CLASSES:
        setattr(found[MASKS], kind.__name__, kind)
        setattr(found["xformers.ops"], kind.__name__, kind)
    return found

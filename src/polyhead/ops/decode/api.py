"""Attention of new tokens over a KV cache read in place, with the mask and options of `attention`.

Padding lengths become the lengths of the cache's sequences, explicit positions become those of its slots, causal edges
and sliding windows stay as they are, and a relative bias becomes a table. Other mask terms are reported by
`cached_reasons`; such calls use `attention` over plain keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.masks import Mask, Padding
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import NAMES, RowStatistics, Statistics, kernel_reasons
from polyhead.ops.common.tracing import EXPORTED, is_exporting
from polyhead.ops.decode.fused import CacheArguments, decode, decode_reasons, width_reasons


def cached_reasons(
    query: Tensor,
    cache: CacheArguments,
    num_keys: int,
    *,
    mask: Mask | None,
    scale: float | Tensor | None = None,
    sinks: Tensor | None = None,
    statistics: Statistics | None = None,
) -> list[str]:
    """Return the reasons why the decode kernels do not support this call; empty if they do.

    Invalid arguments are among the reasons, so that the caller falls back to `attention`, which raises the error.
    """
    if query.numel() == 0 or num_keys == 0:
        return [f"decode needs queries and keys, got a query of shape {list(query.shape)} and {num_keys} keys"]
    reasons = decode_reasons(query, cache)
    device_type = query.device.type
    if is_exporting():
        reasons.append(EXPORTED)
    if (
        device_type != "meta"
        and torch.is_autocast_enabled(device_type)
        and query.dtype is not torch.get_autocast_dtype(device_type)
    ):
        reasons.append(f"autocast computes in {torch.get_autocast_dtype(device_type)}, got a query of {query.dtype}")
    for name, tensor in (("scale", scale), ("sinks", sinks)):
        if isinstance(tensor, Tensor):
            reasons += _per_head_reasons(name, tensor, query)
    if statistics is not None:
        reasons += kernel_reasons("decode", statistics.names or NAMES)
    if mask is None:
        return reasons
    if not isinstance(mask, Mask):
        return [*reasons, f"mask must be a polyhead.Mask, got {type(mask).__name__}"]
    return reasons + _mask_reasons(mask, query, cache, num_keys)


def cached_attention(
    query: Tensor,
    cache: CacheArguments,
    num_keys: int,
    *,
    mask: Mask | None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    statistics: Statistics | None = None,
) -> AttentionOutput:
    """`attention` over a KV cache, for calls for which `cached_reasons` returns nothing.

    Args:
        query: [batch, heads, queries, head_dim], the new tokens, whose keys and values are already in the cache.
        cache: the tensors alone, without lengths and positions.
        num_keys: tokens of the longest sequence; the last query is aligned with the last key.
        mask, scale, softcap, sinks, statistics: as in `attention`.
    """
    if mask is None:
        mask = Mask()
    if len(mask.padding):
        lengths, new_lengths = _lengths(mask.padding[0], query, num_keys)
        cache = cache._replace(lengths=lengths, new_lengths=new_lengths)
    elif cache.block_table is not None:
        # The last page of a sequence may be only partly filled.
        lengths = torch.full((query.shape[0],), num_keys, dtype=torch.int32, device=query.device)
        cache = cache._replace(lengths=lengths)
    if mask.placed is not None:
        query_position, key_position = (x.to(query.device, torch.int32, non_blocking=True) for x in mask.placed)
        cache = cache._replace(key_position=key_position, query_position=query_position)
    head_scale = scale if isinstance(scale, Tensor) else None
    sm_scale = 1.0 if isinstance(scale, Tensor) else query.shape[3] ** -0.5 if scale is None else scale
    bias = mask.relative_biases[0] if len(mask.relative_biases) else None
    names = () if statistics is None else statistics.wanted(learned_sinks=sinks is not None)
    output, logsumexp, row_stats = decode(
        query,
        cache,
        scale=sm_scale,
        head_scale=head_scale,
        softcap=softcap,
        sinks=sinks,
        left=mask.left,
        right=mask.right,
        first_keys=mask.sinks,
        table=None if bias is None else bias.table,
        table_zero=0 if bias is None else bias.zero,
        names=names,
        sink_keys=1 if statistics is None else statistics.sink_keys,
        window=0 if statistics is None else statistics.window,
        is_supported=True,
    )
    rows = None if statistics is None else RowStatistics(**row_stats)
    return AttentionOutput(output, logsumexp, statistics=rows, backend="fused")


def _per_head_reasons(name: str, tensor: Tensor, query: Tensor) -> list[str]:
    reasons = []
    if tensor.shape != query.shape[1:2] or tensor.device != query.device or not tensor.is_floating_point():
        reasons.append(
            f"{name} must have one floating-point number per head on {query.device}, "
            f"got {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        reasons.append(f"decode has no gradient, got a {name} that requires one")
    return reasons


def _mask_reasons(mask: Mask, query: Tensor, cache: CacheArguments, num_keys: int) -> list[str]:
    batch, heads, queries, _ = query.shape
    reasons = []
    for term_name, terms in (
        ("documents", mask.packed),
        ("a dense mask", mask.allowed),
        ("a bias tensor", mask.biases),
    ):
        if len(terms):
            reasons.append(
                f"decode supports causal edges, windows, lengths, positions and a relative bias, got {term_name}"
            )
    if len(mask.padding) > 1 or (len(mask.padding) and mask.placed is not None):
        reasons.append("decode takes one set of lengths or positions, got several")
    for padding in mask.padding:
        reasons += _padding_reasons(padding, batch, queries, num_keys, query.device)
    if mask.placed is not None:
        if cache.block_table is not None:
            reasons.append("a paged cache takes no explicit positions, got a mask with positions")
        elif cache.holds_latents and len(width_reasons(cache._replace(key_position=mask.placed[1]))):
            reasons.append("latents of more than 256 channels take no explicit positions, got a mask with positions")
        for rows, size in zip(mask.placed, (queries, num_keys), strict=True):
            if rows.shape[0] not in (1, batch) or rows.shape[1] != size or rows.device.type == "meta":
                reasons.append(f"positions must be [{batch} or 1, {size}], got {list(rows.shape)} on {rows.device}")
    if len(mask.relative_biases) > 1:
        reasons.append(f"decode takes one relative bias, got {len(mask.relative_biases)}")
    for term in mask.relative_biases:
        if term.table.shape[0] not in (1, heads) or term.table.device != query.device:
            reasons.append(
                f"a relative bias needs one row per head on {query.device}, "
                f"got {term.table.shape[0]} rows for {heads} heads on {term.table.device}"
            )
        if term.table.requires_grad and torch.is_grad_enabled():
            reasons.append("decode has no gradient, got a relative bias that requires one")
    return reasons


def _padding_reasons(padding: Padding, batch: int, queries: int, num_keys: int, device: torch.device) -> list[str]:
    reasons = []
    if padding.side != "right":
        reasons.append(f"decode needs padding on the right, got padding on the {padding.side}")
    for lengths, size in ((padding.keys, num_keys), (padding.queries, queries)):
        if lengths is None:
            continue
        if lengths.shape[0] != batch or lengths.device.type not in ("cpu", device.type):
            reasons.append(f"lengths must have {batch} entries, got {lengths.shape[0]} on {lengths.device}")
        elif lengths.device.type == "cpu" and not torch.compiler.is_compiling() and int(lengths.max()) > size:
            reasons.append(f"lengths must not exceed the sequence, got {int(lengths.max())} for {size} tokens")
    return reasons


def _lengths(padding: Padding, query: Tensor, num_keys: int) -> tuple[Tensor, Tensor | None]:
    """Return lengths of sequences and of their new tokens, int32 on the query's device.

    Makes at most one copy to the device.
    """
    real_queries = padding.keys if padding.queries is None and query.shape[2] == num_keys else padding.queries
    if real_queries is None:
        return padding.keys.to(query.device, torch.int32, non_blocking=True), None
    if padding.keys.device != real_queries.device:
        real_queries = real_queries.to(padding.keys.device, non_blocking=True)
    both = torch.stack([padding.keys, real_queries]).to(torch.int32).to(query.device, non_blocking=True)
    return both[0], both[1]

"""Calls of FlexAttention, read as calls of `polyhead.attention`: its mask functions are evaluated for every pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator

from polyhead.masks import Mask
from polyhead.observation.attention_calls import (
    AttentionCall,
    NotUnderstood,
    RunningModule,
    as_mask,
    check_tensors,
    is_cross,
    matching_heads,
)
from polyhead.ops.attention import attention

_MOST_PAIRS = 1 << 31  # of a mask that is evaluated


def read_flex(
    running: RunningModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *buffers: Any,
) -> AttentionCall:
    """Read a call of the operator of `flex_attention`."""
    from torch.nn.attention.flex_attention import _identity

    axes = check_tensors(running, query, key, value)
    if score_mod is not _identity:
        name = getattr(score_mod, "__name__", type(score_mod).__name__)
        raise NotUnderstood(f"its logits are changed by a function, score_mod {name!r}")
    if kernel_options.get("OUTPUT_MAX"):
        raise NotUnderstood("its caller requests the max scores")
    query, key, value = matching_heads(query, key, value, grouped=True)
    mask = _mask(block_mask, query, key)
    return AttentionCall(query, key, value, mask, scale, is_cross(running, query, key, mask), axes)


def run_flex(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator as `flex_attention` does where it is not compiled.

    In eager mode, which a session enforces, tensors that `score_mod` reads would get no gradients.
    """
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)

    def operator(*args: Any, **kwargs: Any) -> Any:
        return flex_operator(*args, **kwargs)

    with torch.compiler.set_stance("default"):
        return torch.compile(operator, backend="eager", fullgraph=True)(*args, **kwargs)


def attend_flex(call: AttentionCall, args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a call with `polyhead.attention`: the eager operator materialises the weights.

    Returns the results of the operator: head outputs, log-sum-exp in base 2, and no max scores.
    """
    result = attention(call.query, call.key, call.value, mask=call.mask, scale=call.scale, logsumexp=True)
    output, logsumexp = result.output, result.logsumexp
    assert logsumexp is not None
    if call.query.stride(2) > call.query.stride(1):  # the outputs have the memory layout of the queries
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
    if args[6].get("BACKEND") != "FLASH":  # the options of the kernel
        logsumexp = logsumexp / math.log(2.0)
    return output, logsumexp, logsumexp.new_empty(0)


def _mask(block_mask: tuple[Any, ...], query: Tensor, key: Tensor) -> Mask | None:
    """Return the mask of a `BlockMask`; raise if its blocks and its function differ, as compiled code reads both."""
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    _, _, counts, indices, full_counts, full_indices, *_ = block_mask
    query_size, key_size, mask_mod = block_mask[-3:]
    queries, keys = query.shape[2], key.shape[2]
    batch, heads = counts.shape[:2]
    if mask_mod is noop_mask and counts.shape[2] == indices.shape[3] == 1 and min(query_size, key_size) >= 1 << 30:
        return None  # no block mask was given
    if batch * heads * queries * keys > _MOST_PAIRS:
        raise NotUnderstood(f"its mask is too large to evaluate for each pair, got {queries} queries and {keys} keys")
    visible = create_mask(mask_mod, batch, heads, queries, keys, device=query.device)
    in_blocks = _in_blocks(counts, indices, query_size, key_size, queries, keys)
    shown = visible & in_blocks
    if full_counts is not None:
        shown = shown | _in_blocks(full_counts, full_indices, query_size, key_size, queries, keys)
    if not torch.equal(shown, visible):
        raise NotUnderstood("the blocks of its block mask differ from its mask_mod, of which eager code reads one")
    return as_mask(visible, queries, keys)


def _in_blocks(counts: Tensor, indices: Tensor, query_size: int, key_size: int, queries: int, keys: int) -> Tensor:
    """Return which pairs are in one of the first `counts` blocks of each row, [batch, heads, queries, keys]."""
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    listed = torch.where(is_listed, indices, 0).long()  # what follows the listed blocks may be anything
    blocks = torch.zeros_like(listed).scatter_add(-1, listed, is_listed.long()) > 0
    tokens = blocks.repeat_interleave(query_size, 2)[:, :, :queries]
    return tokens.repeat_interleave(key_size, 3)[..., :keys]

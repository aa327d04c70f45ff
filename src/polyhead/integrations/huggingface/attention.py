"""Attention function for transformers: translates its arguments to those of `polyhead.attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhead.errors import MaskError, OptionError
from polyhead.integrations.huggingface.arguments import refuse_unknown
from polyhead.integrations.huggingface.described_masks import DescribedMask
from polyhead.integrations.huggingface.mask_functions import ORIGINALS
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, Statistics, attention
from polyhead.ops.common.dropout import draw_seed, keep_tile
from polyhead.ops.common.gates import gate_factors
from polyhead.ops.common.visibility import resolve
from polyhead.ops.uneven_groups import select_heads, uneven_attention

# Module attribute with the KV head of each query head, for uneven groups.
KEY_HEADS = "polyhead_key_heads"
# Families whose eager attention applies learned sinks to the output but returns weights that sum to 1.
SINKS_NOT_IN_WEIGHTS = ("granite_swa", "granitemoe_swa")


class WatchedCall(Protocol):
    """One observed call: the requested statistics, the gates of its heads, and a callback for the result."""

    requested: Statistics | None
    has_collectors: bool  # whether to compute the log-sum-exp, which collectors need
    gate: Tensor | None  # [heads], [batch, heads] or [batch, heads, queries]
    mask: Mask | None  # the one to use; None for that of the call

    def notify(self, attended: Attended) -> Tensor | None:
        """Report the result; compiled code continues with the tensor that this returns, if any, as its output."""


# Called with (module, query, key, mask, learned_sinks=) before every attention call of an observed module; None if the
# call is not observed. Keyed by module rather than a context variable: recomputation in a backward runs in an autograd
# thread.
WATCHERS: dict[nn.Module, Callable[..., WatchedCall | None]] = {}
# Module attribute with the function that compiled code calls instead. Not by module: layers share compiled code.
TRACED = "_polyhead_traced"
# Attribute of observed modules with the implementation that they use outside of the session, e.g. "sdpa" or "eager".
# Its rules apply: a session must not change what a module computes.
ORIGINAL = "_polyhead_original"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    head_mask: Tensor | None = None,
    layer_head_mask: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the signature of transformers' attention functions.

    Takes [batch, heads, queries, head_dim] and returns [batch, queries, heads, value_dim]. Keys and values have
    num_kv_heads heads. Weights are returned if `output_attentions` was requested, and match eager attention: in the
    dtype of the query, after dropout, without the weight of a learned sink.
    """
    refuse_unknown(kwargs)
    if head_mask is not None and layer_head_mask is not None:
        raise OptionError("pass head_mask or layer_head_mask, got both")
    if position_bias is not None and attention_mask is not None and _is_additive(attention_mask):
        position_bias, attention_mask = position_bias + attention_mask, None  # kernels read one bias
        is_causal, sliding_window = False, None
    original = _original(module)
    if original in ("sdpa", "eager"):  # they read no packed sequences
        cu_seq_lens_q = cu_seq_lens_k = seq_idx = None
    mask, key, value = _mask_and_keys(module, query, key, value, attention_mask, is_causal, sliding_window)
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    if position_bias is not None:
        mask = _intersect(mask, Mask.bias(_four_dimensional(position_bias, keys), zero_one=True))
    for extra_mask in (_selected_keys(indices, keys), _documents(cu_seq_lens_q, cu_seq_lens_k, seq_idx, query, key)):
        mask = _intersect(mask, extra_mask)
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling.to(query.dtype), 1.0
    if key.shape[0] == 1 != batch:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    with_weights = _weights_requested(output_attentions)
    rate = float(dropout) if getattr(module, "training", False) else 0.0
    seed = draw_seed(query.device) if with_weights and rate else None
    key_heads = getattr(module, KEY_HEADS, None)
    begin = getattr(module, TRACED, None) if torch.compiler.is_compiling() else WATCHERS.get(module)
    if key_heads is not None and (begin is not None or seed is not None):
        # Observers and the dropout mask for returned weights only support even groups.
        key, value, key_heads = select_heads(key, key_heads), select_heads(value, key_heads), None
    watched = None if begin is None else begin(module, query, key, mask, learned_sinks=s_aux is not None)
    if watched is not None and watched.mask is not None:
        mask = watched.mask
    sinks = None if s_aux is None else s_aux.reshape(-1)
    attention_function = attention if key_heads is None else partial(uneven_attention, key_heads=key_heads)
    result = attention_function(
        query,
        key,
        value,
        mask=mask,
        scale=scaling,
        softcap=softcap,
        sinks=sinks,
        dropout=rate,
        seed=seed,
        weights=with_weights,
        statistics=None if watched is None else watched.requested,
        logsumexp=watched is not None and watched.has_collectors,
        finite=True,  # like transformers' own attention, do not check masked keys for NaN
    )
    # Hidden by the least number rather than -inf: in eager attention, and where sdpa has a bias.
    is_eager = original == "eager" and isinstance(attention_mask, DescribedMask)
    is_biased = original == "sdpa" and position_bias is not None and attention_mask is not None
    if sinks is None and (is_eager or is_biased):
        result = _with_uniform_rows(result, mask, query, key, value)
    output, weights = result.output, result.weights
    if watched is not None:
        noted = watched.notify(Attended(query, key, value, result, mask, scaling, softcap, sinks))
        output = output if noted is None else noted
    if weights is not None:
        weights = weights.to(query.dtype)
        if s_aux is not None and _family(module) in SINKS_NOT_IN_WEIGHTS:
            weights = weights / weights.sum(-1, keepdim=True)
        if seed is not None:
            keep_mask = keep_tile(seed, rate, batch, heads, (0, queries), (0, keys))
            weights = torch.where(keep_mask, weights / (1 - rate), 0.0)
    gates = _gates(head_mask if layer_head_mask is None else layer_head_mask, heads)
    if watched is not None and watched.gate is not None:
        output = output * gate_factors(watched.gate, batch, heads, queries).to(output.dtype)
    if gates is not None:
        output = output * gates.to(output.dtype)
        weights = None if weights is None else weights * gates.to(weights.dtype)
    return output.transpose(1, 2).contiguous(), weights


def _original(module: nn.Module) -> str:
    """Return the implementation that a module uses outside of the session that switched its config; "" without one."""
    original: str = getattr(module, ORIGINAL, "")
    if original or torch.compiler.is_compiling():
        return original
    return ORIGINALS.get(id(getattr(module, "config", None)), "")  # of another model with the same config


def _mask_and_keys(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> tuple[Mask | None, Tensor, Tensor]:
    """Return the mask and the visible part of keys and values, by the rules of transformers' sdpa function.

    A given mask is complete, including the sliding window. Without one, a causal module uses a causal mask, except for
    a single query, which is the last token; the first query is then aligned with the first key, since the rest of a
    preallocated cache is empty. A module without `is_causal` is not causal: our mask function always returns a mask for
    causal models, and encoders such as splinter's do not set it.

    In a session, the rules are those of the implementation that the module uses outside of it: eager attention adds a
    boolean mask like any other and without a mask masks nothing; sdpa has no window without a mask, and takes a module
    without `is_causal` for a causal one.
    """
    queries, keys, original = query.shape[2], key.shape[2], _original(module)
    if attention_mask is not None:
        is_added = original == "eager" and isinstance(attention_mask, Tensor) and not attention_mask.is_floating_point()
        values = attention_mask.to(query.dtype) if is_added else attention_mask
        return _as_mask(values, query.shape[0], queries, keys), key, value
    if original == "eager":
        return None, key, value
    sliding_window = None if original == "sdpa" else sliding_window
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", original == "sdpa")
    if not causal:
        window = None if sliding_window is None else Mask.window(left=int(sliding_window), right=int(sliding_window))
        return window, key, value
    if queries > 1 and keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
    if sliding_window is not None:
        return Mask.window(int(sliding_window)), key, value
    return Mask.causal() if queries > 1 else None, key, value


def _with_uniform_rows(
    result: AttentionOutput, mask: Mask | None, query: Tensor, key: Tensor, value: Tensor
) -> AttentionOutput:
    """Return a result whose rows without visible keys have the mean of all values.

    The minimum of the dtype, added to all logits of a row, leaves nothing of them.
    """
    if mask is None or not len(mask.tensors):  # a query always sees itself
        return result
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    visibility = resolve(mask, batch=batch, heads=heads, queries=queries, keys=keys, device=query.device)
    allowed = None if visibility is None else visibility.allowed_tile((0, queries), (0, keys))
    if allowed is None:
        return result
    is_empty = ~allowed.any(-1, keepdim=True)  # [batch or 1, heads or 1, queries, 1]
    mean = value.mean(2, keepdim=True).repeat_interleave(heads // value.shape[1], 1)
    output, weights = torch.where(is_empty, mean, result.output), result.weights
    if weights is not None:
        weights = torch.where(is_empty, 1 / keys, weights)
    return replace(result, output=output, weights=weights)


def _as_mask(attention_mask: Tensor, batch: int, queries: int, keys: int) -> Mask:
    if not isinstance(attention_mask, Tensor):
        raise MaskError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if isinstance(attention_mask, DescribedMask):
        if (attention_mask.shape[0], *attention_mask.shape[2:]) == (batch, queries, keys):
            # The values may have been modified in place. A compiled graph can read the attribute but not call `dense`.
            made = attention_mask.made
            if made is None:
                return attention_mask.description
            return Mask.dense(made) if made.dtype is torch.bool else Mask.bias(made, zero_one=True)
        attention_mask = attention_mask.dense()  # a description is only valid for its own sizes
    if attention_mask.dtype is torch.bool:
        return Mask.dense(_four_dimensional(attention_mask, keys))
    if attention_mask.is_floating_point():
        return Mask.bias(_four_dimensional(attention_mask, keys), zero_one=True)
    raise MaskError(
        "attention_mask must be boolean (True = may attend) or floating point (added to the logits), "
        f"got {attention_mask.dtype} of shape {list(attention_mask.shape)}; for a 0/1 mask pass mask.bool()"
    )


def _four_dimensional(tensor: Tensor, keys: int) -> Tensor:
    """Broadcast to [batch or 1, heads or 1, queries or 1, keys].

    A mask for a longer, preallocated cache is truncated to the existing keys.
    """
    if tensor.ndim < 4:
        tensor = tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
    if tensor.shape[-1] > keys:
        return tensor[..., :keys]
    return tensor.expand(*tensor.shape[:-1], keys) if tensor.shape[-1] == 1 != keys else tensor


def _family(module: nn.Module) -> str:
    return type(module).__module__.split(".")[-2] if "." in type(module).__module__ else ""


def _is_additive(attention_mask: Tensor) -> bool:
    described = isinstance(attention_mask, DescribedMask)
    return isinstance(attention_mask, Tensor) and attention_mask.is_floating_point() and not described


def _intersect(mask: Mask | None, other: Mask | None) -> Mask | None:
    return other if mask is None else mask if other is None else mask & other


def _selected_keys(indices: Tensor | None, keys: int) -> Mask | None:
    """Return a mask of the keys that an indexer selected for each query, [batch, queries, selected]."""
    if indices is None:
        return None
    if indices.ndim != 3:
        raise OptionError(f"indices must be [batch, queries, selected keys], got shape {list(indices.shape)}")
    selected = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    return Mask.dense(selected.scatter(-1, indices.long(), True)[:, None])


def _documents(
    ends_q: Tensor | None, ends_k: Tensor | None, seq_idx: Tensor | None, query: Tensor, key: Tensor
) -> Mask | None:
    """Return a mask of packed sequences, from cumulative lengths of one flat row or from sequence indices."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    mask = None
    if ends_q is not None or ends_k is not None:
        if batch != 1 or ends_q is None or ends_k is None or queries != keys:
            raise OptionError(
                "cu_seq_lens_q and cu_seq_lens_k must both be passed, for a batch of 1 with as many queries as keys, "
                f"got {batch} rows of {queries} queries and {keys} keys"
            )
        index = torch.arange(keys, device=key.device)
        ids = [torch.searchsorted(ends.to(index)[1:].contiguous(), index, right=True) for ends in (ends_q, ends_k)]
        if ends_q is ends_k:
            mask = Mask.documents(ids[0])
        else:  # positions count from the first key of each document, as `sink_mass` does
            starts = [ends_k.to(index)[x.clamp_max(len(ends_k) - 1)] for x in ids]
            mask = Mask.documents(*ids) & Mask.positions(index - starts[0], index - starts[1])
    if seq_idx is not None:
        if tuple(seq_idx.shape) not in ((batch, keys), (1, keys)) or queries != keys:
            raise OptionError(
                f"seq_idx must be [batch, sequence], with as many queries as keys, got shape {list(seq_idx.shape)} "
                f"for {queries} queries and {keys} keys"
            )
        more = Mask.documents(seq_idx)
        mask = more if mask is None else mask & more
    return mask


def _gates(head_mask: Tensor | None, heads: int) -> Tensor | None:
    """Return one factor per head, [batch or 1, heads, 1, 1]."""
    if head_mask is None:
        return None
    if tuple(head_mask.shape) == (heads,):
        return head_mask.view(1, heads, 1, 1)
    if head_mask.ndim != 4 or tuple(head_mask.shape[1:]) != (heads, 1, 1):
        raise OptionError(
            "head_mask must be [heads] or [batch or 1, heads, 1, 1], "
            f"got shape {list(head_mask.shape)} for {heads} heads"
        )
    return head_mask


def _weights_requested(output_attentions: bool | None) -> bool:
    """Return whether the caller of the model requested the attention weights.

    Some models do not pass the flag on, or pass their own default; transformers then captures the weights with hooks,
    which is visible in its active output collector.
    """
    if output_attentions:
        return True
    from transformers.utils import output_capturing

    collector = output_capturing._active_collector
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False):
        return False  # no collector was opened inside this graph, and a graph cannot read outer state
    collected = collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)

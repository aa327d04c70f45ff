"""The attention function: what transformers hands over, said in the words of `polyhead.attention`."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhead.errors import MaskError, OptionError
from polyhead.integrations.huggingface.arguments import refuse_unknown
from polyhead.integrations.huggingface.described_masks import DescribedMask
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import Statistics, attention
from polyhead.ops.common.dropout import draw_seed, keep_tile
from polyhead.ops.common.gates import gate_factors
from polyhead.ops.uneven_groups import select_heads, uneven_attention

# A module under this name says which KV head each query head reads, where groups are not even.
KEY_HEADS = "polyhead_key_heads"
# Families whose eager attention scales its output by what a learned sink leaves, and returns weights that sum to one.
SINKS_APART = ("granite_swa", "granitemoe_swa")


class WatchedCall(Protocol):
    """One call that somebody watches: what is to be told of it, whom to tell, and a factor for each head."""

    requested: Statistics | None
    has_collectors: bool  # whether the log-sum-exp is wanted as well, for a second look
    gate: Tensor | None  # [heads], [batch, heads] or [batch, heads, queries]

    def notify(self, attended: Attended) -> None: ...


class Watcher(Protocol):
    """Who watches a module: asked before every call, None where this one is left alone."""

    def begin(
        self, module: nn.Module, query: Tensor, key: Tensor, mask: Mask | None, *, learned_sinks: bool
    ) -> WatchedCall | None: ...


# By module and not by context: what a backward computes again runs in a thread of autograd's own.
WATCHERS: dict[nn.Module, Watcher] = {}


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
    """Attention as models of transformers call it: [batch, heads, queries, head_dim] in, queries before heads out.

    Keys and values keep their own number of heads. Weights come back where the caller asked for `output_attentions`,
    as eager gives them: in the dtype of the query, after dropout, without the share of a learned sink.
    """
    refuse_unknown(kwargs)
    if head_mask is not None and layer_head_mask is not None:
        raise OptionError("give head_mask or layer_head_mask, got both")
    if position_bias is not None and attention_mask is not None and _is_additive(attention_mask):
        position_bias, attention_mask = position_bias + attention_mask, None  # kernels read one bias
        is_causal, sliding_window = False, None
    mask, key, value = _mask(module, query, key, value, attention_mask, is_causal, sliding_window)
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    if position_bias is not None:
        mask = _both(mask, Mask.bias(_four_dimensional(position_bias, keys), zero_one=True))
    for more in (_selected(indices, keys), _documents(cu_seq_lens_q, cu_seq_lens_k, seq_idx, query, key)):
        mask = _both(mask, more)
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling.to(query.dtype), 1.0
    if key.shape[0] == 1 != batch:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    wanted = _wants_weights(output_attentions)
    rate = float(dropout) if getattr(module, "training", False) else 0.0
    seed = draw_seed(query.device) if wanted and rate else None
    key_heads = getattr(module, KEY_HEADS, None)
    watcher = None if torch.compiler.is_compiling() else WATCHERS.get(module)
    if key_heads is not None and (watcher is not None or seed is not None):
        # Who watches knows of even groups alone, and so does the mask of dropout that weights are told with.
        key, value, key_heads = select_heads(key, key_heads), select_heads(value, key_heads), None
    watched = None if watcher is None else watcher.begin(module, query, key, mask, learned_sinks=s_aux is not None)
    sinks = None if s_aux is None else s_aux.reshape(-1)
    attending = attention if key_heads is None else partial(uneven_attention, key_heads=key_heads)
    result = attending(
        query,
        key,
        value,
        mask=mask,
        scale=scaling,
        softcap=softcap,
        sinks=sinks,
        dropout=rate,
        seed=seed,
        weights=wanted,
        statistics=None if watched is None else watched.requested,
        logsumexp=watched is not None and watched.has_collectors,
        finite=True,  # as transformers' own attention: nobody looks for NaN in keys that are hidden
    )
    if watched is not None:
        watched.notify(Attended(query, key, value, result, mask, scaling, softcap, sinks))
    output, weights = result.output, result.weights
    if weights is not None:
        weights = weights.to(query.dtype)
        if s_aux is not None and _family(module) in SINKS_APART:
            weights = weights / weights.sum(-1, keepdim=True)
        if seed is not None:
            kept = keep_tile(seed, rate, batch, heads, (0, queries), (0, keys))
            weights = torch.where(kept, weights / (1 - rate), 0.0)
    gates = _gates(head_mask if layer_head_mask is None else layer_head_mask, heads)
    if watched is not None and watched.gate is not None:
        output = output * gate_factors(watched.gate, batch, heads, queries).to(output.dtype)
    if gates is not None:
        output = output * gates.to(output.dtype)
        weights = None if weights is None else weights * gates.to(weights.dtype)
    return output.transpose(1, 2).contiguous(), weights


def _mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> tuple[Mask | None, Tensor, Tensor]:
    """Who may attend to whom, by the rules of transformers' own function for sdpa, and the keys that are left.

    A mask that arrives says all, window included. Without one a module that is causal is causal, except for a single
    query, which is the last; and the first query then stands beside the first key, the rest of a preallocated cache
    being empty. A module that does not say is not causal: our mask function never leaves a causal model without a mask,
    and an encoder such as splinter's says nothing.
    """
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is not None:
        return _as_mask(attention_mask, query.shape[0], queries, keys), key, value
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    if not causal:
        window = None if sliding_window is None else Mask.window(left=int(sliding_window), right=int(sliding_window))
        return window, key, value
    if queries > 1 and keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
    if sliding_window is not None:
        return Mask.window(int(sliding_window)), key, value
    return Mask.causal() if queries > 1 else None, key, value


def _as_mask(attention_mask: Tensor, batch: int, queries: int, keys: int) -> Mask:
    if not isinstance(attention_mask, Tensor):
        raise MaskError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if isinstance(attention_mask, DescribedMask):
        if (attention_mask.shape[0], *attention_mask.shape[2:]) == (batch, queries, keys):
            # Somebody may have written into the values. A compiled graph can read them and not call a method.
            made = attention_mask.made
            return attention_mask.description if made is None else Mask.bias(made, zero_one=True)
        attention_mask = attention_mask.dense()  # a description is bound to the sizes it was made for
    if attention_mask.dtype is torch.bool:
        return Mask.dense(_four_dimensional(attention_mask, keys))
    if attention_mask.is_floating_point():
        return Mask.bias(_four_dimensional(attention_mask, keys), zero_one=True)
    raise MaskError(
        "attention_mask must be boolean (True = may attend) or floating point (added to the logits), "
        f"got {attention_mask.dtype} of shape {list(attention_mask.shape)}; for a 0/1 mask pass mask.bool()"
    )


def _four_dimensional(tensor: Tensor, keys: int) -> Tensor:
    """[batch or 1, heads or 1, queries or 1, keys], by the rules of broadcasting.

    A mask made for a longer, preallocated cache is cut to the keys there are.
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


def _both(mask: Mask | None, more: Mask | None) -> Mask | None:
    return more if mask is None else mask if more is None else mask & more


def _selected(indices: Tensor | None, keys: int) -> Mask | None:
    """The keys an indexer picked for each query, [batch, queries, picked]; the others are hidden."""
    if indices is None:
        return None
    if indices.ndim != 3:
        raise OptionError(f"indices must be [batch, queries, picked keys], got shape {list(indices.shape)}")
    seen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    return Mask.dense(seen.scatter(-1, indices.long(), True)[:, None])


def _documents(
    ends_q: Tensor | None, ends_k: Tensor | None, seq_idx: Tensor | None, query: Tensor, key: Tensor
) -> Mask | None:
    """Packed sequences, said by their cumulative lengths in one flat row or by the number of each token's sequence."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    mask = None
    if ends_q is not None or ends_k is not None:
        if batch != 1 or ends_q is None or ends_k is None or queries != keys:
            raise OptionError(
                "cu_seq_lens_q and cu_seq_lens_k go together and speak of one flat row of as many queries as keys, "
                f"got {batch} rows of {queries} queries and {keys} keys"
            )
        index = torch.arange(keys, device=key.device)
        ids = [torch.searchsorted(ends.to(index)[1:].contiguous(), index, right=True) for ends in (ends_q, ends_k)]
        mask = Mask.documents(ids[0]) if ends_q is ends_k else Mask.documents(*ids) & Mask.positions(index, index)
    if seq_idx is not None:
        if tuple(seq_idx.shape) not in ((batch, keys), (1, keys)) or queries != keys:
            raise OptionError(
                f"seq_idx must be [batch, sequence] of as many queries as keys, got shape {list(seq_idx.shape)} "
                f"for {queries} queries and {keys} keys"
            )
        more = Mask.documents(seq_idx)
        mask = more if mask is None else mask & more
    return mask


def _gates(head_mask: Tensor | None, heads: int) -> Tensor | None:
    """A factor for each head, [batch or 1, heads, 1, 1]."""
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


def _wants_weights(output_attentions: bool | None) -> bool:
    """Whether the caller of the model asked for the weights.

    Some models do not hand the flag on, or hand on their own default; transformers then gathers the weights with hooks,
    and says so in the list it has open for them.
    """
    if output_attentions:
        return True
    from transformers.utils import output_capturing

    collector = output_capturing._active_collector
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False):
        return False  # no list was opened inside this graph, and a graph cannot look outside
    collected = collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)

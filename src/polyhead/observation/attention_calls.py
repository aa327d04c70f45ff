"""Calls of attention functions of PyTorch, read as calls of `polyhead.attention`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.masks import Mask, is_readable
from polyhead.observation.forward_arguments import forward_arguments
from polyhead.observation.torch_modules import FunctionArguments, is_same
from polyhead.observation.transformers_models import SOURCES
from polyhead.ops.common.tracing import is_transformed

if TYPE_CHECKING:
    from polyhead.observation.materialised_calls import MaterialisedCall

# Names under which modules keep their number of heads, and receive the tokens of the keys.
_HEAD_COUNTS = ("num_heads", "n_heads", "heads", "n_head", "nhead", "num_attention_heads", "num_attn_heads")
_SOURCES = (*SOURCES, "context", "memory", "encoder_out", "encoder_output", "source", "xa", "kv", "key", "k")
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
_CROSS_NAMES = ("encoder_attn", "src_attn", "enc_attn")


class NotUnderstood(Exception):
    """Reason why an attention call is not observed."""


@dataclass(slots=True, eq=False)
class RunningModule:
    """A module that is running, its inputs, and the number of attention functions that it has called."""

    module: nn.Module
    path: str
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    calls: int = 0
    is_reported: bool = False  # whether its attention is reported in another way
    outer: RunningModule | None = None  # the module that called it
    pending: list[MaterialisedCall] = field(default_factory=list)  # attention that is reported when it returns
    has_unknown_softmax: bool = False  # whether it has a hand-written attention that was not understood

    def around(self) -> Iterator[RunningModule]:
        """Iterate over the modules that this module runs in, from the inside."""
        module = self.outer
        while module is not None:
            yield module
            module = module.outer

    def inputs(self) -> dict[str, Any]:
        """Return the inputs by name."""
        return forward_arguments(self.module, self.positional, self.keywords)

    def tensors(self) -> dict[str, Tensor]:
        """Return the floating-point inputs by name."""
        return {name: x for name, x in self.inputs().items() if isinstance(x, Tensor) and x.is_floating_point()}


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, eq=False)
class HeadAxes:
    """Conversion between the axes of a call and [batch, heads, sequence, dim], by views where possible."""

    split: Callable[[Tensor], Tensor] = _same
    join: Callable[[Tensor], Tensor] = _same


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One attention call with the arguments of `polyhead.attention`."""

    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    mask: Mask | None
    scale: float | None
    cross: bool
    axes: HeadAxes = field(default_factory=HeadAxes)
    tokens: Tensor | None = None  # [batch, queries], False for padding; None: as the mask shows


def read_scaled_dot_product(
    running: RunningModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Read a call of `F.scaled_dot_product_attention`; weights are those before dropout."""
    axes = check_tensors(running, query, key, value)
    rank = query.ndim
    ends_aligned = _is_aligned_at_the_end(attn_mask)
    if ends_aligned is not None:
        is_causal, attn_mask = True, None
    elif attn_mask is not None:
        if is_causal:
            raise NotUnderstood("it has a mask and is_causal, which PyTorch did not define")
        attn_mask = split_mask(attn_mask, query, axes)
    query, key, value = matching_heads(*(axes.split(x) for x in (query, key, value)), grouped=enable_gqa or rank == 4)
    if is_causal and not ends_aligned:
        return causal_from_the_start(query, key, value, scale, axes)
    if is_causal:
        return AttentionCall(query, key, value, Mask.causal(), scale, cross=False, axes=axes)
    queries, keys = query.shape[2], key.shape[2]
    mask = None if attn_mask is None else as_mask(attn_mask, queries, keys)
    return AttentionCall(query, key, value, mask, scale, is_cross(running, query, key, mask), axes)


def causal_from_the_start(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, axes: HeadAxes
) -> AttentionCall:
    """Return a causal call whose first query is aligned with the first key, [batch, heads, sequence, head_dim]."""
    queries, keys = query.shape[2], key.shape[2]
    if keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
    causal = Mask.causal()
    if queries > keys:
        positions = torch.arange(queries, device=query.device)
        causal = causal & Mask.positions(positions, positions[:keys])
    return AttentionCall(query, key, value, causal, scale, cross=False, axes=axes)


def read_multi_head(
    running: RunningModule, *args: Any, **kwargs: Any
) -> tuple[FunctionArguments, dict[str, Any], bool]:
    """Read a call of `F.multi_head_attention_forward` as one of its module, and whether it is cross-attention."""
    arguments = _MULTI_HEAD.bind(*args, **kwargs)
    arguments.apply_defaults()
    given = arguments.arguments
    check_plain(given["query"], given["key"], given["value"])
    if any(given[name] is not None for name in ("bias_k", "static_k", "static_v")) or given["add_zero_attn"]:
        raise NotUnderstood(
            "its keys or values are not all projected from its inputs: it has bias_k, add_zero_attn or static_k"
        )
    projections = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    layer = FunctionArguments(
        embed_dim=given["embed_dim_to_check"],
        dropout=given["dropout_p"],
        out_weight=given["out_proj_weight"],
        bias_k=None,
        add_zero_attn=False,
        _qkv_same_embed_dim=not given["use_separate_proj_weight"],
        **{name: given[name] for name in ("num_heads", "training", *projections)},
    )
    query, key = given["query"], given["key"]
    batch, queries, keys = query.shape[1] if query.ndim > 2 else 1, len(query), len(key)
    # Without a common address, by which these could be taken for heads that the module receives.
    sizes = (query.new_empty(batch, 1, queries, 0), query.new_empty(batch, 1, keys, 0))
    return layer, given, not is_same(query, key) and is_cross(running, *sizes, None)


def _is_aligned_at_the_end(mask: Tensor | None) -> bool | None:
    """Return whether a causal bias of PyTorch aligns the last query with the last key; None for other masks."""
    module = sys.modules.get("torch.nn.attention.bias")  # importing it loads Triton
    if module is None or not isinstance(mask, module.CausalBias):
        return None
    return bool(mask.variant is module.CausalVariant.LOWER_RIGHT)


def check_tensors(running: RunningModule, *tensors: Tensor) -> HeadAxes:
    """Return the axes of query, key and value; raise for tensors that cannot be observed."""
    check_plain(*tensors)
    ranks = [x.ndim for x in tensors]
    if len({*ranks}) > 1:
        raise NotUnderstood(f"queries, keys and values must have one number of axes, got {ranks}")
    return _axes(running, tensors[0])


def check_plain(*tensors: Tensor) -> None:
    """Raise for query, key and value that cannot be observed, of any rank."""
    if reason := unreadable("queries, keys and values", *tensors):
        raise NotUnderstood(reason)


def unreadable(names: str, *tensors: Tensor) -> str:
    """Return why tensors, which the message calls `names`, cannot be observed; empty if they can."""
    if is_transformed():
        return "it runs inside a transform of torch.func or in forward-mode AD"
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "it is traced"
    for x in tensors:
        if type(x) not in (Tensor, nn.Parameter) or x.is_nested or x.is_meta:
            kind = "meta tensor" if type(x) is Tensor and x.is_meta else type(x).__name__
            kind = "nested tensor" if isinstance(x, Tensor) and x.is_nested else kind
            return f"{names} must be plain tensors, got a {kind}"
    return ""


def _axes(running: RunningModule, query: Tensor) -> HeadAxes:
    """Return the axes of a call of any rank; raise where heads and batch cannot be distinguished."""
    match query.ndim:
        case 4:
            return HeadAxes()
        case 2:
            return HeadAxes(lambda x: x[None, None], lambda x: x[0, 0])
        case 3:
            rows, length = query.shape[:2]
            tokens = next(iter(running.tensors().values()), None)
            if tokens is not None and tokens.ndim == 3 and tuple(tokens.shape[:2]) == (rows, length):
                return HeadAxes(lambda x: x[:, None], lambda x: x[:, 0])
            is_one_sequence = tokens is not None and (tokens.ndim == 2 or tokens.shape[0] == 1)
            if is_one_sequence and rows in _head_counts(running.module):
                return HeadAxes(lambda x: x[None], lambda x: x[0])
        case rank if rank > 4:
            leading, counts = query.shape[:-2], _head_counts(running.module)
            axes = [axis for axis, size in enumerate(leading) if size in counts]
            if len(axes) == 1:
                others = [size for axis, size in enumerate(leading) if axis != axes[0]]
                return HeadAxes(
                    lambda x: x.movedim(axes[0], -3).flatten(0, -4),
                    lambda x: x.unflatten(0, others).movedim(-3, axes[0]),
                )
    raise NotUnderstood(
        f"the axes of batch and heads must be known, as in [batch, heads, sequence, head_dim], got {[*query.shape]}"
    )


def head_counts(running: RunningModule) -> set[int]:
    """Return the numbers of heads that a module, or the nearest around it that has any, names."""
    for module in (running.module, *(x.module for x in running.around())):
        for owner in (module, getattr(module, "config", None)):
            if counts := _head_counts(owner) or _head_counts(owner, ("h",)):
                return counts
    return set()


def _head_counts(module: object, names: tuple[str, ...] = _HEAD_COUNTS) -> set[int]:
    counts = (getattr(module, name, None) for name in names)
    return {count for count in counts if isinstance(count, int) and not isinstance(count, bool)}


def split_mask(mask: Tensor, query: Tensor, axes: HeadAxes) -> Tensor:
    """Return a mask that broadcasts to the logits as [batch or 1, heads or 1, queries or 1, keys or 1]."""
    if type(mask) not in (Tensor, nn.Parameter) or mask.is_nested:
        raise NotUnderstood(f"masks must be plain tensors, got {type(mask).__name__}")
    if mask.ndim > query.ndim or mask.ndim < 2:
        raise NotUnderstood(f"masks must have 2 to {query.ndim} axes, as the queries, got shape {[*mask.shape]}")
    mask = mask.reshape((1,) * (query.ndim - mask.ndim) + tuple(mask.shape))
    if all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(1, 1, *mask.shape[-2:])
    is_broadcast = query.ndim > 4
    return axes.split(mask.expand(*query.shape[:-2], *mask.shape[-2:]) if is_broadcast else mask)


def matching_heads(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast the batch, and check that heads are shared as `polyhead.attention` shares them."""
    batch = max(x.shape[0] for x in (query, key, value))
    query, key, value = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 != batch else x for x in (query, key, value))
    heads, key_heads, value_heads = (x.shape[1] for x in (query, key, value))
    if key_heads != value_heads or heads % max(key_heads, 1) or not (grouped or heads == key_heads):
        raise NotUnderstood(
            "keys and values must have the same heads, of which the heads of the queries are a multiple, got "
            f"{heads}, {key_heads} and {value_heads}"
        )
    return query, key, value


def as_mask(mask: Tensor, queries: int, keys: int) -> Mask | None:
    """Return the mask of a tensor that broadcasts to [batch, heads, queries, keys], which is not copied.

    Tensors on the CPU are compared with a causal mask.
    """
    if mask.shape[-1] == 1 != keys:
        mask = mask.expand(-1, -1, -1, keys)
    if is_readable(mask) and not mask.requires_grad:
        visible, hidden = (mask, ~mask) if mask.dtype is torch.bool else (mask == 0, mask == -torch.inf)
        if bool(visible.all()):
            return None
        is_square = mask.shape == (1, 1, queries, keys) and queries == keys and bool((visible | hidden).all())
        if is_square and torch.equal(visible[0, 0], torch.ones_like(visible[0, 0]).tril()):
            return Mask.causal()
    return Mask.dense(mask) if mask.dtype is torch.bool else Mask.bias(mask, zero_one=True)


def is_cross(running: RunningModule, query: Tensor, key: Tensor, mask: Mask | None) -> bool:
    """Return whether keys and queries are different tokens, from the inputs and the name of the calling module."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if _is_named_cross(running):
        return True
    while running.outer is not None and _receives_heads(running, query):
        running = running.outer  # a module around it has projected the tokens
        if _is_named_cross(running):
            return True
    inputs = running.tensors()
    own = next(iter(inputs.values()), None)
    if not _receives_heads(running, query):
        sources = [inputs[name] for name in _SOURCES if name in inputs]
        if any(x is not own and _has_tokens(x, batch, keys) for x in sources):
            return True
    if queries == keys:
        return False
    others = [x for x in inputs.values() if x is not own and x.ndim == 3]
    if queries > keys or any(x.shape[1] == keys for x in others):
        return True
    if own is not None and own.ndim == 3 and own.shape[1] == keys and any(x.shape[1] == queries for x in others):
        return True  # of two sequences, the second attends to the first
    # With fewer queries than keys, a mask that depends on the query means a cache, as do queries of all input tokens.
    if mask is not None and any(x.shape[2] > 1 for x in (*mask.allowed, *mask.biases)):
        return False
    if own is None or own.ndim < 2:
        return True
    return own.shape[-3 if own.ndim > 3 and _ends_in_heads(own, query) else -2] != queries


def _is_named_cross(running: RunningModule) -> bool:
    names = (type(running.module).__name__.lower(), running.path.rpartition(".")[2].lower())
    is_marked = getattr(running.module, "is_cross_attention", False) is True
    return is_marked or any("cross" in name for name in names) or names[1] in _CROSS_NAMES


def _receives_heads(running: RunningModule, query: Tensor) -> bool:
    """Return whether the first input of a module is the queries of its heads rather than tokens."""
    own = next(iter(running.tensors().values()), None)
    if own is None or own.ndim < 2:
        return False
    is_of_heads = own.ndim > 3 and (own.shape[-2:] == query.shape[-2:] or _ends_in_heads(own, query))
    return is_of_heads or own.data_ptr() == query.data_ptr()


def _ends_in_heads(x: Tensor, query: Tensor) -> bool:
    """Return whether the last axes of an input are the heads, as in [batch, sequence, heads, head_dim]."""
    return x.shape[-2:] == (query.shape[1], query.shape[3])


def _has_tokens(x: Tensor, batch: int, count: int) -> bool:
    """Return whether an input has this many tokens: [..., tokens, width], [tokens, batch, width] or an image."""
    if x.ndim < 2:
        return False
    is_image = x.ndim == 4 and x.shape[2] * x.shape[3] == count
    return x.shape[-2] == count or is_image or (x.ndim == 3 and tuple(x.shape[:2]) == (count, batch))

"""Layers that are watched by their own calls: those of `polyhead.layers` and `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.torch_compat import MultiheadAttention
from polyhead.layers.torch_compat.steps import torch_mask
from polyhead.layers.variants.routed.layer import RoutedHeads
from polyhead.layers.variants.talking.layer import TalkingHeads
from polyhead.observation.rows import Tokens
from polyhead.observation.watcher import WatchedCall, Watcher
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, RowStatistics, Statistics, attention
from polyhead.ops.common.gates import gate_factors
from polyhead.ops.common.statistics import as_statistics

Ours = MultiHeadAttention | LatentAttention | RoutedHeads


def attention_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    return tuple(x for x in model.modules() if isinstance(x, Ours | nn.MultiheadAttention))


@contextmanager
def without_shortcuts(layers: Sequence[nn.Module]) -> Iterator[None]:
    """PyTorch's inference shortcut off: it calls no attention module, and turns padded batches into nested ones."""
    before = torch.backends.mha.get_fastpath_enabled()
    if not any(isinstance(layer, nn.MultiheadAttention) for layer in layers):
        yield
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def watched(layer: nn.Module, session: Watcher) -> Iterator[None]:
    """Hooks on a layer, and off again."""
    with ExitStack() as undo:
        if isinstance(layer, Ours):
            if layer._listener is not None:
                raise OptionError(
                    f"one session at a time observes a layer, got a {type(layer).__name__} that is observed already"
                )
            ours = _Ours(session, layer)
            before = layer.register_forward_pre_hook(ours.before, with_kwargs=True, prepend=False)
            after = layer.register_forward_hook(ours.after, with_kwargs=True, prepend=True)
            handles = (before, after)
            layer._listener = ours.listen
            undo.callback(delattr, layer, "_listener")
        else:
            theirs = _Theirs(session)
            before = layer.register_forward_pre_hook(theirs.before, with_kwargs=True)
            after = layer.register_forward_hook(theirs.after, with_kwargs=True, prepend=True)
            handles = (before, after)
        for handle in handles:
            undo.callback(handle.remove)
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A call of a layer of ours, and what its caller had asked for."""

    call: WatchedCall
    statistics: Statistics | None
    logsumexp: bool


class _Ours:
    """Asks a layer of ours for more than its caller did, and hides from the caller that it was asked."""

    def __init__(self, session: Watcher, layer: Ours) -> None:
        self.session = session
        self.names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
        self.mixes = isinstance(layer, TalkingHeads)
        self.waiting: list[_Request] = []

    def before(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        assert isinstance(module, Ours)
        self.waiting.clear()  # what a call that raised has left
        given = {**dict(zip(self.names, positional, strict=False)), **keywords}
        query, cross = given.get("query"), given.get("key") is not None
        if not isinstance(query, Tensor) or query.ndim != 3:
            return None  # the layer says what is wrong with it
        heads = module.num_maps if isinstance(module, MultiHeadAttention) else module.layout.num_heads
        learned_sinks = module.sinks is not None
        call = self.session.call(module, heads, _tokens(query, given), cross=cross, learned_sinks=learned_sinks)
        if call is None:
            return None
        callers = as_statistics(given.get("statistics"))
        requested = _Request(call, callers, bool(given.get("logsumexp")))
        self.waiting.append(requested)
        gate = given.get("head_gate")
        if call.gate is not None:
            sizes = (query.shape[0], heads, query.shape[1])
            own = gate_factors(call.gate, *sizes)
            gate = call.gate if gate is None else (gate_factors(gate, *sizes) * own).squeeze(-1).expand(sizes)
        return positional, {
            **keywords,
            "statistics": _joined(call.requested, callers, learned_sinks),
            "logsumexp": requested.logsumexp or call.whole,
            "head_gate": gate,
        }

    def listen(self, attended: Attended) -> None:
        if len(self.waiting):
            call = self.waiting[-1].call
            mixed = self.mixes and call.differentiable
            call.notify(_with_gradients(attended, call.requested) if mixed else attended)

    def after(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: AttentionOutput
    ) -> AttentionOutput | None:
        if not len(self.waiting):
            return None
        requested = self.waiting.pop()
        statistics = None
        if requested.statistics is not None and output.statistics is not None:
            names = requested.statistics.wanted(learned_sinks=requested.call.learned_sinks)
            statistics = RowStatistics(**{k: v for k, v in output.statistics.items() if k in names})
        return replace(output, statistics=statistics, logsumexp=output.logsumexp if requested.logsumexp else None)


def _with_gradients(attended: Attended, requested: Statistics | None) -> Attended:
    """Talking heads with statistics that can be differentiated, which those of `talking_attention` cannot be.

    Their softmax is that of plain heads over mixed queries, and is computed as such beside them.
    """
    query, key, mask, scale = attended.query, attended.key, attended.mask, attended.scale
    if requested is None or not torch.is_grad_enabled():
        return attended
    rows = attention(query, key, key[..., :1], mask=mask, scale=scale, statistics=requested).statistics
    return replace(attended, result=replace(attended.result, statistics=rows))


def _tokens(query: Tensor, given: dict[str, Any]) -> Tokens | Tensor | None:
    batch, queries, _ = query.shape
    mask, cache, lengths = given.get("mask"), given.get("cache"), given.get("lengths")
    if cache is None:
        keys = given["key"].shape[1] if isinstance(given.get("key"), Tensor) else queries
        return Tokens(mask, batch, queries, keys, query.device)
    if lengths is None:
        return None
    real = torch.as_tensor(lengths).to(query.device, non_blocking=True)
    return torch.arange(queries, device=query.device) < real[:, None]


def _joined(requested: Statistics | None, callers: Statistics | None, learned_sinks: bool) -> Statistics | None:
    """What the session and the layer's caller want, in one."""
    if callers is None or requested is None:
        return callers if requested is None else requested
    theirs = _crossed(callers, requested.cross).wanted(learned_sinks=learned_sinks)
    for name, option in (("sink_mass", "sink_keys"), ("window_mass", "window")):
        ours, other = getattr(requested, option), getattr(callers, option)
        if name in requested.names and name in theirs and ours != other:
            raise OptionError(
                f"the layer is asked for {name} by its caller as well, with {option} {other} where the session has "
                f"{ours}; observe with statistics=polyhead.Statistics(..., {option}={other})"
            )
    sinks, window = (callers if name in theirs else requested for name in ("sink_mass", "window_mass"))
    names = dict.fromkeys((*requested.names, *theirs))
    return Statistics(*names, sink_keys=sinks.sink_keys, window=window.window, cross=requested.cross)


def _crossed(requested: Statistics, cross: bool) -> Statistics:
    return Statistics(
        *requested.names, sink_keys=requested.sink_keys, window=requested.window, cross=cross or requested.cross
    )


class _Theirs:
    """Tells of `torch.nn.MultiheadAttention` by a computation beside its own, so that its results stay its own."""

    def __init__(self, session: Watcher) -> None:
        self.session = session
        self.names = tuple(inspect.signature(nn.MultiheadAttention.forward).parameters)[1:]
        self.missing: Tensor | None = None

    def before(self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.missing = None
        given = {**dict(zip(self.names, positional, strict=False)), **keywords}
        inputs = [x for x in (given.get(name) for name in ("query", "key", "value")) if isinstance(x, Tensor)]
        if len(inputs) < 3 or not all(x.ndim in (2, 3) for x in inputs):
            return  # the layer says what is wrong with it
        if any(x.is_nested for x in inputs):
            raise OptionError("statistics have no nested form, got a nested tensor; pad it and say key_padding_mask")
        self.missing = _tell_torch(cast(MultiheadAttention, module), self.session, given)

    def after(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any] | None:
        missing, self.missing = self.missing, None
        return None if missing is None else (output[0] - missing, output[1])


def _tell_torch(layer: MultiheadAttention, session: Watcher, given: dict[str, Any]) -> Tensor | None:
    """Compute the heads of a call; what its gates take from the layer's output, None where there are none."""
    query, key, value = given["query"], given["key"], given["value"]
    attn_mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    cross = query is not key
    if query.ndim == 2:
        batch, queries, keys = 1, query.shape[0], key.shape[0]
        padding = None if padding is None else padding[None]
    else:
        sizes = (0, 1) if layer.batch_first else (1, 0)
        batch, queries, keys = query.shape[sizes[0]], query.shape[sizes[1]], key.shape[sizes[1]]
    # Which tokens are padding is said by their own mask alone: a triangle over them hides no token from all.
    shape = torch.empty(batch, 1, keys, 0, device=query.device)
    mask = torch_mask(shape, shape, None, padding, False)
    call = session.call(layer, layer.num_heads, Tokens(mask, batch, queries, keys, query.device), cross=cross)
    if call is None or not (call.counts or call.differentiable or call.gate is not None):
        return None
    if layer.bias_k is not None or layer.add_zero_attn:
        raise OptionError(
            "observe does not know where the keys stand that add_bias_kv and add_zero_attn append, "
            f"got a torch.nn.MultiheadAttention with them at {call.site.name!r}; leave it out with layers="
        )
    if call.gate is not None and layer.training and layer.dropout:
        raise OptionError(
            "a head of torch.nn.MultiheadAttention is gated without dropout, which that layer draws by itself, "
            f"got {call.site.name!r} in training with dropout {layer.dropout}; call model.eval()"
        )
    with torch.set_grad_enabled((call.differentiable or call.gate is not None) and torch.is_grad_enabled()):
        # It reads weights alone, which PyTorch's class has as well.
        q, k, v = MultiheadAttention._project(layer, query, key, value)
        mask = torch_mask(q, k, attn_mask, padding, False)
        seen = v if call.whole or call.gate is not None else v[..., :1]
        result = attention(q, k, seen, mask=mask, statistics=call.requested, logsumexp=call.whole)
        call.notify(Attended(q, k, v, result, mask))
        if call.gate is None:
            return None
        factors = gate_factors(call.gate, batch, layer.num_heads, queries).to(result.output.dtype)
        taken = result.output * (1 - factors)
        missing = F.linear(taken.transpose(1, 2).flatten(2), layer.out_proj.weight)  # [batch, queries, embed_dim]
    if query.ndim == 2:
        return missing[0]
    return missing if layer.batch_first else missing.transpose(0, 1)

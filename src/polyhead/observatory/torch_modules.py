"""Layers that are watched by their own calls: `polyhead.MultiHeadAttention` and `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.functional import AttentionOutput, RowStatistics, Statistics, attention
from polyhead.functional.statistics import as_statistics
from polyhead.layers import MultiHeadAttention
from polyhead.layers.torch_compat import MultiheadAttention
from polyhead.layers.torch_steps import torch_mask
from polyhead.observatory.rows import Tokens
from polyhead.observatory.statistics import AttentionSite

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class WatchedCall(Protocol):
    """One call that is watched: what is to be told of its rows, and whom to tell."""

    site: AttentionSite
    asked: Statistics
    counts: bool
    learned_sinks: bool

    def tell(self, rows: RowStatistics) -> None: ...


class Watcher(Protocol):
    """Who watches layers: asked before every call, None where this one is left alone."""

    def call(
        self,
        module: nn.Module,
        num_heads: int,
        tokens: Tokens | Tensor | None,
        *,
        cross: bool,
        learned_sinks: bool = False,
    ) -> WatchedCall | None: ...


def attention_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    return tuple(x for x in model.modules() if isinstance(x, MultiHeadAttention | nn.MultiheadAttention))


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
    if isinstance(layer, MultiHeadAttention):
        ours = _Ours(session)
        handles = [
            layer.register_forward_pre_hook(ours.before, with_kwargs=True, prepend=False),
            layer.register_forward_hook(ours.after, with_kwargs=True, prepend=True),
        ]
    else:
        handles = [layer.register_forward_pre_hook(_torch_hook(session), with_kwargs=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Ours:
    """Asks a layer of ours for statistics beside its output, and hides from its caller that they were asked for."""

    def __init__(self, session: Watcher) -> None:
        self.session = session
        self.names = tuple(inspect.signature(MultiHeadAttention.forward).parameters)[1:]
        self.waiting: list[tuple[WatchedCall, Statistics | None]] = []

    def before(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        assert isinstance(module, MultiHeadAttention)
        self.waiting.clear()  # what a call that raised has left
        given = {**dict(zip(self.names, positional, strict=False)), **keywords}
        query, cross = given.get("query"), given.get("key") is not None
        if not isinstance(query, Tensor) or query.ndim != 3:
            return None  # the layer says what is wrong with it
        heads = module.layout.num_heads
        call = self.session.call(
            module, heads, _tokens(module, query, given), cross=cross, learned_sinks=module.sinks is not None
        )
        if call is None:
            return None
        callers = as_statistics(given.get("statistics"))
        self.waiting.append((call, callers))
        return positional, {**keywords, "statistics": _joined(call.asked, callers, module.sinks is not None)}

    def after(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: AttentionOutput
    ) -> AttentionOutput | None:
        if not len(self.waiting) or output.statistics is None:
            return None
        call, callers = self.waiting.pop()
        call.tell(output.statistics)
        if callers is None:
            return replace(output, statistics=None)
        names = callers.wanted(learned_sinks=call.learned_sinks)
        return replace(output, statistics=RowStatistics(**{k: v for k, v in output.statistics.items() if k in names}))


def _tokens(layer: MultiHeadAttention, query: Tensor, given: dict[str, Any]) -> Tokens | Tensor | None:
    batch, queries, _ = query.shape
    mask, cache, lengths = given.get("mask"), given.get("cache"), given.get("lengths")
    if cache is None:
        keys = given["key"].shape[1] if isinstance(given.get("key"), Tensor) else queries
        return Tokens(mask, batch, queries, keys, query.device)
    if lengths is None:
        return None
    real = torch.as_tensor(lengths).to(query.device, non_blocking=True)
    return torch.arange(queries, device=query.device) < real[:, None]


def _joined(asked: Statistics, callers: Statistics | None, learned_sinks: bool) -> Statistics:
    """What the session and the layer's caller want, in one."""
    if callers is None:
        return asked
    theirs = _crossed(callers, asked.cross).wanted(learned_sinks=learned_sinks)
    for name, option in (("sink_mass", "sink_keys"), ("window_mass", "window")):
        ours, other = getattr(asked, option), getattr(callers, option)
        if name in asked.names and name in theirs and ours != other:
            raise OptionError(
                f"the layer is asked for {name} by its caller as well, with {option} {other} where the session has "
                f"{ours}; observe with statistics=polyhead.Statistics(..., {option}={other})"
            )
    sinks, window = (callers if name in theirs else asked for name in ("sink_mass", "window_mass"))
    names = dict.fromkeys((*asked.names, *theirs))
    return Statistics(*names, sink_keys=sinks.sink_keys, window=window.window, cross=asked.cross)


def _crossed(asked: Statistics, cross: bool) -> Statistics:
    return Statistics(*asked.names, sink_keys=asked.sink_keys, window=asked.window, cross=cross or asked.cross)


def _torch_hook(session: Watcher) -> Hook:
    """Tells of `torch.nn.MultiheadAttention` by a computation beside its own, so that its results stay its own."""
    names = tuple(inspect.signature(nn.MultiheadAttention.forward).parameters)[1:]

    def hook(module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = {**dict(zip(names, positional, strict=False)), **keywords}
        inputs = [x for x in (given.get(name) for name in ("query", "key", "value")) if isinstance(x, Tensor)]
        if len(inputs) < 3 or not all(x.ndim in (2, 3) for x in inputs):
            return  # the layer says what is wrong with it
        if any(x.is_nested for x in inputs):
            raise OptionError("statistics have no nested form, got a nested tensor; pad it and say key_padding_mask")
        _tell_torch(cast(MultiheadAttention, module), session, given)

    return hook


@torch.no_grad()
def _tell_torch(layer: MultiheadAttention, session: Watcher, given: dict[str, Any]) -> None:
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
    if call is None or not call.counts:
        return
    if layer.bias_k is not None or layer.add_zero_attn:
        raise OptionError(
            "observe does not know where the keys stand that add_bias_kv and add_zero_attn append, "
            f"got a torch.nn.MultiheadAttention with them at {call.site.name!r}; leave it out with layers="
        )
    # It reads weights alone, which PyTorch's class has as well.
    q, k, v = MultiheadAttention._project(layer, query, key, value)
    mask = torch_mask(q, k, attn_mask, padding, False)
    rows = attention(q, k, v[..., :1], mask=mask, statistics=call.asked).statistics
    assert rows is not None
    call.tell(rows)

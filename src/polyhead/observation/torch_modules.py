"""Hooks for the layers of `polyhead.layers` and for `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.layers.base_attention import BaseAttention
from polyhead.layers.torch_compat import MultiheadAttention
from polyhead.layers.torch_compat.forward_steps import torch_mask
from polyhead.layers.variants.talking import TalkingHeads
from polyhead.observation.forward_arguments import forward_arguments
from polyhead.observation.nested_sessions import SharedSetting, merged_requests, product_of_gates
from polyhead.observation.recomputation import hidden_operators
from polyhead.observation.rows import Tokens, with_documents
from polyhead.observation.staging import wrapped_calls
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, RowStatistics, Statistics, attention
from polyhead.ops.common.gates import gate_factors
from polyhead.ops.common.statistics import as_statistics
from polyhead.ops.common.tracing import is_transformed

if TYPE_CHECKING:
    from polyhead.observation.calls import Call
    from polyhead.observation.session import Session


def attention_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules whose attention follows from their inputs and weights."""
    modules = (x for x in model.modules() if isinstance(x, BaseAttention | nn.MultiheadAttention))
    return tuple(x for x in modules if not has_own_forward(x))


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a `torch.nn.MultiheadAttention` has a forward of its own, which may change what it attends to.

    The attention function that it calls is intercepted.
    """
    if not isinstance(module, nn.MultiheadAttention):
        return False
    is_patched = "forward" in vars(module) and not isinstance(module, MultiheadAttention)
    return is_patched or type(module).forward not in _FORWARDS


_FORWARDS = (nn.MultiheadAttention.forward, MultiheadAttention.forward)


def without_shortcuts(model: nn.Module) -> AbstractContextManager[None]:
    """Disable PyTorch's inference fast path, which bypasses attention modules and nests padded batches."""
    has_torch_layers = any(isinstance(x, nn.MultiheadAttention) for x in model.modules())
    return _NO_FASTPATH.held() if has_torch_layers else nullcontext()


@contextmanager
def _without_fastpath() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_NO_FASTPATH = SharedSetting(_without_fastpath)


@contextmanager
def watched(layer: nn.Module, session: Session) -> Iterator[None]:
    """Hook a layer for the duration of the context."""
    hooks = _PolyheadHooks(session, layer) if isinstance(layer, BaseAttention) else _TorchHooks(session)
    with ExitStack() as undo:
        if isinstance(layer, BaseAttention):
            assert isinstance(hooks, _PolyheadHooks)
            outer = layer._listener
            layer._listener = hooks.listen if outer is None else _both(outer, hooks.listen)
            undo.callback(
                delattr if outer is None else setattr, layer, "_listener", *(() if outer is None else (outer,))
            )
        before = layer.register_forward_pre_hook(hooks.before, with_kwargs=True)
        undo.callback(before.remove)

        def run(
            call: Callable[..., Any], module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
        ) -> Any:
            """Run the layer with this pre-hook last: those registered in the session may change inputs or weights."""
            hooks = cast(OrderedDict[int, Any], module._forward_pre_hooks)
            if next(reversed(hooks), None) != before.id and before.id in hooks:
                hooks.move_to_end(before.id)
            return call(*positional, **keywords)

        undo.enter_context(wrapped_calls([layer], run))
        always = isinstance(hooks, _TorchHooks)  # to clean up after a call that raised
        after = layer.register_forward_hook(hooks.after, with_kwargs=True, prepend=True, always_call=always)
        undo.callback(after.remove)
        yield


def _both(outer: Callable[[Attended], None], inner: Callable[[Attended], None]) -> Callable[[Attended], None]:
    def listen(attended: Attended) -> None:
        outer(attended)
        inner(attended)

    return listen


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A call of a polyhead layer, and the outputs that its caller requested."""

    call: Call
    statistics: Statistics | None
    logsumexp: bool


class _Hooks:
    """Hooks of one layer. Those of a copy of the layer do nothing: a session observes the layer itself."""

    session: Session | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.session = None
        return copied


class _PolyheadHooks(_Hooks):
    """Hooks of a polyhead layer: request additional outputs and remove them from the caller's result."""

    def __init__(self, session: Session, layer: BaseAttention) -> None:
        self.session = session
        self.mixes_heads = isinstance(layer, TalkingHeads)
        self.request: _Request | None = None  # of the running call

    def before(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.session is None:
            return None
        assert isinstance(module, BaseAttention)
        self.request = None  # left over from a call that raised
        arguments = forward_arguments(module, positional, keywords)
        query, cross = arguments.get("query"), arguments.get("key") is not None
        if not isinstance(query, Tensor) or query.ndim != 3:
            return None  # the layer raises for invalid inputs
        heads, learned_sinks = module.num_maps, module.sinks is not None
        call = self.session.call(module, heads, _tokens(query, arguments), cross=cross, learned_sinks=learned_sinks)
        if call is None:
            return None
        callers_statistics = as_statistics(arguments.get("statistics"))
        self.request = _Request(call, callers_statistics, bool(arguments.get("logsumexp")))
        gate = arguments.get("head_gate")
        if call.gate is not None:
            sizes = (query.shape[0], heads, query.shape[1])
            gate = call.gate if gate is None else product_of_gates(gate, call.gate, *sizes)
        return positional, {
            **keywords,
            "statistics": merged_requests(call.requested, callers_statistics, learned_sinks),
            "logsumexp": self.request.logsumexp or call.has_collectors,
            "head_gate": gate,
        }

    def listen(self, attended: Attended) -> None:
        if self.session is not None and self.request is not None:
            call = self.request.call
            recompute = self.mixes_heads and call.differentiable
            call.notify(_with_gradients(attended, call.requested) if recompute else attended)

    def after(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: AttentionOutput
    ) -> AttentionOutput | None:
        request, self.request = self.request, None
        if self.session is None or request is None:
            return None
        statistics = None
        if request.statistics is not None and output.statistics is not None:
            names = request.statistics.wanted(learned_sinks=request.call.learned_sinks)
            statistics = RowStatistics(**{k: v for k, v in output.statistics.items() if k in names})
        return replace(output, statistics=statistics, logsumexp=output.logsumexp if request.logsumexp else None)


def _with_gradients(attended: Attended, requested: Statistics | None) -> Attended:
    """Recompute the statistics of talking heads differentiably; those of `talking_attention` have no gradients.

    Their softmax equals that of plain heads with mixed queries, and is recomputed as such.
    """
    query, key, mask, scale = attended.query, attended.key, attended.mask, attended.scale
    if requested is None or not torch.is_grad_enabled():
        return attended
    with hidden_operators(gradients=True):
        rows = attention(query, key, key[..., :1], mask=mask, scale=scale, statistics=requested).statistics
    return replace(attended, result=replace(attended.result, statistics=rows))


def _tokens(query: Tensor, arguments: dict[str, Any]) -> Tokens | Tensor:
    batch, queries, _ = query.shape
    mask, cache, lengths = arguments.get("mask"), arguments.get("cache"), arguments.get("lengths")
    if cache is None:
        keys = arguments["key"].shape[1] if isinstance(arguments.get("key"), Tensor) else queries
        return Tokens(mask, batch, queries, keys, query.device)
    if lengths is None:
        return Tokens(None, batch, queries, queries, query.device)
    num_tokens = torch.as_tensor(lengths).to(query.device, non_blocking=True)
    return torch.arange(queries, device=query.device) < num_tokens[:, None]


_GATED = "_polyhead_gated"  # set on a module during a call with gates


class _TorchHooks(_Hooks):
    """Hooks of `torch.nn.MultiheadAttention`, which recompute its attention and leave its output unchanged."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.removed: Tensor | None = None

    def before(self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.removed = None
        if self.session is None:
            return
        arguments = forward_arguments(module, positional, keywords)
        inputs = [x for x in (arguments.get(name) for name in ("query", "key", "value")) if isinstance(x, Tensor)]
        if len(inputs) < 3 or not all(x.ndim in (2, 3) for x in inputs):
            return  # the layer raises for invalid inputs
        if any(x.is_nested for x in inputs):
            raise OptionError("nested tensors cannot be observed, got a nested input; pad it and pass key_padding_mask")
        cross = not is_same(arguments["query"], arguments["key"])
        self.removed = notify_torch(cast(MultiheadAttention, module), arguments, self.session, module, cross=cross)
        if self.removed is not None:
            if _GATED in vars(module):
                self.removed = None
                raise OptionError(
                    "the heads of torch.nn.MultiheadAttention can be gated by one session at a time, got a second with "
                    "gates; multiply the gates, or use polyhead.MultiHeadAttention.from_torch"
                )
            vars(module)[_GATED] = True

    def after(
        self,
        module: nn.Module,
        positional: tuple[Any, ...],
        keywords: dict[str, Any],
        output: tuple[Tensor, Any] | None,
    ) -> tuple[Tensor, Any] | None:
        removed, self.removed = self.removed, None
        if removed is None:
            return None
        vars(module).pop(_GATED)
        return None if output is None else (output[0] - removed, output[1])


@dataclass(frozen=True, slots=True, eq=False)
class FunctionArguments:
    """Arguments of `F.multi_head_attention_forward` under the names of attributes of `torch.nn.MultiheadAttention`."""

    embed_dim: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    add_zero_attn: bool
    dropout: float
    out_weight: Tensor
    training: bool
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None
    _qkv_same_embed_dim: bool
    batch_first: bool = False

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


def is_same(query: Tensor, key: Tensor) -> bool:
    """Return whether two inputs are the same tensor, also if both are the same view of one."""
    is_plain = type(query) is type(key) is Tensor and not (query.is_meta or key.is_meta or is_transformed())
    if query is key or not is_plain or query.data_ptr() != key.data_ptr():
        return query is key
    return query.shape == key.shape and query.stride() == key.stride() and query.dtype == key.dtype


def notify_torch(
    layer: MultiheadAttention | FunctionArguments,
    arguments: dict[str, Any],
    session: Session,
    site: nn.Module | str,
    *,
    cross: bool,
) -> Tensor | None:
    """Recompute the attention of a call; return what its gates remove from the layer's output, or None."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    attn_mask, padding = arguments.get("attn_mask"), arguments.get("key_padding_mask")
    if query.ndim == 2:
        batch, queries, keys = 1, query.shape[0], key.shape[0]
        padding = None if padding is None else padding[None]
    else:
        sizes = (0, 1) if layer.batch_first else (1, 0)
        batch, queries, keys = query.shape[sizes[0]], query.shape[sizes[1]], key.shape[sizes[1]]
    # Padding is derived from key_padding_mask only; attn_mask (e.g. causal) does not identify padding.
    shape = torch.empty(batch, 1, keys, 0, device=query.device)
    mask = torch_mask(shape, shape, None, padding, False)
    call = session.call(site, layer.num_heads, Tokens(mask, batch, queries, keys, query.device), cross=cross)
    if call is None or not (call.counts or call.differentiable or call.has_listener or call.gate is not None):
        return None
    if layer.bias_k is not None or layer.add_zero_attn:
        raise OptionError(
            "observe does not support the keys that add_bias_kv and add_zero_attn append, which have no position, "
            f"got a torch.nn.MultiheadAttention with them at {call.site.name!r}; exclude it with layers="
        )
    if call.gate is not None and layer.training and layer.dropout:
        raise OptionError(
            "gates of torch.nn.MultiheadAttention need dropout to be off, since its dropout mask is not accessible, "
            f"got {call.site.name!r} in training mode with dropout {layer.dropout}; call model.eval()"
        )
    with hidden_operators(gradients=call.differentiable or call.gate is not None):
        # `_project` only reads weights that PyTorch's class has too.
        q, k, v = MultiheadAttention._project(cast(MultiheadAttention, layer), query, key, value)
        # PyTorch's own condition for taking the hint in place of the mask.
        causal = bool(arguments.get("is_causal")) and padding is None and not arguments.get("need_weights", True)
        mask = torch_mask(q, k, attn_mask, padding, causal)
        if not cross:
            mask, call.statistics_mask = with_documents(mask, queries, keys)
        is_value_needed = call.has_collectors or call.has_listener or call.gate is not None
        if not is_value_needed and call.statistics_mask is not None:
            mask, call.statistics_mask = call.statistics_mask, None
        call.mask = mask
        needed_value = v if is_value_needed else v[..., :1]
        result = attention(q, k, needed_value, mask=mask, statistics=call.requested, logsumexp=call.has_collectors)
        call.notify(Attended(q, k, v, result, mask))
        if call.gate is None:
            return None
        factors = gate_factors(call.gate, batch, layer.num_heads, queries).to(result.output.dtype)
        removed_heads = result.output * (1 - factors)
        weight = layer.out_weight if isinstance(layer, FunctionArguments) else layer.out_proj.weight
        removed = F.linear(removed_heads.transpose(1, 2).flatten(2), weight)  # [batch, queries, embed_dim]
    if query.ndim == 2:
        return removed[0]
    return removed if layer.batch_first else removed.transpose(0, 1)

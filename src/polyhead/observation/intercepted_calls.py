"""Observe models that call attention functions of PyTorch, e.g. `F.scaled_dot_product_attention`, or a softmax by hand.

While a module of the model runs, a `TorchFunctionMode` of its thread receives the calls, under whatever name the
function was imported. The model continues with the output of its own call; the statistics are computed in a second pass
over queries and keys, or over the logits of the softmax, outside of its autograd graph.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from polyhead.observation import flex_calls, foreign_functions
from polyhead.observation.attention_calls import (
    AttentionCall,
    NotUnderstood,
    RunningModule,
    read_multi_head,
    read_scaled_dot_product,
)
from polyhead.observation.cache_positions import SequenceStart, locate_tokens
from polyhead.observation.followed_tensors import (
    CARRYING,
    FOLLOWED,
    SOFTMAX,
    FollowedTensors,
    Scores,
    Weights,
    name_of,
)
from polyhead.observation.materialised_calls import MaterialisedCall
from polyhead.observation.matrix_products import MATRIX_PRODUCTS, MatrixProduct
from polyhead.observation.recomputation import hidden_operators, is_recomputed
from polyhead.observation.rows import Tokens
from polyhead.observation.softmax_calls import read_product, softmax_of
from polyhead.observation.staging import wrapped_calls
from polyhead.observation.torch_modules import notify_torch
from polyhead.observation.transformers_models import uses_interface
from polyhead.ops.attended import Attended
from polyhead.ops.attention import attention
from polyhead.ops.common.gates import gate_factors

if TYPE_CHECKING:
    from polyhead.observation.calls import Call
    from polyhead.observation.session import Session

MATERIALISED = "weights materialised by the model: slow, memory quadratic in the context length"


class SkippedCall(NamedTuple):
    """An attention call that a session did not observe: its site, and the reason."""

    site: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """Parser of the arguments of an attention function, which returns the head outputs, alone or first of a tuple."""

    read: Callable[..., AttentionCall]
    serve: Callable[[AttentionCall, tuple[Any, ...]], Any] | None = None  # runs in place of the function
    run: Callable[..., Any] = lambda original, args, kwargs: original(*args, **kwargs)


_SDPA = _Function(read_scaled_dot_product)
_FLEX = _Function(flex_calls.read_flex, flex_calls.attend_flex, flex_calls.run_flex)
_MULTI_HEAD = F.multi_head_attention_forward
_FUNCTIONS: dict[Any, _Function] = {
    F.scaled_dot_product_attention: _SDPA,
    torch.ops.aten.scaled_dot_product_attention: _SDPA,
    torch.ops.aten.scaled_dot_product_attention.default: _SDPA,
    flex_operator: _FLEX,
}


class _ThreadState(threading.local):
    """Modules that run in the current thread, the innermost last, and the tensors that are followed in it."""

    def __init__(self) -> None:
        self.stack: list[RunningModule] = []
        self.followed = FollowedTensors()


@dataclass(slots=True, eq=False)
class Interceptor:
    """Intercepts the attention functions that modules of a model call.

    Args:
        session: the session.
        on_return: called when the model itself returns from its outermost call.
        names: paths of the model's modules, by id.
    """

    session: Session
    on_return: Callable[[], None]
    names: Mapping[int, str] = field(default_factory=dict)
    skipped: dict[SkippedCall, None] = field(default_factory=dict)
    called: dict[str, None] = field(default_factory=dict)  # names of all sites, understood or not
    materialised: dict[str, None] = field(default_factory=dict)  # names of sites whose weights the model materialises
    has_run: bool = False  # whether a module of the model has finished a call
    _starts: dict[str, deque[SequenceStart]] = field(default_factory=dict)
    _reported: set[int] = field(default_factory=set)  # ids of modules whose attention other hooks report
    _thread: _ThreadState = field(default_factory=_ThreadState)

    @contextmanager
    def watching(self, model: nn.Module, modules: Iterable[nn.Module], reported: Iterable[nn.Module]) -> Iterator[None]:
        """Intercept while one of these modules runs; other hooks report the attention of those in `reported`."""
        modules, reported = tuple(modules), tuple(reported)
        self._reported = {id(module) for module in reported}
        with ExitStack() as undo:
            undo.callback(self._leave)
            # Before other hooks of the model, which may end what a session keeps of its forward.
            undo.callback(model.register_forward_hook(_ReportOf(self), prepend=True).remove)
            undo.enter_context(foreign_functions.replaced({type(x) for x in modules}, _wrapped_foreign))
            undo.enter_context(wrapped_calls(dict.fromkeys((*modules, *reported)), self.run))
            yield

    def _leave(self) -> None:
        self._starts.clear()
        self._thread = _ThreadState()
        _remove_modes(self)

    def run(
        self, call: Callable[..., Any], module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Run a module of the model."""
        stack = self._thread.stack
        path, outer = self.names[id(module)], stack[-1] if len(stack) else None
        is_reported = id(module) in self._reported or (outer is not None and outer.is_reported)
        stack.append(RunningModule(module, path, positional, keywords, 0, is_reported, outer))
        try:
            if len(stack) > 1:
                result = call(*positional, **keywords)
                self._report_pending(stack[-1])
                return result
            with _InterceptingMode(self):
                result = call(*positional, **keywords)
                self._report_pending(stack[-1])
            self._list_unmultiplied()
            if not is_recomputed():
                self.has_run = True
                if module is self.session.model:
                    self.on_return()
            return result
        finally:
            stack.pop()
            if not len(stack):
                self._thread.followed.clear()

    def follow(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is no attention function, and follow hand-written attention through it."""
        stack, followed, name = self._thread.stack, self._thread.followed, name_of(original)
        is_followed = name in FOLLOWED or (len(followed.entries) > 0 and (followed.has_softmax or name in CARRYING))
        if not is_followed or not len(stack) or stack[-1].is_reported or uses_interface(type(stack[-1].module)):
            return original(*args, **kwargs)
        if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        if name in MATRIX_PRODUCTS:
            product = MatrixProduct.of(name, args, kwargs)
            if product is not None and isinstance(result, Tensor):
                return self._multiplied(stack[-1], followed, product, result)
        if name in SOFTMAX:
            softmax_of(stack[-1], args, kwargs, result, followed)
        else:
            followed.follow(original, name, args, kwargs, result)
        return result

    def _multiplied(
        self, running: RunningModule, followed: FollowedTensors, product: MatrixProduct, result: Tensor
    ) -> Tensor:
        """Follow a product that may be of queries and keys; observe one of weights and values."""
        origins = [followed.get(x) for x in product.operands]
        index = next((number for number, origin in enumerate(origins) if isinstance(origin, Weights)), None)
        if index is None:
            if min(x.ndim for x in product.operands) > 1 and len(product.contracted()) == 1 and product.is_complete():
                followed.set(result, Scores((product,)))
            return result
        weights = origins[index]
        assert isinstance(weights, Weights)
        softmax, values = weights.softmax, product.operands[1 - index]
        if len(softmax.products):  # outputs of its heads are the sum of several products
            if softmax.products[0] is not None:
                softmax.products[0].add_product()
            return result
        if softmax.scores is None and (values.ndim < 3 or not len(product.shared(index))):
            return result  # such as a router or a codebook
        if any(x is softmax.running for x in running.around()):
            running = softmax.running  # products may be computed in a module of their own
        site = self._next_site(running)
        try:
            with hidden_operators():
                read = read_product(running, product, index, weights, followed)
            call = self._locate_tokens(read.call, site)
        except NotUnderstood as reason:
            self.skipped[SkippedCall(site, str(reason))] = None
            running.has_unknown_softmax |= softmax.scores is not None
            softmax.products.append(None)
            return result
        observed = self._begin(running, site, call, learned_sinks=read.sinks is not None)
        if observed is None:
            softmax.products.append(None)
            return result
        heads = call.axes.split(result)
        pending = MaterialisedCall(site, observed, replace(read, call=call), heads)
        softmax.products.append(pending)
        running.pending.append(pending)
        if observed.gate is None:
            return call.axes.join(heads) if observed.has_listener else result
        return call.axes.join(heads * gate_factors(observed.gate, *heads.shape[:3]).to(heads.dtype))

    def _next_site(self, running: RunningModule) -> str:
        """Return the name of the attention call that a module begins: its path, with a number from the second on."""
        running.calls += 1
        site = running.path if running.calls == 1 else f"{running.path}#{running.calls}"
        self.called[site] = None
        return site

    def _locate_tokens(self, call: AttentionCall, site: str) -> AttentionCall:
        """Return a call with the positions of its tokens; raise if its site had other heads before."""
        with hidden_operators():
            call = locate_tokens(call, self._starts, site)
        known = self.session.heads_at(site, cross=call.cross)
        _check_heads(known, call.query.shape[1])
        return call

    def _begin(
        self, running: RunningModule, site: str, call: AttentionCall, *, learned_sinks: bool = False
    ) -> Call | None:
        """Announce a call to the session; None if it is not observed."""
        key = running.module if running.calls == 1 else site
        tokens = Tokens.of(call.mask, call.query, call.key) if call.tokens is None else call.tokens
        return self.session.call(key, call.query.shape[1], tokens, cross=call.cross, learned_sinks=learned_sinks)

    def report_root(self, module: nn.Module) -> None:
        """Report the hand-written attention of the model itself, before the other hooks of its forward."""
        stack = self._thread.stack
        if len(stack) and stack[-1].module is module:
            self._report_pending(stack[-1])

    def _report_pending(self, running: RunningModule) -> None:
        """Report the hand-written attention of a module that returns, unless only a part of it was understood."""
        pending, running.pending = running.pending, []
        for x in pending:
            if running.has_unknown_softmax:
                self.session.withdraw(x.observed)
                reason = "its module has another hand-written attention, which is not observed"
                self.skipped[SkippedCall(x.site, reason)] = None
                x.release()
                continue
            self.materialised[x.site] = None
            x.report()

    def _list_unmultiplied(self) -> None:
        """List as skipped every followed softmax that was not multiplied with values."""
        for site, products in self._thread.followed.softmaxes:
            if not len(products):
                self.called[site] = None
                reason = "its weights, a softmax of products, are not multiplied with values by matmul, bmm or einsum"
                self.skipped[SkippedCall(site, reason)] = None

    def running(self) -> RunningModule | None:
        """Return the module that runs in this thread; None if its attention is reported in another way."""
        stack = self._thread.stack
        return stack[-1] if len(stack) and not stack[-1].is_reported else None

    def attend(
        self, function: _Function, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an attention function that a module calls, and report its attention."""
        running = self.running()
        if running is None:
            return original(*args, **kwargs)
        return self.attend_in(running, function, original, args, kwargs)

    def attend_in(
        self,
        running: RunningModule,
        function: _Function,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an attention function that this module calls, and report its attention."""
        result: Any = None
        if function.serve is None:
            result = original(*args, **kwargs)  # also checks its arguments
        site = self._next_site(running)
        try:
            call = self._locate_tokens(function.read(running, *args, **kwargs), site)
        except NotUnderstood as reason:
            self.skipped[SkippedCall(site, str(reason))] = None
            return result if function.serve is None else function.run(original, args, kwargs)
        if function.serve is not None:
            result = function.serve(call, args)
        observed = self._begin(running, site, call)
        if observed is None:
            return result
        # The tensor that the model continues with, so that gradient hooks on it are called.
        heads = call.axes.split(result[0] if isinstance(result, tuple) else result)
        if observed.counts or observed.differentiable or observed.has_listener:
            _report(observed, call, heads)
        if observed.gate is not None:
            heads = heads * gate_factors(observed.gate, *heads.shape[:3]).to(heads.dtype)
        output = call.axes.join(heads)
        return (output, *result[1:]) if isinstance(result, tuple) else output

    def attend_multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `F.multi_head_attention_forward`, which projects its inputs and outputs, and report its attention."""
        running, result = self.running(), _MULTI_HEAD(*args, **kwargs)  # also checks its arguments
        if running is None:
            return result
        site = self._next_site(running)
        try:
            layer, arguments, cross = read_multi_head(running, *args, **kwargs)
            _check_heads(self.session.heads_at(site, cross=cross), layer.num_heads)
        except NotUnderstood as reason:
            self.skipped[SkippedCall(site, str(reason))] = None
            return result
        key = running.module if running.calls == 1 else site
        removed = notify_torch(layer, arguments, self.session, key, cross=cross)
        return result if removed is None else (result[0] - removed, result[1])


def _check_heads(known: int | None, heads: int) -> None:
    if known not in (None, heads):
        raise NotUnderstood(f"a site must always have the same heads, got {heads} after {known}")


def _report(observed: Call, call: AttentionCall, heads: Tensor) -> None:
    """Compute the statistics of a call and report them."""
    observed.mask = call.mask
    with hidden_operators(gradients=observed.differentiable):
        attended = attention(
            call.query,
            call.key,
            call.value[..., :1],  # the statistics need no values
            mask=call.mask,
            scale=call.scale,
            statistics=observed.requested,
            logsumexp=observed.has_collectors,
        )
        result = replace(attended, output=heads)
        observed.notify(Attended(call.query, call.key, call.value, result, call.mask, call.scale))


class _InterceptingMode(TorchFunctionMode):
    """Passes the attention functions of the current thread to an interceptor."""

    def __init__(self, interceptor: Interceptor) -> None:
        super().__init__()
        self.interceptor = interceptor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = _FUNCTIONS.get(func)
        if function is None:
            if func is _MULTI_HEAD:
                return self.interceptor.attend_multi_head(args, kwargs or {})
            return self.interceptor.follow(func, args, kwargs or {})
        if sys._getframe(1).f_globals.get("__name__", "").startswith("polyhead.ops."):
            return func(*args, **(kwargs or {}))
        return self.interceptor.attend(function, func, args, kwargs or {})


def _wrapped_foreign(original: FunctionType, read: foreign_functions.Read) -> FunctionType:
    """Return what is called in place of a function of another package: it reports to the sessions of its thread."""
    function = _Function(read)

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("polyhead.ops."):
            return original(*args, **kwargs)
        return _attend_foreign(function, original, args, kwargs)

    return cast("FunctionType", wrapper)


def _attend_foreign(
    function: _Function, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function that no mode receives, and report its attention to every session whose module calls it."""
    modes = [x for x in _get_current_function_mode_stack() if isinstance(x, _InterceptingMode)]  # the innermost last
    calling = [(x.interceptor, running) for x in modes if (running := x.interceptor.running()) is not None]
    calling = [(x, running) for x, running in calling if not uses_interface(type(running.module))]

    def call(depth: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not depth:
            return original(*args, **kwargs)
        interceptor, running = calling[depth - 1]
        return interceptor.attend_in(running, function, lambda *x, **y: call(depth - 1, x, y), args, kwargs)

    try:
        for _, running in calling:
            running.is_reported = True  # hides the operators of the function, and those of the statistics
        return call(len(calling), args, kwargs)
    finally:
        for _, running in calling:
            running.is_reported = False


def _remove_modes(interceptor: Interceptor) -> None:
    """Remove modes that an interrupt between two instructions has left behind in this thread."""
    modes = _get_current_function_mode_stack()
    if any(isinstance(x, _InterceptingMode) and x.interceptor is interceptor for x in modes):
        for _ in modes:
            torch._C._pop_torch_function_stack()
        for mode in modes:
            if not (isinstance(mode, _InterceptingMode) and mode.interceptor is interceptor):
                torch._C._push_on_torch_function_stack(mode)


@dataclass(frozen=True, slots=True, eq=False)
class _ReportOf:
    """Forward hook of the model; that of a pickled or copied model, which is not observed, does nothing."""

    interceptor: Interceptor | None

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.interceptor is not None:
            self.interceptor.report_root(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ReportOf, (None,)


def why_nothing_called(model: nn.Module) -> str:
    """Return the error message for a model that ran without any attention that can be observed."""
    return (
        "observe supports transformers models, polyhead.MultiHeadAttention, torch.nn.MultiheadAttention and modules "
        "that call F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, flash_attn or "
        f"xformers, or compute a softmax of products of queries and keys, got {type(model).__name__}, which ran "
        "without any of them; pass adapters for its attention modules: observe(model, adapters=...)"
    )


def materialised_note(sites: Iterable[str]) -> str:
    """Return a note that names up to three sites with materialised weights; empty without any."""
    names = list(sites)
    if not len(names):
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{MATERIALISED} ({', '.join(names[:3])}{more})"


def skipped_note(skipped: Iterable[SkippedCall]) -> str:
    """Return a note that names up to three calls that were not observed; empty without any."""
    calls = list(skipped)
    if not len(calls):
        return ""
    more = f", and {len(calls) - 3} more in session.skipped" if len(calls) > 3 else ""
    return "not observed: " + ", ".join(f"{x.site} ({x.reason})" for x in calls[:3]) + more

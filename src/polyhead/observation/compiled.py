"""Observe compiled transformers models: operators by which compiled code reports head outputs and their gradients.

Compiled code cannot call a session, but it may contain operators whose bodies do: one after each attention, and one in
the backward that receives the gradient of its output. A body runs whenever the code runs, so it counts like an eager
call.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead.integrations.huggingface.attention import TRACED
from polyhead.masks import Mask
from polyhead.observation import intercepted_calls, staging
from polyhead.observation.rows import Tokens, corrected, hidden_by_bias, with_positions
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, RowStatistics, Statistics, attention

GradientHook = Callable[[Tensor], None]
# Called with a result, its non-padding rows, whether the call is supported, and whether autocast is in float16. Returns
# what is called with the gradient of the output.
Record = Callable[[AttentionOutput, Tensor | None, bool, bool], GradientHook | None]

# Files whose code runs the method of a compiled module.
_CALLING_FILES = (nn.modules.module.__file__, staging.__file__, intercepted_calls.__file__)
_numbers = itertools.count(1)


class _Site(NamedTuple):
    """Attention module as the operators see it."""

    names: tuple[str, ...]  # of the statistics
    record: Record
    hooks: dict[int, GradientHook]  # of the forwards of a step, by number


_SITES: dict[int, _Site] = {}  # of entered sessions, by the number of the `TracedModule`


class TracedModule:
    """Attribute of an attention module that its compiled code calls, in place of a session.

    The number of the module is a tensor, so that it is an input of the graph rather than a constant, and layers share
    one compiled graph.

    Args:
        requested: statistics to compute.
        learned_sinks: whether the module has learned sinks.
        record: records a call.
    """

    def __init__(self, requested: Statistics, record: Record, *, learned_sinks: bool) -> None:
        self.requested, self.record, self.learned_sinks = requested, record, learned_sinks
        self.names = requested.wanted(learned_sinks=learned_sinks)
        self.number = torch.tensor(next(_numbers))
        self.last_forward = torch.zeros(2, dtype=torch.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the module is not observed

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, mask: Mask | None, *, learned_sinks: bool
    ) -> TracedCall:
        return TracedCall(self, query, key, mask, has_kernel=query.is_cuda)


class TracedCall:
    """An attention call of compiled code.

    Args:
        module: its module.
        query: queries of the call.
        key: keys of the call.
        mask: mask of the call.
        has_kernel: whether output and statistics are computed in one pass, as on a CUDA device. Otherwise the
            statistics take a second pass, without gradients.
    """

    has_collectors = False
    gate = None

    def __init__(
        self, module: TracedModule, query: Tensor, key: Tensor, mask: Mask | None, *, has_kernel: bool
    ) -> None:
        self.module, self.requested = module, module.requested if has_kernel else None
        self.non_padding = Tokens.of(mask, query, key).non_padding()
        self.is_same = query.shape[2] == key.shape[2]
        self.numbered = with_positions(mask, self.non_padding) if self.is_same else mask
        self.hidden, self.mask = hidden_by_bias(self.numbered, query.shape[:3]), self.numbered if has_kernel else mask

    def notify(self, attended: Attended) -> Tensor:
        """Return the output of the operator; called by a tracer."""
        query, module, rows = attended.query, self.module, attended.result.statistics
        if rows is None:
            with torch.no_grad():
                rows = attention(
                    query.detach(),
                    attended.key.detach(),
                    attended.value.detach(),
                    mask=self.numbered,
                    scale=attended.scale,
                    softcap=attended.softcap,
                    sinks=attended.sinks,
                    statistics=module.requested,
                    finite=True,
                ).statistics
        assert rows is not None
        rows = corrected(rows, self.hidden, None)
        device = query.device.type
        is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        heads = attended.result.output
        forward = _observe_heads(
            heads.detach(),
            [getattr(rows, name).detach() for name in module.names],
            self.non_padding,
            module.number,
            self.is_same and (attended.sinks is not None) == module.learned_sinks,
            is_half,
        )
        _keep(forward, module.last_forward)
        output: Tensor = _ObservedHeads.apply(heads, forward)
        return output


class CompiledModules:
    """Attention modules of a session that observes compiled code.

    Args:
        traced: the `TracedModule` of each attention module.
        compiled: the modules that are compiled. Modules inside of them stay as they are, and so does their code.
    """

    def __init__(self, traced: Mapping[nn.Module, TracedModule], compiled: Iterable[nn.Module]) -> None:
        self.traced, self.compiled = dict(traced), tuple(compiled)
        self.hooks: dict[int, GradientHook] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let compiled code report its attention for the duration of the context."""
        with ExitStack() as undo:
            for module, traced in self.traced.items():
                number = int(traced.number)
                _SITES[number] = _Site(traced.names, traced.record, self.hooks)
                undo.callback(_SITES.pop, number)
                setattr(module, TRACED, traced)
                undo.callback(delattr, module, TRACED)
            yield

    def outside(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the compiled modules and those of `modules` that are not inside of one."""
        inside = {id(x) for module in self.compiled for x in module.modules() if x is not module}
        return [x for x in dict.fromkeys((*self.compiled, *modules)) if id(x) not in inside]


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are compiled, or whose forward is."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return []
    return [
        x
        for x in model.modules()
        if isinstance(x, torch._dynamo.OptimizedModule)
        or x._compiled_call_impl is not None
        or hasattr(vars(x).get("forward"), "_torchdynamo_orig_callable")
    ]


def compiled_callers() -> tuple[list[nn.Module], bool]:
    """Return the compiled modules around the running call, and whether there is a compiled function around it."""
    modules: list[nn.Module] = []
    is_in_function = False
    frame: Any = sys._getframe() if "torch._dynamo" in sys.modules else None
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if code.co_name == "compile_wrapper" and code.co_filename == torch._dynamo.eval_frame.__file__:
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch._dynamo.OptimizedModule):
                modules.append(caller)
            elif frame.f_code.co_filename not in _CALLING_FILES:
                is_in_function = True
    return modules, is_in_function


# Their bodies run Python in every call, which the replay of a CUDA graph would skip.
@torch.library.custom_op("polyhead::observe_heads", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _observe_heads(
    heads: Tensor, rows: list[Tensor], non_padding: Tensor | None, number: Tensor, is_supported: bool, is_half: bool
) -> Tensor:
    """Record a call; returns the numbers of the site and of this forward."""
    site, forward = _SITES.get(int(number)), next(_numbers)
    if site is not None:
        result = AttentionOutput(heads, statistics=RowStatistics(**dict(zip(site.names, rows, strict=True))))
        hook = site.record(result, non_padding, is_supported, is_half)
        if hook is not None:
            site.hooks[forward] = hook
    return torch.tensor([int(number), forward])


@_observe_heads.register_fake
def _(heads: Tensor, *rest: Any) -> Tensor:
    return torch.empty(2, dtype=torch.int64)


# Of a mutation of their inputs, compilers keep what it depends on. Without it a forward would not contain the call that
# it records, where no backward reads the number: without gradients, or where a backward computes the layer again.
@torch.library.custom_op("polyhead::keep_forward", mutates_args=("last",), tags=(torch.Tag.cudagraph_unsafe,))
def _keep(forward: Tensor, last: Tensor) -> None:
    """Copy the numbers of a forward to those of the last one."""
    last.copy_(forward)


@torch.library.custom_op("polyhead::observe_gradients", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _observe_gradients(grad: Tensor, forward: Tensor) -> Tensor:
    """Record the gradient with respect to the outputs of the heads in a forward; returns a copy of it."""
    number, index = forward.tolist()
    hook = _SITES[number].hooks.get(index) if number in _SITES else None
    if hook is not None:
        hook(grad)
    return grad.clone()


@_observe_gradients.register_fake
def _(grad: Tensor, forward: Tensor) -> Tensor:
    return torch.empty_like(grad)


class _ObservedHeads(torch.autograd.Function):
    """Outputs of heads, not copied, whose gradient is recorded as that of a forward."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, forward: Tensor) -> Tensor:
        ctx.save_for_backward(forward)
        return heads.view_as(heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (forward,) = ctx.saved_tensors
        return _observe_gradients(grad, forward), None

"""Several sessions that observe a model at the same time: one attention call serves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.integrations.huggingface.attention import WatchedCall
from polyhead.ops.attended import Attended
from polyhead.ops.attention import Statistics
from polyhead.ops.common.gates import gate_factors

Begin = Callable[..., WatchedCall | None]


class SharedSetting:
    """A setting of the whole process, made by the first session that needs it and undone by the last.

    Sessions on different models may be exited in any order. If each restored the setting that it had read, the last
    could restore one that another session had made.
    """

    def __init__(self, create: Callable[[], AbstractContextManager[Any]]) -> None:
        self._create, self._count, self._made = create, 0, ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the setting for the duration of the context."""
        if self._count == 0:
            self._made.enter_context(self._create())
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if self._count == 0:
                self._made.close()


# A compiled graph cannot return statistics besides its outputs.
EAGER = SharedSetting(lambda: torch.compiler.set_stance("force_eager"))


class NestedCall:
    """A call that two sessions observe: the statistics of both, and the product of their gates."""

    def __init__(self, outer: WatchedCall, inner: WatchedCall, query: Tensor, *, learned_sinks: bool) -> None:
        self.calls = (outer, inner)
        self.requested = merged_requests(inner.requested, outer.requested, learned_sinks)
        self.has_collectors = outer.has_collectors or inner.has_collectors
        # That with positions, which a session adds if its statistics need them.
        is_placed = outer.mask is not None and outer.mask.placed is not None
        self.mask = outer.mask if is_placed else inner.mask
        self.gate = outer.gate if inner.gate is None else inner.gate
        if outer.gate is not None and inner.gate is not None:
            self.gate = product_of_gates(outer.gate, inner.gate, *query.shape[:3])

    def notify(self, attended: Attended) -> None:
        for call in self.calls:
            call.notify(attended)


def begin_both(outer: Begin, inner: Begin) -> Begin:
    """Return the function that two sessions register together for the attention calls of a module."""

    def begin(module: nn.Module, query: Tensor, *inputs: Any, learned_sinks: bool) -> WatchedCall | None:
        first, second = (each(module, query, *inputs, learned_sinks=learned_sinks) for each in (outer, inner))
        if first is None or second is None:
            return second if first is None else first
        return NestedCall(first, second, query, learned_sinks=learned_sinks)

    return begin


def product_of_gates(first: Tensor, second: Tensor, batch: int, heads: int, queries: int) -> Tensor:
    """Return the product of two gates of any shape, [batch, heads, queries]."""
    factors = gate_factors(first, batch, heads, queries) * gate_factors(second, batch, heads, queries)
    return factors.squeeze(-1).expand(batch, heads, queries)


def merged_requests(requested: Statistics | None, outer: Statistics | None, learned_sinks: bool) -> Statistics | None:
    """Combine the statistics requested by a session and those by an outer session or by the layer's caller."""
    if outer is None or requested is None:
        return outer if requested is None else requested
    cross = requested.cross or outer.cross
    in_call = Statistics(*outer.names, sink_keys=outer.sink_keys, window=outer.window, cross=cross)
    outer_names = in_call.wanted(learned_sinks=learned_sinks)
    for name, option in (("sink_mass", "sink_keys"), ("window_mass", "window")):
        own_value, outer_value = getattr(requested, option), getattr(outer, option)
        if name in requested.names and name in outer_names and own_value != outer_value:
            raise OptionError(
                f"the session and the layer's caller, or another session, must request {name} with the same {option}, "
                f"got {own_value} and {outer_value}; "
                f"observe with statistics=polyhead.Statistics(..., {option}={outer_value})"
            )
    sinks, window = (outer if name in outer_names else requested for name in ("sink_mass", "window_mass"))
    names = dict.fromkeys((*requested.names, *outer_names))
    return Statistics(*names, sink_keys=sinks.sink_keys, window=window.window, cross=requested.cross)


_entered: list[tuple[Any, frozenset[int]]] = []  # sessions, and the modules that they observe


@contextmanager
def entered(session: object, model: nn.Module) -> Iterator[None]:
    """Record that a session observes a model, for the duration of the context."""
    _entered.append((session, frozenset(id(module) for module in model.modules())))
    try:
        yield
    finally:
        _entered[:] = [(other, modules) for other, modules in _entered if other is not session]


def check_innermost(session: object) -> None:
    """Raise if a session that was entered later still observes modules of the same model."""
    position = next(i for i, (other, _) in enumerate(_entered) if other is session)
    modules = _entered[position][1]
    if any(not modules.isdisjoint(others) for _, others in _entered[position + 1 :]):
        raise OptionError(
            "sessions that observe the same model must be exited in reverse order, got one that was entered before "
            "another that still observes it; exit that one first. A HeadMonitor with every above 1 leaves and returns "
            "in training: enter it after the others"
        )


def is_shared(session: Any) -> bool:
    """Return whether another session observes modules of the same model."""
    others = [modules for x, modules in _entered if x is not session]
    return len(others) > 0 and any(id(module) in x for module in session.model.modules() for x in others)


def is_observed(model: nn.Module) -> bool:
    """Return whether a session observes modules of a model."""
    observed = frozenset(id(module) for module in model.modules())
    return any(not observed.isdisjoint(modules) for _, modules in _entered)


def is_gated_by_another(session: object, module: nn.Module) -> bool:
    """Return whether another session that observes a module has gates."""
    others = [x for x, modules in _entered if x is not session and id(module) in modules]
    return any(len(x.gates) or x.gates.create is not None for x in others)

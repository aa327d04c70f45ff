"""Transactional counting: the data of a model call is committed when it finishes and discarded if it raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from torch import nn

from polyhead.errors import OptionError
from polyhead.observation.collectors import CollectorState
from polyhead.observation.statistics import AttentionSite, SiteStatistics


@dataclass(slots=True, eq=False)
class Tally:
    """Accumulated data of a session. Its values are immutable, so copies share them."""

    sites: dict[tuple[str, str], AttentionSite] = field(default_factory=dict)  # by name and kind
    calls: Counter[AttentionSite] = field(default_factory=Counter)
    statistics: dict[AttentionSite, SiteStatistics] = field(default_factory=dict)
    collected: dict[AttentionSite, dict[str, CollectorState]] = field(default_factory=dict)
    resumed: set[AttentionSite] = field(default_factory=set)  # resumed sites, whose states may be on another device
    begun: Counter[AttentionSite] = field(default_factory=Counter)  # all calls, of which every k-th is observed

    def copy(self) -> Tally:
        # The inner dictionaries of `collected` are replaced, never mutated.
        states = dict(self.statistics), dict(self.collected)
        return Tally(dict(self.sites), self.calls.copy(), *states, set(self.resumed), self.begun.copy())


@dataclass(slots=True, eq=False)
class Staging:
    """Committed data, and the staged copy of the outermost running call.

    `on_abort` is called after a call that raised any exception, including KeyboardInterrupt, `on_commit` after one that
    added data.
    """

    on_abort: Callable[[], None]
    on_commit: Callable[[], None]
    counted: Tally = field(default_factory=Tally)
    staged: Tally | None = None
    is_updated: bool = False  # whether the running call has added data
    lock: Lock = field(default_factory=Lock)  # of `take` against the beginning of a call in another thread

    @property
    def current(self) -> Tally:
        """The tally to update: the staged one during a call, otherwise the committed one."""
        return self.counted if self.staged is None else self.staged

    def run(
        self, call: Callable[..., Any], module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Run a call of a module and commit its data atomically; a nested call is part of the outer one."""
        if self.staged is not None:
            return call(*positional, **keywords)
        with self.lock:
            staged = self.staged = self.counted.copy()
        self.is_updated = done = False
        try:
            result = call(*positional, **keywords)
            # A single assignment, so that an interrupt cannot leave a call half counted.
            self.counted = staged
            done = True
        finally:
            self.staged = None
            if not done:
                self.on_abort()
        if self.is_updated:
            self.on_commit()
        return result

    def take(self) -> None:
        """Replace the committed data by an empty tally of the same sites."""
        with self.lock:
            if self.staged is not None:
                raise OptionError(
                    "take needs a moment between two forwards, got a running one, whose data would be counted twice; "
                    "call it in the callback of observe or after the forward"
                )
            self.counted = Tally(dict(self.counted.sites), begun=self.counted.begun.copy())

    def watching(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Stage the calls of these modules, hooks included; restores the modules on exit."""
        return wrapped_calls(modules, self.run)


# Runs a method of a module, given the method, the module, and the positional and keyword arguments of a call.
Run = Callable[[Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def wrapped_calls(
    modules: Iterable[nn.Module], run: Run, methods: Sequence[str] = ("_call_impl", "_compiled_call_impl")
) -> Iterator[None]:
    """Let `run` call methods of modules, by default those that run a module and its hooks; restores them on exit."""
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in modules:
            # Set in the instance dict, where PyTorch looks them up; nn.Module's setattr is bypassed.
            for name in methods:
                method = getattr(module, name, None)
                if method is not None:
                    replaced.append((module, name, module.__dict__.get(name)))
                    module.__dict__[name] = _Wrapped(run, method, module, name)
        yield
    finally:
        for module, name, method in reversed(replaced):
            if method is None:
                module.__dict__.pop(name, None)  # an interrupt may have come before it was set
            else:
                module.__dict__[name] = method


@dataclass(frozen=True, slots=True, eq=False)
class _Wrapped:
    """A method of a module that `run` calls."""

    run: Run
    method: Callable[..., Any]
    module: nn.Module
    name: str

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        return self.run(self.method, self.module, positional, keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied module gets its own method back and is not observed.
        return getattr, (self.module, self.name)


def enclosing_modules(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the model, these modules, and all modules on the paths between them."""
    targets = {id(module) for module in modules}
    paths = [name.split(".") for name, module in model.named_modules() if id(module) in targets]
    names = dict.fromkeys(["", *(".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1))])
    return list({id(module): module for module in (model.get_submodule(name) for name in names)}.values())

"""Counting call by call of the model: what a call adds is counted when it has ended, and dropped where it raised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from polyhead.observation.collectors import CollectorState
from polyhead.observation.statistics import AttentionSite, SiteStatistics


@dataclass(slots=True, eq=False)
class Tally:
    """Everything that a session has counted. The values in it are never written to, so a copy shares them."""

    sites: dict[tuple[str, str], AttentionSite] = field(default_factory=dict)  # by name and kind
    calls: Counter[AttentionSite] = field(default_factory=Counter)
    statistics: dict[AttentionSite, SiteStatistics] = field(default_factory=dict)
    collected: dict[AttentionSite, dict[str, CollectorState]] = field(default_factory=dict)
    taken_up: set[AttentionSite] = field(default_factory=set)  # whose values are where an earlier session left them

    def copy(self) -> Tally:
        # The dictionaries within `collected` are replaced as a whole, never changed.
        return Tally(
            dict(self.sites), self.calls.copy(), dict(self.statistics), dict(self.collected), set(self.taken_up)
        )


@dataclass(slots=True, eq=False)
class Staging:
    """What is counted, and what the outermost call that is running would add to it.

    `dropped` is called after a call that raised, whatever it raised: an interrupt as well as an error.
    """

    dropped: Callable[[], None]
    counted: Tally = field(default_factory=Tally)
    staged: Tally | None = None

    @property
    def current(self) -> Tally:
        """The tally to count in: that of the running call, and where none is running the counted one."""
        return self.counted if self.staged is None else self.staged

    def run(self, call: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        """Make a call, and count what it adds as a whole; within another one it is part of that."""
        if self.staged is not None:
            return call(*positional, **keywords)
        staged = self.staged = self.counted.copy()
        done = False
        try:
            result = call(*positional, **keywords)
            # One assignment: whatever interrupts it, the call is counted or it is not.
            self.counted = staged
            done = True
        finally:
            self.staged = None
            if not done:
                self.dropped()
        return result

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Run the calls of these modules as above, with their hooks; the modules are as they were afterwards."""
        before: list[tuple[nn.Module, str, Any]] = []
        try:
            for module in modules:
                # In the instance: PyTorch looks both up there, and other attributes have setters of their own.
                for name in ("_call_impl", "_compiled_call_impl"):
                    own = getattr(module, name, None)
                    if own is not None:
                        before.append((module, name, module.__dict__.get(name)))
                        module.__dict__[name] = _Staged(self, own, module)
            yield
        finally:
            for module, name, own in reversed(before):
                if own is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = own


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    staging: Staging
    call: Callable[..., Any]
    module: nn.Module

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        return self.staging.run(self.call, *positional, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module calls itself, and is not watched.
        return getattr, (self.module, "_call_impl")


def around(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The model, these modules, and all between: whose calls have calls of these modules within."""
    wanted = {id(module) for module in modules}
    paths = [name.split(".") for name, module in model.named_modules() if id(module) in wanted]
    names = dict.fromkeys(["", *(".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1))])
    return list({id(module): module for module in (model.get_submodule(name) for name in names)}.values())

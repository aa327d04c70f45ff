"""What a session refuses, because it would count less than its user believes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadId, HeadOrigins
from polyhead.observation import torch_modules, transformers_models
from polyhead.observation.statistics import AttentionSite


@dataclass(slots=True, eq=False)
class OneThread:
    """The thread whose calls a session counts: the first that calls. What runs at the same time would mix its state."""

    ident: int | None = None

    def check(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a backward computes a layer again in a thread of autograd's own, and counts nothing
        ident = threading.get_ident()
        if self.ident is None:
            self.ident = ident
        elif self.ident != ident:
            raise OptionError(
                "a session counts the calls of one thread, got a call of the observed model from another; "
                "observe a copy of the model in each thread and merge their observations"
            )

    def forget(self) -> None:
        self.ident = None


def stack_of(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def check_numbers(layers: Iterable[int | str], names: Sequence[str]) -> None:
    """Refuse numbers of layers that no stack of the model has; of a model that returns weights it is known later."""
    deepest = max(Counter(map(stack_of, names)).values(), default=None)
    if deepest is None:
        return
    beyond = sorted(x for x in layers if isinstance(x, int) and x >= deepest)
    if beyond:
        got = ", ".join(map(str, beyond))
        raise OptionError(f"layers count from 0 in each stack, here to {deepest - 1}, got {got}")


def check_paths(layers: Iterable[int | str], names: Sequence[str]) -> None:
    """Refuse the paths of modules that do not attend."""
    for path in layers:
        if isinstance(path, str) and path not in names:
            inside = [name for name in names if name.startswith(f"{path}.")]
            hint = f", which holds {', '.join(inside[:3])}" if inside else ""
            raise OptionError(f"layers are numbers or paths of modules that attend, got {path!r}{hint}")


def check_heads(site: AttentionSite, num_heads: int, origins: HeadOrigins | None) -> None:
    """Refuse to go on with a module whose heads have become others."""
    if site.num_heads != num_heads or site.origins != origins:
        others = "" if site.num_heads != num_heads else " other ones"
        raise OptionError(
            f"a session counts heads that stay the same, got {num_heads} heads in {site.name!r}, which had "
            f"{site.num_heads}{others}; observe the edited model in a session of its own"
        )


def check_chosen(heads: Iterable[int | HeadId], sites: Iterable[AttentionSite], names: Iterable[str]) -> None:
    """Refuse heads that no layer has, once every module of the given names was called."""
    seen = list(sites)
    if not {*names} <= {site.name for site in seen}:
        return
    most = max((site.num_heads for site in seen), default=0)
    there = {HeadId(site.layer, head) for site in seen for head in range(site.num_heads)} | {*range(most)}
    missing = sorted(str(head) for head in heads if head not in there)
    if missing:
        raise OptionError(f"heads are those of the model's layers, here up to {most} in each, got {', '.join(missing)}")


@contextmanager
def with_the_same_modules(model: nn.Module, watched: Iterable[nn.Module]) -> Iterator[None]:
    """Refuse a model that has got attention modules inside the session, whose calls nobody has counted."""
    before = {id(module) for module in watched}
    yield
    attending = {*transformers_models.asking_modules(model), *torch_modules.attention_layers(model)}
    new = [name for name, module in model.named_modules() if module in attending and id(module) not in before]
    if new:
        raise OptionError(
            f"a session counts the modules that the model had when it was entered, got {', '.join(new[:3])} in their "
            "place inside it; observe the model after the change"
        )

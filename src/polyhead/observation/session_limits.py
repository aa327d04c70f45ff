"""Checks that raise where a session would otherwise silently miss calls, layers or heads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadId, HeadOrigins
from polyhead.observation import torch_modules, transformers_models
from polyhead.observation.recomputation import is_recomputed
from polyhead.observation.statistics import AttentionSite


@dataclass(slots=True, eq=False)
class OneThread:
    """Restricts a session to the first thread that calls the model; concurrent calls would mix their state.

    When that thread has ended, another may follow.
    """

    thread: threading.Thread | None = None

    def check(self) -> None:
        if is_recomputed():
            return  # it runs in an autograd thread and is not counted
        thread = threading.current_thread()
        if self.thread is None or not self.thread.is_alive():
            self.thread = thread
        elif self.thread is not thread:
            raise OptionError(
                "a session observes calls from one thread only, got a call from another; "
                "observe a copy of the model in each thread and merge their observations"
            )

    def forget(self) -> None:
        self.thread = None


def stack_of(name: str) -> str:
    """Return a module path with `*` for its numbers, which is the same for all layers of a stack.

    >>> stack_of("encoder.layers.3.attention")
    'encoder.layers.*.attention'
    """
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def chosen_layers(layers: Iterable[int | str]) -> frozenset[int | str]:
    """Return the requested layers as a set; raise for what is neither an index nor a path."""
    selected = frozenset([layers] if isinstance(layers, int | str) else layers)
    for layer in selected:
        if isinstance(layer, bool) or not isinstance(layer, int | str) or (isinstance(layer, int) and layer < 0):
            raise OptionError(f"layers must be non-negative indices or module paths, got {layer!r}")
    return selected


def chosen_heads(heads: Iterable[int | HeadId]) -> frozenset[int | HeadId]:
    """Return the requested heads as a set; raise for what is no head."""
    selected = frozenset([heads] if isinstance(heads, int | HeadId) else heads)
    for head in selected:
        number = head.head if isinstance(head, HeadId) else head
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise OptionError(f"heads must be non-negative indices or polyhead.HeadId(layer, head), got {head!r}")
    return selected


def check_numbers(layers: Iterable[int | str], names: Sequence[str]) -> None:
    """Raise for layer indices beyond every stack of the model, if any is known."""
    deepest = max(Counter(map(stack_of, names)).values(), default=None)
    if deepest is None:
        return
    beyond = sorted(x for x in layers if isinstance(x, int) and x >= deepest)
    if beyond:
        got = ", ".join(map(str, beyond))
        raise OptionError(f"layers of this model are numbered 0 to {deepest - 1} in each stack, got {got}")


def check_paths(layers: Iterable[int | str], names: Sequence[str]) -> None:
    """Raise for paths of modules that are not attention modules."""
    for path in layers:
        if isinstance(path, str) and path not in names:
            inside = [name for name in names if name.startswith(f"{path}.")]
            hint = f", which contains {', '.join(inside[:3])}" if inside else ""
            raise OptionError(f"layers must be indices or paths of attention modules, got {path!r}{hint}")


def check_module_paths(paths: Iterable[str], names: Collection[str]) -> None:
    """Raise for paths that are no module of the model, nor a further attention call of one (`path#2`)."""
    for path in paths:
        module, _, number = path.partition("#")
        if module not in names or ("#" in path and not (number.isdecimal() and int(number) > 1)):
            raise OptionError(
                f"layers must be indices or paths of attention modules, got {path!r}, which the model does not have"
            )


def check_heads_unchanged(site: AttentionSite, num_heads: int, origins: HeadOrigins | None) -> None:
    """Raise if the heads of a module changed during the session."""
    if site.num_heads != num_heads or site.origins != origins:
        note = "" if site.num_heads != num_heads else " different ones"
        raise OptionError(
            f"the heads of a model must not change during a session, got {num_heads} heads in {site.name!r}, which had "
            f"{site.num_heads}{note}; observe the edited model in a new session (DynamicHeads takes a monitor itself)"
        )


def check_heads_exist(heads: Iterable[int | HeadId], sites: Iterable[AttentionSite], names: Iterable[str]) -> None:
    """Raise for heads that no layer has; nothing is checked until every module in `names` was called."""
    called = list(sites)
    if not {*names} <= {site.name for site in called}:
        return
    max_heads = max((site.num_heads for site in called), default=0)
    existing = {HeadId(site.layer, head) for site in called for head in range(site.num_heads)} | {*range(max_heads)}
    missing = sorted(str(head) for head in heads if head not in existing)
    if missing:
        raise OptionError(
            f"heads must exist in the model, which has up to {max_heads} per layer, got {', '.join(missing)}"
        )


@contextmanager
def check_modules_unchanged(model: nn.Module, watched: Iterable[nn.Module]) -> Iterator[None]:
    """Raise on exit if the model gained attention modules during the session, which were not observed."""
    before = {id(module) for module in watched}
    yield
    attending = {*transformers_models.interface_modules(model), *torch_modules.attention_layers(model)}
    new = [name for name, module in model.named_modules() if module in attending and id(module) not in before]
    if new:
        raise OptionError(
            "a session observes the modules that the model had when it was entered, got new ones: "
            f"{', '.join(new[:3])}; observe the model after the change"
        )

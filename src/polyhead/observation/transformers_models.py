"""Models of Hugging Face transformers: which of their modules can be watched, and switching them there and back."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyhead.errors import OptionError
from polyhead.integrations.huggingface.attention import WATCHERS
from polyhead.integrations.huggingface.registration import register
from polyhead.masks import Mask

# By these names the modules of transformers are given the sequence that a cross-attention reads.
SOURCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "encoder_states")


@contextmanager
def watching(model: nn.Module, watcher: Any) -> Iterator[None]:
    """Tell `watcher` of every call of the model's modules, for a while."""
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if module in WATCHERS:
                raise OptionError(
                    f"one session at a time observes a model, got {type(model).__name__}, of which "
                    f"{name or type(module).__name__!r} is observed already"
                )
            WATCHERS[module] = watcher
            undo.callback(WATCHERS.pop, module)
        yield


@dataclass(frozen=True, slots=True)
class Arrival:
    """What an attention module was told and its attention function is not."""

    cross: bool = False
    first_key: int | None = None  # where the first key stands that the cache still holds; None without a cache


def asking_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules whose own code asks transformers' attention interface."""
    if "transformers" not in sys.modules:
        return ()  # nobody has made a model of it
    return tuple(module for module in model.modules() if _asks(type(module)))


def _reads_interface(kind: type) -> bool:
    from transformers import PreTrainedModel

    if issubclass(kind, PreTrainedModel):
        return False
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] == "torch":
            break
        for member in vars(owner).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
    return False


_asks: Callable[[type], bool] = cache(_reads_interface)


def why_unobservable(model: nn.Module) -> str:
    """What to tell somebody whose model has no attention that can be watched."""
    name = type(model).__name__
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel

        own = [type(module).__name__ for module in model.modules() if isinstance(module, PreTrainedModel)]
        if len(own):
            classes = sorted({type(module).__name__ for module in model.modules() if _is_attention(module)})
            computed = f" (in {', '.join(classes)})" if len(classes) else ""
            return (
                "observe enters a model of transformers through its attention interface, "
                f"got {name}, which computes attention by itself{computed}; docs/huggingface.md lists the families "
                "that use the interface. observe(model, via_weights=True), or polyhead inspect --via-weights, reads "
                "the weights that the model itself returns: slow, and O(n²) in memory"
            )
    return (
        "observe knows models of transformers, polyhead.MultiHeadAttention and torch.nn.MultiheadAttention, "
        f"got {name}, which holds none of them; hand in its attention modules with observe(model, adapters=...)"
    )


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


@contextmanager
def switched(model: nn.Module, asking: Sequence[nn.Module], name: str | None = None) -> Iterator[None]:
    """Every configuration that the given modules, or the models around them, read: on polyhead, and back."""
    if name is None:
        name = register()
    # Written where transformers itself keeps it: its setters reach into other configurations, and what they change
    # there could not be put back.
    before = {id(config): (config, config._attn_implementation_internal) for config in _configs(model, asking)}
    try:
        for config, _ in before.values():
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before.values():
            if config._attn_implementation_internal == name:  # not what somebody has set meanwhile
                config._attn_implementation_internal = implementation


def _configs(model: nn.Module, asking: Sequence[nn.Module]) -> Iterator[Any]:
    from transformers import PretrainedConfig

    watched = {id(module) for module in asking}
    paths = [name for name, module in model.named_modules() if id(module) in watched]
    around = {""} | {".".join(path.split(".")[:depth]) for path in paths for depth in range(1, path.count(".") + 2)}
    waiting = [getattr(model.get_submodule(path), "config", None) for path in sorted(around)]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PretrainedConfig):
            yield config
            waiting += [getattr(config, name, None) for name in config.sub_configs]


def announce(module: nn.Module, arrivals: MutableMapping[int, Arrival]) -> RemovableHandle:
    """Note, before each call of an attention module, what its attention function will not be told."""
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    entered = getattr(getattr(module, "config", None), "_attn_implementation", None)  # polyhead, by `switched`

    def note(module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", entered)
        if implementation != entered:
            raise OptionError(
                f"a session counts what {entered!r} computes, got a model that was switched to {implementation!r} "
                "inside it; switch it before or after"
            )
        given = {**dict(zip(names, positional, strict=False)), **keywords}
        cross = any(name in names and given.get(name) is not None for name in SOURCES)
        arrivals[id(module)] = Arrival(cross, None if cross else _first_key(module, given))

    return module.register_forward_pre_hook(note, with_kwargs=True)


def _first_key(module: nn.Module, given: dict[str, Any]) -> int | None:
    """How many keys a windowed cache has let go of; asked as transformers asks for its masks."""
    caches = (given.get(name) for name in ("past_key_values", "past_key_value"))
    cache = next((found for found in caches if found is not None), None)
    layer, hidden = getattr(module, "layer_idx", None), given.get("hidden_states")
    sizes = getattr(cache, "get_mask_sizes", None)
    if sizes is None or layer is None or not isinstance(hidden, Tensor):
        return None
    offset = sizes(hidden.shape[1], layer)[1]
    return offset if isinstance(offset, int) else None


def looks_cross(module: nn.Module, query: Tensor, key: Tensor, mask: Mask | None) -> bool:
    """Whether queries and keys are different sequences, where the call did not say so by a name that we know."""
    if getattr(module, "is_cross_attention", False) is True or "CrossAttention" in type(module).__name__:
        return True
    if query.shape[2] == key.shape[2] or getattr(module, "is_causal", False):
        return False
    # Fewer queries than keys are a step over a cache if the mask orders them, a look at other tokens if it does not.
    ordered = mask is not None and (
        mask.right is not None or mask.placed is not None or any(x.shape[2] > 1 for x in (*mask.allowed, *mask.biases))
    )
    return not ordered

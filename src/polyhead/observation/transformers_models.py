"""Observe Hugging Face transformers models: find attention modules, switch implementations and restore them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyhead.errors import OptionError
from polyhead.integrations.huggingface.attention import ORIGINAL, WATCHERS
from polyhead.integrations.huggingface.mask_functions import ORIGINALS
from polyhead.integrations.huggingface.registration import NAME, OBSERVED, OBSERVED_EAGER, register
from polyhead.masks import Mask
from polyhead.observation.forward_arguments import forward_arguments, parameters_of
from polyhead.observation.nested_sessions import Begin, begin_both

if TYPE_CHECKING:
    from polyhead.observation.session import Session

# Argument names under which transformers modules receive the encoder sequence of a cross-attention.
SOURCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "encoder_states")


@contextmanager
def watching(model: nn.Module, session: Session) -> Iterator[None]:
    """Register a session for all modules of the model for the duration of the context."""
    with ExitStack() as undo:
        for module in model.modules():
            outer = WATCHERS.get(module)
            WATCHERS[module] = session.begin if outer is None else begin_both(outer, session.begin)
            undo.callback(_restore, module, outer)
        yield


def _restore(module: nn.Module, outer: Begin | None) -> None:
    if outer is None:
        del WATCHERS[module]
    else:
        WATCHERS[module] = outer


@dataclass(frozen=True, slots=True)
class CallContext:
    """Arguments of an attention module that its attention function does not receive."""

    cross: bool = False
    first_key: int | None = None  # position of the first key still in the cache; None without a cache
    first_query: int | Tensor = 0  # position of the first query in the cache
    first_tokens: Tensor | None = None  # position of the first token of each sequence, [batch or 1]; None if unknown


def interface_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules whose code calls transformers' attention interface."""
    if "transformers" not in sys.modules:
        return ()  # then the model contains no transformers module
    return tuple(module for module in model.modules() if uses_interface(type(module)))


def _calls_interface(kind: type) -> bool:
    """Return whether the code of a class calls transformers' attention interface."""
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


# No decorator: mypy takes classes of modules for unhashable.
uses_interface: Callable[[type], bool] = cache(_calls_interface)


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, which is not imported for that."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def pretrained_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the transformers models in a module by path, without those inside another; a model itself at ""."""
    models: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if is_pretrained(module) and not any(is_inside(path, outer) for outer in models):
            models[path] = module
    return models


def is_inside(path: str, outer: str) -> bool:
    """Return whether a module at `path` is inside the one at `outer`."""
    return not outer or path.startswith(f"{outer}.")


def why_unobservable(model: nn.Module) -> str:
    """Return the error message for a model without observable attention modules."""
    name = type(model).__name__
    if any(is_pretrained(module) for module in model.modules()):
        names = {type(module).__name__ for module in model.modules()}
        classes = sorted(x for x in names if "attention" in x.lower())
        computed = f" (in {', '.join(classes)})" if len(classes) else ""
        return (
            "observe needs a transformers model that uses the attention interface, an attention function of PyTorch, "
            f"or a softmax of products of queries and keys, got {name}, which computes attention in another way"
            f"{computed}; docs/huggingface.md lists the families. Pass adapters for its attention modules: "
            "observe(model, adapters=...)"
        )
    return (
        "observe supports transformers models, polyhead.MultiHeadAttention and torch.nn.MultiheadAttention, "
        f"got {name}, which contains none of them; pass adapters for its attention modules: "
        "observe(model, adapters=...)"
    )


@contextmanager
def switched(
    model: nn.Module, modules: Sequence[nn.Module], name: str | None = None
) -> Iterator[Callable[[bool], None]]:
    """Set the attention implementation in all configs that these modules or their parents read; restores on exit.

    Returns a function that sets it (True) or restores it (False) before the exit.
    """
    if name is None:
        name = register()
    # Write the private attribute: the public setters also modify other configs, which could not be restored.
    before = {id(config): (config, config._attn_implementation_internal) for config in _configs(model, modules)}
    # That of an outer session has been recorded by it.
    originals = {key: str(x) for key, (_, x) in before.items() if x not in (None, NAME, OBSERVED, OBSERVED_EAGER)}

    def switch(is_set: bool) -> None:
        for config, implementation in before.values():
            observed = OBSERVED_EAGER if name == OBSERVED and implementation == "eager" else name
            if is_set:
                config._attn_implementation_internal = observed
            elif config._attn_implementation_internal == observed:  # keep a value that the user set meanwhile
                config._attn_implementation_internal = implementation

    marked: list[nn.Module] = []
    try:
        switch(True)
        ORIGINALS.update(originals)
        for module in modules:
            if (original := originals.get(id(getattr(module, "config", None)))) is not None:
                marked.append(module)
                setattr(module, ORIGINAL, original)
        yield switch
    finally:
        switch(False)
        for module in marked:
            delattr(module, ORIGINAL)
        for key in originals:
            del ORIGINALS[key]


def _configs(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[Any]:
    from transformers import PretrainedConfig

    watched = {id(module) for module in modules}
    paths = [name for name, module in model.named_modules() if id(module) in watched]
    prefixes = {""} | {".".join(path.split(".")[:depth]) for path in paths for depth in range(1, path.count(".") + 2)}
    pending = [getattr(model.get_submodule(path), "config", None) for path in sorted(prefixes)]
    while pending:
        config = pending.pop()
        if isinstance(config, PretrainedConfig):
            yield config
            pending += [getattr(config, name, None) for name in config.sub_configs]


def record_context(
    module: nn.Module, contexts: MutableMapping[int, CallContext], check_paged: Callable[[Any, str | None], None]
) -> RemovableHandle:
    """Record, before each call of an attention module, arguments that its attention function does not receive.

    `check_paged` is called with the paged cache of a call, if any, and the attention implementation.
    """
    entered = getattr(getattr(module, "config", None), "_attn_implementation", None)  # polyhead, by `switched`

    def record(module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", entered)
        if keywords.get("cache") is not None:
            check_paged(keywords["cache"], implementation)
            return
        if implementation != entered:
            raise OptionError(
                f"the attention implementation must stay {entered!r} during a session, got {implementation!r}; "
                "switch it before or after the session. After continuous batching was initialized, a session observes "
                "that alone"
            )
        arguments, names = forward_arguments(module, positional, keywords), parameters_of(type(module).forward)
        cross = any(name in names and arguments.get(name) is not None for name in SOURCES)
        first_tokens = getattr(arguments.get("attention_mask"), "first_tokens", None)
        contexts[id(module)] = CallContext(
            cross, *((None, 0) if cross else _positions(module, arguments)), first_tokens
        )

    return module.register_forward_pre_hook(record, with_kwargs=True)


def _positions(module: nn.Module, arguments: dict[str, Any]) -> tuple[int | None, int | Tensor]:
    """Return how many keys a sliding-window cache has dropped, and the length of the sequence in a cache so far."""
    caches = (arguments.get(name) for name in ("past_key_values", "past_key_value"))
    cache = next((candidate for candidate in caches if candidate is not None), None)
    layer, hidden = getattr(module, "layer_idx", None), arguments.get("hidden_states")
    if not hasattr(cache, "get_mask_sizes") or layer is None or not isinstance(hidden, Tensor):
        return None, 0
    assert cache is not None
    offset = cache.get_mask_sizes(hidden.shape[1], layer)[1]  # as transformers computes it for masks
    if not isinstance(offset, int):
        return None, 0
    length = cache.get_seq_length(layer)
    return offset, length.clone() if isinstance(length, Tensor) else length  # a cache updates its tensor in place


def infer_cross(module: nn.Module, query: Tensor, key: Tensor, mask: Mask | None) -> bool:
    """Infer whether queries and keys are different sequences, for modules without a known argument name."""
    if getattr(module, "is_cross_attention", False) is True or "CrossAttention" in type(module).__name__:
        return True
    if query.shape[2] == key.shape[2] or getattr(module, "is_causal", False):
        return False
    # With fewer queries than keys, a mask that depends on the query means decoding with a cache, otherwise cross.
    is_query_dependent = mask is not None and (
        mask.right is not None or mask.placed is not None or any(x.shape[2] > 1 for x in (*mask.allowed, *mask.biases))
    )
    return not is_query_dependent

"""Continuous batching of transformers in a session: managers that are created inside it are observed.

A manager reads the attention implementation of the model's config when it is created, and prepares the inputs of every
step for it. The session therefore restores the model's own implementation for good when the first one is created, and
observes the calls of that implementation which have a paged cache. Steps run in a thread of the manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.integrations.huggingface.evicted_requests import counted_once
from polyhead.integrations.huggingface.paged_calls import observed_implementation
from polyhead.observation.nested_sessions import SharedSetting
from polyhead.observation.staging import wrapped_calls

_METHOD = "init_continuous_batching"  # the method that all entry points to continuous batching call
_OBSERVED: dict[str, SharedSetting] = {}  # by name of an attention implementation
_COUNTED_ONCE = SharedSetting(counted_once)  # marks tokens that are computed again after their request was evicted


class Managers:
    """Managers of continuous batching that were created in a session.

    Args:
        on_create: called after a manager was created; its steps run in a thread of its own.
        is_supported: whether the session collects nothing but row statistics, which is all that can be observed.
    """

    def __init__(self, on_create: Callable[[], None], *, is_supported: bool) -> None:
        self.on_create, self.is_supported = on_create, is_supported
        self.managers: list[Any] = []
        self.implementations: set[str] = set()  # names of the attention implementations that are observed
        self._undo = ExitStack()
        self._modules: Sequence[nn.Module] = ()
        self._switch: Callable[[bool], None] = lambda observed: None

    @contextmanager
    def watching(
        self, model: nn.Module, modules: Sequence[nn.Module], switch: Callable[[bool], None]
    ) -> Iterator[None]:
        """Observe the managers that methods of the model and its parts create in this context.

        Args:
            model: the observed model.
            modules: its attention modules.
            switch: sets the attention implementation of the session (True) or of the model (False).
        """
        self._modules, self._switch = modules, switch
        with ExitStack() as self._undo:
            creators = [module for module in model.modules() if callable(getattr(type(module), _METHOD, None))]
            self._undo.enter_context(wrapped_calls(creators, self._run_creator, (_METHOD,)))
            self._undo.callback(self.implementations.clear)
            yield

    def _run_creator(
        self, method: Callable[..., Any], module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        return self.create(method, module, *positional, **keywords)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the generation of running managers between two steps."""
        with ExitStack() as stack:
            for manager in self.managers:
                if manager.is_running():
                    try:
                        stack.enter_context(manager.pause())
                    except RuntimeError:
                        manager.join(0.0)  # it finished meanwhile
            self.managers = [manager for manager in self.managers if manager.is_running()]
            yield

    def synchronize(self) -> None:
        """Wait for the streams of the managers, on which statistics are computed."""
        for manager in self.managers:
            if manager.model.device.type == "cuda":
                torch.cuda.synchronize(manager.model.device)

    def check_call(self, cache: Any, implementation: str | None) -> None:
        """Raise if a call with a paged cache is not observed.

        Args:
            cache: the cache.
            implementation: attention implementation of the calling module.
        """
        caches = [getattr(manager.batch_processor, "cache", None) for manager in self.managers]
        if implementation not in self.implementations or not any(cache is known for known in caches):
            raise OptionError(
                "continuous batching is observed by the session in which it was initialized, got a cache from "
                f"elsewhere and attention by {implementation!r}; enter the session first"
            )

    def create(
        self,
        initialize: Callable[..., Any],
        model: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """Return the manager that a model's method creates, without CUDA graphs and compiled code.

        Args:
            initialize: the method.
            model: the model.
            generation_config, continuous_batching_config, workload_hints: arguments of the method.
        """
        if not self.is_supported:
            raise OptionError(
                "continuous batching is observed without collectors and keep_statistics, which do not support packed "
                "sequences"
            )
        cached = getattr(model, "_cached_continuous_batching_manager", None)
        if cached is not None and cached not in self.managers:
            raise OptionError(
                "a session observes managers of continuous batching that are created inside it, got a persistent one; "
                "call model.destroy_cached_continuous_batching_manager() first"
            )
        options = _without_graphs(model, generation_config, continuous_batching_config)
        self._switch(False)
        try:
            manager = initialize(generation_config, options, workload_hints)
        except BaseException:
            if not len(self.managers):  # else earlier managers need the model's own implementation
                self._switch(True)
            raise
        self.on_create()
        if not len(self.implementations):
            self._undo.enter_context(_COUNTED_ONCE.held())
        if manager not in self.managers:
            self.managers.append(manager)
        configs = [getattr(module, "config", None) for module in self._modules]
        names = {str(config._attn_implementation) for config in configs if config is not None}
        for name in names - self.implementations:
            setting = _OBSERVED.setdefault(name, SharedSetting(partial(observed_implementation, name)))
            self._undo.enter_context(setting.held())
            self.implementations.add(name)
        return manager


def _without_graphs(model: Any, generation: Any, options: Any) -> Any:
    """Return a config of continuous batching in which every step runs Python code."""
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    if not hasattr(ContinuousBatchingManager, "pause"):
        import transformers

        raise OptionError(
            f"observing continuous batching needs transformers 5.22 or newer, got {transformers.__version__}"
        )
    if options is None:
        generation = model.generation_config if generation is None else generation
        options = getattr(generation, "continuous_batching_config", None) or ContinuousBatchingConfig()
    options = copy(options)
    graphs = options.use_cuda_graph
    requested = {
        "use_cuda_graph": any(graphs) if isinstance(graphs, tuple) else bool(graphs),
        "varlen_compile_config": options.varlen_compile_config is not None,
        "decode_compile_config": options.decode_compile_config is not None,
        "default_compile_level": options.default_compile_level > 0,
        "max_blocks_per_request": bool(options.max_blocks_per_request),
    }
    if unsupported := [name for name, is_requested in requested.items() if is_requested]:
        raise OptionError(
            "continuous batching is observed without CUDA graphs, compiled code and block tables, in which attention "
            f"does not pass through Python, got {', '.join(unsupported)}; leave them out in a session"
        )
    options.use_cuda_graph, options.max_blocks_per_request = False, 0
    return options

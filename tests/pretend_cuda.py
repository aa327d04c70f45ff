"""A CUDA device that is not there: tensors stay in the memory of the CPU and no kernel runs, but every launch is seen.

Tests that need a GPU can be run under it up to the numbers, which are left as they were allocated: what a test launches
(see `tests.gpu_launches`) is found on any machine. A tensor counts as one of the device unless it is known to have been
made on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_iter, tree_map
from triton.backends.compiler import GPUTarget

import polyhead.ops

CAPABILITY = (9, 0)
SHARED_MEMORY, MULTIPROCESSORS, MEMORY = 232448, 132, 150_000_000_000  # those of an H200

_DEVICE = torch.device("cuda", 0)
_GETTERS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.device.__get__: lambda x: torch.device("cpu") if _is_host(x) else _DEVICE,
    Tensor.is_cuda.__get__: lambda x: not _is_host(x),
    Tensor.is_cpu.__get__: lambda x: _is_host(x),
    Tensor.get_device: lambda x: -1 if _is_host(x) else 0,
}
_FRESH = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)


def _is_host(x: Tensor) -> bool:
    return getattr(x, "_on_host", False)


def _set_host(x: Tensor, on_host: bool) -> None:
    if on_host:
        x._on_host = True  # type: ignore[attr-defined]
    elif _is_host(x):
        del x._on_host  # type: ignore[attr-defined]


def _as_device(x: object) -> torch.device | None:
    if isinstance(x, torch.device):
        return x
    if isinstance(x, str) and x.split(":")[0] in ("cpu", "cuda", "meta"):
        return torch.device(x)
    return None


class PretendCuda(TorchFunctionMode):
    """Serves what is asked of a CUDA device from the CPU, and remembers which tensors are the CPU's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in _GETTERS:
            x = args[0]
            return func(*args, **kwargs) if x.is_meta else _GETTERS[func](x)
        if func is Tensor.is_meta.__get__ or getattr(func, "__name__", "") in ("device", "_parse_to"):
            return func(*args, **kwargs)
        if func is Tensor.data.__set__:
            func(*args, **kwargs)
            return _set_host(args[0], _is_host(args[1]))
        if func is Tensor.cuda:
            func, args, kwargs = Tensor.to, (args[0], _DEVICE), {}
        if func is Tensor.cpu:
            func, args, kwargs = Tensor.to, (args[0], torch.device("cpu")), {}
        if func is Tensor.pin_memory:
            return args[0]
        named = [d for d in map(_as_device, (*args, *kwargs.values())) if d is not None]
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if named:
            on_host = named[-1].type == "cpu"
        elif func is Tensor.to and len(given) > 1:
            on_host = _is_host(given[-1])
        else:
            on_host = all(map(_is_host, given))
        args, kwargs = tree_map(lambda x: _moved(x), (args, kwargs))
        result = func(*args, **kwargs)
        if func in _FRESH:
            result.zero_()  # an index that no kernel writes is one that can be read with
        ours = {id(x) for x in given}

        def marked(x: Any) -> Any:
            if not isinstance(x, Tensor) or _is_host(x) == on_host:
                return x
            if id(x) in ours and named:
                x = x.view_as(x)  # a move that had nothing to copy gave back what it was given
            elif id(x) in ours:
                return x
            _set_host(x, on_host)
            return x

        return tree_map(marked, result) if tree_any(lambda x: isinstance(x, Tensor), result) else result


def _moved(x: Any) -> Any:
    device = _as_device(x)
    if device is None or device.type != "cuda":
        return x
    return torch.device("cpu")


class _Driver:
    """What Triton asks of its driver before it compiles."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return _DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda


class _Nothing:
    """A stream, an event, a graph or a context of the device: whatever is asked of it is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


def _properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=MULTIPROCESSORS,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=SHARED_MEMORY,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=60 << 20,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
    )


class _Generator(torch.Generator):
    def __new__(cls, device: object = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


_FUNCTIONS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: "NVIDIA H200",
    "is_bf16_supported": lambda *args: True,
    "is_current_stream_capturing": lambda: False,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: None,
    "set_sync_debug_mode": lambda mode: None,
    "get_sync_debug_mode": lambda: 0,
    "current_stream": _Nothing,
    "default_stream": _Nothing,
    **{
        name: lambda device=None: 0
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    },
    **{name: lambda device=None: None for name in ("reset_peak_memory_stats", "reset_max_memory_allocated")},
    **dict.fromkeys(("Stream", "Event", "CUDAGraph", "graph", "stream", "device", "device_of"), _Nothing),
}


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """Let torch and Triton find an H200 that computes nothing."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "a CUDA device is there, and what is kept of it would be mixed up: set CUDA_VISIBLE_DEVICES="
        )
    for module in pkgutil.walk_packages(polyhead.ops.__path__, "polyhead.ops."):
        if ".kernels" not in module.name:
            importlib.import_module(module.name)
    get_torch_obj_rule_map()  # what imports Dynamo keeps tables of torch's functions, and should find the true ones
    with contextlib.ExitStack() as stack:
        for name, replacement in _FUNCTIONS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        # A compiled program reaches the same operators, and these the same kernels.
        stack.enter_context(mock.patch.object(torch, "compile", lambda model=None, **options: model))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _Driver()))
        # Whatever torch calls from below, operators and gradients, is called without the mode that called torch.
        stack.enter_context(
            mock.patch.object(
                torch.autograd, "_engine_run_backward", _under_the_mode(torch.autograd._engine_run_backward)
            )
        )
        for operator in list(OPDEFS.values()):
            if operator._qualname.startswith("polyhead::"):
                served = {device: _under_the_mode(body) for device, body in operator._backend_fns.items()}
                stack.enter_context(mock.patch.dict(operator._backend_fns, served))
        stack.enter_context(PretendCuda())
        yield


def _under_the_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with PretendCuda():
            return function(*args, **kwargs)

    return called

"""Attention functions of flash-attn and xformers, read as calls of `polyhead.attention`.

They are plain Python functions, which no `TorchFunctionMode` receives. While a session is entered, wrappers replace
them in the modules that imported them.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from polyhead.masks import Mask, is_readable
from polyhead.observation.attention_calls import (
    AttentionCall,
    HeadAxes,
    NotUnderstood,
    RunningModule,
    as_mask,
    causal_from_the_start,
    check_plain,
    is_cross,
    matching_heads,
    split_mask,
)
from polyhead.observation.torch_modules import is_same

_HOMES = ("flash_attn", "flash_attn.flash_attn_interface", "xformers.ops", "xformers.ops.fmha")
_PACKAGES = ("flash_attn", "xformers", "mslk")  # mslk has the kernels of xformers, which re-exports them
_XFORMERS_MASKS = "xformers.ops.fmha.attn_bias"

_PADDED = HeadAxes(lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2))  # [batch, sequence, heads, head_dim]
_PACKED = HeadAxes(lambda x: x.transpose(0, 1)[None], lambda x: x[0].transpose(0, 1))  # [tokens, heads, head_dim]


Read = Callable[..., AttentionCall]
Wrap = Callable[[FunctionType, Read], FunctionType]
_Arguments = dict[str, Any]
_FLASH = {
    *("q", "k", "v", "kv", "qkv", "softmax_scale", "causal", "window_size"),
    *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k"),
    *("dropout_p", "deterministic", "return_attn_probs"),  # do not change the weights before dropout
}
_XFORMERS = {"query", "key", "value", "attn_bias", "scale", "p", "op", "output_dtype"}


def _read_flash(running: RunningModule, given: _Arguments, signature: inspect.Signature) -> AttentionCall:
    """Read a call of flash-attn, with tensors that are packed or not."""
    _check_others(given, signature, _FLASH)
    tensors = _flash_tensors(given)
    offsets = [given[name] for name in ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k") if name in given]
    axes = _PACKED if len(offsets) else _PADDED
    _check_axes(tensors, 3 if len(offsets) else 4)
    query, key, value = matching_heads(*(axes.split(x) for x in tensors), grouped=True)
    causal = bool(given.get("causal"))
    if causal and "window_size" not in given and query.shape[2] != key.shape[2]:
        raise NotUnderstood("flash-attn before 2.3 may align a causal mask with the first key, and has no window_size")
    left, right = given.get("window_size") or (None, None)
    left, right = (None if x is None or x < 0 else int(x) for x in (left, right))
    mask = None
    if causal or left is not None or right is not None:
        mask = Mask.window(left=left, right=0 if causal else right)  # the last query is aligned with the last key
    if len(offsets):
        documents = Mask.documents(_documents(offsets, query.shape[2]))
        mask = documents if mask is None else documents & mask
    cross = not causal and is_cross(running, query, key, mask)
    return AttentionCall(query, key, value, mask, given.get("softmax_scale"), cross, axes)


def _flash_tensors(given: _Arguments) -> tuple[Tensor, ...]:
    for names in (("q", "k", "v"), ("q", "kv"), ("qkv",)):
        if all(isinstance(given.get(name), Tensor) for name in names):
            *alone, last = (given[name] for name in names)
            check_plain(*alone, last)
            return (*alone, last) if len(names) == 3 else (*alone, *last.unbind(-3))
    raise NotUnderstood(f"queries, keys and values must be its parameters q, k, v, kv or qkv, got {[*given]}")


def _documents(offsets: list[Tensor], tokens: int) -> Tensor:
    """Return the document of each token, [tokens], from the cumulative lengths; -1 for tokens outside of all."""
    first = offsets[0]
    for other in offsets[1:]:
        if is_same(first, other):
            continue
        if not (is_readable(first) and is_readable(other) and torch.equal(first, other)):
            raise NotUnderstood("cu_seqlens_q and cu_seqlens_k must be the same tensor, or equal ones on the CPU")
    ids = torch.searchsorted(first, torch.arange(tokens, device=first.device, dtype=first.dtype), right=True) - 1
    return torch.where(ids < len(first) - 1, ids, -1)


def _read_cached(running: RunningModule, given: _Arguments, signature: inspect.Signature) -> AttentionCall:
    raise NotUnderstood("flash_attn_with_kvcache attends to a cache, whose tokens are not known")


def _read_memory_efficient(running: RunningModule, given: _Arguments, signature: inspect.Signature) -> AttentionCall:
    """Read a call of `xformers.ops.memory_efficient_attention`."""
    _check_others(given, signature, _XFORMERS)
    tensors: list[Any] = [given.get(name) for name in ("query", "key", "value")]
    bias, scale = given.get("attn_bias"), given.get("scale")
    check_plain(*tensors)
    _check_axes(tensors, 4)
    query, key, value = matching_heads(*(_PADDED.split(x) for x in tensors), grouped=False)
    masks = vars(sys.modules[_XFORMERS_MASKS]) if _XFORMERS_MASKS in sys.modules else {}
    if type(bias) is masks.get("LowerTriangularMask", NotImplemented):
        return causal_from_the_start(query, key, value, scale, _PADDED)
    if type(bias) is masks.get("LowerTriangularFromBottomRightMask", NotImplemented):
        return AttentionCall(query, key, value, Mask.causal(), scale, cross=False, axes=_PADDED)
    if bias is None:
        return AttentionCall(query, key, value, None, scale, is_cross(running, query, key, None), _PADDED)
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        kind = f"a tensor of {bias.dtype}" if type(bias) is Tensor else f"a {type(bias).__name__}"
        raise NotUnderstood(
            "attn_bias must be a floating-point tensor, LowerTriangularMask or LowerTriangularFromBottomRightMask, "
            f"got {kind}"
        )
    mask = as_mask(split_mask(bias, query, HeadAxes()), query.shape[2], key.shape[2])
    return AttentionCall(query, key, value, mask, scale, is_cross(running, query, key, mask), _PADDED)


def _check_others(given: _Arguments, signature: inspect.Signature, known: set[str]) -> None:
    """Raise for arguments that may change the attention, unless they have their defaults."""
    for name, value in given.items():
        default = signature.parameters[name].default
        is_number = type(value) in (int, float) and type(default) in (int, float)
        if name not in known and value is not default and not (is_number and value == default):
            got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise NotUnderstood(f"its argument {name} may change the attention, got {got}")


def _check_axes(tensors: Iterable[Tensor], rank: int) -> None:
    ranks = [x.ndim for x in tensors]
    if ranks != [rank] * 3:
        axes = "[batch, sequence, heads, head_dim]" if rank == 4 else "[tokens, heads, head_dim]"
        raise NotUnderstood(f"queries, keys and values must be {axes}, got {ranks} axes")


_READERS: dict[str, Callable[[RunningModule, _Arguments, inspect.Signature], AttentionCall]] = {
    "flash_attn_func": _read_flash,
    "flash_attn_kvpacked_func": _read_flash,
    "flash_attn_qkvpacked_func": _read_flash,
    "flash_attn_varlen_func": _read_flash,
    "flash_attn_varlen_kvpacked_func": _read_flash,
    "flash_attn_varlen_qkvpacked_func": _read_flash,
    "flash_attn_with_kvcache": _read_cached,
    "memory_efficient_attention": _read_memory_efficient,
}
NAMES = frozenset(_READERS)


def is_foreign(value: Any) -> bool:
    """Return whether a value is an attention function that one of these packages, not a substitute, defines."""
    if not isinstance(value, FunctionType) or value.__name__ not in NAMES:
        return False
    return (value.__module__ or "").partition(".")[0] in _PACKAGES


def _reader(function: FunctionType) -> Read:
    """Return what reads a call of an attention function, which has accepted its arguments."""
    signature = inspect.signature(function)  # of the installed version

    def read(running: RunningModule, *args: Any, **kwargs: Any) -> AttentionCall:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return _READERS[function.__name__](running, given.arguments, signature)

    return read


class _Replacements:
    """Wrappers in place of the functions, for as long as any session is entered.

    A wrapper that is left somewhere, e.g. imported under another name during a session, runs the function.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holders: set[object] = set()
        self.wrappers: dict[FunctionType, FunctionType] = {}
        self.replaced: list[tuple[dict[str, Any], str]] = []

    def replace(self, kinds: Iterable[type], wrap: Wrap) -> None:
        """Replace the functions by name in all modules, and under any name in those of some classes."""
        originals = set(self.wrappers.values())
        for home in _namespaces(_HOMES):
            for name in NAMES & home.keys():
                value = home[name]
                if is_foreign(value) and value not in self.wrappers and value not in originals:
                    self.wrappers[value] = wrap(value, _reader(value))
        if not len(self.wrappers):
            return
        for namespace, name in [*_by_name(), *_of_classes(kinds)]:
            value = namespace[name]
            if isinstance(value, FunctionType) and value in self.wrappers:
                self.replaced.append((namespace, name))
                namespace[name] = self.wrappers[value]

    def restore(self) -> None:
        """Restore the functions where their wrappers still are, also in modules that were imported since."""
        originals = {wrapper: original for original, wrapper in self.wrappers.items()}
        for namespace, name in [*self.replaced, *(_by_name() if len(originals) else ())]:
            value = namespace.get(name)
            if isinstance(value, FunctionType) and value in originals:
                namespace[name] = originals[value]
        self.replaced.clear()
        self.wrappers.clear()


_REPLACEMENTS = _Replacements()


@contextmanager
def replaced(kinds: Iterable[type], wrap: Wrap) -> Iterator[None]:
    """Replace the functions of packages that are imported, until the last of these contexts ends.

    Args:
        kinds: classes of modules that may call them.
        wrap: returns what is called in place of a function, given it and what reads its arguments.
    """
    holder, state = object(), _REPLACEMENTS
    try:
        with state.lock:
            state.holders.add(holder)
            state.replace(kinds, wrap)
        yield
    finally:
        with state.lock:
            state.holders.discard(holder)
            if not len(state.holders):
                state.restore()


def _namespaces(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the globals of those of some modules that are imported."""
    for name in names:
        module = sys.modules.get(name)
        if isinstance(module, ModuleType):
            yield vars(module)


def _by_name() -> Iterator[tuple[dict[str, Any], str]]:
    for namespace in _namespaces(list(sys.modules)):
        for name in NAMES & namespace.keys():
            yield namespace, name


def _of_classes(kinds: Iterable[type]) -> Iterator[tuple[dict[str, Any], str]]:
    files = dict.fromkeys(owner.__module__ for kind in kinds for owner in kind.__mro__)
    for namespace in _namespaces(files):
        for name in list(namespace):
            yield namespace, name

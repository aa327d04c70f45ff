"""Find the modules whose own code may call attention functions, from the code of their classes."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.layers.torch_compat import MultiheadAttention
from polyhead.observation import foreign_functions
from polyhead.observation.matrix_products import MATRIX_PRODUCTS
from polyhead.observation.torch_modules import has_own_forward
from polyhead.observation.transformers_models import uses_interface

_FUNCTIONS = (
    *("scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward"),
    *sorted(foreign_functions.NAMES),
)
_LIBRARIES = ("torch", "polyhead")
_MATRIX_OPERATOR = next(
    (x.opcode, x.arg or 0) for x in dis.get_instructions(compile("a @ b", "", "eval")) if x.opname == "BINARY_OP"
)


def calling_modules(model: nn.Module, observed: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return the modules whose own code may call attention functions; none if no module is likely to.

    In these modules every torch function is intercepted, which costs a few microseconds each. To avoid that, the source
    files of the classes are searched for calls of attention functions, in models of transformers and in models some of
    whose attention is observed in another way. Any other class is assumed to call one.

    Args:
        model: a model.
        observed: its modules whose attention is observed in another way.
    """
    modules, observed = tuple(model.modules()), tuple(observed)
    overridden = [x for x in modules if has_own_forward(x) and x not in observed]
    for x in overridden:
        if isinstance(x, MultiheadAttention):
            raise OptionError(
                "subclasses of polyhead's MultiheadAttention that override forward cannot be observed, since they call "
                f"no attention function of PyTorch, got {type(x).__name__}; subclass torch.nn.MultiheadAttention "
                "instead, or pass adapters"
            )
    external = [x for x in modules if _package(type(x)) not in _LIBRARIES or isinstance(x, torch.fx.GraphModule)]

    def may_call(kind: type) -> bool:
        is_unknown = not len(observed) and _package(kind) != "transformers"
        return is_unknown or _calls_attention(kind) or _multiplies_softmax(kind)

    if not len(overridden) and not any(may_call(type(x)) for x in external):
        return ()
    return tuple(dict.fromkeys((model, *external, *overridden)))


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _external_classes(kind: type) -> Iterator[type]:
    """Iterate over a class and its bases, without those of torch, polyhead and Python."""
    return (owner for owner in kind.__mro__ if _package(owner) not in (*_LIBRARIES, "builtins"))


@cache
def _calls_attention(kind: type) -> bool:
    """Return whether the Python module of a class calls an attention function.

    Outside of transformers, a function that it imports may also call one, or be one of flash-attn or xformers.
    """
    for owner in _external_classes(kind):
        python_module = sys.modules.get(owner.__module__)
        with_imports = _package(owner) != "transformers"
        for value in (owner, *(() if python_module is None else vars(python_module).values())):
            if with_imports and foreign_functions.is_foreign(value):
                return True
            if getattr(value, "__module__", None) == owner.__module__ or (with_imports and inspect.isfunction(value)):
                members = vars(value).values() if inspect.isclass(value) else (value,)
                if any(name in _FUNCTIONS for code in _codes(members) for name in code.co_names):
                    return True
    return False


@cache
def _multiplies_softmax(kind: type) -> bool:
    """Return whether the code of a class computes a softmax and a matrix product, without an attention interface."""
    if uses_interface(kind):
        return False
    for owner in _external_classes(kind):
        codes = list(_codes(vars(owner).values()))
        names = {name for code in codes for name in code.co_names}
        if any("softmax" in x.lower() for x in names):
            is_multiplied = "attention" in owner.__name__.lower() or any(x in names for x in MATRIX_PRODUCTS)
            if is_multiplied or any(map(_has_matrix_operator, codes)):
                return True
    return False


def _codes(members: Iterable[Any]) -> Iterator[CodeType]:
    """Yield the code of every function among some members, and that of the functions inside of it."""
    for member in members:
        code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
        if isinstance(code, CodeType):
            yield from _with_inner(code)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _has_matrix_operator(code: CodeType) -> bool:
    """Return whether the bytecode contains the operator @; disassembling it would take thirty times as long."""
    return _MATRIX_OPERATOR in zip(code.co_code[::2], code.co_code[1::2], strict=True)

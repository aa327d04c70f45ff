"""Triton's interpreter without the work that changes no number, which is more than half of what it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """For the rest of this process."""
    _patch_the_language_once_a_launch()
    _remember_dtypes()
    # The check is computed for each sum and product of integers, and read with the option `debug` alone.
    if not interpreter.interpreter_builder.options.debug:
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = options


def _patch_the_language_once_a_launch() -> None:
    """Each function that a kernel calls patches `triton.language` again, although the first has until the launch ends.

    What there is to patch depends on which of two modules the function's own module has imported.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    imported_by: dict[int, frozenset[str]] = {}
    patched: set[frozenset[str]] = set()

    def patch_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in imported_by:
            modules = [value for value in names.values() if inspect.ismodule(value) and value in (tl, tl.core)]
            imported_by[id(names)] = frozenset(module.__name__ for module in modules)
        imported = imported_by[id(names)]
        if imported in patched:
            return None
        patched.add(imported)
        return patch(function)

    def launch_afresh(self: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()
        return launch(self, *arguments, **options)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def _remember_dtypes() -> None:
    """A table of all dtypes is built for each that is looked up."""
    look_up: Callable[[Any], np.dtype[Any]] = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def remembered(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered

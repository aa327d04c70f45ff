"""A faster Triton interpreter: skips work that changes no result, more than half of the total."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

READ = "3.9."  # the release whose sources the patches of types were written for; others are left as they are
# Functions of NumPy that compute operators of the language, for tensors of one dtype and Python numbers.
OPERATORS: dict[str, Callable[..., Any]] = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "where": np.where,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__radd__": np.add,
    "__rmul__": np.multiply,
    "__rsub__": lambda x, y: np.subtract(y, x),
}
# Dtypes that NumPy computes with as Triton does, and the Python numbers that are converted to each.
PLAIN = {"fp32": (np.float32, (int, float)), "int32": (np.int32, (int,)), "int64": (np.int64, (int,))}


def install() -> None:
    """Install the patches for the rest of this process."""
    if triton.__version__.startswith("3.6."):
        _convert_arrays_of_one_number()
    _patch_the_language_once_a_launch()
    _remember_dtypes()
    if triton.__version__.startswith(READ):
        _remember_block_types()
        _remember_shapes()
        _remember_computation_types()
        _compare_types_by_identity()
        _leave_equal_shapes_alone()
        _insert_dimensions_at_once()
        _pass_the_semantic_on()
    # The check is computed for each sum and product of integers, and read with the option `debug` alone.
    if not interpreter.interpreter_builder.options.debug:
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = options


def _convert_arrays_of_one_number() -> None:
    """Convert scalars, arrays of shape [1], to `int`, which NumPy 2.5 rejects.

    Triton 3.7 squeezes them first.
    """
    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_index


def _patch_the_language_once_a_launch() -> None:
    """Patch `triton.language` once per launch instead of in every function that a kernel calls.

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
    """Cache the table of dtypes, which is rebuilt at every lookup."""
    look_up: Callable[[Any], np.dtype[Any]] = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def remembered(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def _remember_block_types() -> None:
    """Cache block types, which are built and checked for every tile but never modified."""
    build = core.block_type.__init__
    known: dict[tuple[Any, ...], Any] = {}

    def remembered(cls: type, *arguments: Any, **options: Any) -> Any:
        if cls is not core.block_type or options:
            return object.__new__(cls)
        element, shape = arguments
        sizes = tuple([x.value if isinstance(x, core.constexpr) else x for x in shape])
        # By name, because pointers have no hash.
        key = type(element), getattr(element, "name", None), getattr(element, "address_space", None), sizes
        found = known.get(key)
        if found is None:
            found = object.__new__(cls)
            build(found, element, shape)
            if isinstance(element, core.dtype):
                known[key] = found
        return found

    def initialise(self: Any, *arguments: Any, **options: Any) -> None:
        if type(self) is not core.block_type or options:
            build(self, *arguments, **options)

    core.block_type.__new__ = remembered
    core.block_type.__init__ = initialise


def _remember_shapes() -> None:
    """Cache shapes and sizes, which are rebuilt from constants for every result."""
    build = core.tensor.__init__
    of_scalars: list[Any] = []

    def initialise(self: Any, handle: Any, type: Any) -> None:
        if type.is_block():
            known = type.__dict__.get("known_shape")
        else:
            known = of_scalars[0] if of_scalars else None
        if known is None:
            build(self, handle, type)
            known = self.shape, self.numel
            if type.is_block():
                type.known_shape = known
            else:
                of_scalars.append(known)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    core.tensor.__init__ = initialise


def _remember_computation_types() -> None:
    """Cache the computation type of two operand types."""
    find = TritonSemantic.computation_type_impl
    known: dict[tuple[Any, ...], Any] = {}

    def remembered(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = find(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    TritonSemantic.computation_type_impl = remembered


def _compare_types_by_identity() -> None:
    for kind in (core.dtype, core.block_type):
        compare = kind.__eq__

        def equal(self: Any, other: Any, compare: Callable[[Any, Any], bool] = compare) -> bool:
            return self is other or compare(self, other)

        kind.__eq__ = equal


def _leave_equal_shapes_alone() -> None:
    """Skip broadcasting for operands of equal shape, the common case."""
    broadcast = TritonSemantic.broadcast_impl_value

    def unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other or (one.is_block() and other.is_block() and one.shape.values == other.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = unless_equal


def _insert_dimensions_at_once() -> None:
    """Index a block with `None` and `:` in one step of NumPy, with the type of the first such result."""
    index = core.tensor.__getitem__
    known: dict[tuple[Any, ...], tuple[Any, Any, tuple[slice | None, ...]]] = {}

    def indexed(self: Any, slices: Any, _semantic: Any = None) -> Any:
        places = [_place(x) for x in (slices if type(slices) is tuple else (slices,))]
        key = id(self.type), *places
        if key not in known:
            result = index(self, slices, _semantic=_semantic)
            if self.type.is_block() and Ellipsis not in places:
                known[key] = self.type, result.type, tuple([slice(None) if x else None for x in places])
            return result
        _, kind, at = known[key]
        return core.tensor(interpreter.TensorHandle(self.handle.data[at], kind.scalar), kind)

    core.tensor.__getitem__ = core.builtin(indexed)


def _place(x: Any) -> Any:
    """Return None for a new dimension, True for a whole one and ... for whatever else, which Triton refuses."""
    if x is None or (type(x) is core.constexpr and x.value is None):
        return None
    return True if type(x) is slice and x == slice(None) else ...


def _pass_the_semantic_on() -> None:
    """Pass the semantic on without copying the options in every call, and compute simple operators without it."""
    operators: dict[str, Callable[..., Any]] = {}

    def patch(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return member(*arguments, **options)

        if name in OPERATORS:
            call = operators.setdefault(name, _directly(name, call))
        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def _directly(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """Call NumPy for operands of types that `operator` has been called with, from which the type of a result is known.

    Types are found by identity; those that are known are kept, so that no other type can have it.
    """
    known: dict[tuple[object, ...], tuple[Any, Callable[..., Any], Any, list[Any]]] = {}

    def call(*operands: Any, _semantic: Any = None) -> Any:
        operands = tuple([x.value if type(x) is core.constexpr else x for x in operands])
        key = tuple([id(x.type) if type(x) is core.tensor else type(x) for x in operands])
        if key not in known:
            result = operator(*operands)
            simple = _simple(name, operands)
            if simple is not None:
                known[key] = result.type, *simple, [x.type for x in operands if type(x) is core.tensor]
            return result
        kind, function, convert, _ = known[key]
        data = function(*[x.handle.data if type(x) is core.tensor else convert(x) for x in operands])
        return core.tensor(interpreter.TensorHandle(data, kind.scalar), kind)

    return call


def _simple(name: str, operands: tuple[Any, ...]) -> tuple[Callable[..., Any], Any] | None:
    """Return the function of NumPy for operands of these types, and what converts Python numbers; None without one."""
    if name == "where":
        condition, *operands = operands
        if getattr(condition, "dtype", None) is not core.int1:
            return None
    dtypes = [x.dtype for x in operands if type(x) is core.tensor]
    if name == "__add__" and dtypes[0].is_ptr():
        size = max(1, dtypes[0].element_ty.primitive_bitwidth // 8)
        is_offset = dtypes[1:] in ([core.int32], [core.int64])
        return (lambda pointers, offsets: pointers + size * offsets.astype(np.uint64), None) if is_offset else None
    if dtypes == [core.int1] * 2 and name in ("__and__", "__or__", "where"):
        return OPERATORS[name], None
    if name != "where" and dtypes in ([core.int32, core.int64], [core.int64, core.int32]):
        return OPERATORS[name], None  # both compute in int64
    convert, numbers = PLAIN.get(dtypes[0].name, (None, ())) if dtypes else (None, ())
    is_plain = all(x.dtype is dtypes[0] if type(x) is core.tensor else type(x) in numbers for x in operands)
    return (OPERATORS[name], convert) if convert is not None and is_plain else None

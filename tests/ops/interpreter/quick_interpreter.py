"""A faster Triton interpreter: skips work that changes no result, more than half of the total."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

PATCHED_RELEASE = "3.9."  # of Triton: the patches of types are for its sources, and not installed in others
# Functions of NumPy that compute operators of the language, for tensors of one dtype and Python numbers.
OPERATORS: dict[str, Callable[..., Any]] = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
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
# Functions of the builder that return the same for the same arguments, and change nothing.
PURE = ("get_", "create_make_range", "create_splat", "create_broadcast", "create_expand_dims", "create_fp_to_si")
PURE += ("create_int_cast", "create_si_to_fp", "create_ui_to_fp", "create_fp_trunc", "create_fp_ext")
# Dtypes that NumPy computes with as Triton does, and the Python numbers that are converted to each.
PLAIN = {"fp32": (np.float32, (int, float)), "int32": (np.int32, (int,)), "int64": (np.int64, (int,))}


def install() -> None:
    """Install the patches for the rest of this process."""
    if triton.__version__.startswith("3.6."):
        _convert_arrays_of_one_number()
    _patch_the_language_once_a_launch()
    _remember_dtypes()
    if triton.__version__.startswith(PATCHED_RELEASE):
        _remember_block_types()
        _remember_shapes()
        _remember_sizes()
        _remember_pointers()
        _compare_types_by_identity()
        _return_tensors_as_they_are()
        _remember_builtins()
        _notice_reads_of_scalars()
        _index_new_dimensions()
        _replay_builtins()
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

    def initialise(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("known_shape")
        if known is None:
            build(self, handle, type)
            type.known_shape = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = known

    core.tensor.__init__ = initialise


def _remember_sizes() -> None:
    """Cache whether items of an array fit into a dtype, which is checked for every tensor."""
    fits = interpreter._validate_np_data_size
    known: dict[tuple[int, str], bool] = {}

    def remembered(array: Any, dtype: Any) -> bool:
        key = array.itemsize, dtype.name
        if key not in known:
            known[key] = fits(array, dtype)
        return known[key]

    interpreter._validate_np_data_size = remembered


def _remember_pointers() -> None:
    """Cache types of pointers, so that those of one launch are those of the next."""
    build = tl.str_to_ty
    known: dict[str, Any] = {}

    def remembered(name: Any, c: Any) -> Any:
        if not (isinstance(name, str) and name.startswith("*")):
            return build(name, c)
        if name not in known:
            known[name] = build(name, c)
        return known[name]

    tl.str_to_ty = remembered


def _remember_builtins() -> None:
    """List the builtins of the language once, while none is patched, and not for every launch."""
    listed = {
        x: [(name, member) for name, member in inspect.getmembers(x) if core.is_builtin(member)]
        for x in (tl, tl.core, tl.math, tl.tensor, core.tensor_descriptor_base)
    }

    def patch(obj: Any, builder: Any, scope: Any) -> None:
        for name, member in listed[obj]:
            if getattr(obj, name) is member:
                interpreter._patch_attr(obj, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _compare_types_by_identity() -> None:
    for kind in (core.dtype, core.block_type):
        compare = kind.__eq__

        def equal(self: Any, other: Any, compare: Callable[[Any, Any], bool] = compare) -> bool:
            return self is other or compare(self, other)

        kind.__eq__ = equal


def _return_tensors_as_they_are() -> None:
    """Return a tensor at once where the value of an assignment is made one."""
    convert = TritonSemantic.to_tensor

    def converted(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is core.tensor else convert(self, x, check_type)

    TritonSemantic.to_tensor = converted


def _replay_builtins() -> None:
    """Pass the semantic on without copying the options in every call, and skip what depends on the types alone."""
    quick: dict[Callable[..., Any], Callable[..., Any]] = {}

    def patch(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        if member not in quick:
            call = _replayed(member)
            quick[member] = _directly(name, call) if name in OPERATORS else call
        scope.set_attr(obj, name, quick[member])

    interpreter._patch_attr = patch


class _Recorder:
    """A builder that also lists the functions it is called with, which of their arguments are tensors, and the results.

    `values` are the handles of the operands, then arguments and results; a step is a function and where its arguments
    and its result are in them. What has no tensor as its input but a constant is computed once.
    """

    def __init__(self, builder: Any, operands: list[Any]) -> None:
        self._builder = builder
        self.values = [x.handle for x in operands]
        self.steps: list[tuple[str, tuple[int, ...], int]] = []
        self.constants: set[int] = set()
        self.is_replayable = True  # no value was read and no tensor is hidden in a list

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._builder, name)
        if not callable(function):
            return function

        def recorded(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            is_tensor = isinstance(result, interpreter.TensorHandle)
            if is_tensor or not name.startswith("get_"):  # others return types
                self._record(name, arguments, result)
                self.is_replayable &= (is_tensor or result is None) and not options
            return result

        return recorded

    def _record(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        places = []
        for x in arguments:
            if isinstance(x, interpreter.TensorHandle):
                places.append(self.place(x))
            else:
                self.is_replayable &= not (isinstance(x, (list, tuple)) and not all(isinstance(y, int) for y in x))
                places.append(self._add(x, is_constant=True))
        is_constant = name.startswith(PURE) and self.constants.issuperset(places)
        place = self._add(result, is_constant)
        if not is_constant:
            self.steps.append((name, tuple(places), place))

    def _add(self, value: Any, is_constant: bool) -> int:
        self.values.append(value)
        if is_constant:
            self.constants.add(len(self.values) - 1)
            if isinstance(value, interpreter.TensorHandle):
                value.data.flags.writeable = False  # by every later call as well
        return len(self.values) - 1

    def place(self, handle: Any) -> int:
        """Return where a handle is among the values; one that no builder made cannot be made again."""
        found = next((i for i, x in enumerate(self.values) if x is handle), None)
        self.is_replayable &= found is not None
        return 0 if found is None else found


_new = object.__new__
_recorders: list[_Recorder] = []  # the one that is recording, if any


def _replayed(member: Callable[..., Any]) -> Callable[..., Any]:
    """Call a builtin, or only the functions of the builder that it called for operands of the same types and numbers.

    Triton's builtins read no number in a tensor, except whether a scalar is zero; such a call is never replayed.
    """
    known: dict[Any, Any] = {}

    def call(*arguments: Any, **options: Any) -> Any:
        options.pop("_semantic", None)
        operands: list[Any] = []
        key = _key((*arguments, *options, *options.values()) if options else arguments, operands)
        found = known.get(key)
        if found is None or _recorders:
            options["_semantic"] = interpreter.interpreter_semantic
            if key is None or key in known or _recorders or len({id(x.handle) for x in operands}) < len(operands):
                return member(*arguments, **options)  # or two operands share one array
            known[key], result = _record(member, arguments, options, operands)
            return result
        kind, values, steps, place, _ = found
        if not steps:
            return operands[place] if place < len(operands) else _tensor(values[place - len(operands)].data, kind)
        values = [*[x.handle for x in operands], *values]
        for name, places, at in steps:
            values[at] = getattr(interpreter.interpreter_builder, name)(*[values[i] for i in places])
        return operands[place] if place < len(operands) else core.tensor(values[place], kind)

    return call


def _record(
    member: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], operands: list[Any]
) -> tuple[Any, Any]:
    """Call a builtin; return what is needed to replay it, None if it cannot be, and its result."""
    semantic = interpreter.interpreter_semantic
    recorder = _Recorder(semantic.builder, operands)
    builder, semantic.builder = semantic.builder, recorder
    _recorders.append(recorder)
    try:
        result = member(*arguments, **options)
    finally:
        _recorders.pop()
        semantic.builder = builder
    if type(result) is not core.tensor:
        return None, result
    place = recorder.place(result.handle)
    if not recorder.is_replayable or (place < len(operands) and result is not operands[place]):
        return None, result
    values = [x if i in recorder.constants else None for i, x in enumerate(recorder.values)][len(operands) :]
    kept = [x.type for x in operands], [x for x in (*arguments, *options.values()) if type(x) is not core.tensor]
    return (result.type, values, recorder.steps, place, kept), result


def _key(values: Sequence[Any], operands: list[Any]) -> Any:
    """Return what a call is recorded by: types of tensors, which are added to `operands`, and values of others.

    Types are found by identity; those that are recorded are kept, so that no other type can have it. None for a call
    that is not recorded.
    """
    key: list[Any] = []
    for x in values:
        kind = type(x)
        if kind is core.tensor:
            operands.append(x)
            key.append(id(x.type))
            continue
        while kind is core.constexpr:
            key.append(kind)
            x = x.value
            kind = type(x)
        key.append(kind)
        if kind is float:
            key.append(repr(x))  # 0.0 equals -0.0, and nothing equals NaN
        elif kind is tuple or kind is list or kind is slice:
            inner = _key((x.start, x.stop, x.step) if kind is slice else x, operands)
            if inner is None:
                return None
            key.append(inner)
        elif isinstance(x, core.dtype):
            key.append(id(x))
        elif kind in (int, bool, str, type(None)):
            key.append(x)
        else:
            return None
    return tuple(key)


def _notice_reads_of_scalars() -> None:
    """Record no call that depends on the number in a tensor."""
    patch = interpreter._patch_lang_tensor

    def noticed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def read(self: Any) -> Any:
            if _recorders and self.handle.data.size == 1:
                _recorders[-1].is_replayable = False
            return function(self)

        return read

    def patch_noticed(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        for name in ("__bool__", "__index__"):
            scope.set_attr(tensor, name, noticed(getattr(tensor, name)))

    interpreter._patch_lang_tensor = patch_noticed


def _index_new_dimensions() -> None:
    """Add a dimension by an index, several times as fast as by `np.expand_dims`."""

    def expand(self: Any, x: Any, axis: int) -> Any:
        return interpreter.TensorHandle(x.data[(slice(None),) * axis + (None,)], x.dtype.scalar)

    interpreter.InterpreterBuilder.create_expand_dims = expand


def _tensor(data: Any, kind: Any) -> Any:
    """Return the tensor of an array, without the checks of a tensor whose type is new."""
    result, handle = _new(core.tensor), _new(interpreter.TensorHandle)
    result.shape, result.numel, result.dtype = kind.known_shape
    result.handle, result.type = handle, kind
    handle.data, handle.dtype, handle.attr = data, result.dtype, {}
    return result


def _directly(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """Call NumPy for operands of types that `operator` has been called with, from which the type of a result is known.

    Types are found by identity; those that are known are kept, so that no other type can have it.
    """
    known: dict[tuple[object, object], tuple[Any, Callable[..., Any], Any, list[Any]]] = {}
    tensor, constexpr = core.tensor, core.constexpr

    def call(x: Any, y: Any, _semantic: Any = None) -> Any:
        if type(y) is constexpr:
            y = y.value
        is_tensor = type(y) is tensor
        key = id(x.type), id(y.type) if is_tensor else type(y)
        found = known.get(key)
        if found is None or _recorders:
            result = operator(x, y, _semantic=_semantic)
            simple = None if _recorders else _simple(name, x, y)
            if simple is not None:
                known[key] = result.type, *simple, [x.type, y.type if is_tensor else None]
            return result
        kind, function, convert, _ = found
        return _tensor(function(x.handle.data, y.handle.data if is_tensor else convert(y)), kind)

    return call


def _simple(name: str, *operands: Any) -> tuple[Callable[..., Any], Any] | None:
    """Return the function of NumPy for operands of these types, and what converts Python numbers; None without one."""
    dtypes = [x.dtype for x in operands if type(x) is core.tensor]
    if name == "__add__" and dtypes[0].is_ptr():
        size = max(1, dtypes[0].element_ty.primitive_bitwidth // 8)
        is_offset = dtypes[1:] in ([core.int32], [core.int64])
        return (lambda pointers, offsets: pointers + size * offsets.astype(np.uint64), None) if is_offset else None
    if dtypes == [core.int1] * 2 and name in ("__and__", "__or__"):
        return OPERATORS[name], None
    if dtypes in ([core.int32, core.int64], [core.int64, core.int32]):
        return OPERATORS[name], None  # both compute in int64
    convert, numbers = PLAIN.get(dtypes[0].name, (None, ())) if dtypes else (None, ())
    is_plain = all(x.dtype is dtypes[0] if type(x) is core.tensor else type(x) in numbers for x in operands)
    return (OPERATORS[name], convert) if convert is not None and is_plain else None

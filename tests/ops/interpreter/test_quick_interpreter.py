"""Results of the quick interpreter, computed by NumPy alone or replayed, equal those of Triton's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.ops.interpreter.interpreted import in_the_interpreter

RANDOM = np.random.default_rng(5)


def skip_unless_patched() -> None:
    version = pytest.importorskip("triton").__version__
    from tests.ops.interpreter.quick_interpreter import PATCHED_RELEASE

    if not version.startswith(PATCHED_RELEASE):
        pytest.skip(f"types are only patched in Triton {PATCHED_RELEASE}x, got {version}")


def tensor(dtype: Any, shape: list[int]) -> Any:
    """Return random numbers as a tensor of the interpreter, a scalar for the shape []; some are negative, some NaN."""
    import triton.language as tl
    from triton.runtime import interpreter

    data = RANDOM.integers(0 if dtype is tl.int1 else -2, 2 if dtype is tl.int1 else 3, shape or [1])
    if dtype.is_ptr():
        data = (1000 + 8 * data).astype(np.uint64)
    else:
        data = data.astype(interpreter._get_np_dtype(dtype))
    if dtype in (tl.float16, tl.float32):
        data[RANDOM.random(data.shape) < 0.2] = np.nan
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)


def pointers(array: np.ndarray[Any, Any], items: list[int]) -> Any:
    """Return a block of pointers to items of an array of float32; a scalar pointer to a single item."""
    import triton.language as tl
    from triton.runtime import interpreter

    data = (array.ctypes.data + array.itemsize * np.array(items)).astype(np.uint64)
    kind = tl.str_to_ty("*fp32", None)
    return tl.tensor(
        interpreter.TensorHandle(data, kind), tl.block_type(kind, [len(items)]) if len(items) > 1 else kind
    )


def by_triton(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a builtin of the language as Triton's own interpreter calls it."""
    from triton.runtime import interpreter

    return partial(function, _semantic=interpreter.interpreter_semantic)


@contextmanager
def patched_language() -> Iterator[None]:
    """Patch the language as Triton's interpreter does for a launch, except for the builtins."""
    import triton.language as tl
    from triton.runtime import interpreter

    patches = interpreter._LangPatchScope()
    interpreter._patch_lang_core(tl, patches)
    interpreter._patch_lang_tensor(tl.tensor, patches)
    try:
        yield
    finally:
        patches.restore()


def assert_equal(actual: Any, expected: Any, name: str) -> None:
    assert actual.type == expected.type, name
    assert actual.shape == expected.shape, name
    assert actual.dtype == expected.dtype, name
    if expected.handle is None:
        assert actual.handle is None, name
        return
    assert actual.handle.data.dtype == expected.handle.data.dtype, name
    if actual.dtype.name != "int1":  # Triton leaves the dtype of the operands on the result of a comparison
        assert actual.handle.dtype == expected.handle.dtype, name
    np.testing.assert_array_equal(actual.handle.data, expected.handle.data, str((name, expected.type)))
    if actual.handle.data.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(actual.handle.data), np.signbit(expected.handle.data), name)


def check_operators() -> None:
    import triton.language as tl
    from triton.language.semantic import IncompatibleTypeErrorImpl

    from tests.ops.interpreter.quick_interpreter import OPERATORS, _directly

    dtypes = [tl.float32, tl.float16, tl.bfloat16, tl.int1, tl.int32, tl.int64, tl.pointer_type(tl.float16)]
    left, right = ([partial(tensor, x, shape) for x in dtypes for shape in ([], block)] for block in ([4, 1], [1, 8]))
    numbers = [lambda: 2, lambda: -0.5, lambda: True, lambda: tl.constexpr(3)]
    by_numpy = dict.fromkeys(OPERATORS, 0)  # cases that did not call Triton
    for name in OPERATORS:
        operator = mock.Mock(side_effect=lambda *x, _semantic=None, name=name: by_triton(getattr(tl.tensor, name))(*x))
        quick = _directly(name, operator)
        for one, other in itertools.product(left, [*right, *numbers]):
            try:
                quick(one(), other())  # from which the type of the result is known
            except (IncompatibleTypeErrorImpl, TypeError, ValueError):
                continue  # Triton refuses these dtypes
            operands = one(), other()
            expected = operator(*operands)
            operator.reset_mock()
            actual = quick(*operands)
            by_numpy[name] += not operator.called
            assert_equal(actual, expected, name)
        for first, second in ((tl.int32, tl.int64), (tl.int64, tl.int32)):
            quick(tensor(first, [4, 1]), tensor(second, [1, 8]))
            operator.reset_mock()
            quick(tensor(first, [4, 1]), tensor(second, [1, 8]))
            assert not operator.called, (name, first)
    assert min(by_numpy.values()) >= 6, by_numpy


def test_numpy_computes_what_triton_does_for_every_operator_and_dtype() -> None:
    skip_unless_patched()
    in_the_interpreter(check_operators)


def check_builtins() -> None:
    import triton.language as tl

    from tests.ops.interpreter.quick_interpreter import _replayed

    memory = RANDOM.standard_normal(64).astype(np.float32)
    fp32, fp16, int32, int1 = (partial(tensor, x) for x in (tl.float32, tl.float16, tl.int32, tl.int1))

    def random_pointers(size: int) -> Any:
        return pointers(memory, RANDOM.choice(64, size, replace=False).tolist())

    floats = (tl.float16, tl.bfloat16, tl.float32, tl.float64)
    cases: list[tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = [
        *((tl.tensor.to, lambda x=x, y=y: (tensor(x, [4, 8]), y)) for x in (*floats, tl.int32) for y in floats),
        *((tl.cast, lambda x=x: (int32([]), x)) for x in (tl.int64, tl.float32, tl.int1)),
        (tl.arange, lambda: (0, tl.constexpr(8))),
        (tl.full, lambda: ([4, tl.constexpr(8)], -0.0, tl.float32)),
        (tl.full, lambda: ([4, tl.constexpr(8)], 0.0, tl.float32)),
        (tl.full, lambda: ([4], float("nan"), tl.float32)),
        (tl.where, lambda: (int1([4, 1]), fp32([1, 8]), -float("inf"))),
        (tl.where, lambda: (int1([4, 8]), fp32([4, 8]), fp16([4, 1]))),
        (tl.maximum, lambda: (fp32([4, 8]), fp32([8]))),
        (tl.minimum, lambda: (int32([]), 1)),
        (tl.dot, lambda: (fp16([16, 16]), fp16([16, 16]))),
        (tl.dot, lambda: (fp32([16, 16]), fp32([16, 16]), fp32([16, 16]), "ieee")),
        (tl.trans, lambda: (fp32([4, 8]),)),
        (tl.permute, lambda: (fp32([4, 8, 2]), (2, tl.constexpr(0), 1))),
        (tl.reshape, lambda: (fp32([4, 8]), [8, 4])),
        (tl.broadcast_to, lambda: (fp32([4, 1]), [4, 8])),
        (tl.floor, lambda: (fp32([4, 8]),)),
        (tl.abs, lambda: (fp32([]),)),
        (tl.exp2, lambda: (fp32([4]),)),
        (tl.fma, lambda: (fp32([4]), fp32([4]), fp32([4]))),
        (tl.clamp, lambda: (fp32([4]), -1.0, 1.0)),
        (tl.tensor.__neg__, lambda: (int32([4, 8]),)),
        (tl.tensor.__invert__, lambda: (int1([4, 8]),)),
        (tl.tensor.__floordiv__, lambda: (int32([4, 8]), 3)),
        (tl.tensor.__mod__, lambda: (int32([4, 8]), tl.constexpr(3))),
        (tl.tensor.__lshift__, lambda: (int32([4, 8]), 3)),
        (tl.tensor.__rshift__, lambda: (int32([4, 8]), 1)),
        (tl.tensor.__truediv__, lambda: (fp32([4, 8]), fp16([4, 1]))),
        (tl.load, lambda: (random_pointers(8),)),
        (tl.load, lambda: (random_pointers(1),)),
        (tl.load, lambda: (random_pointers(8), int1([8]), 0.5)),
        (tl.load, lambda: (random_pointers(8), int1([8]))),
    ]
    with patched_language():
        for member, make in cases:
            name = f"{member.__name__} of {make()}"
            called = mock.Mock(side_effect=member)
            quick = _replayed(called)
            for _ in range(3):
                arguments = make()
                assert_equal(quick(*arguments), by_triton(member)(*arguments), name)
            assert called.call_count == 1, name
        check_what_depends_on_more_than_types(random_pointers)


def check_what_depends_on_more_than_types(random_pointers: Callable[[int], Any]) -> None:
    """Numbers that are part of a call, the same operand twice, masked scalars, stores and program indices."""
    import triton.language as tl
    from triton.runtime import interpreter

    from tests.ops.interpreter.quick_interpreter import _replayed

    full, where, maximum, load, store, index = (
        _replayed(x) for x in (tl.full, tl.where, tl.maximum, tl.load, tl.store, tl.program_id)
    )
    condition, flag = tensor(tl.int1, [64]), tensor(tl.int1, [64])
    for value in (0.0, -0.0, 0, False, 1, True, 1.0, 2.5):
        dtype = {bool: tl.int1, int: tl.int32, float: tl.float32}[type(value)]
        assert_equal(full([4], value, dtype), by_triton(tl.full)([4], value, dtype), str(value))
        assert_equal(where(condition, flag, value), by_triton(tl.where)(condition, flag, value), str(value))
    one, other = (tensor(tl.int32, [64]) for _ in range(2))
    for pair in ((one, one), (one, other), (other, one)):
        assert_equal(maximum(*pair), by_triton(tl.maximum)(*pair), "maximum")
    pointer = random_pointers(1)
    for mask, value in itertools.product((True, False), (0.0, 1.5)):
        scalar = by_triton(tl.to_tensor)(mask), by_triton(tl.to_tensor)(value)
        assert_equal(load(pointer, *scalar), by_triton(tl.load)(pointer, *scalar), "scalar")
    for _ in range(2):
        values, mask = tensor(tl.float32, [8]), tensor(tl.int1, [8])
        pointer = random_pointers(8)
        expected = np.where(mask.handle.data, values.handle.data, by_triton(tl.load)(pointer).handle.data)
        assert_equal(store(pointer, values, mask), tl.tensor(None, tl.void), "store")
        np.testing.assert_array_equal(by_triton(tl.load)(pointer).handle.data, expected)
    interpreter.interpreter_builder.set_grid_dim(3, 1, 1)
    for i in range(3):
        interpreter.interpreter_builder.set_grid_idx(i, 0, 0)
        assert index(0).handle.data.item() == i


def test_a_replayed_builtin_has_the_result_of_triton() -> None:
    skip_unless_patched()
    in_the_interpreter(check_builtins)


def check_new_dimensions() -> None:
    """Indices that add a dimension give what Triton's give, also when replayed; others are refused as by Triton."""
    import triton.language as tl
    from triton.runtime import interpreter

    from tests.ops.interpreter.quick_interpreter import _replayed

    index = _replayed(tl.tensor.__getitem__)
    for dtype, shape in itertools.product((tl.float32, tl.int1), ([4], [8], [4, 8], [8, 4])):
        data = np.arange(np.prod(shape)).reshape(shape).astype(interpreter._get_np_dtype(dtype))
        x = tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, shape))
        whole = (slice(None),) * len(shape)
        for place in range(len(shape) + 1):
            slices = (*whole[:place], tl.constexpr(None) if place == 1 else None, *whole[place:])
            for _ in range(2):  # recorded, then replayed
                actual = index(x, slices)
                assert actual.type == tl.block_type(dtype, [*shape[:place], 1, *shape[place:]])
                assert actual.handle.dtype == dtype
                np.testing.assert_array_equal(actual.handle.data, np.expand_dims(data, place))
        for _ in range(2):
            for slices in ((*whole[:-1], slice(1, None)), (None, *whole[:-1], slice(0, 2)), (0,)):
                with pytest.raises(ValueError, match="unsupported tensor index"):
                    index(x, slices)
            with pytest.raises(ValueError, match="too many indices"):
                index(x, (*whole, slice(None)))


def test_new_dimensions_are_those_of_triton() -> None:
    skip_unless_patched()
    in_the_interpreter(check_new_dimensions)

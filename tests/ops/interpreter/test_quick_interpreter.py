"""Operators that the quick interpreter computes with NumPy alone have the results of Triton's."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.ops.interpreter.interpreted import in_the_interpreter


def check_operators() -> None:
    import triton
    import triton.language as tl
    from triton.language.semantic import IncompatibleTypeErrorImpl
    from triton.runtime import interpreter

    from tests.ops.interpreter.quick_interpreter import OPERATORS, READ, _directly

    if not triton.__version__.startswith(READ):
        return  # nothing is patched

    draw = np.random.default_rng(5)

    def tensor(dtype: Any, shape: list[int]) -> Any:
        """Draw a tensor, or a scalar without a shape: small numbers, negative ones and NaN among them."""
        data = draw.integers(0 if dtype is tl.int1 else -2, 2 if dtype is tl.int1 else 3, shape or [1])
        if dtype.is_ptr():
            data = (1000 + 8 * data).astype(np.uint64)
        else:
            data = data.astype(interpreter._get_np_dtype(dtype))
        if dtype in (tl.float16, tl.float32):
            data[draw.random(data.shape) < 0.2] = np.nan
        return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)

    dtypes = [tl.float32, tl.float16, tl.bfloat16, tl.int1, tl.int32, tl.int64, tl.pointer_type(tl.float16)]
    tensors = [partial(tensor, dtype, shape) for dtype in dtypes for shape in ([4, 1], [1, 8], [])]
    others = [*tensors, lambda: 2, lambda: -0.5, lambda: True, lambda: tl.constexpr(3)]
    condition = partial(tensor, tl.int1, [4, 8])
    patches = interpreter._LangPatchScope()
    interpreter._patch_lang_core(tl, patches)
    compared = dict.fromkeys(OPERATORS, 0)
    for name in OPERATORS:
        function = tl.where if name == "where" else getattr(tl.tensor, name)
        operator = mock.Mock(side_effect=partial(function, _semantic=interpreter.interpreter_semantic))
        quick = _directly(name, operator)
        first = itertools.product([condition], others) if name == "where" else ((x,) for x in tensors)
        for (*some, left), right in itertools.product(first, others):
            try:
                quick(*(x() for x in (*some, left, right)))
            except (IncompatibleTypeErrorImpl, TypeError, ValueError):
                continue  # Triton refuses these dtypes
            operands = [x() for x in (*some, left, right)]
            expected = operator(*operands)
            operator.reset_mock()
            found = quick(*operands)
            compared[name] += not operator.called
            assert found.type == expected.type
            assert found.handle.data.dtype == expected.handle.data.dtype
            np.testing.assert_array_equal(found.handle.data, expected.handle.data, str((name, expected.type)))
        if name != "where":
            for left, right in ((tl.int32, tl.int64), (tl.int64, tl.int32)):
                quick(tensor(left, [4, 1]), tensor(right, [1, 8]))
                operator.reset_mock()
                quick(tensor(left, [4, 1]), tensor(right, [1, 8]))
                assert not operator.called, (name, left)
    patches.restore()
    assert min(compared.values()) >= 6, compared


def check_new_dimensions() -> None:
    """Index blocks with NumPy as Triton does step by step; refuse what Triton refuses."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    from tests.ops.interpreter.quick_interpreter import READ

    if not triton.__version__.startswith(READ):
        return  # nothing is patched

    semantic = interpreter.interpreter_semantic
    for dtype, shape in itertools.product((tl.float32, tl.int1), ([4], [8], [4, 8], [8, 4])):
        data = np.arange(np.prod(shape)).reshape(shape).astype(interpreter._get_np_dtype(dtype))
        x = tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, shape))
        whole = (slice(None),) * len(shape)
        for at in range(len(shape) + 1):
            slices = (*whole[:at], tl.constexpr(None) if at == 1 else None, *whole[at:])
            expected = semantic.expand_dims(x, at)
            for _ in range(2):  # computed by Triton, then by NumPy
                found = tl.tensor.__getitem__(x, slices, _semantic=semantic)
                assert found.type == expected.type
                assert found.handle.dtype == expected.handle.dtype
                np.testing.assert_array_equal(found.handle.data, expected.handle.data)
        for slices in ((*whole[:-1], slice(1, None)), (None, *whole[:-1], slice(0, 2)), (0,)):
            with pytest.raises(ValueError, match="unsupported tensor index"):
                tl.tensor.__getitem__(x, slices, _semantic=semantic)
        for _ in range(2):
            with pytest.raises(ValueError, match="too many indices"):
                tl.tensor.__getitem__(x, (*whole, slice(None)), _semantic=semantic)


def test_new_dimensions_are_those_of_triton() -> None:
    in_the_interpreter(check_new_dimensions)


def test_numpy_computes_what_triton_does_for_every_operator_and_dtype() -> None:
    in_the_interpreter(check_operators)

"""Matrix products and views of tensors by axes: which axes are contracted and shared, and where a view moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

MATRIX_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum")
VIEWS = (
    "view", "reshape", "view_as", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "movedim",
    "moveaxis", "swapaxes", "swapdims", "__getitem__", "narrow", "select", "chunk", "split", "unbind", "T", "mT",
    "tensor_split",
)  # fmt: skip
Axis = int | str
_SINGLE = 1 << 50  # stride of the first axis of size 1, larger than that of any other axis


@dataclass(frozen=True, slots=True, eq=False)
class MatrixProduct:
    """A product of two tensors with a label for each axis; equal labels are multiplied."""

    operands: tuple[Tensor, Tensor]
    axes: tuple[tuple[Axis, ...], tuple[Axis, ...]]
    output: tuple[Axis, ...]
    is_plain: bool = True  # nothing is added, and there is no factor

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MatrixProduct | None:
        """Return the product that a call computes, None for calls of another form."""
        if name == "einsum":
            return cls._of_einsum(args)
        if name == "baddbmm":
            arguments = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | dict(kwargs)
            is_plain = arguments.get("beta", 1) == 0 and arguments.get("alpha", 1) == 1
            operands = (arguments.get("batch1"), arguments.get("batch2"))
        else:
            second = next((kwargs[x] for x in ("other", "mat2", "tensor2") if x in kwargs), None)
            first = args[0] if len(args) else kwargs.get("input")
            operands, is_plain = (first, args[1] if len(args) > 1 else second), True
            operands = operands[::-1] if name == "__rmatmul__" else operands
        left, right = operands
        if not isinstance(left, Tensor) or not isinstance(right, Tensor) or min(left.ndim, right.ndim) < 2:
            return None
        leading = tuple(range(max(left.ndim, right.ndim) - 2))
        axes: tuple[tuple[Axis, ...], tuple[Axis, ...]] = (
            (*leading[len(leading) - left.ndim + 2 :], "rows", "contracted"),
            (*leading[len(leading) - right.ndim + 2 :], "contracted", "columns"),
        )
        return cls((left, right), axes, (*leading, "rows", "columns"), is_plain)

    @classmethod
    def _of_einsum(cls, args: tuple[Any, ...]) -> MatrixProduct | None:
        equation, operands = args[0], args[1:]
        operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
        if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
            return None
        inputs, arrow, output = equation.replace(" ", "").partition("->")
        terms = inputs.split(",")
        if not arrow:
            letters = inputs.replace(",", "").replace(".", "")
            output = ("..." if "..." in inputs else "") + "".join(x for x in sorted(letters) if letters.count(x) == 1)
        most = max(x.ndim - len(term.replace("...", "")) for x, term in zip(operands, terms, strict=True))
        axes = [
            _expanded(term, x.ndim - len(term.replace("...", "")) if "..." in term else 0, most)
            for x, term in zip(operands, terms, strict=True)
        ]
        if any(len(set(x)) < len(x) or len(x) != t.ndim for x, t in zip(axes, operands, strict=True)):
            return None
        return cls((operands[0], operands[1]), (axes[0], axes[1]), _expanded(output, most, most))

    def sizes(self, index: int) -> dict[Axis, int]:
        return dict(zip(self.axes[index], self.operands[index].shape, strict=True))

    def contracted(self) -> list[Axis]:
        return [x for x in self.axes[0] if x in self.axes[1] and x not in self.output]

    def shared(self, index: int) -> list[Axis]:
        """Return the axes of an operand and the output that the other operand has too, not broadcast."""
        own, other = self.sizes(index), self.sizes(1 - index)
        return [x for x in self.axes[index] if x in self.output and x in other and other[x] == own[x]]

    def own(self, index: int) -> list[Axis]:
        """Return the axes of an operand and the output along which the other operand is constant."""
        shared = self.shared(index)
        return [x for x in self.axes[index] if x in self.output and x not in shared]

    def is_complete(self) -> bool:
        """Return whether no axis is summed over in one operand alone."""
        first, second = self.axes
        return all((x in self.output) or (x in first and x in second) for x in (*first, *second))


def _expanded(term: str, own: int, most: int) -> tuple[Axis, ...]:
    before, dots, after = term.partition("...")
    return (*before, *(range(most - own, most) if dots else ()), *after)


@dataclass(frozen=True, slots=True)
class MovedAxis:
    """An axis of a view: the axes of the tensor that it consists of, in order."""

    sources: tuple[int, ...]
    size: int
    is_whole: bool  # all of these axes, none of them in part


def moved_axes(
    shape: torch.Size, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[list[MovedAxis], int]] | None:
    """Return the axes of each result of a view of a tensor of a shape, and the offset of its first element.

    None if the result is no view: then the relation of its axes is unknown.
    """
    rest = (*args[1:], *kwargs.values())
    if any(isinstance(x, Tensor) or (isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x)) for x in rest):
        return None
    with _disable_current_modes(), torch.no_grad():
        contiguous = torch.empty(shape, device="meta").stride()
        # The strides of axes of size 1 are free: distinct ones tell them apart.
        strides = [_SINGLE + axis if size == 1 else contiguous[axis] for axis, size in enumerate(shape)]
        source = torch.empty_strided(shape, strides, device="meta")
        first = {name: source if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        result = function(source, *args[1:], **first)
    results = result if isinstance(result, list | tuple) else (result,)
    if not all(isinstance(x, Tensor) and x._base is source for x in results):
        return None
    return [([_moved(source, *x) for x in zip(r.shape, r.stride(), strict=True)], r.storage_offset()) for r in results]


def _moved(source: Tensor, size: int, stride: int) -> MovedAxis:
    sizes, strides = source.shape, source.stride()
    if size == 1:
        axis = stride - _SINGLE
        return MovedAxis((axis,), 1, True) if 0 <= axis < source.ndim else MovedAxis((), 1, False)
    sources: list[int] = []
    remaining, expected = size, stride
    for axis in reversed(range(source.ndim)):
        if sizes[axis] == 1:
            continue
        if strides[axis] == expected and remaining > 1:
            sources.insert(0, axis)
            if remaining % sizes[axis]:
                return MovedAxis(tuple(sources), size, False)
            remaining //= sizes[axis]
            expected = strides[axis] * sizes[axis]
        elif not sources and strides[axis] < stride < strides[axis] * sizes[axis]:
            return MovedAxis((axis,), size, False)  # the outer part of an axis that was split
    return MovedAxis(tuple(sources), size, remaining == 1)

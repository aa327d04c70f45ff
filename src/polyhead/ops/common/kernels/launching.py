"""Launches of compiled kernels with little host time, and arguments that are the same in several kernels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

FAR = 1 << 30  # beyond any key position

_MOST_REPEATED = 4096

_compiled: dict[Hashable, Any] = {}
_repeated: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}  # the compiled kernel and its constants


def bounded(edge: int | None) -> int:
    """Return an edge of a band as a number, which is `FAR` if the band is open."""
    return FAR if edge is None else min(edge, FAR)


def wide(*numbers: int) -> Hashable:
    """Return which integers have 64 bits: Triton compiles another variant for them."""
    return tuple(number >> 31 != 0 for number in numbers)


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    *,
    variant: Hashable,
    num_warps: int = 4,
) -> None:
    """Launch a kernel, from the second time on without Triton's binder, which takes longer than the launch itself.

    Args:
        kernel: its integers must not be specialised (`do_not_specialize`).
        arguments: tensors, descriptors and numbers, in the order of the kernel.
        constants: its constexpr arguments, which follow.
        variant: whatever else decides what Triton compiles: device, dtypes, and which pointers are None or no multiple
            of 16 bytes.
        num_warps: of the kernel's default partition; always the same for a kernel and its constants.
    """
    key = kernel, constants, variant
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*arguments, *constants, num_warps=num_warps)
    else:
        compiled[programs, 1, 1](*arguments, *constants)


def launch_repeated(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
    *,
    device: int,
) -> None:
    """Launch a kernel, without Triton's binder if it was launched with equal numbers before.

    For kernels whose integers Triton specialises. What it compiles depends on the types and values of numbers and
    constants and on the dtypes and alignments of tensors, and so on less than what is compared here.

    Args:
        kernel: the kernel.
        programs: number of programs.
        arguments: tensors, descriptors, numbers and tuples of them, in the order of the kernel.
        constants: its constexpr arguments, by name.
        options: Triton's launch options.
        device: index of the GPU.
    """
    key = kernel, device, _kind(arguments), *constants.values(), *options.values()
    known = _repeated.get(key)
    if known is not None:
        compiled, values = known
        compiled[programs, 1, 1](*arguments, *values)
        return
    compiled = kernel[(programs,)](*arguments, **constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_repeated) >= _MOST_REPEATED:  # lengths of a growing cache
            _repeated.clear()
        _repeated[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _kind(arguments: tuple[Any, ...]) -> Hashable:
    """Return what Triton may compile into a kernel: dtypes and alignments of tensors, types and values of numbers."""
    kinds: list[Hashable] = []
    for x in arguments:
        if x is None or type(x) is int:  # most of them
            kinds.append(x)
        elif isinstance(x, Tensor):
            kinds.append((x.dtype, x.data_ptr() % 16))
        elif isinstance(x, tuple):
            kinds.append(_kind(x))
        elif isinstance(x, TensorDescriptor):
            kinds.append((x.base.dtype, x.base.data_ptr() % 16, *x.shape, *x.strides, *x.block_shape))
        else:
            value = x.value if isinstance(x, tl.constexpr) else x
            kinds.append((type(value), value))
    return tuple(kinds)

"""Launches of compiled kernels with little host time, and arguments that are the same in several kernels."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

FAR = 1 << 30  # beyond any key position

_compiled: dict[Hashable, Any] = {}


def bounded(edge: int | None) -> int:
    """Return an edge of a band as a number, which is `FAR` if the band is open."""
    return FAR if edge is None else min(edge, FAR)


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
        num_warps: of the kernel's default partition; always the same for a kernel.
    """
    key = kernel, constants, variant
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*arguments, *constants, num_warps=num_warps)
    else:
        compiled[programs, 1, 1](*arguments, *constants)

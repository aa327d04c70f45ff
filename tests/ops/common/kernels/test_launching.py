"""Launches without Triton's binder: whatever may change what Triton compiles is a launch of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from polyhead.ops.common.kernels import launching


class Kernel:
    """Stand-in for a kernel: lists what the binder compiled and what was launched."""

    arg_names = ("x", "terms", "scale", "BLOCK", "FLAG")

    def __init__(self, *, compiles: bool = True) -> None:
        self.compiles = compiles
        self.bound: list[Any] = []
        self.launched: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def bind(*arguments: Any, **named: Any) -> Any:
            self.bound.append((arguments, named))
            return Compiled(self) if self.compiles else None

        return bind


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


class Terms(NamedTuple):
    bias: torch.Tensor | None
    width: int
    WIDE: tl.constexpr


BASE = torch.zeros(4, 8, 64, dtype=torch.float32)
ARGUMENTS = (BASE, Terms(None, 16, tl.constexpr(False)), 0.5)
CONSTANTS, OPTIONS = {"FLAG": True, "BLOCK": 32}, {"num_warps": 4}


@pytest.fixture(autouse=True)
def _no_launch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_repeated", {})


def test_an_equal_launch_passes_all_arguments_in_order_without_the_binder() -> None:
    kernel, again = Kernel(), (torch.ones(4, 8, 64), *ARGUMENTS[1:])
    launching.launch_repeated(kernel, 7, ARGUMENTS, CONSTANTS, OPTIONS, device=0)
    launching.launch_repeated(kernel, 11, again, CONSTANTS, OPTIONS, device=0)
    assert kernel.bound == [(ARGUMENTS, {**CONSTANTS, **OPTIONS})]
    ((grid, passed),) = kernel.launched
    assert grid == (11, 1, 1)
    assert passed[0] is again[0]
    assert passed[1:] == (*ARGUMENTS[1:], 32, True)  # constants in the order of the kernel


@pytest.mark.parametrize(
    ("arguments", "constants", "options", "device"),
    [
        ((BASE.double(), *ARGUMENTS[1:]), CONSTANTS, OPTIONS, 0),
        ((BASE.flatten()[1:], *ARGUMENTS[1:]), CONSTANTS, OPTIONS, 0),  # another alignment
        ((None, *ARGUMENTS[1:]), CONSTANTS, OPTIONS, 0),
        ((BASE, Terms(BASE, 16, tl.constexpr(False)), 0.5), CONSTANTS, OPTIONS, 0),
        ((BASE, Terms(None, 1, tl.constexpr(False)), 0.5), CONSTANTS, OPTIONS, 0),
        ((BASE, Terms(None, 17, tl.constexpr(False)), 0.5), CONSTANTS, OPTIONS, 0),
        ((BASE, Terms(None, 1 << 31, tl.constexpr(False)), 0.5), CONSTANTS, OPTIONS, 0),
        ((BASE, Terms(None, 16, tl.constexpr(True)), 0.5), CONSTANTS, OPTIONS, 0),
        ((BASE, Terms(None, 16, tl.constexpr(0)), 0.5), CONSTANTS, OPTIONS, 0),
        ((BASE, ARGUMENTS[1], 1.0), CONSTANTS, OPTIONS, 0),
        ((BASE, ARGUMENTS[1], 1), CONSTANTS, OPTIONS, 0),
        ((TensorDescriptor(BASE, [4, 8, 64], [512, 64, 1], [1, 8, 64]), *ARGUMENTS[1:]), CONSTANTS, OPTIONS, 0),
        (ARGUMENTS, {"FLAG": True, "BLOCK": 64}, OPTIONS, 0),
        (ARGUMENTS, {"FLAG": False, "BLOCK": 32}, OPTIONS, 0),
        (ARGUMENTS, CONSTANTS, {"num_warps": 8}, 0),
        (ARGUMENTS, CONSTANTS, {"num_warps": 4, "num_stages": 2}, 0),
        (ARGUMENTS, CONSTANTS, OPTIONS, 1),
    ],
)
def test_what_triton_may_compile_is_bound_anew(
    arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, int], device: int
) -> None:
    kernel = Kernel()
    launching.launch_repeated(kernel, 7, ARGUMENTS, CONSTANTS, OPTIONS, device=0)
    launching.launch_repeated(kernel, 7, (BASE, ARGUMENTS[1], 1.5), CONSTANTS, OPTIONS, device=0)
    launching.launch_repeated(kernel, 7, arguments, constants, options, device=device)
    assert len(kernel.bound) == 3
    assert not kernel.launched


def test_descriptors_differ_by_their_block_and_kernels_by_themselves() -> None:
    kernel, other = Kernel(), Kernel()
    for block in (8, 16):
        described = TensorDescriptor(BASE, [4, 8, 64], [512, 64, 1], [1, block, 64])
        launching.launch_repeated(kernel, 7, (described, *ARGUMENTS[1:]), CONSTANTS, OPTIONS, device=0)
    launching.launch_repeated(other, 7, (described, *ARGUMENTS[1:]), CONSTANTS, OPTIONS, device=0)
    assert (len(kernel.bound), len(other.bound), kernel.launched, other.launched) == (2, 1, [], [])


def test_a_kernel_that_does_not_fit_is_not_kept_and_few_launches_are() -> None:
    class Failing(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            raise MemoryError("out of shared memory")

    with pytest.raises(MemoryError, match="shared memory"):
        launching.launch_repeated(Failing(), 7, ARGUMENTS, CONSTANTS, OPTIONS, device=0)
    for _ in range(2):
        launching.launch_repeated(Kernel(compiles=False), 7, ARGUMENTS, CONSTANTS, OPTIONS, device=-1)
    assert not launching._repeated
    kernel = Kernel()
    for length in range(launching._MOST_REPEATED + 3):
        launching.launch_repeated(kernel, 7, (None, length, 0.5), CONSTANTS, OPTIONS, device=0)
    assert len(launching._repeated) == 3

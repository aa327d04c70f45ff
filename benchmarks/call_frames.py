"""Python frames between `polyhead.attention` and the launch of its kernel: `python -m benchmarks.call_frames`.

    python -m benchmarks.call_frames                  # the fused backend; without a GPU in Triton's interpreter
    python -m benchmarks.call_frames --gradients      # while gradients are recorded

A call with all statistics is followed up to the first launch of a kernel of attention, which does not run. Two
numbers are printed for each mask: the frames on the stack at the launch, with their names from the outermost to the
innermost, and all frames entered until then, which include helpers that returned before the launch. Only frames of
polyhead's own modules count. The stack is the same on every machine up to the kernel's host function: on Hopper the
kernel for bands is launched by its host function itself, the portable one through `launch_fitting`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import torch

SHAPE = (1, 4, 32, 64)  # more queries than the decode kernels take
KERNELS = "polyhead.ops.attention.kernels."  # not those that clean the keys before
LAUNCHER = "polyhead.ops.common.kernels.launching"  # called by the host functions of kernels


class Frames(NamedTuple):
    stack: list[str]  # at the launch, outermost first
    entered: Counter[str]


class _Launched(BaseException):
    """Ends a call at its launch."""


def frames_to_launch(call: Callable[[], object]) -> Frames:
    """Run a call up to its first launch of an attention kernel and return polyhead's frames until then."""
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__.__code__
    stack: list[str] = []
    entered: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        caller = host = frame.f_back
        while host is not None and host.f_globals["__name__"] == LAUNCHER:
            host = host.f_back
        if frame.f_code is launch and host is not None and host.f_globals["__name__"].startswith(KERNELS):
            sys.setprofile(before)
            while caller is not None:
                stack.extend(_own_names(caller))
                caller = caller.f_back
            raise _Launched
        entered.update(_own_names(frame))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    except _Launched:
        return Frames(stack[::-1], entered)
    finally:
        sys.setprofile(before)
    raise RuntimeError("the call ended without a kernel launch")


def _own_names(frame: FrameType) -> list[str]:
    """Return the frame's qualified name if it is polyhead's, in a list of at most one."""
    module = str(frame.f_globals.get("__name__", ""))
    return [f"{module}.{frame.f_code.co_qualname}"] if module.partition(".")[0] == "polyhead" else []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gradients", action="store_true", help="record gradients")
    parser.add_argument("--entered", action="store_true", help="also list the frames that were entered")
    options = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and polyhead are imported
    from polyhead import Mask, attention

    x = torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=options.gradients)
    for name, mask in (("no mask", None), ("causal", Mask.causal()), ("lengths", Mask.lengths([SHAPE[2] - 3]))):

        def call(mask: Mask | None = mask) -> object:
            with torch.set_grad_enabled(options.gradients):
                return attention(x, x, x, mask=mask, statistics=True, backend="fused")

        frames_to_launch(call)  # imports and caches
        stack, entered = frames_to_launch(call)
        print(f"{name}: {len(stack)} frames on the stack, {entered.total()} entered")
        print("  " + "\n  ".join(stack))
        if options.entered:
            print("".join(f"  {count:4} {entry}\n" for entry, count in entered.most_common()), end="")


if __name__ == "__main__":
    main()

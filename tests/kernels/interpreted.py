"""What tests of kernels share: a process of its own with Triton's interpreter, and fresh memory that holds no zeros."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor


def in_the_interpreter(root: Path, code: str) -> None:
    """Run Python code where kernels are interpreted, which must be chosen before Triton is imported."""
    pytest.importorskip("triton")
    path = os.pathsep.join([str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let fresh tensors hold NaN, or -77 where they are integers, so that what a kernel leaves out shows."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*sizes: object, **options: object) -> Tensor:
            tensor = make(*sizes, **options)
            if tensor.device.type == "meta":
                return tensor
            return tensor.fill_(torch.nan if tensor.is_floating_point() else -77)

        return fresh

    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poisoned(Tensor.new_empty)),
    ):
        yield

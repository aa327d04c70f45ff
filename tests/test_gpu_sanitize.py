"""The cases for compute-sanitizer launch every kernel there is; seen without a GPU, where none of them runs."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import triton

import polyhead.ops
from tests import gpu_sanitize
from tests.pretend_cuda import pretend_cuda


def kernels() -> set[str]:
    """Every function that can be launched: by the project's rule its name ends with `kernel`."""
    found = set()
    for module in pkgutil.walk_packages(polyhead.ops.__path__, "polyhead.ops."):
        if ".kernels." not in module.name:
            continue
        members = vars(importlib.import_module(module.name))
        for name, member in members.items():
            if isinstance(member, triton.JITFunction) and name.endswith("kernel"):
                found.add(f"{member.module}.{name}")
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is there cannot be pretended")
# Said once by PyTorch on a CPU without bfloat16 instructions.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_every_kernel_is_launched_by_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()

    def hook(*, fn: Any, **rest: Any) -> bool:
        launched.add(f"{fn.module}.{fn.name}")
        return True  # neither compile nor launch

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    with pretend_cuda():
        for case in gpu_sanitize.CASES.values():
            case()
    assert launched >= kernels(), f"no case launches {sorted(kernels() - launched)}"
    assert not {name for name in launched if not name.endswith("kernel")}
    assert len(kernels()) > 30

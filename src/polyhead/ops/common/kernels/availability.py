"""Availability of the Triton and Gluon kernels. Importing this module does not import Triton."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

# Triton reads the same variable when it is imported.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, not imported


@functools.cache
def capability(device: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def device_reasons(device: torch.device, required: tuple[int, int] = (8, 0)) -> list[str]:
    """Return the reasons why kernels that require a compute capability do not run on a device; empty if they do."""
    if device.type != "cuda" and not (device.type == "cpu" and IS_INTERPRETED):
        return [f"our kernels run on CUDA devices, got tensors on {device.type}"]
    if not HAS_TRITON:
        return ["our kernels need Triton, which is not installed"]
    if device.type == "cuda" and torch.version.cuda is None:
        return ["our kernels support NVIDIA GPUs only"]
    if device.type == "cuda" and not torch.compiler.is_compiling() and capability(device.index) < required:
        (major, minor), (got_major, got_minor) = required, capability(device.index)
        return [f"this kernel needs compute capability {major}.{minor}, got {got_major}.{got_minor}"]
    return []


def has_hopper_kernels(device: torch.device) -> bool:
    """Return True if the Hopper-only kernels can run on the device."""
    return device.type == "cuda" and not IS_INTERPRETED and _has_gluon() and capability(device.index)[0] == 9


@functools.cache
def _has_gluon() -> bool:
    return HAS_TRITON and importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None


@functools.cache
def multiprocessors(device: int) -> int:
    """Return the number of streaming multiprocessors; 1 for device -1, the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 1

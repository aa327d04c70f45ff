"""Machine, versions and commit of a measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from polyhead.version import VERSION

PACKAGE = Path(__file__).resolve().parents[2]


def describe(device: torch.device, known_commit: str | None = None) -> dict[str, object]:
    """Return the machine, versions, commit and date, which are saved with results."""
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": usable_cores(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        },
        "versions": {
            "polyhead": VERSION,
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # with the build, such as +cpu, which the metadata may lack
            **{name: version(name) for name in ("triton", "numpy", "x-transformers")},
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        },
        "commit": known_commit or commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg()[0],
    }


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Return the name of the processor; on Arm machines only lscpu knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or "unknown"
    for line in _output("lscpu").splitlines():
        if line.startswith("Model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the source, with the suffix -modified if the tree differs; None outside a repository."""
    # An installed package may be inside another repository, which does not track it.
    if not _output("git", "ls-files", "--error-unmatch", "__init__.py"):
        return None
    # Results also depend on the scripts in benchmarks/.
    changed = _output("git", "status", "--porcelain", "--", ".", ":(top,glob)benchmarks/**/*.py")
    return _output("git", "rev-parse", "HEAD") + ("-modified" if changed else "")


def _output(*command: str) -> str:
    """Return the output of a program; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE, check=False, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""The record of the last run of the GPU tests, and whether the kernels have changed since.

    python -m tests.gpu_record

warns (and succeeds) where the sources of the kernels or of their callers are not those of the last full green run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path("benchmarks/results/gpu-suite-cuda-nvidia-h200.json")
PACKAGE = Path("src/polyhead")
WHOLE = ("kernels", "functional")  # packages of which every file counts


def sources(root: Path = ROOT) -> list[Path]:
    """The files on which the numbers of a GPU depend most: kernels, `functional`, and whoever imports kernels."""
    package = root / PACKAGE
    files = sorted(package.rglob("*.py"))
    return [file for file in files if file.relative_to(package).parts[0] in WHOLE or _imports_kernels(file.read_text())]


def _imports_kernels(text: str) -> bool:
    if "polyhead.kernels" not in text:
        return False
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(name == "polyhead.kernels" or name.startswith("polyhead.kernels.") for name in names):
            return True
    return False


def sources_hash(root: Path = ROOT) -> str:
    """One hash of names and contents; line endings do not count."""
    found = hashlib.sha256()
    for file in sources(root):
        content = hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
        found.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    return found.hexdigest()


def warning(root: Path = ROOT) -> str | None:
    """A line about the record that is missing, not green, not full, or of other sources; None if all is well."""
    again = "run make test-gpu on a GPU and commit its record"
    path = root / RECORD
    if not path.exists():
        return f"{RECORD} is missing, so it is not known whether the kernels pass on a GPU: {again}"
    record: dict[str, Any] = json.loads(path.read_text())
    if not record["full"]:
        return f"the GPU tests of {RECORD} were not run to their end ({_told(record)}): {again}"
    if not record["green"]:
        return f"{_told(record)} in {RECORD}: {again}"
    if record["sources"] != sources_hash(root):
        at = str(record["commit"])[:12]
        return f"the kernels or their callers have changed since the GPU tests of {RECORD} (commit {at}): {again}"
    return None


def _told(record: dict[str, Any]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in record["counts"].items())


def main() -> int:
    found = warning()
    if found is not None:
        print(f"warning: {found}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

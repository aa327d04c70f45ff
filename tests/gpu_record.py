"""The record of the last run of the GPU tests, and whether the kernels have changed since.

    python -m tests.gpu_record

warns (and succeeds) where the sources of the kernels or of their callers are not those of the last full green run.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import sys
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path("benchmarks/results/gpu-suite-cuda-nvidia-h200.json")
OPS = Path("src/polyhead/ops")  # kernels and their callers; import-linter keeps kernels from being imported elsewhere


def sources(root: Path = ROOT) -> list[Path]:
    """Source files of the kernels and their callers."""
    return sorted((root / OPS).rglob("*.py"))


def code(text: str) -> str:
    """Source text without docstrings, comments and blank lines."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            for line in range(docstring.lineno - 1, docstring.end_lineno):
                lines[line] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def sources_hash(root: Path = ROOT) -> str:
    """Hash of the names and the code of all sources."""
    found = hashlib.sha256()
    for file in sources(root):
        content = hashlib.sha256(code(file.read_text(encoding="utf-8")).encode()).hexdigest()
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

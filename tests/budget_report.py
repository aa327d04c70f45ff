"""A record of how much of its error budget every result used: JSON lines in the file that POLYHEAD_BUDGETS names.

The run that wrote it ends with the ten largest shares, and fails where one is above `MOST`: with less room than that
another CPU's order of summation decides whether a test passes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

MOST = 0.7


def record(**entry: object) -> None:
    """Add a line, from whatever process a test runs its checks in."""
    if file := os.environ.get("POLYHEAD_BUDGETS"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"test": test, **entry}) + "\n")


def read(file: str | Path) -> list[dict]:
    """The entries of a record, the largest share first."""
    path = Path(file)
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return sorted(entries, key=lambda entry: -entry["share"])


def summary(entries: list[dict], count: int = 10) -> list[str]:
    """One line for all of them, and one for each of the largest shares."""
    above = sum(entry["share"] > MOST for entry in entries)
    tests = len({entry["test"] for entry in entries})
    lines = [
        f"{len(entries)} results of {tests} tests were held to an error budget; {above} used more than {MOST} of it"
    ]
    for entry in entries[:count]:
        error = f"{entry['error']:.2e} of {entry['bound']:.2e}"
        lines.append(f"{entry['share']:.3f}  {error}  {entry['test'].split('::', 1)[-1]}  {entry['name'][:80]}")
    return lines


class Report:
    """The pytest plugin; with several workers, that of the process that started them."""

    def __init__(self, file: str) -> None:
        self.file = file
        Path(file).unlink(missing_ok=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        entries = read(self.file)
        if session.exitstatus == 0 and any(entry["share"] > MOST for entry in entries):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("error budgets")
        for line in summary(read(self.file)):
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    file = os.environ.get("POLYHEAD_BUDGETS")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(file))

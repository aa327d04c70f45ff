"""A record of how much of its error budget every result used: JSON lines in the file that POLYHEAD_BUDGETS names.

The run that wrote it ends with the ten largest shares, and fails where one is above `MOST`: with less room than that
another CPU's order of summation decides whether a test passes.

    python -m tests.budget_report BEFORE.jsonl AFTER.jsonl

prints the budgets of two records beside each other.
"""

from __future__ import annotations

import json
import os
import re
import sys
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


def above(entries: list[dict]) -> list[dict]:
    """Return the entries above `MOST`."""
    return [entry for entry in entries if entry["share"] > MOST]


def summary(entries: list[dict], count: int = 10) -> list[str]:
    """One line for all of them, and one for each of the largest shares."""
    tests = len({entry["test"] for entry in entries})
    results = f"{len(entries)} results of {tests} tests were held to an error budget"
    lines = [f"{results}; {len(above(entries))} used more than {MOST} of it"]
    for entry in entries[:count]:
        error = f"{entry['error']:.2e} of {entry['bound']:.2e}"
        if entry["factor"] != 2:
            error += f" (factor {entry['factor']})"
        lines.append(f"{entry['share']:.3f}  {error}  {entry['test'].split('::', 1)[-1]}  {entry['name'][:80]}")
    return lines


class Report:
    """The pytest plugin; with several workers, that of the process that started them."""

    def __init__(self, file: str) -> None:
        self.file = file
        Path(file).unlink(missing_ok=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        entries = read(self.file)
        if session.exitstatus == 0 and above(entries):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("error budgets")
        for line in summary(read(self.file)):
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    file = os.environ.get("POLYHEAD_BUDGETS")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(file))


def bounds(entries: list[dict]) -> dict[tuple[str, str, str], tuple[int, float, float]]:
    """The number of results, the largest budget and the largest share, by test, dtype and kind of result."""
    found: dict[tuple[str, str, str], tuple[int, float, float]] = {}
    for entry in entries:
        test = entry["test"].split("[")[0].removeprefix("tests/")
        kinds = re.findall(r"gradient of:? ([\w.]+)", entry["name"]) or [entry["name"].rpartition(": ")[2]]
        kind = "logsumexp" if kinds[0] in ("sum", "log-sum-exp") else kinds[0] if len(kinds[0]) < 25 else "output"
        key = test, entry["dtype"].removeprefix("torch."), kind
        count, bound, share = found.get(key, (0, 0.0, 0.0))
        found[key] = count + 1, max(bound, entry["bound"]), max(share, entry["share"])
    return found


def compared(before: list[dict], after: list[dict]) -> str:
    """Tab-separated lines: budgets and shares of two records."""
    old, new = bounds(before), bounds(after)
    lines = ["test\tdtype\tresult\tbefore: results\tbudget\tshare\tafter: results\tbudget\tshare"]
    for key in sorted(old.keys() | new.keys()):
        sides = [f"{x[0]}\t{x[1]:.2e}\t{x[2]:.3f}" if x else "\t\t" for x in (old.get(key), new.get(key))]
        lines.append("\t".join([*key, *sides]))
    return "\n".join(lines)


if __name__ == "__main__":
    print(compared(*(read(file) for file in sys.argv[1:3])))

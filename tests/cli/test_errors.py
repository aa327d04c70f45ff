"""Commands of a `CommandGroup`: expected failures are one line and an exit code, bugs keep their traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from polyhead.cli.errors import CommandGroup, Terminated, resumable
from polyhead.errors import CheckpointError, OptionError


def failing(error: BaseException, folder: Path | None = None):
    app = typer.Typer(name="program", cls=CommandGroup, pretty_exceptions_enable=False)

    @app.command("run")
    def run() -> None:
        with resumable(folder):
            raise error

    @app.command("other")
    def other() -> None:
        """Without a second command there would be no group."""

    return CliRunner().invoke(app, ["run"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OptionError("one\ntwo"), 2, "program run: one two\n"),
        (CheckpointError("damaged"), 2, "program run: damaged\n"),
        (KeyboardInterrupt(), 130, "program run: interrupted\n"),
        (Terminated(143), 143, "program run: terminated\n"),
        (MemoryError(), 1, "program run: out of memory (MemoryError)\n"),
        (RuntimeError("can't allocate memory: 9 bytes\nmore"), 1, "can't allocate memory: 9 bytes)\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_is_one_line(error, code, line):
    result = failing(error)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.endswith(line)
    assert result.stderr.count("\n") == 1


def test_only_an_interrupted_run_with_saved_progress_says_how_to_resume(tmp_path):
    assert failing(KeyboardInterrupt(), tmp_path).stderr == "program run: interrupted\n"
    (tmp_path / "progress").touch()
    hint = f"; progress is saved, continue by repeating the command with --resume {tmp_path}\n"
    assert failing(KeyboardInterrupt(), tmp_path).stderr == f"program run: interrupted{hint}"
    assert failing(MemoryError(), tmp_path).stderr.endswith(hint)
    assert failing(CheckpointError("damaged"), tmp_path).stderr == "program run: damaged\n"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug")])
def test_a_bug_keeps_its_traceback(error):
    result = failing(error)
    assert result.exception is error
    assert result.stderr == ""


def test_without_a_command_the_help_is_shown():
    from polyhead.cli import app

    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert all(f"{name} " in result.stdout for name in ("inspect", "prune", "plan", "--help"))

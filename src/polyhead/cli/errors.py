"""One-line errors of all commands: `polyhead COMMAND: message` on stderr, and an exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from polyhead.errors import OptionError, PolyheadError
from polyhead.names import suggestion
from polyhead.out_of_memory import is_out_of_memory

# Exceptions of click; later versions of typer contain a copy of it and do not import the package.
_click: Any = import_module(typer.BadParameter.__module__)


class Terminated(SystemExit):
    """Raised on SIGTERM; ends a run as Ctrl-C does, with completed steps saved."""


def end_on_sigterm() -> None:
    """Install a handler that raises `Terminated` on SIGTERM."""

    def end(*_: object) -> None:
        raise Terminated(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def resumable(run_folder: Path | None, how: str = "by repeating the command with") -> Iterator[None]:
    """Say how to resume if a run that saves its progress in `run_folder` is interrupted or out of memory.

    `how` precedes `--resume DIR`; a command whose folder stores all options is not repeated.
    """
    try:
        yield
    except (KeyboardInterrupt, Terminated, MemoryError, RuntimeError) as error:
        if run_folder is not None and run_folder.is_dir() and any(run_folder.iterdir()):
            error.add_note(f"progress is saved, continue {how} --resume {run_folder}")
        raise


class CommandGroup(TyperGroup):
    """Group of commands that end in one line on stderr if they fail.

    Exit codes: 2 for usage errors and polyhead's own errors, 128 + signal for interrupts and SIGTERM, 1 if out of
    memory. Other exceptions are bugs and keep their traceback.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with one_line(lambda: info_name or "", args):
            return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            typer.echo(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command by its name, which may have two words: `plan calibrate`."""
        if " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        if args[0] not in self.commands:
            hint = suggestion(args[0], self.commands) or f"use {', '.join(self.commands)}"
            raise OptionError(f"there is no command {args[0]}; {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        arguments: list[str] = ctx.args  # of the command; the call below clears the list of the context
        with one_line(lambda: f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip(), arguments):
            return super().invoke(ctx)


@contextmanager
def one_line(command: Callable[[], str], arguments: Sequence[str]) -> Iterator[None]:
    """Print an error as one line, and raise `typer.Exit` with its code."""
    try:
        yield
    except _click.UsageError as error:
        raise _end(command(), _describe(error, command(), arguments), 2) from None
    except PolyheadError as error:
        raise _end(command(), str(error), 2) from None
    except KeyboardInterrupt as error:
        raise _end(command(), _interruption("interrupted", error), 128 + signal.SIGINT) from None
    except Terminated as error:
        raise _end(command(), _interruption("terminated", error), 128 + signal.SIGTERM) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = f"out of memory ({str(error).partition(chr(10))[0] or type(error).__name__})"
        raise _end(command(), _interruption(reason, error), 1) from None


def _end(command: str, message: str, code: int) -> typer.Exit:
    typer.echo(f"{command}: {' '.join(message.splitlines())}", err=True)
    return typer.Exit(code)


def _interruption(reason: str, error: BaseException) -> str:
    return "; ".join([reason, *getattr(error, "__notes__", ())])


def _describe(error: Any, command: str, arguments: Sequence[str]) -> str:
    """Return a usage error of click as one sentence: the rule, what arrived, what to do."""
    see = f"see {command} --help"
    if isinstance(error, _click.NoSuchOption):
        similar = sorted(error.possibilities or ())
        hint = f"did you mean {' or '.join(similar)}?" if similar else see
        return f"there is no option {error.option_name}; {hint}"
    parameter = getattr(error, "param", None)
    if parameter is None or error.ctx is None:
        message = error.format_message().rstrip(".")
        return f"{message[:1].lower()}{message[1:]}; {see}"
    is_option = parameter.param_type_name == "option"
    name = max(parameter.opts, key=len) if is_option else parameter.metavar or parameter.name.upper()
    if isinstance(error, _click.MissingParameter):
        return f"{name} is required, got none; {see}"
    rule, is_rule = re.subn("^Input should be ", "must be ", error.message.partition(", unable to")[0])
    if not is_rule:
        return f"{name}: {rule.rstrip('.')}; {see}"
    values, _, _ = error.ctx.command.make_parser(error.ctx).parse_args(list(arguments))
    return f"{name} {rule}, got {values.get(parameter.name)!r}; {see}"

"""Rules for every option of every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from polyhead.cli import app


def options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, (*path, name))
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield path, parameter


def test_no_option_is_named_by_what_stands_for_its_value():
    # Older versions of typer take a metavar that is an option's name in capitals for the name itself: --MODEL.
    found = [(path, x.name) for path, x in options(typer.main.get_command(app)) if x.metavar == x.name.upper()]
    assert found == []


def test_every_option_says_what_it_does():
    silent = [(path, x.name) for path, x in options(typer.main.get_command(app)) if not (x.help or "").strip()]
    assert silent == []

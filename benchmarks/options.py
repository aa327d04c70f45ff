"""Options shared by the commands of `python -m benchmarks`."""

from __future__ import annotations

from typing import Annotated

import typer

Quick = Annotated[bool, typer.Option("--quick", help="Fewer or smaller cases, timed once: a look, no figure.")]
Seed = Annotated[int, typer.Option(help="Seed of the random data and of the order of the contenders.")]
Commit = Annotated[str | None, typer.Option(metavar="SHA", help="What is measured, for a copy without its repository.")]

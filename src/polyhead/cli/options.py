"""Options that several verbs have: where a model runs, in which numbers, what it is trusted with, in which language."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.errors import OptionError


def writable_file(file: Path | None) -> Path | None:
    """Check that results can be written to a file."""
    from polyhead.observation.run_folder import check_file

    if file is not None:
        try:
            check_file(file, "--output")
        except OptionError as error:
            raise typer.BadParameter(str(error)) from None
    return file


DTYPES = ("float32", "bfloat16", "float16")

ResultFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Where to keep the run as JSON, every sample in it.", callback=writable_file),
]
Language = Annotated[
    str, typer.Option(metavar="en|zh", help="The language that the page opens in; a reader can switch.")
]
Device = Annotated[
    str | None, typer.Option(help="Where to run: cpu, cuda, ...; a GPU if there is one.", show_default=False)
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; by default float32 on a CPU, else bfloat16.", show_default=False),
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read weights from pickles, which can run code. Only if you trust them.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. Only if you trust it.")
]


def check_language(lang: str) -> None:
    """That there is such a language."""
    from polyhead.inspection.vocabulary import LANGUAGES

    if lang not in LANGUAGES:
        raise typer.BadParameter(
            f"a page is written in one of the languages {', '.join(LANGUAGES)}; got {lang!r}", param_hint="--lang"
        )


def check_dtype(dtype: str | None) -> None:
    """That there is such a type of numbers."""
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(
            f"a dtype is {', '.join(DTYPES[:-1])} or {DTYPES[-1]}; got {dtype!r}", param_hint="--dtype"
        )


def device_or_gpu(device: str | None) -> str:
    """The device that was asked for, else a GPU if there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def check_device(device: str | None) -> str:
    """The device to run on; refused where PyTorch knows none of that name, or has none here."""
    from polyhead.sources.models import checked_device

    return str(checked_device(device_or_gpu(device)))


def check_positive(option: str, number: float | None, *, zero: bool = False) -> None:
    """That a number is more than 0, or `zero` as well."""
    if number is not None and not (number > 0 or (zero and number == 0)):
        raise OptionError(f"{option} must be {'0 or more' if zero else 'more than 0'}, got {number:g}")


def check_text(text: str | None, field: str) -> None:
    """That there is such a text; it is read later."""
    from polyhead.sources import read_texts

    if text is not None:
        read_texts(text, field=field)


def part_of(text: str) -> tuple[int, int]:
    """Which of several processes this is, counted from 0, and how many there are.

    >>> part_of("2/4")
    (1, 4)
    """
    part, _, whole = text.partition("/")
    if not (part.isdecimal() and whole.isdecimal() and 1 <= int(part) <= int(whole)):
        raise OptionError(f"a share is I/N with I from 1 to N, such as 2/4; got {text!r}")
    return int(part) - 1, int(whole)

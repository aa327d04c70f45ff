"""Arguments and options shared by several commands: the model to read, device, dtype, permissions, pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.errors import OptionError

if TYPE_CHECKING:
    from polyhead.analysis.languages import Language as LanguageCode


def optional(help: str, *names: str, metavar: str | None = None, **options: Any) -> Any:
    """Return an option without a default; the help text says in brackets what its absence means."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False, **options)


def writable_file(file: Path | None) -> Path | None:
    """Return the file if results can be written to it, else raise; a callback of options."""
    from polyhead.observation.run_folder import check_file

    if file is not None:
        check_file(file, "--output")
    return file


def known_dtype(dtype: str | None) -> str | None:
    """Return the dtype of a model's weights, else raise; a callback of options."""
    from polyhead.inspection.settings import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"--dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}; got {dtype!r}")
    return dtype


ReadModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a transformers model, .gguf file, name on the Hugging Face hub, or a packaged model: "
        "tiny, minilm, smollm2 (SmolLM2-135M-Instruct, quantised to Q4_1). [default: minilm]",
        show_default=False,
    ),
]
ShowTable = Annotated[
    bool, typer.Option("--table", help="Also print all values per head, and its most attended tokens.")
]
HtmlReport = Annotated[Path | None, optional("Also write a self-contained HTML report.", metavar="FILE")]
ResultFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the results to this JSON file, with all samples.", callback=writable_file),
]
Language = Annotated[str, typer.Option(metavar="en|zh", help="Initial language of the page; readers can switch.")]
Device = Annotated[str | None, optional("Device: cpu, cuda, cuda:1, ... [default: a GPU if available]")]
Dtype = Annotated[
    str | None,
    optional("Dtype: float32, bfloat16 or float16. [default: float32 on a CPU, else bfloat16]", callback=known_dtype),
]
MachineName = Annotated[
    str | None,
    optional("Predict times for this machine, measured or from its datasheet, or .json file.", metavar="NAME|FILE"),
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Load pickled weights, which can run code. Use only with models you trust."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code shipped with the model. Use only with models you trust.")
]


def page_language(lang: str) -> LanguageCode:
    """Return the language of a page; raise if pages are not available in it."""
    from polyhead.analysis.languages import LANGUAGES

    for language in LANGUAGES:
        if lang == language:
            return language
    raise OptionError(f"--lang must be one of {', '.join(LANGUAGES)}; got {lang!r}")


def default_device(device: str | None) -> str:
    """Return the requested device, by default a GPU if available."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def check_device(device: str | None) -> str:
    """Return the device to run on; raise if it does not exist."""
    from polyhead.sources.models import checked_device

    return str(checked_device(default_device(device)))


def check_positive(option: str, number: float | None, *, zero: bool = False) -> None:
    """Raise unless a number is positive; `zero` allows 0."""
    if number is not None and not (number > 0 or (zero and number == 0)):
        raise OptionError(f"{option} must be {'at least 0' if zero else 'greater than 0'}, got {number:g}")


def check_text(text: str | None, field: str) -> None:
    """Raise if the text does not exist; it is read later."""
    from polyhead.sources.datasets import PREFIX, check_dataset
    from polyhead.sources.texts import read_texts

    if text is not None and text.startswith(PREFIX):
        check_dataset(text)
    elif text is not None:
        read_texts(text, field=field)


def part_of(text: str) -> tuple[int, int]:
    """Parse I/N into the index of this process, from 0, and the number of processes.

    >>> part_of("2/4")
    (1, 4)
    """
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise OptionError(f"a part must be I/N with I from 1 to N, e.g. 2/4; got {text!r}")
    return int(index) - 1, int(count)

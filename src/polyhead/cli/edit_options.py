"""Options of the verbs that edit a model: which one, on which text, and where to in which form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.options import check_positive, check_text

FORMS = ("uniform", "uneven", "padded")
CONTEXT = 512

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder with a model of transformers, edited already or not, a .gguf file, a name on the Hugging Face "
        "hub, or one that comes as a package: minilm or smollm2.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FOLDER", help="Where to write the edited model: a new folder.", show_default=False
    ),
]
SavedForm = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(FORMS),
        help="uniform: plain transformers loads it. padded: the same with heads of zeros where some are gone, so that "
        "no time is saved. uneven: polyhead.load alone loads it. By default uniform where that can be, else uneven.",
        show_default=False,
    ),
]
Replace = Annotated[
    bool, typer.Option("--replace", help="Replace the output folder if polyhead wrote it and nothing else is in it.")
]
PreviewOnly = Annotated[bool, typer.Option("--preview", help="Only count what would change; nothing is written.")]
Stack = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of which stack of layers, where a model has several, as an encoder and a decoder; left out, an error "
        "lists them.",
        show_default=False,
    ),
]
Text = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|DIR|-",
        help="The text that heads are chosen and repaired on: .txt, .md, .jsonl or .parquet (also .gz), a folder of "
        "them, or - for standard input. Without it, a short text in English and Chinese that comes with polyhead: "
        "give text such as the model will read.",
        show_default=False,
    ),
]
Field = Annotated[str, typer.Option(help="The field or column of .jsonl and .parquet that holds the text.")]
ContextLength = Annotated[
    int | None,
    typer.Option(
        metavar="N", help=f"How many tokens are read together: {CONTEXT}, or fewer if the model was made for fewer."
    ),
]
Tokens = Annotated[int, typer.Option(metavar="N", help="How many tokens of the text to read, at most.")]
ResumeIn = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="DIR",
        help="Keep what is done in this folder, step by step; the same command given again goes on from there.",
        show_default=False,
    ),
]
SavedDtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16; by default as the weights were saved, so that undoing gives the same bits.",
        show_default=False,
    ),
]


def check_output(
    output: Path | None, form: str | None, *, preview: bool, replace: bool, source: str | Path | None = None
) -> None:
    """Check the place for the result, its form, and what is copied there, before anything costs time."""
    from polyhead.observation.run_folder import check_place
    from polyhead.surgery import SideFiles
    from polyhead.surgery.storage.folders import check_free

    if form is not None and form not in FORMS:
        raise typer.BadParameter(f"a form is one of {', '.join(FORMS)}; got {form!r}", param_hint="--form")
    if output is None:
        if not preview:
            raise typer.BadParameter(
                "an edited model is written to a new folder, name one; or only count with --preview",
                param_hint="--output",
            )
        return
    check_free(output, replace=replace, source=source)
    check_place(output, "--output")
    if source is not None and (Path(source).expanduser() / "config.json").is_file():
        SideFiles(Path(source).expanduser()).check()


def check_reading(text: str | None, field: str, context: int | None, tokens: int) -> None:
    """Before anything costs time: that there is such a text, and that some of it is to be read."""
    check_positive("--context", context)
    check_positive("--tokens", tokens)
    check_text(text, field)


def check_criterion(criterion: str) -> None:
    """That heads can be chosen by it."""
    from polyhead.errors import OptionError
    from polyhead.surgery.selection.criteria import CRITERIA

    if criterion not in CRITERIA:
        raise OptionError(f"a criterion is one of {', '.join(CRITERIA)}, got {criterion!r}")

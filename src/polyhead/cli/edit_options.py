"""Options of the commands that edit a model: model, calibration text, output and its form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.options import check_positive, check_text, known_dtype, optional
from polyhead.errors import OptionError
from polyhead.surgery.options import FORMS

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a transformers model (edited ones included), .gguf file, name on the Hugging Face hub, or a "
        "packaged model: tiny, minilm, smollm2.",
    ),
]
Output = Annotated[
    Path | None,
    optional(
        "Write the edited model to this new folder, and the record to undo the edit to FOLDER.undo beside it.",
        "--output",
        "-o",
        metavar="FOLDER",
    ),
]
SavedForm = Annotated[
    str,
    typer.Option(
        metavar="|".join(FORMS),
        help="Form of the saved model. uniform: equally many heads in every layer, loads in plain transformers; where "
        "that is impossible, the command stops before it loads the weights. padded: removed heads are zeros, loads "
        "anywhere, saves nothing. uneven: smaller, loads with polyhead.load.",
    ),
]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="Replace the output folder, and its undo record, if it contains only a model saved by polyhead.",
    ),
]
PreviewOnly = Annotated[bool, typer.Option("--preview", help="Show the effect on size and cost; write nothing.")]
Stack = Annotated[
    str | None,
    optional(
        "Stack of layers to edit, for models with several (encoder and decoder); an error lists the names.",
        metavar="NAME",
    ),
]
Text = Annotated[
    str | None,
    optional(
        "Calibration text: .txt, .md, .jsonl or .parquet (also .gz), a folder of them, or - for standard input. "
        "Use text like the model's inputs. [default: a short built-in text in English, and in Chinese if the "
        "tokenizer knows it]",
        metavar="FILE|DIR|-",
    ),
]
Field = Annotated[str, typer.Option(help="Text field of .jsonl files, or text column of .parquet files.")]
ContextLength = Annotated[
    int | None, optional("Tokens per context. [default: 512, or the model's maximum if smaller]", metavar="N")
]
Tokens = Annotated[
    int | None,
    optional(
        "Maximum number of tokens of the text, which is sampled over all of it. [default: 24 for each channel of the "
        "widest layer, at least 12,288; 65,536 with --search]",
        metavar="N",
    ),
]
TestText = Annotated[
    str | None,
    optional(
        "Text to evaluate the edited model on, instead of a held-out part of --text: a file or folder.",
        "--test-text",
        metavar="FILE|DIR",
    ),
]
ResumeIn = Annotated[
    Path | None,
    optional(
        "Save progress in this folder; repeat the same command to continue an interrupted run.",
        "--resume",
        metavar="DIR",
    ),
]
SavedDtype = Annotated[
    str | None,
    optional(
        "Dtype of the weights: float32, bfloat16 or float16. [default: as saved, so that undo is bit-exact]",
        callback=known_dtype,
    ),
]


def check_output(
    output: Path | None, form: str, *, preview: bool, replace: bool, source: str | Path | None = None
) -> None:
    """Check the output folder, the form, and the files to copy, before any expensive work."""
    from polyhead.observation.run_folder import check_folder
    from polyhead.sources.model_source import find_source
    from polyhead.surgery.options import check_form
    from polyhead.surgery.storage.folders import check_free
    from polyhead.surgery.storage.side_files import SideFiles
    from polyhead.surgery.storage.undo_folder import undo_folder

    if isinstance(source, str):
        find_source(source)
    check_form(form)
    if output is None:
        if not preview:
            raise OptionError(
                "--output is required unless --preview is used; specify a new folder for the edited model"
            )
        return
    check_free(output, replace=replace, source=source)
    for folder in (output, undo_folder(output)):
        check_folder(folder, "--output")
    if source is not None and (Path(source).expanduser() / "config.json").is_file():
        SideFiles(Path(source).expanduser()).check()


def check_reading(
    text: str | None, field: str, context: int | None, tokens: int | None, test_text: str | None = None
) -> None:
    """Check the text and its limits, before any expensive work."""
    check_positive("--context", context)
    check_positive("--tokens", tokens)
    check_text(text, field)
    check_text(test_text, field)

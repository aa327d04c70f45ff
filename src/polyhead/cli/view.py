"""`polyhead view`: explore a model's attention, or a training run, in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polyhead.cli.options import (
    AllowPickle,
    Device,
    Dtype,
    Language,
    TrustRemoteCode,
    check_device,
    check_positive,
    optional,
    page_language,
)
from polyhead.errors import OptionError

# Names that occur twice show previous-token, duplicate-token and induction heads, and whom a pronoun refers to.
EXAMPLE = "When Mary and John went to the store, John gave a drink to Mary because she was thirsty."


def view(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A model: folder, .gguf file, name on the Hugging Face hub, tiny, minilm or smollm2. Or a folder "
            "written by `polyhead inspect --save`, to show its model with head roles. Or a training run, to show its "
            "steps: a folder written by `polyhead.training.RunDirectory`, or tiny-run. [default: minilm]",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        optional(
            "UTF-8 text to open with, or - for standard input. [default: an example]", metavar="FILE", allow_dash=True
        ),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="Port on localhost; 0 selects a free one.")] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser, if there is a display.")
    ] = True,
    context: Annotated[
        int | None,
        optional("Maximum tokens of a text. [default: the model's maximum, or what fits in memory]", metavar="N"),
    ] = None,
    cache: Annotated[int, typer.Option(metavar="MiB", help="Size of the cache of computed tiles, in MiB.")] = 256,
    lang: Language = "en",
    device: Device = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Explore a model's attention, or a training run, in a browser.

    Type a text to see all heads at once; zoom from a full attention map down to single tokens, at any text length;
    ablate heads and see the effect; step through generation. For a training run, the page shows every head's statistics
    over the steps, and a grid of layers and heads with a slider. Reload it for the latest steps of a run in progress.

    The page is served on localhost only, under a URL with a secret token, which is printed. Stop with Ctrl-C.
    """
    from polyhead.inspection.run_files import is_training_run
    from polyhead.sources.model_source import find_source
    from polyhead.sources.packaged import run_folder

    language = page_language(lang)
    if cache < 0:
        raise OptionError(f"--cache must be at least 0 MiB, got {cache}")
    if not 0 <= port < 1 << 16:
        raise OptionError(f"--port must be from 0 to 65535, got {port}")

    def ready(address: str) -> None:
        typer.echo(f"Viewer running at {address}\nPress Ctrl-C to stop.")
        if open_browser and _has_display():
            typer.launch(address)

    check_positive("--context", context)
    folder = None if what is None else run_folder(what)
    if folder is not None and is_training_run(folder) and not (folder / "config.json").exists():
        options = {"--text": text, "--context": context, "--device": device, "--dtype": dtype}
        if given := [option for option, value in options.items() if value is not None]:
            raise OptionError(f"{' and '.join(given)} must be left out with a training run, which has no model: {what}")

        from polyhead.report.viewer.serve import serve_run

        serve_run(folder, language=language, port=port, ready=ready)
        return
    # Errors of the model's name and of the text are raised here, before a model is loaded.
    inspected = Path(what) if what is not None and _has_inspection(Path(what)) else None
    if inspected is None:
        find_source(what)
    initial_text = EXAMPLE if text is None else _read_text(text)

    import torch

    from polyhead.inspection import load_inspection
    from polyhead.report import page_of
    from polyhead.report.viewer.model import ViewedModel
    from polyhead.report.viewer.serve import check_installed, serve
    from polyhead.report.viewer.viewing import Viewer
    from polyhead.workflows.model_loading import load_model

    device = check_device(device)
    check_installed()
    page: dict[str, Any] | None = None
    name, model_dtype = what, dtype
    if inspected is not None:
        # --allow-pickle and --trust-remote-code must be given again: the folder may come from somebody else.
        inspection = load_inspection(inspected)
        page = page_of(inspection, language=language)
        name, model_dtype = inspection.settings.model, dtype or inspection.settings.dtype
    typer.echo("Loading the model ...", err=True)
    loaded = load_model(
        name,
        device=device,
        dtype=None if model_dtype is None else getattr(torch, model_dtype),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    viewer = Viewer(ViewedModel(loaded, context=context), cache_bytes=cache << 20, run=page, lang=language)
    if text is not None or viewer.model.knows_words(EXAMPLE):
        typer.echo(f"Reading {'an example' if text is None else text} ...", err=True)
        viewer.put("A", viewer.model.trace("A", initial_text, ()))
    if serve(viewer, port=port, ready=ready):
        sys.stdout.flush()
        os._exit(0)  # the model is still running: a normal exit would wait for the layer being computed, or crash


def _has_display() -> bool:
    """Return whether a browser can open a window; over SSH, a text browser would take over the terminal."""
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))


def _has_inspection(folder: Path) -> bool:
    """Return whether a folder contains an inspection, finished or not."""
    from polyhead.inspection.run_files import INSPECTION, OBSERVATIONS

    return (folder / INSPECTION).is_file() or (folder / OBSERVATIONS).is_file()


def _read_text(path: Path) -> str:
    from polyhead.report.viewer.request_fields import TEXT_BYTES

    try:
        # No more than the limit is read: the path may be a pipe without end.
        with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
            content = file.read(TEXT_BYTES + 1)
        if len(content) > TEXT_BYTES:
            raise OptionError(f"--text must be a file of at most {TEXT_BYTES:,} bytes, got {path} with more")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--text must be a UTF-8 text file, got {path}: {error}") from error

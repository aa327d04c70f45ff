"""`polyhead view`: walk around inside a model's attention, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from polyhead.cli.options import (
    AllowPickle,
    Device,
    Dtype,
    Language,
    TrustRemoteCode,
    check_device,
    check_dtype,
    check_language,
    check_positive,
    device_or_gpu,
)

if TYPE_CHECKING:
    from polyhead.report.viewer.viewing import Viewer


def view(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|MODEL]",
            help="A folder that `polyhead inspect --save` wrote, whose model is then shown with its roles; or a model: "
            "a folder, a .gguf file, a name on the Hugging Face hub, minilm (the default) or smollm2.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text to begin with, UTF-8; - is standard input.",
            show_default=False,
            allow_dash=True,
        ),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="Where to listen, on this machine alone; 0 takes any.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The most tokens of a text; by default what the model was made for, or what memory can hold.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        int, typer.Option(metavar="MB", help="How much of the tiles computed is kept, in megabytes.")
    ] = 256,
    lang: Language = "en",
    device: Device = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Walk around inside a model's attention.

    Type a text and see every head at once; open one and zoom from the whole matrix down to single tokens, whatever the
    length of the text; switch heads off and see what changes; step through generation.

    The page is served on this machine alone, under an address with a token that nobody else knows. Ctrl-C ends it.
    """
    from polyhead.errors import PolyheadError
    from polyhead.report.viewer.serve import serve

    check_language(lang)
    check_dtype(dtype)
    if cache < 0:
        raise typer.BadParameter(f"a cache has 0 megabytes or more, got {cache}", param_hint="--cache")
    if not 0 <= port < 1 << 16:
        raise typer.BadParameter(f"a port is a number from 0 to 65535, got {port}", param_hint="--port")

    def ready(address: str) -> None:
        typer.echo(f"The viewer is at {address}\nCtrl-C ends it.")
        if open_browser:
            typer.launch(address)

    try:
        check_positive("--context", context)
        check_device(device)
        begun = None if text is None else _content(text)  # before a model is loaded for it
        viewer = _viewer(
            what,
            context=context,
            cache_bytes=cache << 20,
            lang="zh" if lang == "zh" else "en",
            device=device,
            dtype=dtype,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        if begun is not None:
            typer.echo(f"Reading {text} ...", err=True)
            viewer.hold(viewer.model.read("A", begun, frozenset()))
        serve(viewer, port=port, ready=ready)
    except PolyheadError as error:
        typer.echo(f"polyhead view: {error}", err=True)
        raise typer.Exit(2) from None


def _viewer(
    what: str | None,
    *,
    context: int | None,
    cache_bytes: int,
    lang: Literal["en", "zh"],
    device: str | None,
    dtype: str | None,
    allow_pickle: bool,
    trust_remote_code: bool,
) -> Viewer:
    import torch

    from polyhead.report.viewer.model import ViewedModel
    from polyhead.report.viewer.serve import check_installed
    from polyhead.report.viewer.viewing import Viewer
    from polyhead.sources import load_model

    check_installed()
    run: dict[str, Any] | None = None
    name, number_format = what, dtype
    if what is not None and _is_run(Path(what)):
        from polyhead.inspection import load_inspection
        from polyhead.report import page_of
        from polyhead.report.packing import plain

        # What a run was trusted with is not passed on: its folder may come from somebody else.
        found = load_inspection(Path(what))
        run = plain(page_of(found, language=lang))
        name, number_format = found.settings.model, dtype or found.settings.dtype
    typer.echo("Loading the model ...", err=True)
    loaded = load_model(
        name,
        device=device_or_gpu(device),
        dtype=None if number_format is None else getattr(torch, number_format),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    return Viewer(ViewedModel(loaded, context=context), cache_bytes=cache_bytes, run=run, lang=lang)


def _is_run(folder: Path) -> bool:
    from polyhead.inspection.files import OBSERVATIONS, REST

    return (folder / REST).is_file() or (folder / OBSERVATIONS).is_file()


def _content(path: Path) -> str:
    from polyhead.errors import OptionError

    try:
        return typer.get_text_stream("stdin").read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--text names a file of UTF-8 text, got {path}: {error}") from error

"""`polyhead inspect`: what every head of a model does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.options import (
    AllowPickle,
    Device,
    Dtype,
    Language,
    TrustRemoteCode,
    check_device,
    check_dtype,
    check_positive,
    check_text,
)
from polyhead.cli.progress import errors_told
from polyhead.cli.report import check_page, write

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.inspection import Inspection, Progress, Settings
    from polyhead.inspection.settings import Report

TOP_KEYS = 5  # shown of each head
# Options that a resumed run takes from the command line: permissions among them, which no file can give.
_NOT_OF_THE_RUN = (
    "resume",
    "save_seconds",
    "table",
    "html",
    "lang",
    "deterministic",
    "allow_pickle",
    "trust_remote_code",
)


def inspect(
    command: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A folder with a model of transformers, a .gguf file, a name on the Hugging Face hub, or one that "
            "comes as a package: minilm (the default) or smollm2.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR|-",
            help="What to read: .txt, .md, .jsonl or .parquet (also .gz), a folder of them, or - for standard input. "
            "Without it, a text in English and Chinese that comes with polyhead.",
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(help="The field or column of .jsonl and .parquet that holds the text.")
    ] = "text",
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="How many tokens are read together: 512, or fewer if the model was made for fewer."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="How many tokens to read in all, at most.")] = 65_536,
    batch: Annotated[int, typer.Option(metavar="N", help="Tokens in a batch, at most.")] = 4096,
    layers: Annotated[
        str | None, typer.Option(metavar="0,1,...", help="Only these layers, counted from 0.", show_default=False)
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Only these columns of the table: entropy, normalized_entropy, confidence, max_logit, max_abs_logit, "
            "mean_distance, mean_offset, mean_squared_distance, sink_mass, self_mass, previous_mass, next_mass, "
            "window_mass, "
            "learned_sink_mass.",
            show_default=False,
        ),
    ] = None,
    importance: Annotated[
        str,
        typer.Option(
            metavar="auto|none|gradient|ablation",
            help="How to find out which heads matter: by the gradient of the loss, by taking out each head in turn "
            "(exact and slow), or not at all. auto: gradients where the model predicts tokens, else ablation on a "
            "short text.",
        ),
    ] = "auto",
    chance: Annotated[
        bool,
        typer.Option(
            "--chance/--no-chance", help="Watch a model with random weights as well, to know what chance shows."
        ),
    ] = True,
    via_weights: Annotated[
        bool,
        typer.Option(
            "--via-weights",
            help="Read the weights that the model itself returns, for models that compute attention by themselves "
            "(bloom, falcon, deberta, ...). Slow, and memory grows with the square of the context; what heads write, "
            "and which matter, stays unknown.",
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep the table, the matrices and what was gathered in this folder.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with a run that was stopped, in its folder.", show_default=False),
    ] = None,
    save_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often a run writes to its folder while it reads.")
    ] = 30.0,
    table: Annotated[
        bool, typer.Option("--table", help="Print every number of every head as well, and the tokens it looks at most.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write it all as one HTML page that opens anywhere, as well.", show_default=False
        ),
    ] = None,
    lang: Language = "en",
    device: Device = None,
    dtype: Dtype = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only kernels that give the same bits each time, on a GPU as well.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of samples, random weights and repeated words.")] = 0,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """See what every head of a model does.

    Reads a text with the model and watches each attention head: where it looks, what it writes, which heads say the
    same, which matter, and which roles they have. Ends with a picture of layers and heads and with the three most
    telling findings. Nothing quadratic in the length of the text is ever held in memory, unless --via-weights asks.

    Long texts are cut: each document is tokenised whole and cut into consecutive contexts, two documents are never
    joined, and a last piece of fewer than 8 tokens is dropped.

    Ctrl-C ends the reading, and what was gathered until then is shown. A batch counts as a whole or not at all, so that
    a run that goes on with --resume ends with the numbers of one that was never stopped.
    """
    import torch
    from rich.console import Console

    from polyhead.inspection import Settings, inspect_model, save_inspection
    from polyhead.inspection.files import FILES, OBSERVATIONS, REST
    from polyhead.observation.run_folder import check_place

    if resume is not None:
        _check_alone(command)
    check_dtype(dtype)
    console = Console(highlight=False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which PyTorch refuses matrix products
        torch.use_deterministic_algorithms(True)
    folder = save if resume is None else resume
    with errors_told("inspect", folder):
        check_page(html, lang)
        check_positive("--save-seconds", save_seconds, zero=True)
        settings = (
            _settings_of(resume)
            if resume is not None
            else Settings(
                model=model,
                text=text,
                field=field,
                context=context,
                tokens=tokens,
                batch_tokens=batch,
                layers=_numbers(layers),
                statistics=None if statistics is None else tuple(statistics.split(",")),
                importance=importance,  # type: ignore[arg-type]  # checked by the settings themselves
                chance=chance,
                via_weights=via_weights,
                seed=seed,
                device=check_device(device),
                dtype=dtype,
            )
        )
        check_text(settings.text, settings.field)
        if save is not None and any((save / name).exists() for name in (OBSERVATIONS, REST)):
            raise typer.BadParameter(
                f"{save} holds a run already; go on with --resume {save}, or name another folder", param_hint="--save"
            )
        there = [] if save is None else [name for name in FILES if (save / name).exists()]
        if there:
            raise typer.BadParameter(
                f"a run is kept in a folder without {there[0]}, got {save}; name another one", param_hint="--save"
            )
        if folder is not None:
            check_place(folder, "--save" if resume is None else "--resume")
        with _Bars() as report:
            found = inspect_model(
                settings,
                folder=folder,
                resume=resume is not None,
                report=report,
                save_seconds=save_seconds,
                allow_pickle=allow_pickle,
                trust_remote_code=trust_remote_code,
            )
        if folder is not None:
            save_inspection(folder, found)
    show(found, console, table=table)
    if folder is not None:
        files = "heads.parquet, inspection.json, relations.safetensors, pictures.safetensors"
        console.print(f"\nKept in {folder}: {files}", markup=False)
    if html is not None:
        with errors_told("inspect"):
            typer.echo(f"\n{write(html, found, lang)}")
    if found.facts["interrupted"]:
        raise typer.Exit(130)


def show(found: Inspection, console: Console, *, table: bool = False) -> None:
    """The summary: where it came from, the picture, the findings."""
    from polyhead.cli.heads_picture import legend, picture
    from polyhead.inspection.identity import edits_of
    from polyhead.inspection.vocabulary import column_of

    facts = found.facts
    console.print(
        f"{facts['model']}\n{facts['tokens']:,} tokens of {facts['documents']} documents, in contexts of up to "
        f"{facts['context']}; {len(found.table)} heads; {facts['seconds']:.0f} s",
        markup=False,
    )
    edits = edits_of(found.table.sites)
    if edits is not None:
        console.print(f"Edited, by the heads of the original: {edits.en}", markup=False, soft_wrap=True)
    if found.settings.via_weights:
        from polyhead.observation.returned_weights import COST

        console.print(COST.capitalize(), style="yellow", markup=False)
    if facts["interrupted"]:
        console.print("Interrupted: what follows is of the text that was read until then.", style="yellow")
    if facts["unknown"] > 0.05:
        console.print(
            f"{facts['unknown']:.0%} of the tokens stand for text that the model has no words for: to its heads they "
            "are all alike.",
            style="yellow",
        )
    for reason in facts["left_out"]:
        console.print(f"Left out: {reason}", style="yellow", markup=False)
    if table:
        console.print(str(found.table), markup=False, soft_wrap=True)
        for name in found.table.names:
            column = column_of(name, facts.get("loss"))
            unit = column.unit.en
            told = f"{name}: {column.label.en}{f' ({unit})' if unit and unit not in column.label.en else ''}"
            console.print(told, style="dim", markup=False, soft_wrap=True)
        _show_top_keys(found, console)
    for drawn in picture(found):
        console.print()
        console.print(drawn)
    console.print(legend(found))
    if found.likeness is not None:
        console.print(
            f"Heads count as the same from a cosine of {found.likeness.threshold:.2f} on: halfway between 1 and the "
            f"{found.likeness.null:.2f} that random weights show.",
            style="dim",
        )
    if len(found.findings):
        console.print("\n[bold]The most telling[/bold]")
        for finding in found.findings:
            console.print(f"  • {finding}", markup=False)


def _show_top_keys(found: Inspection, console: Console) -> None:
    from polyhead.inspection.identity import described

    if not len(found.top_keys):
        return
    console.print("\nThe tokens that each head looks at most, with their share of its attention")
    stack = None
    for site, heads in found.top_keys.items():
        if site.stack != stack:
            stack = site.stack
            console.print(stack, markup=False)
        for number, keys in enumerate(heads):
            told = "  ".join(f"{_printable(key.text)} {key.share:.0%}" for key in keys[:TOP_KEYS])
            console.print(f"{described((site, number)):>5}: {told}", markup=False, soft_wrap=True)


def _printable(text: str) -> str:
    """A token may be anything, also what would move the cursor of a terminal."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _check_alone(command: typer.Context) -> None:
    """A run goes on with what it was begun with; an option that says otherwise is not to be passed over."""
    named = [
        name
        for name in command.params
        if name not in _NOT_OF_THE_RUN and getattr(command.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if named:
        raise typer.BadParameter(
            "a run goes on with the model, text and options it was begun with, and in its own folder, "
            f"got {', '.join(sorted(named))} as well",
            param_hint="--resume",
        )


def _settings_of(folder: Path) -> Settings:
    from polyhead.errors import OptionError
    from polyhead.inspection import Settings
    from polyhead.inspection.files import OBSERVATIONS
    from polyhead.observation import read_facts

    path = folder / OBSERVATIONS
    if not path.exists():
        raise OptionError(f"--resume names the folder of a run that was saved, got {folder} without {OBSERVATIONS}")
    return Settings.from_dict(read_facts(path)["settings"])


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(
            f"layers are numbers from 0 on with commas between, got {text!r}", param_hint="--layers"
        )
    return tuple(int(part) for part in parts)


class _Bars:
    """A bar for each step on a terminal, a line for each step elsewhere."""

    def __init__(self) -> None:
        from rich import progress as bars
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.progress = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.tasks: dict[str, bars.TaskID] = {}

    def __enter__(self) -> Report:
        self.progress.start()
        return self.report

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def report(self, now: Progress) -> None:
        if now.step not in self.tasks:
            self.tasks[now.step] = self.progress.add_task(now.step, total=now.total, rate="")
            if not self.console.is_terminal:
                self.console.print(now.step, markup=False)
        task = self.tasks[now.step]
        self.progress.update(task, completed=now.done, total=now.total)
        speed = self.progress.tasks[task].speed
        self.progress.update(task, rate="" if not speed else f"{speed:,.0f} {now.unit}/s")

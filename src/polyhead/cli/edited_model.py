"""What the verbs that edit a model share: options, the text that repair is calibrated on, how the end is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from polyhead.sources import Context, LoadedModel
    from polyhead.surgery import EditRecord, Preview, SavedModel
    from polyhead.surgery.quality import Fidelity

FORMS = ("uniform", "uneven", "padded")
CONTEXT = 512
# Of a text that has so many contexts, every so many-th is kept to judge the edited model by, up to so many tokens.
FEW, EVERY, JUDGED = 10, 5, 8192

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
        help="uniform: stock transformers loads it. padded: the same with heads of zeros where some are gone, so that "
        "no time is saved. uneven: polyhead.load alone loads it. By default uniform where that can be, else uneven.",
        show_default=False,
    ),
]
Replace = Annotated[bool, typer.Option("--replace", help="Replace the output folder if there is one.")]
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
SavedDtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16; by default as the weights were saved, so that undoing gives the same bits.",
        show_default=False,
    ),
]


@contextmanager
def errors_told(verb: str) -> Iterator[None]:
    """An error of ours is one line and exit code 2."""
    from polyhead.errors import PolyheadError

    try:
        yield
    except PolyheadError as error:
        typer.echo(f"polyhead {verb}: {error}", err=True)
        raise typer.Exit(2) from None


def check_output(output: Path | None, form: str | None, *, preview: bool, replace: bool) -> None:
    """Before anything costs time: that there is a place for the result, and such a form."""
    from polyhead.surgery.folders import check_free

    if form is not None and form not in FORMS:
        raise typer.BadParameter(f"a form is one of {', '.join(FORMS)}; got {form!r}", param_hint="--form")
    if output is None:
        if not preview:
            raise typer.BadParameter(
                "an edited model is written to a new folder, name one; or only count with --preview",
                param_hint="--output",
            )
        return
    check_free(output, replace=replace)


def open_model(
    name: str,
    *,
    device: str | None,
    dtype: str | None,
    output: Path | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """The model to edit, one that can be saved to `output`; in the dtype it was saved in unless another is named."""
    import torch

    from polyhead.cli.options import check_dtype, device_or_gpu
    from polyhead.sources import load_model
    from polyhead.surgery.saving import check_savable

    check_dtype(dtype)
    wanted: torch.dtype | Literal["saved"] = "saved" if dtype is None else getattr(torch, dtype)
    with working("Load the model"):
        loaded = load_model(
            name,
            device=device_or_gpu(device),
            dtype=wanted,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
    check_savable(loaded.model, output)
    return loaded


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    """Contexts of a text; all but those that are held out are read while heads are chosen and repaired.

    By what is held out the edited model is judged.
    """

    loaded: LoadedModel
    contexts: tuple[Context, ...]
    held_out: tuple[Context, ...] = ()
    batch_tokens: int = 4096

    @classmethod
    def of(cls, loaded: LoadedModel, text: str | None, field: str, context: int | None, tokens: int) -> CalibrationText:
        from polyhead.errors import OptionError
        from polyhead.sources import cut_into_contexts, default_documents, read_texts

        if loaded.tokenizer is None or loaded.main_input != "input_ids":
            raise OptionError(
                f"heads are chosen and repaired on text, got {loaded.name}, which reads {loaded.main_input}; name the "
                "heads with --heads and leave them unrepaired with --no-repair"
            )
        made_for = loaded.trained_context
        length = min(CONTEXT, made_for or CONTEXT) if context is None else context
        if made_for is not None and length > made_for:
            raise OptionError(f"{loaded.name} was made for contexts of up to {made_for} tokens, got {length}")
        documents = default_documents() if text is None else read_texts(text, field=field)
        contexts: list[Context] = []
        read = 0
        for piece in cut_into_contexts(documents, loaded.tokenizer, length):
            if read and read + len(piece.ids) > tokens:
                break
            contexts.append(piece)
            read += len(piece.ids)
        if not contexts:
            raise OptionError(f"calibration needs some text, got {text!r} without a piece of 8 tokens or more")
        if len(contexts) < FEW or loaded.kind == "encoder-decoder":
            return cls(loaded, tuple(contexts))
        held_out = contexts[EVERY - 1 :: EVERY]
        while len(held_out) > 1 and sum(len(context.ids) for context in held_out) > JUDGED:
            held_out.pop()
        return cls(loaded, tuple(contexts), tuple(held_out))

    @property
    def tokens(self) -> int:
        return sum(len(context.ids) for context in self.contexts)

    def batches(self) -> Iterator[dict[str, Any]]:
        """What the model is called with, on its device, without what is held out; the same each time."""
        held_out = {id(context) for context in self.held_out}
        return self._batches_of([context for context in self.contexts if id(context) not in held_out])

    def fidelity(self) -> Fidelity | None:
        """To the model as it is now, on the text that is held out; None where none is."""
        from polyhead.surgery.quality import Fidelity

        return Fidelity(self.loaded.model, list(self._batches_of(self.held_out))) if self.held_out else None

    def _batches_of(self, contexts: Sequence[Context]) -> Iterator[dict[str, Any]]:
        from polyhead.sources import batches

        device = next(self.loaded.model.parameters()).device
        for batch in batches(contexts, self.loaded.tokenizer, batch_tokens=self.batch_tokens):
            ids, mask = batch.ids.to(device), batch.mask.to(device)
            given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
            if self.loaded.kind == "encoder-decoder":
                given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
            if self.loaded.kind not in ("encoder", "masked"):
                given["use_cache"] = False
            yield given

    def told(self, step: Callable[[int], None]) -> Sequence[Mapping[str, Any]]:
        """The batches as a list; whoever goes through it tells after each that it is done."""
        return _Told(list(self.batches()), step)


class _Told(Sequence[Mapping[str, Any]]):
    def __init__(self, batches: list[dict[str, Any]], step: Callable[[int], None]) -> None:
        self._batches = batches
        self._step = step

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._batches:
            yield batch
            self._step(1)


@contextmanager
def working(description: str) -> Iterator[None]:
    """Something moves on a terminal while it lasts, and one line is written elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(description):
            yield
    else:
        console.print(description, markup=False)
        yield


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one line elsewhere; what it gives is told how far each step went."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(description, markup=False)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda steps: progress.advance(task, steps)


def show_preview(counted: Preview, console: Console) -> None:
    """What edits change, as a table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("attention of the whole model")
    for column in ("before", "after", "ratio"):
        table.add_column(column, justify="right")
    rows = {
        "heads": "heads",
        "key heads": "key_heads",
        "parameters": "parameters",
        "FLOPs of 512 tokens": "flops",
        "cache bytes a token": "cache_bytes_per_token",
    }
    for words, name in rows.items():
        before, after = getattr(counted.before, name), getattr(counted.after, name)
        table.add_row(words, f"{before:,}", f"{after:,}", f"{after / before:.2f}" if before else "")
    console.print(table)


def show_fidelity(quality: Fidelity, text: CalibrationText, console: Console) -> None:
    """How much of what the model says is left, on text that nothing was chosen or repaired on."""
    found = quality.measure()
    tokens = sum(len(context.ids) for context in text.held_out)
    console.print(
        f"On {tokens:,} tokens of {len(text.held_out)} texts that were held out, its last hidden states have a mean "
        f"cosine of {found.value:.3f} ± {found.error:.3f} with those of the original",
        markup=False,
        soft_wrap=True,
    )


def show_saved(saved: SavedModel, console: Console) -> None:
    told = f"Written to {saved.folder}, {saved.num_bytes:,} bytes, {saved.form}: {saved.stock}"
    console.print(told, markup=False, soft_wrap=True)


def write_edited(
    loaded: LoadedModel, record: EditRecord, output: Path, form: str | None, console: Console, *, replace: bool
) -> None:
    """Save an edited model with what undoes it and all that lay beside it, and say what became of it."""
    from polyhead.surgery import SideFiles, join_records, load_record, save

    origin = Path(str(loaded.model.config.name_or_path))
    from_folder = origin.is_dir() and (origin / "config.json").is_file()
    earlier = load_record(origin) if from_folder else None
    joined = earlier is not None and earlier.after == record.before
    if earlier is not None and joined:
        record = join_records(earlier, record)
    with working("Write the model"):
        saved = save(
            loaded.model,
            output,
            form=form,  # type: ignore[arg-type]  # checked by check_output
            record=record,
            tokenizer=SideFiles(origin) if from_folder else loaded.tokenizer,
            replace=replace,
        )
    show_saved(saved, console)
    told = f"polyhead undo {saved.folder} --output FOLDER gives the original back, bit for bit"
    console.print(told, markup=False, soft_wrap=True)
    if earlier is not None and not joined:
        console.print(
            "Only these edits can be undone, and not those before them: the weights were loaded in another dtype than "
            "they were saved in.",
            style="yellow",
        )

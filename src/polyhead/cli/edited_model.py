"""A model to edit, opened; what an edit does to it, shown; and the edited one, written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyhead.cli.progress import working

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from polyhead.cli.calibration_text import CalibrationText
    from polyhead.sources import LoadedModel
    from polyhead.surgery import EditRecord, Preview, SavedModel
    from polyhead.surgery.selection.quality import Fidelity


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
    from polyhead.surgery.storage.saving import check_savable

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


def show_preview(counted: Preview, console: Console) -> None:
    """What edits change, as a table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("attention of the whole model")
    for column in ("before", "after", "ratio"):
        table.add_column(column, justify="right")
    rows = {
        "heads": "heads",
        "KV heads": "key_heads",
        "parameters": "parameters",
        "FLOPs of 512 tokens": "flops",
        "cache bytes a token": "cache_bytes_per_token",
    }
    for words, name in rows.items():
        before, after = getattr(counted.before, name), getattr(counted.after, name)
        if before or name != "cache_bytes_per_token":  # an encoder keeps no cache
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
    told = f"Written to {saved.folder}, {saved.num_bytes:,} bytes, {saved.form}: {saved.native}"
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

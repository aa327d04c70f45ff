"""Load a model to edit, show the effect of edits, and save the edited model."""

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
    """Load the model to edit, in its saved dtype by default, and check that it can be saved to `output`."""
    import torch

    from polyhead.cli.options import check_dtype, device_or_gpu
    from polyhead.sources import load_model
    from polyhead.surgery.storage.saving import check_savable

    check_dtype(dtype)
    load_dtype: torch.dtype | Literal["saved"] = "saved" if dtype is None else getattr(torch, dtype)
    with working("Load the model"):
        loaded = load_model(
            name,
            device=device_or_gpu(device),
            dtype=load_dtype,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
    check_savable(loaded.model, output)
    return loaded


def show_preview(counted: Preview, console: Console) -> None:
    """Print a table of sizes and costs before and after the edits."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("attention of the model")
    for column in ("before", "after", "ratio"):
        table.add_column(column, justify="right")
    rows = {
        "heads": "heads",
        "KV heads": "key_heads",
        "parameters": "parameters",
        "FLOPs of 512 tokens": "flops",
        "cache bytes per token": "cache_bytes_per_token",
    }
    for label, name in rows.items():
        before, after = getattr(counted.before, name), getattr(counted.after, name)
        if before or name != "cache_bytes_per_token":  # an encoder has no cache
            table.add_row(label, f"{before:,}", f"{after:,}", f"{after / before:.2f}" if before else "")
    console.print(table)


def show_fidelity(quality: Fidelity, text: CalibrationText, console: Console) -> None:
    """Print the fidelity to the original model on the held-out text."""
    fidelity = quality.measure()
    tokens = sum(len(context.ids) for context in text.held_out)
    console.print(
        f"Fidelity on held-out text ({tokens:,} tokens, {len(text.held_out)} contexts): final hidden states have a "
        f"mean cosine of {fidelity.value:.3f} ± {fidelity.error:.3f} with those of the original",
        markup=False,
        soft_wrap=True,
    )


def show_saved(saved: SavedModel, console: Console) -> None:
    summary = f"Saved to {saved.folder}, {saved.num_bytes:,} bytes, {saved.form}: {saved.native}"
    console.print(summary, markup=False, soft_wrap=True)


def write_edited(
    loaded: LoadedModel, record: EditRecord, output: Path, form: str | None, console: Console, *, replace: bool
) -> None:
    """Save an edited model with its undo record and the other files of its folder, and print a summary."""
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
    hint = f"Run `polyhead undo {saved.folder} --output FOLDER` to restore the original bit for bit"
    console.print(hint, markup=False, soft_wrap=True)
    if earlier is not None and not joined:
        console.print(
            "Only these edits can be undone, not earlier ones: the weights were loaded in another dtype than "
            "they were saved in.",
            style="yellow",
        )

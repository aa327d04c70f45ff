"""Load a model to edit, show the effect of edits, and save the edited model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from polyhead.cli.options import default_device
from polyhead.cli.terminal import plain_table, say, wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.progress import ProgressCallback
    from polyhead.sources import LoadedModel
    from polyhead.surgery import Preview, SavedModel
    from polyhead.surgery.selection.quality import Measurement
    from polyhead.workflows.edited_model import EditedModel


def model_loader(
    name: str,
    progress: ProgressCallback,
    output: Path | None,
    device: str | None,
    dtype: str | None,
    *,
    pickle: bool,
    remote_code: bool,
) -> Callable[[], LoadedModel]:
    """Return a function that loads the model to edit, in its saved dtype by default, if it can be saved to `output`.

    Edits are checked against the config before weights are read, unless the model needs remote code.
    """
    from polyhead.progress import Progress
    from polyhead.surgery.storage.saving import check_savable
    from polyhead.workflows.model_loading import ModelLoader, load_model

    def load() -> LoadedModel:
        import torch

        progress(Progress("Load the model"))
        loaded = load_model(
            name,
            device=default_device(device),
            dtype="saved" if dtype is None else getattr(torch, dtype),
            allow_pickle=pickle,
            trust_remote_code=remote_code,
        )
        check_savable(loaded.model, output)
        return loaded

    return load if remote_code else ModelLoader(name, load)


def show_preview(counted: Preview, form: str, console: Console) -> None:
    """Print a table of sizes and costs before and after the edits, and what the form makes of them."""
    table = plain_table(["attention of the model"], ["before", "after", "ratio"])
    rows = {
        "heads": "heads",
        "KV heads": "kv_heads",
        "parameters": "parameters",
        "FLOPs of 512 tokens": "flops",
        "cache bytes per token": "cache_bytes_per_token",
    }
    for label, name in rows.items():
        before, after = getattr(counted.before, name), getattr(counted.after, name)
        if before or name != "cache_bytes_per_token":  # an encoder has no cache
            table.add_row(label, f"{before:,}", f"{after:,}", f"{after / before:.2f}" if before else "")
    console.print(table)
    if form == "padded":
        say(
            console,
            "These are the heads that are left. The padded form fills up with heads of zeros: the saved model has the "
            "sizes and costs of the original.",
        )


def report_edited(edited: EditedModel, summary: str, output: Path | None, *, replace: bool) -> None:
    """Print the edits and their effect on size, cost and quality, and save the edited model."""
    console = wide_console()
    say(console, f"{edited.loaded}\n{summary}")
    show_preview(edited.preview, edited.form, console)
    show_quality(edited, console)
    write_edited(edited, output, console, replace=replace)


def show_quality(edited: EditedModel, console: Console) -> None:
    """Print the quality on held-out text, if there was a text, and warnings about that text."""
    from polyhead.workflows.evaluating import FEW_GROUPS, MAX_PERPLEXITY_RATIO

    if not edited.contexts:
        return
    say(console, _describe_quality(edited))
    warnings = []
    if edited.quality is not None and edited.held_out_groups < FEW_GROUPS:
        warnings.append(
            f"Fewer than {FEW_GROUPS} documents or stretches of text are held out, too few for a reliable interval; "
            "for more, use a longer --text and more --tokens, or a smaller --context"
        )
    if edited.calibration_original is not None and edited.original is not None:
        ratio = edited.original / edited.calibration_original
        if not 1 / MAX_PERPLEXITY_RATIO < ratio < MAX_PERPLEXITY_RATIO:
            warnings.append(
                f"The texts differ: the original model has a perplexity of {edited.original:.4g} on --test-text and of "
                f"{edited.calibration_original:.4g} on --text. Heads were chosen and compensated for the latter; "
                "calibrate on text like the former"
            )
    for warning in warnings:
        say(console, warning, "yellow")


def _describe_quality(edited: EditedModel) -> str:
    """Describe the quality on held-out text before and after the edits."""
    if edited.quality is None:
        if edited.loaded.kind == "encoder-decoder":
            return "Quality was not measured: that needs an encoder or a decoder, got an encoder-decoder"
        return (
            f"Quality was not measured: that needs a text of 8 contexts, of which two are held out, got "
            f"{edited.contexts}; use more text, or a smaller --context"
        )
    perplexity = edited.metric == "perplexity"
    values = [f"{edited.original:.4g} before"] if perplexity else []
    for measured, label in ((edited.not_compensated, "without compensation"), (edited.quality, "after")):
        if measured is not None:
            form = "{:.4g} ± {:.2g} {}" if perplexity else "{:.4f} ± {:.4f} {}"
            values.append(form.format(measured.value, measured.error, label))
    meaning = "" if perplexity else ", the mean cosine of final hidden states with the original's"
    return (
        f"{str(edited.metric).capitalize()} on held-out text ({edited.held_out_tokens:,} tokens, "
        f"{edited.held_out_contexts} contexts){meaning}: {', '.join(values)}"
        + ("; ± is the standard error of the change" if perplexity else "")
        + _describe_prediction(edited.quality, edited.original, perplexity=perplexity)
    )


def _describe_prediction(quality: Measurement, original: float | None, *, perplexity: bool) -> str:
    """Describe what to expect on other text; "" if that is unknown."""
    if math.isnan(quality.ratio_low) or original is None:
        return ""
    if perplexity:
        return (
            f"\n{quality.value / original:.3f} times the original's; on other text of this kind and length, expect "
            f"{quality.ratio_low:.3f} to {quality.ratio_high:.3f} times (95% prediction interval)"
        )
    return (
        f"\nOn other text of this kind and length, expect {quality.ratio_low:.4f} to {quality.ratio_high:.4f} (95% "
        "prediction interval)"
    )


def show_saved(saved: SavedModel, console: Console) -> None:
    say(console, f"Saved to {saved.folder}, {saved.num_bytes:,} bytes, {saved.form}: {saved.native}")


def write_edited(edited: EditedModel, output: Path | None, console: Console, *, replace: bool) -> None:
    """Save an edited model with its undo record and the other files of its folder, and print a summary."""
    from polyhead.cli.progress_bars import ProgressBars
    from polyhead.progress import Progress

    if edited.record is None or output is None:
        return
    with ProgressBars() as progress:
        progress(Progress("Write the model"))
        saved = edited.save(output, replace=replace)
    show_saved(saved, console)
    say(
        console,
        f"Run `polyhead undo {saved.folder} --output FOLDER` to restore the weights as they were loaded, bit for bit; "
        f"their record is {saved.undo_folder}, to be kept beside the model",
    )
    if edited.undo_caveat:
        say(console, f"Only these edits can be undone, not earlier ones: {edited.undo_caveat}.", "yellow")

"""`polyhead prune`: remove heads from a model and compensate for them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.calibration_text import CalibrationText
from polyhead.cli.edit_options import (
    ContextLength,
    Field,
    Model,
    Output,
    PreviewOnly,
    Replace,
    SavedDtype,
    SavedForm,
    Stack,
    Text,
    Tokens,
    check_criterion,
    check_output,
    check_reading,
)
from polyhead.cli.edited_model import open_model, show_fidelity, show_preview, write_edited
from polyhead.cli.objectives import judge_of, weighting_of
from polyhead.cli.options import AllowPickle, Device, TrustRemoteCode
from polyhead.cli.progress import bar, errors_told

if TYPE_CHECKING:
    from polyhead.surgery import PruneHeads


def prune(
    model: Model,
    heads: Annotated[
        str | None,
        typer.Option(metavar="LAYER.HEAD,...", help="Heads to remove, e.g. 0.3,1.7.", show_default=False),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="N%",
            help="Remove this share of all heads, e.g. 30%, selected by --criterion.",
            show_default=False,
        ),
    ] = None,
    criterion: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Importance score for --share: compensated (error after compensation), plain (error without it), "
            "ablation, gradient, taylor, magnitude, redundancy, or random (control).",
        ),
    ] = "compensated",
    output: Output = None,
    text: Text = None,
    field: Field = "text",
    compensation: Annotated[
        bool,
        typer.Option(
            "--compensate/--no-compensate",
            help="Compensate for removed heads: refit the output projections layer by layer, by least squares on the "
            "text.",
        ),
    ] = True,
    form: SavedForm = None,
    preview: PreviewOnly = False,
    replace: Replace = False,
    stack: Stack = None,
    context: ContextLength = None,
    tokens: Tokens = 65_536,
    seed: Annotated[int, typer.Option(help="Seed of the random criterion.")] = 0,
    device: Device = None,
    dtype: SavedDtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Remove heads from a trained model, without retraining.

    Select heads with --heads, or a share of them with --share. The remaining heads compensate by least squares on a
    text. Writes the model to a new folder, with a record to undo the edit; the original is not modified.

    Example: `polyhead prune minilm --share 30% --text corpus.txt --output pruned`
    """
    from rich.console import Console

    from polyhead.sources.models import check_layers
    from polyhead.surgery import apply, apply_in_order
    from polyhead.surgery import preview as count

    console = Console(highlight=False)
    if (heads is None) == (share is None):
        raise typer.BadParameter("specify either --heads or --share; got both or neither")
    with errors_told("prune"):
        check_output(output, form, preview=preview, replace=replace, source=model)
        fraction = None if share is None else _share(share)
        requested = None if heads is None else _parse_heads(heads, stack)
        check_reading(text, field, context, tokens)
        check_criterion(criterion)
        if requested is not None:
            check_layers(model, [edit.layer for edit in requested], trust_remote_code=trust_remote_code)
        loaded = open_model(
            model,
            device=device,
            dtype=dtype,
            output=output,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        if requested is not None:
            count(loaded.model, requested)  # raises on invalid heads before the text is read
        needs_text = fraction is not None or (compensation and not preview)
        calibration = CalibrationText.of(loaded, text, field, context, tokens) if needs_text else None
        if requested is not None:
            edits = requested
        else:
            assert fraction is not None
            assert calibration is not None
            edits = select_heads(calibration, fraction, criterion=criterion, stack=stack, seed=seed)
        counted = count(loaded.model, edits)
        console.print(f"{loaded}\nwithout heads {_format_heads(edits)}", markup=False, soft_wrap=True)
        show_preview(counted, console)
        if preview or output is None:
            return
        quality = None if calibration is None else calibration.fidelity()
        if compensation:
            assert calibration is not None
            layers = len({(edit.stack, edit.layer) for edit in edits})
            with bar("Compensate layer by layer", layers) as step:
                record = apply_in_order(loaded.model, edits, calibration.batches, progress=lambda done, total: step(1))
        else:
            record = apply(loaded.model, edits)
        if calibration is not None and quality is not None:
            show_fidelity(quality, calibration, console)
        write_edited(loaded, record, output, form, console, replace=replace)


def select_heads(
    text: CalibrationText, share: float, *, criterion: str, stack: str | None, seed: int
) -> list[PruneHeads]:
    """Select the least important heads by a criterion, over all layers or those of one stack."""
    from polyhead.errors import OptionError
    from polyhead.surgery import PruneHeads, choose_heads
    from polyhead.surgery.selection.criteria import orders_by
    from polyhead.surgery.selection.measurements import Evidence

    model = text.loaded.model
    with bar(f"Select heads by {criterion}", len(list(text.batches()))) as step:
        evidence = Evidence(model, text.batches_with_progress(step), judge_of(text.loaded))
        layers = {path: layer for path, layer in evidence.layers.items() if stack in (None, layer.stack)}
        if not layers:
            stacks = ", ".join(dict.fromkeys(layer.stack for layer in evidence.layers.values()))
            raise OptionError(f"--stack must be one of {stacks}, got {stack!r}")
        total = sum(evidence.heads[path].num_heads for path in layers)
        number = round(share * total)
        if not number:
            raise OptionError(f"--share must be at least one head, got {share:.1%} of {total} heads")
        orders = orders_by(criterion, evidence, weighting=weighting_of(criterion), seed=seed)
    selected = choose_heads({path: orders[path] for path in layers}, number)
    return [
        PruneHeads(layers[path].number, heads, stack=layers[path].stack) for path, heads in selected.items() if heads
    ]


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share < 1:
        raise typer.BadParameter(
            f"must be a percentage between 0% and 100%, e.g. 30%; got {text!r}",
            param_hint="--share",
        )
    return share


def _parse_heads(text: str, stack: str | None) -> list[PruneHeads]:
    from polyhead.geometry import HeadId
    from polyhead.surgery import PruneHeads

    by_layer: dict[int, list[int]] = {}
    for part in text.split(","):
        head = HeadId.parse(part.strip())
        by_layer.setdefault(head.layer, []).append(head.head)
    return [PruneHeads(layer, tuple(heads), stack=stack) for layer, heads in sorted(by_layer.items())]


def _format_heads(edits: list[PruneHeads]) -> str:
    several = len({edit.stack for edit in edits}) > 1
    return ", ".join(
        (f"{edit.stack} " if several else "") + f"{edit.layer}.{head}" for edit in edits for head in edit.heads
    )

"""`polyhead prune`: a model without some of its heads, the others making up for them."""

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
        typer.Option(metavar="LAYER.HEAD,...", help="The heads to take out, as in 0.3,1.7.", show_default=False),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="N%",
            help="Take out this share of all heads, chosen by --criterion on the text.",
            show_default=False,
        ),
    ] = None,
    criterion: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="By what heads are chosen: repaired (what the others cannot make up for), plain (what they write), "
            "ablation, gradient, taylor, magnitude, redundancy, or random, the control.",
        ),
    ] = "compensated",
    output: Output = None,
    text: Text = None,
    field: Field = "text",
    compensation: Annotated[
        bool,
        typer.Option(
            "--repair/--no-repair",
            help="Solve the output matrices of the heads that stay, layer by layer, for what the whole layer wrote on "
            "the text.",
        ),
    ] = True,
    form: SavedForm = None,
    preview: PreviewOnly = False,
    replace: Replace = False,
    stack: Stack = None,
    context: ContextLength = None,
    tokens: Tokens = 65_536,
    seed: Annotated[int, typer.Option(help="Of the random criterion.")] = 0,
    device: Device = None,
    dtype: SavedDtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Take heads out of a trained model, without retraining.

    Name the heads, or say how many should go. Heads that stay are repaired on a text, in closed form. The model is
    written to a new folder, with what undoes the edit; the original is not touched.
    """
    from rich.console import Console

    from polyhead.sources.models import check_layers
    from polyhead.surgery import apply, apply_in_order
    from polyhead.surgery import preview as count

    console = Console(highlight=False)
    if (heads is None) == (share is None):
        raise typer.BadParameter("name heads with --heads, or say how many with --share; got both or neither")
    with errors_told("prune"):
        check_output(output, form, preview=preview, replace=replace, source=model)
        wanted = None if share is None else _share(share)
        named = None if heads is None else _named(heads, stack)
        check_reading(text, field, context, tokens)
        check_criterion(criterion)
        if named is not None:
            check_layers(model, [edit.layer for edit in named], trust_remote_code=trust_remote_code)
        loaded = open_model(
            model,
            device=device,
            dtype=dtype,
            output=output,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        if named is not None:
            count(loaded.model, named)  # refused before the text is read
        needs_text = wanted is not None or (compensation and not preview)
        calibration = CalibrationText.of(loaded, text, field, context, tokens) if needs_text else None
        if named is not None:
            edits = named
        else:
            assert wanted is not None
            assert calibration is not None
            edits = chosen(calibration, wanted, criterion=criterion, stack=stack, seed=seed)
        counted = count(loaded.model, edits)
        console.print(f"{loaded}\nwithout heads {_told(edits)}", markup=False, soft_wrap=True)
        show_preview(counted, console)
        if preview or output is None:
            return
        quality = None if calibration is None else calibration.fidelity()
        if compensation:
            assert calibration is not None
            layers = len({(edit.stack, edit.layer) for edit in edits})
            with bar("Repair the heads that stay", layers) as step:
                record = apply_in_order(loaded.model, edits, calibration.batches, progress=lambda done, total: step(1))
        else:
            record = apply(loaded.model, edits)
        if calibration is not None and quality is not None:
            show_fidelity(quality, calibration, console)
        write_edited(loaded, record, output, form, console, replace=replace)


def chosen(text: CalibrationText, share: float, *, criterion: str, stack: str | None, seed: int) -> list[PruneHeads]:
    """The heads that can best go by a criterion, of all layers whose heads are known, or of one stack of them."""
    from polyhead.errors import OptionError
    from polyhead.surgery import PruneHeads, choose_heads
    from polyhead.surgery.selection.criteria import orders_by
    from polyhead.surgery.selection.measurements import Evidence

    model = text.loaded.model
    with bar(f"Choose heads by {criterion}", len(list(text.batches()))) as step:
        evidence = Evidence(model, text.told(step), judge_of(text.loaded))
        layers = {path: layer for path, layer in evidence.layers.items() if stack in (None, layer.stack)}
        if not layers:
            stacks = ", ".join(dict.fromkeys(layer.stack for layer in evidence.layers.values()))
            raise OptionError(f"stack must be one of {stacks}, got {stack!r}")
        total = sum(evidence.heads[path].num_heads for path in layers)
        number = round(share * total)
        if not number:
            raise OptionError(f"a share of {share:.1%} must be a head at least, got {total} heads in all")
        orders = orders_by(criterion, evidence, weighting=weighting_of(criterion), seed=seed)
    found = choose_heads({path: orders[path] for path in layers}, number)
    return [PruneHeads(layers[path].number, heads, stack=layers[path].stack) for path, heads in found.items() if heads]


def _share(text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share < 1:
        raise typer.BadParameter(
            f"a share of the heads is written like 30%, more than 0% and less than 100%; got {text!r}",
            param_hint="--share",
        )
    return share


def _named(text: str, stack: str | None) -> list[PruneHeads]:
    from polyhead.geometry import HeadId
    from polyhead.surgery import PruneHeads

    found: dict[int, list[int]] = {}
    for part in text.split(","):
        head = HeadId.parse(part.strip())
        found.setdefault(head.layer, []).append(head.head)
    return [PruneHeads(layer, tuple(heads), stack=stack) for layer, heads in sorted(found.items())]


def _told(edits: list[PruneHeads]) -> str:
    several = len({edit.stack for edit in edits}) > 1
    return ", ".join(
        (f"{edit.stack} " if several else "") + f"{edit.layer}.{head}" for edit in edits for head in edit.heads
    )

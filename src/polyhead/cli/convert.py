"""`polyhead convert`: fewer KV heads for a trained model, and so a smaller KV cache."""

from __future__ import annotations

from typing import Annotated

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
    check_output,
    check_reading,
)
from polyhead.cli.edited_model import open_model, show_fidelity, show_preview, write_edited
from polyhead.cli.options import AllowPickle, Device, TrustRemoteCode, check_positive
from polyhead.cli.progress import bar, errors_told


def convert(
    model: Model,
    kv_heads: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="KV heads per layer after the conversion; must divide the current number. 1: multi-query attention.",
            show_default=False,
        ),
    ],
    output: Output = None,
    text: Text = None,
    field: Field = "text",
    grouping: Annotated[
        str,
        typer.Option(
            metavar="similar|neighbours",
            help="Merge KV heads that are similar, or neighbouring ones.",
        ),
    ] = "similar",
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Rounds of alternating least squares that refit the shared K and V projections to the text.",
        ),
    ] = 0,
    form: SavedForm = None,
    preview: PreviewOnly = False,
    replace: Replace = False,
    stack: Stack = None,
    context: ContextLength = None,
    tokens: Tokens = 65_536,
    device: Device = None,
    dtype: SavedDtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Convert a trained model to fewer KV heads (GQA or MQA), without retraining.

    Merges similar KV heads in closed form and compensates the output projections by least squares on a text. Writes the
    model to a new folder, with a record to undo the edit; the original is not modified.

    Example: `polyhead convert smollm2 --kv-heads 1 --text corpus.txt --output smollm2-mqa`
    """
    from rich.console import Console

    import polyhead.integrations.huggingface
    from polyhead.errors import OptionError
    from polyhead.surgery import ShareKeys, convert_groups
    from polyhead.surgery import preview as count
    from polyhead.surgery.kv_sharing.convert import GROUPINGS, layers_to_convert
    from polyhead.surgery.kv_sharing.grouping import neighbours

    console = Console(highlight=False)
    with errors_told("convert"):
        check_output(output, form, preview=preview, replace=replace, source=model)
        check_reading(text, field, context, tokens)
        check_positive("--kv-heads", kv_heads)
        if rounds < 0:
            raise OptionError(f"--rounds must be at least 0, got {rounds}")
        if grouping not in GROUPINGS:
            raise OptionError(f"--grouping must be one of {', '.join(GROUPINGS)}, got {grouping!r}")
        loaded = open_model(
            model,
            device=device,
            dtype=dtype,
            output=output,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        layers = layers_to_convert(loaded.model, kv_heads, stack)
        edits = [
            ShareKeys(layer.number, neighbours(layer.layout.num_kv_heads, kv_heads), stack=layer.stack)
            for layer in layers
            if layer.layout is not None
        ]
        counted = count(loaded.model, edits)
        summary = f"with {kv_heads} KV head{'s' * (kv_heads > 1)} in each of {len(layers)} layers"
        console.print(f"{loaded}\n{summary}", markup=False, soft_wrap=True)
        show_preview(counted, console)
        if preview or output is None:
            return
        calibration = CalibrationText.of(loaded, text, field, context, tokens)
        # Only polyhead's attention supports groups that the config of a family cannot express.
        loaded.model.set_attn_implementation(polyhead.integrations.huggingface.register())
        quality = calibration.fidelity()
        with bar("Merge KV heads, layer by layer", len(layers)) as step:
            record = convert_groups(
                loaded.model,
                kv_heads,
                calibration.batches,
                stack=stack,
                grouping=grouping,
                rounds=rounds,
                progress=lambda done, total: step(1),
            )
        if quality is not None:
            show_fidelity(quality, calibration, console)
        write_edited(loaded, record, output, form, console, replace=replace)

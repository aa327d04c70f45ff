"""`polyhead convert`: fewer KV heads for a trained model, and so a smaller KV cache."""

from __future__ import annotations

from typing import Annotated

import typer

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
    check_output,
    check_reading,
)
from polyhead.cli.edit_results import model_loader, report_edited
from polyhead.cli.options import AllowPickle, Device, TrustRemoteCode, optional
from polyhead.cli.progress_bars import ProgressBars


def convert(
    model: Model,
    kv_heads: Annotated[
        int,
        optional(
            "KV heads per layer after the conversion; must divide the current number. 1: multi-query attention.",
            metavar="N",
        ),
    ],
    output: Output = None,
    text: Text = None,
    field: Field = "text",
    grouping: Annotated[
        str, typer.Option(metavar="similar|neighbours", help="Merge KV heads that are similar, or neighbouring ones.")
    ] = "similar",
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Rounds of alternating least squares that refit the shared K and V projections to the text.",
        ),
    ] = 0,
    form: SavedForm = "uniform",
    preview: PreviewOnly = False,
    replace: Replace = False,
    stack: Stack = None,
    context: ContextLength = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of tokens of the text, which is sampled over all of it.")
    ] = 65_536,
    device: Device = None,
    dtype: SavedDtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Convert a trained model to fewer KV heads (GQA or MQA), without retraining.

    Merges similar KV heads in closed form and compensates the output projections by least squares on a text. Writes the
    model to a new folder, and the record to undo the edit beside it; the original is not modified.

    Example: `polyhead convert smollm2 --kv-heads 1 --text corpus.txt --output smollm2-mqa`
    """
    from polyhead.surgery.options import check_conversion

    with ProgressBars() as progress:
        check_output(output, form, preview=preview, replace=replace, source=model)
        check_reading(text, field, context, tokens)
        check_conversion(kv_heads, grouping, rounds)

        import polyhead

        edited = polyhead.convert(
            model_loader(model, progress, output, device, dtype, pickle=allow_pickle, remote_code=trust_remote_code),
            kv_heads,
            text=text,
            field=field,
            grouping=grouping,  # type: ignore[arg-type]  # checked by the function
            rounds=rounds,
            form=form,  # type: ignore[arg-type]  # checked by the function
            preview=preview,
            stack=stack,
            context=context,
            tokens=tokens,
            progress=progress,
        )
    summary = f"with {kv_heads} KV head{'s' * (kv_heads > 1)} in each of {len(edited.edits)} layers"
    report_edited(edited, summary, output, replace=replace)

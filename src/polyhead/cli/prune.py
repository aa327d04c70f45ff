"""`polyhead prune`: remove heads from a model and compensate for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

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
    TestText,
    Text,
    Tokens,
    check_output,
    check_reading,
)
from polyhead.cli.edit_results import model_loader, report_edited
from polyhead.cli.options import AllowPickle, Device, TrustRemoteCode, optional
from polyhead.cli.progress_bars import ProgressBars
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from polyhead.surgery import Preview


def prune(
    model: Model,
    heads: Annotated[str | None, optional("Heads to remove, e.g. L0H3,L1H7.", metavar="HEAD,...")] = None,
    share: Annotated[
        str | None,
        optional(
            "Remove this share of all heads, e.g. 30%, selected by --criterion. With --form uniform, at least this "
            "share: the smallest that leaves equally many in every layer. If that is more than 10 percentage points "
            "beyond it, the command stops and lists the shares that are possible.",
            metavar="N%",
        ),
    ] = None,
    criterion: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Importance score for --share: compensated (error after compensation), plain (error without it), "
            "ablation, gradient, taylor, magnitude, redundancy, or random (control). --form uniform needs compensated.",
        ),
    ] = "compensated",
    output: Output = None,
    text: Text = None,
    field: Field = "text",
    test_text: TestText = None,
    compensation: Annotated[
        bool,
        typer.Option(
            "--compensate/--no-compensate",
            help="Compensate for removed heads: refit the output projections on the text, by least squares and "
            "distillation.",
        ),
    ] = True,
    form: SavedForm = "uniform",
    preview: PreviewOnly = False,
    replace: Replace = False,
    stack: Stack = None,
    context: ContextLength = None,
    tokens: Tokens = None,
    seed: Annotated[int, typer.Option(help="Seed of the random criterion.")] = 0,
    device: Device = None,
    dtype: SavedDtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Remove heads from a trained model, without retraining.

    Select heads with --heads, or a share of them with --share. The output projections of the remaining heads are
    refitted on a text, by least squares and distillation. Writes the model to a new folder, and the record to undo the
    edit beside it; the original is not modified.

    Example: `polyhead prune smollm2 --share 30% --text corpus.txt --output pruned`
    """
    from polyhead.geometry import parse_heads
    from polyhead.surgery.options import check_selection

    if (heads is None) == (share is None):
        raise OptionError("specify either --heads or --share; got both or neither")
    with ProgressBars() as progress:
        check_output(output, form, preview=preview, replace=replace, source=model)
        fraction = None if share is None else _share(share)
        check_selection(form, criterion, by_name=share is None, seed=seed)
        check_reading(text, field, context, tokens, test_text)
        removed = [] if heads is None else parse_heads(heads)

        import polyhead
        from polyhead.sources.models import check_layers

        if len(removed):
            check_layers(model, [head.layer for head in removed], trust_remote_code=trust_remote_code)
        edited = polyhead.prune(
            model_loader(model, progress, output, device, dtype, pickle=allow_pickle, remote_code=trust_remote_code),
            heads,
            share=fraction,
            criterion=criterion,
            text=text,
            field=field,
            compensate=compensation,
            form=form,  # type: ignore[arg-type]  # checked by the function
            preview=preview,
            stack=stack,
            context=context,
            tokens=tokens,
            test_text=test_text,
            seed=seed,
            progress=progress,
        )
    summary = [f"without heads {_format_heads(edited.edits)}"] if edited.edits else []
    if fraction is not None and form == "uniform":
        summary.append(_describe_layout(edited.preview, fraction))
    if edited.compensation:
        summary.append(edited.compensation)
    report_edited(edited, "\n".join(summary), output, replace=replace)


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share < 1:
        raise OptionError(f"--share must be a percentage between 0% and 100%, e.g. 30%; got {text!r}")
    return share


def _describe_layout(counted: Preview, share: float) -> str:
    """Describe the layout of the pruned layers, and the share of their heads that it takes."""
    pruned = [layer for layer in counted.layers if layer.after.heads < layer.before.heads]
    before, left = (sum(getattr(layer, name).heads for layer in pruned) for name in ("before", "after"))
    after = pruned[0].after
    return (
        f"{after.heads} heads over {after.kv_heads} KV heads remain in every layer, {1 - left / before:.1%} fewer than "
        f"before, for {share:.1%} requested"
    )


def _format_heads(edits: Sequence[Any]) -> str:
    from polyhead.geometry import HeadId

    several = len({edit.stack for edit in edits}) > 1
    return ", ".join(
        (f"{edit.stack} " if several else "") + str(HeadId(edit.layer, head)) for edit in edits for head in edit.heads
    )

"""`polyhead shrink`: prune heads to a target size, with a curve of quality over size and two controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.edit_options import (
    ContextLength,
    Field,
    Model,
    Output,
    Replace,
    ResumeIn,
    SavedDtype,
    SavedForm,
    TestText,
    Tokens,
    check_output,
    check_reading,
)
from polyhead.cli.edit_results import model_loader, show_preview, show_quality, write_edited
from polyhead.cli.errors import resumable
from polyhead.cli.options import AllowPickle, Device, TrustRemoteCode, optional
from polyhead.cli.progress_bars import ProgressBars
from polyhead.cli.shrink_curve import show_curve
from polyhead.cli.terminal import say, wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.workflows.shrinking import SearchGain, ShrunkModel


def shrink(
    model: Model,
    target: Annotated[
        str,
        typer.Option(
            metavar="N%-heads|Nx-cache|Nx-faster",
            help="30%-heads: remove 30% of the heads. 2x-cache: halve the KV cache. 1.2x-faster: 1/1.2 of the FLOPs of "
            "the model or, with --measured, of its time on this machine.",
        ),
    ],
    text: Annotated[
        str | None,
        optional(
            "Text like the model's inputs (required): .txt, .md, .jsonl or .parquet (also .gz), a folder of them, "
            "or - for standard input. Of 8 documents, 5 select heads and calibrate, 1 selects the compensation, and 2 "
            "are the test set.",
            metavar="FILE|DIR|-",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        optional(
            "Quality: perplexity (causal models), or fidelity, the mean cosine of final hidden states with those "
            "of the original. [default: perplexity for causal models, else fidelity]",
            metavar="perplexity|fidelity",
        ),
    ] = None,
    output: Output = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Show the pruned model's size and quality; write nothing.")
    ] = False,
    criterion: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Importance score of heads, as in `polyhead prune`. --form uniform needs compensated."
        ),
    ] = "compensated",
    measured: Annotated[
        bool, typer.Option("--measured", help="Measure Nx-faster on this machine instead of counting FLOPs.")
    ] = False,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Improve the selection by local search: swap heads within layers (with --form padded or uneven: move "
            "removals between layers) while quality improves and the target holds. Takes some hundred evaluations; "
            "does not affect the curve.",
        ),
    ] = False,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve",
            help="Also measure the quality over sizes, with two controls: the same heads without compensation, and "
            "random heads with it. Takes several times as long as the result.",
        ),
    ] = False,
    field: Field = "text",
    test_text: TestText = None,
    form: SavedForm = "uniform",
    replace: Replace = False,
    context: ContextLength = None,
    tokens: Tokens = None,
    resume: ResumeIn = None,
    device: Device = None,
    dtype: SavedDtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Prune heads of a trained model to a target size, without retraining.

    Selects heads, with errors weighted by their effect on the model's loss per layer, direction and token, and refits
    the output projections of the others by least squares and distillation, as `polyhead prune` does. All layers keep
    the same number of heads and KV heads, the largest that reaches the target, so that the model loads in plain
    transformers; with another --form, heads are selected over all layers.

    With --resume DIR every measurement is saved. Repeat the same command to continue an interrupted run with identical
    results; another model, text or option is refused.

    Example: `polyhead shrink smollm2 --target 30%-heads --text corpus.txt --output small`
    """
    from polyhead.surgery.options import Target, check_shrinking

    console = wide_console()
    with resumable(resume), ProgressBars() as progress:
        check_output(output, form, preview=preview, replace=replace, source=model)
        check_reading(text, field, context, tokens, test_text)
        goal = Target.parse(target)
        check_shrinking(
            goal,
            has_text=text is not None,
            metric=metric,
            criterion=criterion,
            form=form,
            measured=measured,
            search=search,
        )

        import polyhead

        shrunk = polyhead.shrink(
            model_loader(model, progress, output, device, dtype, pickle=allow_pickle, remote_code=trust_remote_code),
            goal,
            text,
            metric=metric,  # type: ignore[arg-type]  # checked by the function
            criterion=criterion,
            form=form,  # type: ignore[arg-type]  # checked by the function
            measured=measured,
            search=search,
            curve=curve,
            preview=preview,
            field=field,
            context=context,
            tokens=tokens,
            test_text=test_text,
            resume=resume,
            progress=progress,
        )
    with resumable(resume):
        _show(shrunk, console)
        write_edited(shrunk, output, console, replace=replace)


def _show(shrunk: ShrunkModel, console: Console) -> None:
    say(console, f"{shrunk.loaded}\n{shrunk.tokens:,} tokens of text in {shrunk.contexts} contexts")
    if len(shrunk.curve):
        show_curve(shrunk, console)
    aim = f"{shrunk.target.amount:g} times less time on this machine" if shrunk.measured else shrunk.target
    console.print(f"\nFor {aim}: {shrunk.summary}, {shrunk.compensation}", markup=False)
    if shrunk.search is not None:
        say(console, _search_summary(shrunk, shrunk.search))
    show_preview(shrunk.preview, shrunk.form, console)
    console.print(f"{shrunk.size.flops:.0%} of the original model's FLOPs at {shrunk.flops_tokens} tokens")
    show_quality(shrunk, console)


def _search_summary(shrunk: ShrunkModel, gain: SearchGain) -> str:
    prefix = f"Search, {gain.measurements:,} measurements: "
    if not gain.moved:
        return f"{prefix}no head {gain.search_action}"
    text = "on the text that selects the compensation"
    if not gain.used:
        return f"{prefix}heads {gain.search_action} gained nothing {text}, and were reverted"
    heads = "head" if gain.moved == 1 else "heads"
    return (
        f"{prefix}{gain.moved} {heads} {gain.search_action}; {text} {shrunk.metric} {gain.after:.4g} instead of "
        f"{gain.before:.4g}, original model {gain.original:.4g}"
    )

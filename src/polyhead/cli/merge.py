"""`polyhead merge`: merge redundant heads."""

from __future__ import annotations

from typing import Annotated

from polyhead.cli.edit_options import Model, Output, PreviewOnly, Replace, SavedDtype, SavedForm, Stack, check_output
from polyhead.cli.edit_results import model_loader, report_edited
from polyhead.cli.options import AllowPickle, Device, TrustRemoteCode, optional
from polyhead.cli.progress_bars import ProgressBars


def merge(
    model: Model,
    heads: Annotated[
        str,
        optional(
            "Heads to merge into one, e.g. L1H3+L1H7; separate several groups by commas. Numbers are those before "
            "any merge.",
            metavar="HEAD+HEAD,...",
        ),
    ],
    output: Output = None,
    form: SavedForm = "uniform",
    preview: PreviewOnly = False,
    replace: Replace = False,
    stack: Stack = None,
    device: Device = None,
    dtype: SavedDtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Merge redundant heads of a layer into one.

    Averages their Q, K and V projections and sums their output projections: identical heads are merged without loss.
    Writes the model to a new folder, and the record to undo the edit beside it; the original is not modified.

    Example: `polyhead merge minilm --heads L1H3+L1H7 --form uneven --output merged`
    """
    from polyhead.geometry import parse_head_groups

    with ProgressBars() as progress:
        check_output(output, form, preview=preview, replace=replace, source=model)
        groups = parse_head_groups(heads)

        import polyhead
        from polyhead.sources.models import check_layers

        check_layers(model, [group[0].layer for group in groups], trust_remote_code=trust_remote_code)
        edited = polyhead.merge(
            model_loader(model, progress, output, device, dtype, pickle=allow_pickle, remote_code=trust_remote_code),
            heads,
            form=form,  # type: ignore[arg-type]  # checked by the function
            preview=preview,
            stack=stack,
        )
    listed = ",".join("+".join(map(str, group)) for group in groups)
    report_edited(edited, f"with heads {listed} merged", output, replace=replace)

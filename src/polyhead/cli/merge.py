"""`polyhead merge`: merge redundant heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.edit_options import Model, Output, PreviewOnly, Replace, SavedDtype, SavedForm, Stack, check_output
from polyhead.cli.edited_model import open_model, show_preview, write_edited
from polyhead.cli.options import AllowPickle, Device, TrustRemoteCode
from polyhead.cli.progress import errors_told

if TYPE_CHECKING:
    from polyhead.surgery import MergeHeads


def merge(
    model: Model,
    heads: Annotated[
        str,
        typer.Option(
            metavar="LAYER.HEAD+LAYER.HEAD,...",
            help="Heads to merge into one, e.g. 1.3+1.7; separate several groups by commas. Numbers are those before "
            "any merge.",
            show_default=False,
        ),
    ],
    output: Output = None,
    form: SavedForm = None,
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
    Writes the model to a new folder, with a record to undo the edit; the original is not modified.

    Example: `polyhead merge minilm --heads 1.3+1.7 --output merged`
    """
    from rich.console import Console

    from polyhead.sources.models import check_layers
    from polyhead.surgery import apply
    from polyhead.surgery import preview as count

    console = Console(highlight=False)
    with errors_told("merge"):
        check_output(output, form, preview=preview, replace=replace, source=model)
        edits = merges(heads, stack)
        check_layers(model, [edit.layer for edit in edits], trust_remote_code=trust_remote_code)
        loaded = open_model(
            model,
            device=device,
            dtype=dtype,
            output=output,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        counted = count(loaded.model, edits)
        console.print(f"{loaded}\nwith heads {heads} merged", markup=False, soft_wrap=True)
        show_preview(counted, console)
        if preview or output is None:
            return
        write_edited(loaded, apply(loaded.model, edits), output, form, console, replace=replace)


def merges(text: str, stack: str | None = None) -> list[MergeHeads]:
    """Parse groups of heads into edits; heads after a merged one are renumbered for later edits of the layer.

    >>> [edit.heads for edit in merges("1.0+1.2,1.3+1.5")]
    [(0, 2), (2, 4)]
    """
    from polyhead.errors import OptionError
    from polyhead.geometry import HeadId
    from polyhead.surgery import MergeHeads

    removed: dict[int, list[int]] = {}
    used: set[HeadId] = set()
    edits = []
    for group in text.split(","):
        heads = [HeadId.parse(part.strip()) for part in group.split("+")]
        layers = {head.layer for head in heads}
        if len(layers) > 1 or len(heads) < 2:
            raise OptionError(f"a group must be two or more heads of one layer, e.g. 1.3+1.7; got {group.strip()!r}")
        repeated = sorted(used & set(heads))
        if len(repeated) or len(set(heads)) < len(heads):
            raise OptionError(
                f"a head may occur only once, got {repeated[0] if repeated else heads[0]} more than once in {text!r}"
            )
        used |= set(heads)
        (layer,) = layers
        before = removed.setdefault(layer, [])
        moved = tuple(head.head - sum(other < head.head for other in before) for head in heads)
        edits.append(MergeHeads(layer, moved, stack=stack))
        before += sorted(head.head for head in heads)[1:]
    return edits

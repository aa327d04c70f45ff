"""`polyhead merge`: heads that do the same made one."""

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
            help="Which heads become one, as in 1.3+1.7; several groups with commas between. All heads are numbered as "
            "they are before the first merge.",
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
    """Make heads of one layer that do the same into one.

    The mean of what they read, the sum of what they write: heads that compute the same are merged without loss. The
    model is written to a new folder, with what undoes the edit; the original is not touched.
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
    """The edits that a text names; later ones of a layer speak of heads that have moved up by then.

    >>> [edit.heads for edit in merges("1.0+1.2,1.3+1.5")]
    [(0, 2), (2, 4)]
    """
    from polyhead.errors import OptionError
    from polyhead.geometry import HeadId
    from polyhead.surgery import MergeHeads

    gone: dict[int, list[int]] = {}
    named: set[HeadId] = set()
    edits = []
    for group in text.split(","):
        heads = [HeadId.parse(part.strip()) for part in group.split("+")]
        layers = {head.layer for head in heads}
        if len(layers) > 1 or len(heads) < 2:
            raise OptionError(f"two heads or more of one layer become one, as in 1.3+1.7; got {group.strip()!r}")
        again = sorted(named & set(heads))
        if len(again) or len(set(heads)) < len(heads):
            raise OptionError(f"a head is named once, got {again[0] if again else heads[0]} more than once in {text!r}")
        named |= set(heads)
        (layer,) = layers
        before = gone.setdefault(layer, [])
        moved = tuple(head.head - sum(other < head.head for other in before) for head in heads)
        edits.append(MergeHeads(layer, moved, stack=stack))
        before += sorted(head.head for head in heads)[1:]
    return edits

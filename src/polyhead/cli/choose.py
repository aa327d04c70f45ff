"""`polyhead choose`: list head layouts within a budget, and those of well-known models for comparison."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli.options import MachineName, optional
from polyhead.cli.terminal import wide_console
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from polyhead.costs.choosing import Choice, Choices

MOST = 20  # layouts in the table


def choose(
    parameters: Annotated[
        str | None, optional("Maximum parameters of all attention layers, e.g. 500M or 1.5G.", metavar="N")
    ] = None,
    cache: Annotated[
        str | None, optional("Maximum KV cache per token over all layers, e.g. 128KiB.", metavar="BYTES")
    ] = None,
    latency: Annotated[
        str | None,
        optional(
            "Maximum predicted time of the phase, on a GPU without launch overhead, e.g. 20ms; requires --machine.",
            metavar="TIME",
        ),
    ] = None,
    d_model: Annotated[int | None, optional("Width of the model. [default: try common widths]", metavar="N")] = None,
    layers: Annotated[int, typer.Option(metavar="N", help="Number of attention layers.")] = 32,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens per sequence.")] = 4096,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences per batch.")] = 1,
    phase: Annotated[
        str, typer.Option(metavar="training|prefill|decode", help="Phase whose time is limited and shown.")
    ] = "decode",
    dtype: Annotated[
        str | None, optional("Dtype of the layers. [default: bfloat16, or one that --machine has rates in]")
    ] = None,
    cache_dtype: Annotated[
        str | None, optional("Dtype of the KV cache, also int8 or float8_e4m3fn. [default: that of the layers]")
    ] = None,
    machine: MachineName = None,
    latents: Annotated[
        bool, typer.Option("--latents", help="Include multi-head latent attention (MLA), as in DeepSeek.")
    ] = False,
    most: Annotated[
        int | None,
        optional(f"Maximum number of layouts to show. [default: {MOST}, and all of them with --json]", metavar="N"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List the best head layouts within a budget.

    Shows the Pareto front: a layout is left out if another one within the budget has at least as many heads, at least
    the same head_dim and at least as many KV heads. Known weaknesses are listed as warnings, and well-known models for
    comparison.

    Example: `polyhead choose --d-model 4096 --layers 32 --cache 128KiB`
    """
    from polyhead.costs.options import Budget, check_choice, parse_phases
    from polyhead.costs.quantities import named_dtype, parse_count, parse_dtype, parse_seconds
    from polyhead.costs.timing.machine_files import find_machine

    if most is not None and most < 1:
        raise OptionError(f"--most must be at least 1, got {most}")
    budget = Budget(
        parameters=None if parameters is None else parse_count(parameters, name="--parameters"),
        cache_bytes_per_token=None if cache is None else parse_count(cache, of_bytes=True, name="--cache"),
        seconds=None if latency is None else parse_seconds(latency, name="--latency"),
    )
    parse_phases([phase])
    check_choice(budget, d_model=d_model, layers=layers, context=context, batch=batch, has_machine=machine is not None)
    for name in (dtype, cache_dtype):
        if name is not None:
            parse_dtype(name)
    if machine is not None:
        find_machine(machine)

    import polyhead
    from polyhead.costs.layout_warnings import explained
    from polyhead.costs.plan_wording import machine_words

    choices = polyhead.choose(
        budget,
        d_model=d_model,
        layers=layers,
        context=context,
        batch=batch,
        phase=phase,
        dtype=None if dtype is None else named_dtype(dtype),
        cache_dtype=None if cache_dtype is None else named_dtype(cache_dtype),
        machine=machine,
        latents=latents,
    )
    if as_json:
        typer.echo(json.dumps(_as_dict(choices, most), indent=2))
        return
    console = wide_console()
    timed = machine is not None
    if choices.machine is not None:
        console.print(f"times of {phase} on {machine_words(choices.machine)}", markup=False)
        console.print("device time: without launch overhead, as under a CUDA graph; layouts are compared by it")
    console.print(_head_dims(choices))
    front = choices.found
    shown_front = front[: MOST if most is None else most]
    if front:
        console.print(_table(shown_front, f"{len(front)} of {choices.considered:,} layouts", timed=timed))
    else:
        console.print(f"none of {choices.considered:,} layouts is within the budget")
    if len(front) > len(shown_front):
        console.print(f"… and {len(front) - len(shown_front)} more; show them with --most")
    console.print()
    console.print(_table(choices.references, f"well-known models, at context {context:,}", timed=timed))
    shown = (*shown_front, *choices.references)
    for kind, explanation in explained(warned for choice in shown for warned in choice.warnings):
        console.print(f"{kind}: {explanation}", style="dim", markup=False)
    for note in choices.notes:
        console.print(f"note: {note}", style="dim", markup=False)


def _table(choices: Sequence[Choice], title: str, *, timed: bool) -> Table:
    from rich.table import Table

    from polyhead.costs.quantities import count, seconds, size

    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("layout", overflow="fold")
    for column in (
        "layers",
        "parameters",
        "cache per token",
        *(("device time", "with launch overhead") if timed else ()),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("warnings", style="yellow")
    for choice in choices:
        cells = [str(choice.layers), count(choice.parameters)]
        cells.append(size(choice.cache_bytes_per_token) if choice.cache_bytes_per_token else "none")
        if timed:
            cells += ["" if x is None else seconds(x) for x in (choice.device_seconds, choice.seconds)]
        table.add_row(_layout(choice), *cells, ", ".join(warned.kind for warned in choice.warnings))
    return table


def _head_dims(choices: Choices) -> str:
    """Return the head_dims that were considered, and those excluded with their reasons."""
    text = f"head_dim considered: {', '.join(map(str, choices.head_dims))}"
    for reason in dict.fromkeys(choices.excluded.values()):
        dims = ", ".join(str(head_dim) for head_dim, why in choices.excluded.items() if why == reason)
        text += f"; excluded: {dims} ({reason})"
    return text


def _layout(choice: Choice) -> str:
    """Return the layout in words, prefixed with the name of a known model."""
    if " at " in choice.name:
        return choice.name
    layout = choice.config.layout  # type: ignore[attr-defined]
    num_kv_heads = getattr(layout, "num_kv_heads", None)
    latent = f" over a latent of {layout.cache_width}" if num_kv_heads is None else ""
    kv_heads = f"/{num_kv_heads}" if num_kv_heads not in (None, layout.num_heads) else ""
    return f"{choice.name}: {layout.num_heads}{kv_heads}x{layout.head_dim}{latent} at {layout.embed_dim}"


def _as_dict(choices: Choices, most: int | None) -> dict[str, Any]:
    return {
        "considered": choices.considered,
        "found": len(choices.found),
        "head_dims": list(choices.head_dims),
        "excluded": choices.excluded,
        "layouts": [choice.to_dict() for choice in choices.found[:most]],
        "references": [choice.to_dict() for choice in choices.references],
        "machine": None if choices.machine is None else dataclasses.asdict(choices.machine),
        "notes": list(choices.notes),
    }

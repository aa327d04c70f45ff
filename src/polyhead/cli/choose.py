"""`polyhead choose`: which head layouts a budget allows, beside those of models that people know."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from polyhead.costs.choosing import Choice, Choices

T = TypeVar("T")


def choose(
    parameters: Annotated[
        str | None,
        typer.Option(metavar="N", help="Most parameters of all attention layers: 500M, 1.5G.", show_default=False),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Most cache bytes a token, of all layers: 128KiB.", show_default=False),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Most time of the phase: 20ms; needs --hardware.", show_default=False),
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(metavar="N", help="Width of the model; the usual ones are tried.", show_default=False)
    ] = None,
    layers: Annotated[int, typer.Option(metavar="N", help="Attention layers.")] = 32,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences at a time.")] = 1,
    phase: Annotated[str, typer.Option(help="What the time is of: training, prefill or decode.")] = "decode",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the layers; bfloat16, or what the machine was calibrated in.", show_default=False),
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="Of the cache, also int8 or float8_e4m3fn; as the layers.", show_default=False)
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A calibrated machine, or its file, to predict with.", show_default=False),
    ] = None,
    latents: Annotated[bool, typer.Option("--latents", help="Consider latent heads as well, as in DeepSeek.")] = False,
    most: Annotated[int, typer.Option(metavar="N", help="How many layouts to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Write all of it as JSON.")] = False,
) -> None:
    """List the head layouts within a budget that no other within it outdoes.

    `polyhead choose --d-model 4096 --layers 32 --cache 128KiB` asks how many heads, how wide and over how many key
    heads fit a cache. Shown are those of which no other has as many heads, as wide, over as many KV heads; each with
    what experience warns of, and below them the layouts of models that people know.
    """
    from rich.console import Console

    from polyhead.costs import choosing
    from polyhead.costs.layout_warnings import explained
    from polyhead.costs.layouts.model import named_dtype
    from polyhead.costs.quantities import parse_count, parse_seconds
    from polyhead.costs.timing.machine import Machine
    from polyhead.errors import OptionError, PolyheadError

    limits = {
        "parameters": _parsed(parameters, "--parameters", parse_count),
        "cache_bytes_per_token": _parsed(cache, "--cache", lambda text: parse_count(text, of_bytes=True)),
        "seconds": _parsed(latency, "--latency", parse_seconds),
    }
    try:
        if most < 1:
            raise OptionError(f"--most must be at least 1, got {most}")
        found = choosing.choose(
            choosing.Budget(**limits),  # type: ignore[arg-type]
            d_model=d_model,
            layers=layers,
            context=context,
            batch=batch,
            phase=phase,
            dtype=None if dtype is None else named_dtype(dtype),
            cache_dtype=None if cache_dtype is None else named_dtype(cache_dtype),
            machine=None if hardware is None else Machine.load(hardware),
            latents=latents,
        )
    except PolyheadError as error:
        typer.echo(f"polyhead choose: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(_as_dict(found), indent=2))
        return
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=120, highlight=False)
    timed = hardware is not None
    if found.found:
        console.print(_table(found.found[:most], f"{len(found.found)} of {found.considered:,} layouts", timed=timed))
    else:
        console.print(f"none of {found.considered:,} layouts is within the budget")
    if len(found.found) > most:
        console.print(f"… and {len(found.found) - most} more; --most shows them")
    console.print()
    console.print(_table(found.references, f"models that people know, at context {context:,}", timed=timed))
    shown = (*found.found[:most], *found.references)
    for kind, why in explained(warned for choice in shown for warned in choice.warnings):
        console.print(f"{kind}: {why}", style="dim", markup=False)
    for note in found.notes:
        console.print(f"note: {note}", style="dim", markup=False)


def _table(choices: Sequence[Choice], title: str, *, timed: bool) -> Table:
    from rich.table import Table

    from polyhead.costs.quantities import count, seconds, size

    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("layout", overflow="fold")
    for column in ("layers", "parameters", "cache a token", *(("time",) if timed else ())):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("warnings", style="yellow")
    for choice in choices:
        cells = [str(choice.layers), count(choice.parameters)]
        cells.append(size(choice.cache_bytes_per_token) if choice.cache_bytes_per_token else "none")
        if timed:
            cells.append("" if choice.seconds is None else seconds(choice.seconds))
        table.add_row(_layout(choice), *cells, ", ".join(warned.kind for warned in choice.warnings))
    return table


def _layout(choice: Choice) -> str:
    """By its heads, with the name of a model before them."""
    if " at " in choice.name:
        return choice.name
    layout = choice.config.layout  # type: ignore[attr-defined]
    kept = getattr(layout, "num_kv_heads", None)
    shared = f" over a latent of {layout.cache_width}" if kept is None else ""
    kv_heads = f"/{kept}" if kept not in (None, layout.num_heads) else ""
    return f"{choice.name}: {layout.num_heads}{kv_heads}x{layout.head_dim}{shared} at {layout.embed_dim}"


def _as_dict(found: Choices) -> dict[str, Any]:
    return {
        "considered": found.considered,
        "layouts": [choice.to_dict() for choice in found.found],
        "references": [choice.to_dict() for choice in found.references],
        "notes": list(found.notes),
    }


def _parsed(text: str | None, option: str, parse: Callable[[str], T]) -> T | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None

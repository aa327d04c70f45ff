"""`polyhead plan`: what a head layout costs before anything is trained or served."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.costs.layouts.model import ModelLayout
    from polyhead.costs.timing.machine import Machine

DEFAULT_CONTEXT = 4096


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model people know (llama3.1-8b, gpt3-175b, ...), a folder or file of a config, a name on the hub.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A config as JSON: Hugging Face's, or one of ours.", show_default=False),
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(metavar="N", help="Width of the model, for a layout by its sizes.", show_default=False)
    ] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Query heads.", show_default=False)] = None,
    kv_heads: Annotated[
        int | None, typer.Option(metavar="N", help="Key and value heads; as many as heads.", show_default=False)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(metavar="N", help="Width of a head; d-model / heads.", show_default=False)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Layers, for sizes or a config of ours; 1.", show_default=False)
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="N", help="Keys that a token sees, for sizes; all.", show_default=False)
    ] = None,
    rotary: Annotated[bool, typer.Option("--rotary", help="Rotary positions, for a layout by its sizes.")] = False,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--bidirectional", help="Whether tokens see no later ones.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences at a time.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Tokens of a sequence; {DEFAULT_CONTEXT}, or the model's longest if that is less.",
            show_default=False,
        ),
    ] = None,
    beyond: Annotated[bool, typer.Option("--beyond", help="Allow a context longer than the model's own.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the layers: bfloat16, float16, float32; what the config says.", show_default=False),
    ] = None,
    cache_dtype: Annotated[
        str | None,
        typer.Option(help="Of the cache, also int8 or float8_e4m3fn; as the layers.", show_default=False),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(metavar="PHASE,...", help="Any of training, prefill, decode; all.", show_default=False),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A calibrated machine, or its file, to predict times for.", show_default=False
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine first, keep what it reached, and predict with it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the plan as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with plots.", show_default=False)
    ] = None,
) -> None:
    """What the attention of a model costs: parameters, FLOPs, bytes, memory, cache, and predicted time.

    `polyhead plan llama3.1-8b --context 8192`, `polyhead plan --d-model 4096 --heads 32 --kv-heads 8 --layers 32`,
    `polyhead plan --config config.json --hardware nvidia-h200 --output plan.html`. Counts are exact; times come from
    what a machine was measured to reach, and `--calibrate` measures this one.
    """
    from polyhead.cli.plan_table import draw
    from polyhead.costs.layouts.model import named_dtype
    from polyhead.costs.planning import plan_model
    from polyhead.costs.timing.machine import Machine
    from polyhead.errors import PolyheadError

    by_sizes = {"--heads": heads, "--kv-heads": kv_heads, "--head-dim": head_dim, "--window": window}
    try:
        _check_output(output)
        _check_calibration(calibrate, hardware, dtype)
        machine = None if hardware is None else Machine.load(hardware)
        if calibrate and all(x is None for x in (model, config, d_model, layers, output, *by_sizes.values())):
            _calibrated(as_json)
            return
        layout = _layout(model, config, d_model, by_sizes, layers, causal, rotary)
        usual = min(DEFAULT_CONTEXT, layout.context or DEFAULT_CONTEXT)
        planned = partial(
            plan_model,
            layout,
            context=usual if context is None else context,
            batch=batch,
            dtype=None if dtype is None else named_dtype(dtype),
            cache_dtype=None if cache_dtype is None else named_dtype(cache_dtype),
            phases=None if phase is None else [part.strip() for part in phase.split(",")],
            beyond=beyond,
        )
        if calibrate:
            planned()  # what it refuses is refused before minutes are spent on measuring
            machine = _calibrated(as_json)
        found = planned(machine=machine)
        written = None
        if output is not None:
            from polyhead.costs.curves import over_context, over_heads
            from polyhead.report.plan_page import write_plan_page

            written = write_plan_page(output, found, over_context(found, machine), over_heads(found, machine))
    except PolyheadError as error:
        typer.echo(f"polyhead plan: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        draw(found, _console())
    if written is not None:
        typer.echo(str(written), err=as_json)


def _layout(
    model: str | None,
    config: Path | None,
    d_model: int | None,
    sizes: dict[str, int | None],
    layers: int | None,
    causal: bool | None,
    rotary: bool,
) -> ModelLayout:
    from polyhead.costs.layouts.reading import from_sizes, read_layout
    from polyhead.errors import OptionError

    given = [
        name for name, value in (("MODEL", model), ("--config", config), ("--d-model", d_model)) if value is not None
    ]
    if len(given) != 1:
        raise OptionError(
            f"a layout is given by MODEL, by --config or by --d-model with --heads; got {' and '.join(given) or 'none'}"
        )
    named = [name for name, value in {**sizes, "--rotary": rotary or None}.items() if value is not None]
    if d_model is None:
        if named:
            raise OptionError(f"{given[0]} says how its heads lie, got {', '.join(named)} beside it; leave them out")
        if config is not None and not config.is_file():
            raise OptionError(f"--config must name a file, got {config}, which is none")
        source = model if model is not None else config
        assert source is not None
        return read_layout(source, layers=layers, causal=causal)
    heads = sizes["--heads"]
    if heads is None:
        raise OptionError(f"a layout by its sizes needs --heads, got --d-model {d_model} without it")
    return from_sizes(
        d_model,
        heads,
        kv_heads=sizes["--kv-heads"],
        head_dim=sizes["--head-dim"],
        layers=1 if layers is None else layers,
        causal=causal is not False,
        window=sizes["--window"],
        rotary=rotary,
    )


def _calibrated(to_stderr: bool) -> Machine:
    """Measure this machine, with a bar, and keep what it reached."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from polyhead.costs.calibration import calibrate
    from polyhead.errors import OptionError

    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        machine = calibrate(report=show)
    try:
        kept = f"kept in {machine.save()}"
    except OptionError as error:
        kept = f"not kept: {error}"
    typer.echo(f"measured {machine.name}, {kept}", err=to_stderr)
    return machine


def _check_calibration(calibrate: bool, hardware: str | None, dtype: str | None) -> None:
    """What would be found out only after minutes of measuring."""
    import torch

    from polyhead.costs.calibration import DTYPES
    from polyhead.costs.layouts.model import dtype_name, named_dtype
    from polyhead.costs.timing.machine import check_own_folder
    from polyhead.errors import OptionError

    if not calibrate:
        return
    if hardware is not None:
        raise OptionError(
            f"--calibrate predicts for the machine that it measures, got --hardware {hardware} beside it; leave one out"
        )
    measured = DTYPES["cuda" if torch.cuda.is_available() else "cpu"]
    if dtype is not None and named_dtype(dtype) not in measured:
        names = ", ".join(str(dtype_name(x)) for x in measured)
        raise OptionError(f"--calibrate measures this machine in {names}, got --dtype {dtype}")
    check_own_folder()


def _check_output(output: Path | None) -> None:
    from polyhead.errors import OptionError
    from polyhead.observation.run_folder import check_file
    from polyhead.report.page import check_place

    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise OptionError(f"a page is one file in a folder that is there, got {output}")
    if output is not None:
        check_file(output, "--output")
        check_place(output)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # Files and pipes have no width of their own; a wrapped table there is no table.
    return console if console.is_terminal else Console(width=120, highlight=False)

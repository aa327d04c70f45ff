"""`python -m benchmarks`: figures of this library on the machine at hand, each beside its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.plan_accuracy.command import plan
from benchmarks.steps import run_and_keep
from benchmarks.surgery_quality.command import surgery
from benchmarks.training.command import training
from polyhead.cli.options import ResultFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.statistics_speed import Shape

app = typer.Typer(help="Measure this library against others on the machine at hand.", no_args_is_help=True)


app.command("plan")(plan)
app.command("surgery")(surgery)
app.command("training")(training)


@app.callback()
def _bench() -> None:
    """Measure this library against others on the machine at hand."""


@app.command(
    "layers",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def layers(context: typer.Context) -> None:
    """Time whole layers against other implementations: forward, training step, decoding, overhead."""
    from benchmarks.layers import main

    raise typer.Exit(main(context.args))


@app.command("statistics")
def statistics(
    output: ResultFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and alternations: a look, no figure.")] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PART,...", help="Any of forward, backward, profile, materialised, memory, layer, decode, cpu."
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="BxHxNxD,...",
            help="Batch, heads (or heads/kv_heads), tokens and head_dim, for every part instead of its own.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random data and of the order of the contenders.")] = 0,
    commit: Annotated[
        str | None, typer.Option(metavar="SHA", help="What is measured, for a copy without its repository.")
    ] = None,
) -> None:
    """Measure the cost of exact statistics of every head, against attention without any.

    On a CUDA machine: forward, forward + backward, the profile, materialised weights, memory at 131,072 tokens, the
    layer, and decoding one token. Anywhere: the CPU. Every contender is held against float64 before it is timed; they
    run in turns, and a figure is the median of paired ratios with its 95% interval. A miss is an interval wholly above
    the bound.
    """
    import torch

    from benchmarks import statistics_speed
    from polyhead.costs.measuring import machine

    parts = _parts(only, statistics_speed.PARTS)
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    steps = statistics_speed.plan(parts, _shapes(shapes), quick=quick, seed=seed, gpu=gpu)
    if gpu is None:
        left_out = [part for part in parts if part != "cpu"]
        typer.echo(statistics_speed.NO_GPU + (f": left out are {', '.join(left_out)}" if left_out else ""))
    if steps:
        facts = {**machine.describe(gpu or torch.device("cpu"), commit), "quick": quick, "parts": parts, "seed": seed}
        run_and_keep(steps, facts, output)


@app.command("inspection")
def inspection(
    output: ResultFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="One place and few alternations: a look, no figure.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random weights and texts.")] = 0,
    commit: Annotated[
        str | None, typer.Option(metavar="SHA", help="What is measured, for a copy without its repository.")
    ] = None,
) -> None:
    """Measure the cost of observing a whole model, against its plain forward.

    On a CUDA machine: a Llama of 16 layers at 4,096 to 131,072 tokens, with statistics of rows and with maps, causal,
    left-padded and windowed, in time and in peak memory; beside it, while it fits, the model's own
    `output_attentions`. Elsewhere: the real MiniLM at 256 tokens.
    """
    import torch

    from benchmarks import inspection_speed, statistics_speed
    from polyhead.costs.measuring import machine

    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    if gpu is None:
        typer.echo(f"{statistics_speed.NO_GPU}: MiniLM is watched on the CPU")
    steps = inspection_speed.plan(quick=quick, seed=seed, gpu=gpu)
    facts = {**machine.describe(gpu or torch.device("cpu"), commit), "quick": quick, "seed": seed}
    run_and_keep(steps, facts, output)


@app.command("viewer")
def viewer(
    output: ResultFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="An eighth of the tokens: a look, no figure.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random queries and keys.")] = 0,
    commit: Annotated[
        str | None, typer.Option(metavar="SHA", help="What is measured, for a copy without its repository.")
    ] = None,
) -> None:
    """Measure the latency of `polyhead view` for the picture of a head, for a tile of it, for a word.

    At 32,768 tokens on a CPU, at 131,072 on a CUDA machine; what is timed is what the server does.
    """
    import torch

    from benchmarks import viewer_speed
    from polyhead.costs.measuring import machine

    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    steps = viewer_speed.plan(quick=quick, seed=seed, gpu=gpu)
    facts = {**machine.describe(gpu or torch.device("cpu"), commit), "quick": quick, "seed": seed}
    run_and_keep(steps, facts, output)


@app.command("variants")
def variants(
    output: ResultFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller shapes: a look, no figure.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="PART,...", help="Any of routed, rows, talking, latent, floors.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random data and of the order of the contenders.")] = 0,
    commit: Annotated[
        str | None, typer.Option(metavar="SHA", help="What is measured, for a copy without its repository.")
    ] = None,
) -> None:
    """Measure the cost of attention variants on a CUDA machine.

    Routed heads over all heads, the attention of chosen rows, talking heads over ordinary ones, one token over a
    latent cache, and every arrangement over its own formula written by hand.
    """
    import torch

    from benchmarks import statistics_speed
    from benchmarks import variant_speed as arrangement_speed
    from polyhead.costs.measuring import machine

    parts = _parts(only, arrangement_speed.PARTS)
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    if gpu is None:
        typer.echo(f"{statistics_speed.NO_GPU}, and these figures are of its kernels")
        return
    steps = arrangement_speed.plan(parts, quick=quick, seed=seed, gpu=gpu)
    run_and_keep(steps, {**machine.describe(gpu, commit), "quick": quick, "parts": parts, "seed": seed}, output)


def _parts(text: str | None, known: Sequence[str]) -> list[str]:
    names = list(known) if text is None else text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"a part is one of {', '.join(known)}; got {', '.join(map(repr, unknown))}", param_hint="--only"
        )
    return names


def _shapes(text: str | None) -> list[Shape] | None:
    from benchmarks.statistics_speed import Shape

    try:
        return None if text is None else [Shape.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shapes") from None

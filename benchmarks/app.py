"""`python -m benchmarks`: figures of this library on the machine at hand, each beside its bound.

Everything that is timed goes through `measuring.runner.run_steps`: a command plans steps, and the runner times their
cases, repeats rows that are too noisy, and shows and writes the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from benchmarks.alarms.command import alarms
from benchmarks.collectives.command import collectives
from benchmarks.coverage.command import coverage
from benchmarks.options import Commit, Quick, Seed
from benchmarks.plan_accuracy.command import plan
from benchmarks.stability.command import stability
from benchmarks.statements.command import statements
from benchmarks.surgery_quality.command import conversion, merging, prediction, surgery
from benchmarks.training.command import training
from polyhead.cli.errors import CommandGroup
from polyhead.cli.options import ResultFile, writable_file
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

T = TypeVar("T")
RESULTS = Path(__file__).resolve().parent / "results"
NO_GPU = "no CUDA GPU was found"

app = typer.Typer(
    name="python -m benchmarks",
    cls=CommandGroup,
    help="Measure this library against others on the machine at hand.",
    pretty_exceptions_enable=False,
)
app.command("plan")(plan)
app.command("statements")(statements)
app.command("surgery")(surgery)
app.command("conversion")(conversion)
app.command("merging")(merging)
app.command("prediction")(prediction)
app.command("training")(training)
app.command("alarms")(alarms)
app.command("stability")(stability)
app.command("collectives")(collectives)
app.command("coverage")(coverage)


@app.callback()
def _bench() -> None:
    """Measure this library against others on the machine at hand.

    Contenders alternate, and a figure is the median of paired ratios with its 95% interval. A miss is a median above
    its bound. A row with an interval wider than 2% of its median is timed again, up to three times; if it is still as
    wide, it is unsettled, neither a pass nor a miss.
    """


@app.command("layers")
def layers(
    output: ResultFile = None,
    quick: Quick = False,
    only: Annotated[
        str | None, typer.Option(metavar="PART,...", help="Any of layer, causal, padded, guard, decode, overhead.")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="BxNxDxH,...", help="Batch, tokens, width and heads, instead of the table's.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="cuda where there is one.", show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 where a bound is missed.")] = False,
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Time whole layers against other implementations: forward, training step, decoding, overhead.

    Without --output the results are written to benchmarks/results/, one file for each machine.
    """
    import torch

    from benchmarks import layer_speed
    from benchmarks.layer_speed.contenders import Shape
    from benchmarks.measuring.runner import run_steps

    if device not in (None, *layer_speed.SHAPES):
        raise OptionError(f"--device must be cpu or cuda, got {device!r}")
    chosen = torch.device(device) if device is not None else _gpu() or torch.device("cpu")
    parts = _parts(only, layer_speed.PARTS)
    steps = layer_speed.plan(parts, _shapes(shapes, Shape.parse), device=chosen, quick=quick, seed=seed)
    if output is None:
        output = RESULTS / layer_speed.file_name(chosen, quick=quick, part=only is not None or shapes is not None)
    run_steps(steps, chosen, output, commit=commit, strict=strict, quick=quick, parts=parts, seed=seed)


@app.command("statistics")
def statistics(
    output: ResultFile = None,
    quick: Quick = False,
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
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Measure the cost of exact statistics of every head, against attention without any.

    On a CUDA machine: forward, forward + backward, the profile, materialised weights, memory at 131,072 tokens, the
    layer, and decoding one token. Anywhere: the CPU. Every contender is checked against float64 before it is timed.
    """
    from benchmarks import statistics_speed
    from benchmarks.statistics_speed import Shape

    parts, gpu = _parts(only, statistics_speed.PARTS), _gpu()
    steps = statistics_speed.plan(parts, _shapes(shapes, Shape.parse), quick=quick, seed=seed, gpu=gpu)
    if gpu is None:
        left_out = [part for part in parts if part != "cpu"]
        typer.echo(NO_GPU + (f": left out are {', '.join(left_out)}" if left_out else ""))
    if steps:
        _run(steps, gpu, output, commit=commit, quick=quick, parts=parts, seed=seed)


@app.command("inspection")
def inspection(output: ResultFile = None, quick: Quick = False, seed: Seed = 0, commit: Commit = None) -> None:
    """Measure the cost of observing a whole model, against its plain forward.

    On a CUDA machine: a Llama of 16 layers at 4,096 to 131,072 tokens, with statistics of rows and with maps, causal,
    left-padded and windowed, in time and in peak memory; beside it, while it fits, the model's own
    `output_attentions`. Elsewhere: the real MiniLM at 256 tokens.
    """
    from benchmarks import inspection_speed

    gpu = _gpu()
    if gpu is None:
        typer.echo(f"{NO_GPU}: MiniLM is observed on the CPU")
    steps = inspection_speed.plan(quick=quick, seed=seed, gpu=gpu)
    _run(steps, gpu, output, commit=commit, quick=quick, seed=seed)


@app.command("monitoring")
def monitoring(
    output: ResultFile = None,
    only: Annotated[str | None, typer.Option(metavar="PART,...", help="Any of eager, compiled.")] = None,
    quick: Quick = False,
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Measure the cost of `HeadMonitor` with all its columns, against the same training steps without it.

    On a CUDA machine: Llama models of 8 and 16 layers in bfloat16 with AdamW, at 2,048 to 16,384 tokens, monitored in
    every step and in every 10th, in time and in peak memory. Elsewhere: a small model, without bounds.
    """
    from benchmarks import monitoring

    parts, gpu = _parts(only, list(monitoring.PARTS)), _gpu()
    steps = monitoring.plan(parts, quick=quick, seed=seed, gpu=gpu)
    _run(steps, gpu, output, commit=commit, quick=quick, seed=seed)


@app.command("one-rank")
def one_rank(
    output: ResultFile = None,
    only: Annotated[str | None, typer.Option(metavar="PART,...", help="Any of tensor, context.")] = None,
    quick: Quick = False,
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Measure what the distributed paths cost in a group of one rank, against the same calls without a group.

    On a CUDA machine with NCCL: language models in bfloat16 whose heads `HeadParallel` distributes, and
    `context_attention` with statistics. Elsewhere with gloo: small ones, without bounds.
    """
    from benchmarks import one_rank

    parts, gpu = _parts(only, one_rank.PARTS), _gpu()
    _run(one_rank.plan(parts, quick=quick, seed=seed, gpu=gpu), gpu, output, commit=commit, quick=quick, seed=seed)


@app.command("viewer")
def viewer(output: ResultFile = None, quick: Quick = False, seed: Seed = 0, commit: Commit = None) -> None:
    """Measure the latency of `polyhead view` for the picture of a head, for a tile of it, for a word.

    At 32,768 tokens on a CPU, at 131,072 on a CUDA machine; what is timed is what the server does.
    """
    from benchmarks import viewer_speed

    gpu = _gpu()
    steps = viewer_speed.plan(quick=quick, seed=seed, gpu=gpu)
    _run(steps, gpu, output, commit=commit, quick=quick, seed=seed)


@app.command("variants")
def variants(
    output: ResultFile = None,
    quick: Quick = False,
    only: Annotated[
        str | None, typer.Option(metavar="PART,...", help="Any of routed, rows, talking, latent, floors.")
    ] = None,
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Measure the cost of attention variants on a CUDA machine.

    Routed heads over all heads, the attention of selected rows, talking heads over plain ones, one token over a
    latent cache, and every variant over its own formula written by hand.
    """
    from benchmarks import variant_speed

    parts, gpu = _parts(only, variant_speed.PARTS), _gpu()
    if gpu is None:
        typer.echo(f"{NO_GPU}, and these figures are of its kernels")
        return
    steps = variant_speed.plan(parts, quick=quick, seed=seed, gpu=gpu)
    _run(steps, gpu, output, commit=commit, quick=quick, parts=parts, seed=seed)


@app.command("recorded")
def recorded(output: ResultFile = None, quick: Quick = False, seed: Seed = 0, commit: Commit = None) -> None:
    """Time forward + backward of attention on a CUDA machine: our kernels and PyTorch's over cuDNN's."""
    from benchmarks.recorded import plan

    gpu = _gpu()
    if gpu is None:
        typer.echo(f"{NO_GPU}, and cuDNN's attention needs one")
        return
    _run(plan(quick=quick, seed=seed, gpu=gpu), gpu, output, commit=commit, quick=quick, seed=seed)


@app.command("replaced")
def replaced(
    output: ResultFile = None,
    quick: Quick = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PART,...",
            help="Any of attention, statistics, training, dense, profile, decode, layer, routed, observe, host.",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 where a bound is missed.")] = False,
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Time our calls with default arguments, Python included, against the calls that they replace.

    On a CUDA machine that is PyTorch's function on cuDNN, a layer written by hand around it, and the model without
    `observe`; on a CPU PyTorch's function, for the parts attention, statistics and layer.
    """
    import torch

    from benchmarks import replaced

    parts, gpu = _parts(only, replaced.PARTS), _gpu()
    steps = replaced.plan(parts, quick=quick, seed=seed, device=gpu or torch.device("cpu"))
    _run(steps, gpu, output, commit=commit, strict=strict, quick=quick, parts=parts, seed=seed)


@app.command("dynamic_heads")
def dynamic_heads(
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="File of finished trainings, one per line; a run resumes from it.",
            callback=writable_file,
        ),
    ],
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the result, as .svg.", callback=writable_file)
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="TASK,...", help="Any of language, translation.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed and few steps: a look, no figure.")] = False,
    commit: Commit = None,
) -> None:
    """Train models whose heads are fixed, pruned or added in training, at equal compute.

    A byte-level language model on Tiny Shakespeare, and translation from Chinese to English on Tatoeba, of the folder
    that POLYHEAD_DATA names; on the packaged texts without it. Held-out bits per byte over five seeds, on one core.
    """
    from benchmarks.dynamic_heads import TASKS, run

    run(output, figure, _parts(only, list(TASKS)), quick=quick, commit=commit)


@app.command("bridge")
def bridge(
    output: ResultFile = None,
    tokens: Annotated[int, typer.Option(min=2048, help="Length of the long text.")] = 100_000,
    commit: Commit = None,
) -> None:
    """Observe a long text through a TransformerBridge, and compute how large the cache of TransformerLens would be.

    Needs TransformerLens, which polyhead does not require: pip install 'transformer-lens>=4'.
    """
    from benchmarks.bridge import run

    run(tokens, output, commit)


def _gpu() -> torch.device | None:
    import torch

    return torch.device("cuda") if torch.cuda.is_available() else None


def _run(steps: Sequence[Any], gpu: torch.device | None, output: Path | None, **settings: Any) -> None:
    import torch

    from benchmarks.measuring.runner import run_steps

    run_steps(steps, gpu or torch.device("cpu"), output, **settings)


def _parts(text: str | None, known: Sequence[str]) -> list[str]:
    names = list(known) if text is None else text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise OptionError(f"--only must be one of {', '.join(known)}; got {', '.join(map(repr, unknown))}")
    return names


def _shapes(text: str | None, parse: Callable[[str], T]) -> list[T] | None:
    try:
        return None if text is None else [parse(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--shapes: {error}") from None

"""`polyhead inspect`: analyse every attention head of a model."""

from __future__ import annotations

import math
import os
import shlex
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli.edit_options import ContextLength, Field
from polyhead.cli.errors import resumable
from polyhead.cli.inspect_runs import check_inputs, check_ray_options, requested_shard, resumed_settings, show_shard
from polyhead.cli.options import (
    AllowPickle,
    Device,
    Dtype,
    Language,
    TrustRemoteCode,
    check_device,
    check_dtype,
    check_positive,
    optional,
)
from polyhead.cli.progress_bars import ProgressBars
from polyhead.cli.report import check_page, write
from polyhead.errors import OptionError
from polyhead.inspection.run_files import REST

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.inspection import Inspection
    from polyhead.workflows.sharded_inspecting import ShardReading

TOP_KEYS = 5  # most attended tokens shown per head
LEAST = 4  # least important heads shown
# Options that a resumed run takes from the command line; permissions are never read from a file.
_NOT_OF_THE_RUN = (
    "resume",
    "save_seconds",
    "worker_timeout",
    "ray",
    "ray_workers",
    "table",
    "html",
    "lang",
    "deterministic",
    "allow_pickle",
    "trust_remote_code",
)


def inspect(
    command: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folder of a transformers model, .gguf file, name on the Hugging Face hub, or a packaged model: "
            "tiny, minilm, smollm2 (SmolLM2-135M-Instruct, quantised to Q4_1). [default: minilm]",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        optional(
            "Text to read: .txt, .md, .jsonl or .parquet (also .gz), a folder of them, - for standard input, or "
            "datasets:PATH[:SPLIT], which Hugging Face `datasets` streams. "
            "[default: a built-in text in English, and in Chinese if the tokenizer knows it]",
            metavar="FILE|DIR|-|datasets:PATH",
        ),
    ] = None,
    field: Field = "text",
    context: ContextLength = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens to read.")] = 65_536,
    batch: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens per batch.")] = 4096,
    layers: Annotated[str | None, optional("Inspect only these layers, from 0.", metavar="0,1,...")] = None,
    statistics: Annotated[
        str | None,
        optional(
            "Compute only these statistics: entropy, normalized_entropy, confidence, max_logit, max_abs_logit, "
            "mean_distance, mean_offset, mean_squared_distance, sink_mass, self_mass, previous_mass, next_mass, "
            "window_mass, learned_sink_mass.",
            metavar="NAME,...",
        ),
    ] = None,
    importance: Annotated[
        str,
        typer.Option(
            metavar="auto|none|gradient|ablation|both",
            help="Head importance: gradient of the loss, ablation of each head in turn (exact, slow), both, or none. "
            "auto: gradient if the model predicts tokens, else ablation on a short text.",
        ),
    ] = "auto",
    importance_tokens: Annotated[
        int | None,
        optional(
            "Number of tokens on which importance is measured. "
            "[default: 8192 for gradient, 2048 for ablation and both, 256 if auto selects ablation]",
            metavar="N",
        ),
    ] = None,
    chance: Annotated[
        bool,
        typer.Option(
            "--chance/--no-chance", help="Also inspect the model with random weights, as a baseline for roles."
        ),
    ] = True,
    save: Annotated[
        Path | None, optional("Save the table, similarity matrices and raw observations to this folder.", metavar="DIR")
    ] = None,
    resume: Annotated[Path | None, optional("Continue an interrupted run from its folder.", metavar="DIR")] = None,
    save_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Interval between saves to the run's folder, in seconds.")
    ] = 30.0,
    shard: Annotated[
        str | None,
        optional(
            "Read only part I of N of the text, such as 3/16, and save it for `polyhead merge-runs`; needs --save.",
            metavar="I/N",
        ),
    ] = None,
    worker_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Under torchrun or Ray, stop if a worker has not reported for this time, in seconds.",
        ),
    ] = 600.0,
    ray: Annotated[
        str | None,
        optional(
            "Read the text with the workers of a Ray cluster: its address, auto for the one of RAY_ADDRESS or of this "
            "machine, or local to start one.",
            metavar="ADDRESS|auto|local",
        ),
    ] = None,
    ray_workers: Annotated[
        int | None, optional("Number of Ray workers. [default: one for each GPU, else for each CPU]", metavar="N")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Also print all values per head, and its most attended tokens.")
    ] = False,
    html: Annotated[Path | None, optional("Also write a self-contained HTML report.", metavar="FILE")] = None,
    lang: Language = "en",
    device: Device = None,
    dtype: Dtype = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Use only deterministic kernels, on a GPU as well.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of samples, random weights and repeated words.")] = 0,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Analyse every attention head of a model.

    Runs the model on a text and reports attention statistics, head outputs, redundancy, importance and roles of each
    head, as a grid of layers and heads with the three main findings. Memory stays linear in the length of the text,
    except for models that compute a softmax by hand (bloom, deberta, ...).

    Documents are tokenised and split into consecutive contexts; contexts never span two documents, and a last one of
    fewer than 8 tokens is dropped.

    Ctrl-C stops reading and shows the results so far. Batches are counted completely or not at all, so a run continued
    with --resume has the same results as an uninterrupted one.

    `torchrun --nproc-per-node 4 -m polyhead inspect ...` reads the text with four processes and has the results of one.
    --resume with as many processes redoes what a killed one had not saved. --ray does the same on a Ray cluster. With
    any other scheduler, start one process for each --shard and merge them with `polyhead merge-runs`.

    Example: `polyhead inspect smollm2 --text corpus.txt --save run --html report.html`
    """
    from rich.console import Console

    from polyhead.cli.workers import joined_workers
    from polyhead.inspection.settings import Settings
    from polyhead.progress import ignore_progress

    if resume is not None:
        _check_alone(command)
    check_dtype(dtype)
    check_positive("--worker-timeout", worker_timeout)
    console = Console(highlight=False)
    folder = save if resume is None else resume
    # How a run is continued; a run of torchrun only by as many processes.
    how = "with: polyhead inspect" if ray is None else f"with: polyhead inspect --ray {ray}"
    found: Inspection | None = None
    reading: ShardReading | None = None
    with (
        joined_workers(command.command_path, worker_timeout) as workers,
        resumable(folder, how if workers is None else "by as many workers with"),
        ExitStack() as stack,
    ):
        check_ray_options(ray, ray_workers, shard, workers)
        check_page(html, lang)
        check_positive("--save-seconds", save_seconds, zero=True)
        if resume is not None:
            settings, part = resumed_settings(resume, workers, by_ray=ray is not None)
        else:
            part = requested_shard(shard, save, workers)
            settings = Settings(
                model=model,
                text=text,
                field=field,
                context=context,
                tokens=tokens,
                batch_tokens=batch,
                layers=_numbers(layers),
                statistics=None if statistics is None else tuple(statistics.split(",")),
                importance=importance,  # type: ignore[arg-type]  # checked by the settings themselves
                importance_tokens=importance_tokens,
                chance=chance,
                seed=seed,
                dtype=dtype,
            )
        # torchrun repeats the command after a failure (--max-restarts), and the run continues.
        restarted = workers is not None and workers.restarts > 0
        divided = workers is not None or part is not None or ray is not None
        is_new = save is not None and (not restarted or (save / REST).exists())
        check_inputs(settings, save=save if is_new else None, folder=folder, divided=divided)
        if part is not None and (table or html is not None):
            raise OptionError(
                "--table and --html show the results of all shards, got them with one; merge the shards first"
            )

        # Threads that wait for the next operation sleep: by default they spin, which a busy machine pays for twice.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when PyTorch is imported
        import torch

        from polyhead.parallel.ray_workers import join_cluster
        from polyhead.workflows.inspecting import inspect_model
        from polyhead.workflows.ray_inspecting import inspect_with_ray
        from polyhead.workflows.sharded_inspecting import inspect_shard, inspect_with_workers

        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch requires it for matrix products
            torch.use_deterministic_algorithms(True)
        cluster = None if ray is None else stack.enter_context(join_cluster(ray, ray_workers))
        if resume is None:
            # The devices of a cluster are not those of this machine.
            settings = replace(settings, device=device or cluster.device if cluster else check_device(device))
        options: dict[str, Any] = {
            "resume": resume is not None or restarted,
            "allow_pickle": allow_pickle,
            "trust_remote_code": trust_remote_code,
        }
        if cluster is None:
            options["save_seconds"] = save_seconds
        with ProgressBars() if workers is None or workers.is_first else nullcontext(ignore_progress) as progress:
            if cluster is not None:
                options |= {"workers": ray_workers, "seconds": worker_timeout}
                found = inspect_with_ray(settings, cluster, folder=folder, progress=progress, **options)
            elif part is not None and folder is not None:
                reading = inspect_shard(settings, part, folder, progress=progress, **options)
            elif workers is not None:
                found = inspect_with_workers(settings, workers, folder=folder, progress=progress, **options)
            else:
                found = inspect_model(settings, folder=folder, progress=progress, **options)
    if reading is not None and folder is not None:
        show_shard(reading, folder, console)
        if not reading.complete:
            raise typer.Exit(130)
    if found is None:
        return  # of a shard, or printed by the first of the workers
    show(found, console, table=table)
    if folder is not None:
        files = "heads.parquet, inspection.json, relations.safetensors, pictures.safetensors"
        console.print(f"\nSaved to {folder}: {files}", markup=False)
    if html is not None:
        typer.echo(f"\n{write(html, found, lang)}")
    if found.facts["interrupted"]:
        raise typer.Exit(130)


def show(found: Inspection, console: Console, *, table: bool = False) -> None:
    """Print the summary of an inspection: its inputs, the grid of heads, and the findings."""
    from polyhead.cli.heads_picture import legend, picture
    from polyhead.costs.quantities import plural
    from polyhead.inspection.identity import edits_of
    from polyhead.inspection.vocabulary import column_of
    from polyhead.inspection.wording import loss_in_words
    from polyhead.workflows.calibration_text import FEW

    facts = found.facts
    console.print(
        f"{facts['model']}\n{facts['tokens']:,} tokens of {plural(facts['documents'], 'document')}, in contexts of "
        f"up to {facts['context']}; {len(found.table)} heads; {facts['seconds']:.0f} s",
        markup=False,
    )
    edits = edits_of(found.table.sites)
    if edits is not None:
        console.print(f"Edited, in head numbers of the original: {edits.en}", markup=False, soft_wrap=True)
    if facts.get("materialised"):
        from polyhead.observation.intercepted_calls import MATERIALISED

        console.print(MATERIALISED.capitalize(), style="yellow", markup=False)
    if facts["interrupted"] and not facts.get("read"):
        console.print("Interrupted: results cover only the text read so far.", style="yellow")
    if facts["unknown"] > 0.05:
        console.print(
            f"{facts['unknown']:.0%} of the tokens are unknown tokens, which the heads cannot distinguish.",
            style="yellow",
        )
    if facts["intervals_over"] == "contexts" and 1 < facts["contexts"] < FEW:
        console.print(
            f"Intervals and standard errors are over fewer than {FEW} contexts, too few to be reliable; for "
            "more, use a longer --text (read up to --tokens) or a smaller --context",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    for reason in facts["left_out"]:
        console.print(f"Skipped: {reason}", style="yellow", markup=False)
    if table:
        names = [name for name in found.table.names if bool(found.table[name].any())]
        shown = replace(found.table, names=tuple(names))
        console.print(shown.to_text(console.width if console.is_terminal else None), markup=False, soft_wrap=True)
        if zero := [name for name in found.table.names if name not in names]:
            console.print(f"0 for every head: {', '.join(zero)}", style="dim", markup=False)
        for name in names:
            column = column_of(name, facts.get("loss"))
            label, unit = column.label.en, column.unit.en
            line = label if label.startswith(name.replace("_", " ")) else f"{name}: {label}"
            line += f" ({unit})" if unit and unit not in label else ""
            console.print(line, style="dim", markup=False, soft_wrap=True)
        _show_top_keys(found, console)
    for drawn in picture(found):
        console.print()
        console.print(drawn)
    console.print(legend(found))
    for line in _redundant(found):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    if facts.get("importance_tokens") is not None:
        methods = [name for name in ("ablation", "gradient") if name in found.table.names]
        measured = loss_in_words(facts["loss"], facts["importance_tokens"]).en
        console.print(f"Importance by {' and '.join(methods)}: {measured}.", style="dim")
        for line in _least_important(found, methods[0]):
            console.print(line, style="dim", markup=False, soft_wrap=True)
    if len(found.findings):
        console.print("\n[bold]Main findings[/bold]")
        for finding in found.findings:
            line = textwrap.fill(str(finding), console.width, initial_indent="  • ", subsequent_indent="    ")
            console.print(line, markup=False, soft_wrap=True)


def _redundant(found: Inspection) -> Iterator[str]:
    """Yield the redundant heads with the command that removes the first, or that there are none."""
    from polyhead.analysis.redundancy import PREDICTABLE, THRESHOLD
    from polyhead.inspection.heads import has_stacks
    from polyhead.inspection.wording import place_of

    table = found.table
    shares = table.columns.get(PREDICTABLE)
    if shares is None or not bool(shares.isfinite().any()):
        return
    stacked = has_stacks(table.sites)
    if not len(found.redundant):
        best = int(shares.nan_to_num(nan=-math.inf).argmax())
        place = place_of((table.sites[best], table.heads[best]), stacked=stacked)
        yield (
            f"No redundant heads: the other heads of a layer predict less than {THRESHOLD:.0%} of each head's output "
            f"linearly, on held-out tokens (at most {float(shares[best]):z.0%}, of {place})."
        )
        return
    shown = [f"{place_of(x.head, stacked=stacked)} {x.share:.0%}" for x in found.redundant[:LEAST]]
    are, their = ("is", "its") if len(shown) == 1 else ("are", "their")
    yield (
        f"{len(found.redundant)} of {len(table)} heads {are} redundant: the other heads of {their} layer predict at "
        f"least {THRESHOLD:.0%} of {their} output linearly, on held-out tokens: {', '.join(shown)}"
        f"{' and others' if len(found.redundant) > LEAST else ''}."
    )
    if not stacked:
        site, head = found.redundant[0].head
        command = f"polyhead prune {_model_of(found)} --heads L{site.layer}H{head} --form uneven --output FOLDER"
        yield f"To remove the first and compensate with the other heads: {command}"


def _least_important(found: Inspection, measure: str) -> Iterator[str]:
    """Yield the least important heads with their standard errors, and the command that removes them."""
    from polyhead.inspection.findings import least_important
    from polyhead.inspection.heads import has_stacks
    from polyhead.inspection.wording import place_of

    table = found.table
    values, errors = table[measure], table[f"{measure}_error"]
    rows, among = least_important(found, measure, LEAST)
    known = bool(errors[rows].isfinite().all())  # not over a single document
    stacked = has_stacks(table.sites)
    shown = [
        f"{place_of((table.sites[row], table.heads[row]), stacked=stacked)} {float(values[row]):.2g}"
        + (f" ± {float(errors[row]):.1g}" if known else "")
        for row in rows
    ]
    yield f"Least important by {measure}: {', '.join(shown)}{'; ± is the standard error' if known else ''}."
    if among is None:
        yield "Without standard errors, which need two contexts, this order may be chance."
    elif among > len(rows):
        others = among - len(rows)
        last = place_of((table.sites[rows[-1]], table.heads[rows[-1]]), stacked=stacked)
        do = "head does" if others == 1 else "heads do"
        yield f"{others} other {do} not differ significantly from the last of these, {last}."
    if stacked:  # a command cannot name their heads
        return
    if measure == "gradient":
        command = f"polyhead inspect {_model_of(found)} --importance ablation"
        yield f"A head with a small gradient may still be needed; before you remove one: {command}"
        return
    heads = ",".join(f"L{table.sites[row].layer}H{table.heads[row]}" for row in rows)
    yield f"To remove them: polyhead prune {_model_of(found)} --heads {heads} --form uneven --output FOLDER"


def _model_of(found: Inspection) -> str:
    """Return the model as an argument of a command."""
    return shlex.quote(str(found.facts.get("name") or found.settings.model or "MODEL"))


def _show_top_keys(found: Inspection, console: Console) -> None:
    from polyhead.inspection.wording import place_of

    if not len(found.top_keys):
        return
    console.print("\nMost attended tokens of each head, with their share of its attention")
    width = max(len(place_of((site, number))) for site, heads in found.top_keys.items() for number in range(len(heads)))
    stack = None
    for site, heads in found.top_keys.items():
        if site.stack != stack:
            stack = site.stack
            console.print(stack, markup=False)
        for number, keys in enumerate(heads):
            tokens = "  ".join(f"{_printable(key.text)} {key.share:.0%}" for key in keys[:TOP_KEYS])
            console.print(f"{place_of((site, number)):>{width}}: {tokens}", markup=False, soft_wrap=True)


def _printable(text: str) -> str:
    """Escape control characters, which could move the cursor of a terminal."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _check_alone(command: typer.Context) -> None:
    """Refuse options that conflict with --resume, which takes the settings of the saved run."""
    conflicting = [
        name
        for name in command.params
        if name not in _NOT_OF_THE_RUN and getattr(command.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if conflicting:
        raise OptionError(
            "--resume continues a run with its own model, text and options, "
            f"got {', '.join(sorted(conflicting))} as well; omit them"
        )


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise OptionError(f"--layers must be layer numbers from 0, separated by commas, got {text!r}")
    return tuple(int(part) for part in parts)

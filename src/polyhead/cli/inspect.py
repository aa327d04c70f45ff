"""`polyhead inspect`: analyse every attention head of a model."""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli.edit_options import ContextLength, Field
from polyhead.cli.errors import resumable
from polyhead.cli.inspect_results import report_inspection
from polyhead.cli.inspect_runs import check_inputs, check_ray_options, requested_shard, resumed_settings, show_shard
from polyhead.cli.options import (
    AllowPickle,
    Device,
    Dtype,
    HtmlReport,
    Language,
    ReadModel,
    ShowTable,
    TrustRemoteCode,
    check_device,
    check_positive,
    optional,
)
from polyhead.cli.progress_bars import ProgressBars
from polyhead.cli.report import check_page
from polyhead.cli.terminal import plain_console
from polyhead.errors import OptionError
from polyhead.inspection.run_files import INSPECTION

if TYPE_CHECKING:
    from polyhead.inspection import Inspection
    from polyhead.workflows.sharded_inspecting import ShardReading

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
    model: ReadModel = None,
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
    table: ShowTable = False,
    html: HtmlReport = None,
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
    from polyhead.cli.workers import joined_workers
    from polyhead.inspection.settings import Settings
    from polyhead.progress import ignore_progress

    if resume is not None:
        _check_alone(command)
    check_positive("--worker-timeout", worker_timeout)
    console = plain_console()
    folder = save if resume is None else resume
    # How a run is continued; a run of torchrun only by as many processes.
    how = "with: polyhead inspect" if ray is None else f"with: polyhead inspect --ray {ray}"
    inspection: Inspection | None = None
    reading: ShardReading | None = None
    with (
        joined_workers(command.command_path, worker_timeout) as workers,
        resumable(folder, how if workers is None else "by as many workers with"),
        ExitStack() as stack,
    ):
        check_ray_options(ray, ray_workers, shard, workers)
        language = check_page(html, lang)
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
        is_new = save is not None and (not restarted or (save / INSPECTION).exists())
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
                inspection = inspect_with_ray(settings, cluster, folder=folder, progress=progress, **options)
            elif part is not None and folder is not None:
                reading = inspect_shard(settings, part, folder, progress=progress, **options)
            elif workers is not None:
                inspection = inspect_with_workers(settings, workers, folder=folder, progress=progress, **options)
            else:
                inspection = inspect_model(settings, folder=folder, progress=progress, **options)
    if reading is not None and folder is not None:
        show_shard(reading, folder, console)
        if not reading.complete:
            raise typer.Exit(130)
    if inspection is None:
        return  # of a shard, or printed by the first of the workers
    report_inspection(inspection, folder, html, language, console, table=table)


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

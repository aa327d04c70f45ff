"""`python -m benchmarks coverage`: which models are observed, each held against an independent oracle."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.options import Commit
from polyhead.cli.options import ResultFile
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from benchmarks.coverage.catalogue import Call, Subject

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coverage.md"


def coverage(
    output: ResultFile = None,
    only: Annotated[str | None, typer.Option(metavar="NAME,...", help="Models, as the table names them.")] = None,
    library: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Any of transformers, timm, diffusers, torchvision, classics."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a model is wrong.")] = False,
    commit: Commit = None,
) -> None:
    """Build models small, observe each, and compare every statistic with the softmaxes that the model computed.

    Then prune heads of each, and compare its outputs with those of the model in which they are masked.

    Models are all families of transformers, transformer models of timm, diffusers and torchvision, and attention as it
    is written by hand. Each runs in a process of its own, within limits of time and memory. The rows of --output are
    replaced, those of other models stay, and with them the table of docs/coverage.md is written.
    """
    import torch

    from benchmarks.coverage.pool import forked
    from benchmarks.coverage.table import filled, line, read, write
    from polyhead.costs.measuring import machine_facts

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    subjects = _chosen(only, library)
    facts = {**machine_facts.describe(torch.device("cpu"), commit), "libraries": _versions()}
    rows = {} if output is None or not output.exists() else read(output)
    found: list[dict[str, Any]] = []
    _warm_up()
    try:
        for subject, verdict in forked(subjects, _judged, jobs=jobs):
            found.append({"library": subject.library, "name": subject.name, **verdict})
            print(line(found[-1]), flush=True)
    finally:
        if output is not None:
            rows |= {(row["library"], row["name"]): row for row in found}
            write(output, facts, rows.values())
            PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), facts, [*rows.values()]), encoding="utf-8")
    counts = Counter(row["verdict"] for row in found)
    typer.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    if strict and (counts["wrong"] or any(row.get("surgery") == "wrong" for row in found)):
        raise typer.Exit(1)


def _chosen(only: str | None, library: str | None) -> list[Subject]:
    from benchmarks.coverage.libraries import LIBRARIES

    libraries = [*LIBRARIES] if library is None else library.split(",")
    if unknown := [name for name in libraries if name not in LIBRARIES]:
        raise OptionError(f"--library must be one of {', '.join(LIBRARIES)}; got {', '.join(map(repr, unknown))}")
    subjects = [subject for name in libraries for subject in LIBRARIES[name]()]
    if only is None:
        return subjects
    names = only.split(",")
    known = {subject.name for subject in subjects}
    if unknown := [name for name in names if name not in known]:
        raise OptionError(f"--only must be names of the table, got {', '.join(map(repr, unknown))}")
    return [subject for subject in subjects if subject.name in names]


def _judged(subject: Subject) -> dict[str, Any]:
    """Build and judge one model, in a process of its own."""
    from benchmarks.coverage.catalogue import CannotBuildError
    from benchmarks.coverage.judge import NONE, REFUSED, judge

    start = time.process_time()
    with open(os.devnull, "w") as silent, contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            model, call = subject.build()
            found = {**judge(model, call).as_dict(), "model": type(model).__name__}
            if found["verdict"] != NONE:
                found |= _edited(model, call)
        except CannotBuildError as error:
            found = {"verdict": REFUSED, "built": False, "reason": str(error)}
    return {**found, "seconds": round(time.process_time() - start, 2)}


def _edited(model: nn.Module, call: Call) -> dict[str, str]:
    from benchmarks.coverage.editing import WRONG, judge_editing

    try:
        return judge_editing(model, call.arguments)
    except Exception as error:  # noqa: BLE001 - a verdict on surgery, which must not hide that on statistics
        return {"surgery": WRONG, "surgery_reason": f"{type(error).__name__}: {error}"}


def _warm_up() -> None:
    """Import and run once whatever every model needs, before processes are forked."""
    import torch
    from transformers import LlamaConfig, LlamaModel
    from transformers.utils import logging

    from benchmarks.coverage.catalogue import Call
    from benchmarks.coverage.judge import judge

    logging.set_verbosity_error()
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=7,
    )
    model = LlamaModel(config).eval()
    judge(model, Call(model, {"input_ids": torch.ones(1, 5, dtype=torch.long)}))


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("transformers", "timm", "diffusers", "torchvision"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found

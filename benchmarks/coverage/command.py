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
    from collections.abc import Callable, Mapping

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
    parts: Annotated[
        str, typer.Option(metavar="NAME,...", help="What is judged: statistics (with surgery), importance.")
    ] = "statistics,importance",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a model is wrong.")] = False,
    commit: Commit = None,
) -> None:
    """Build models small, observe each, and compare every statistic with the softmaxes that the model computed.

    Then prune heads of each, and compare its outputs with those of the model in which they are masked; and compare the
    importance of each head with the loss of the model in which its weights are 0.

    Models are all families of transformers, transformer models of timm, diffusers and torchvision, and attention as it
    is written by hand. Each runs in a process of its own, within limits of time and memory. What is judged replaces
    that of the rows of --output, the rest stays, and with them the table of docs/coverage.md is written.
    """
    import torch

    from benchmarks.coverage.pool import forked
    from benchmarks.coverage.table import line, read, rendered
    from benchmarks.measuring.json_lines import write_rows
    from benchmarks.measuring.markdown import filled
    from polyhead.costs.measuring import machine_facts

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    subjects, works = _chosen(only, library), _works(parts)
    facts = {**machine_facts.describe(torch.device("cpu"), commit), "libraries": _versions()}
    rows = {} if output is None or not output.exists() else read(output)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    _warm_up()
    try:
        for part, work in works.items():
            for subject, verdict in forked(_needed(part, subjects, rows), work, jobs=jobs):
                key = subject.library, subject.name
                kept = {name: x for name, x in rows.get(key, {}).items() if _part(name) != part}
                measured = {name: x for name, x in verdict.items() if _part(name) == part}
                if part == "importance" and not measured:  # its process ended, with a reason
                    measured = {"importance_reason": verdict["reason"]}
                found[key] = rows[key] = {"library": subject.library, "name": subject.name, **kept, **measured}
                print(line(found[key]), flush=True)
    finally:
        if output is not None:
            write_rows(output, facts, rows.values())
            tables = rendered(facts, [*rows.values()])
            PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), "coverage", f"{tables}\n\n"), encoding="utf-8")
    verdicts = [row[name] for row in found.values() for name in ("verdict", "surgery", "importance") if name in row]
    counts = Counter(row["verdict"] for row in found.values())
    typer.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    if strict and "wrong" in verdicts:
        raise typer.Exit(1)


def _works(parts: str) -> dict[str, Callable[[Subject], dict[str, Any]]]:
    """Return what judges each part of a row."""
    works = {"statistics": _judged, "importance": _importance}
    if unknown := [name for name in parts.split(",") if name not in works]:
        raise OptionError(f"--parts must be of {', '.join(works)}; got {', '.join(map(repr, unknown))}")
    return {name: works[name] for name in parts.split(",")}


def _needed(part: str, subjects: list[Subject], rows: Mapping[tuple[str, str], Any]) -> list[Subject]:
    """Return the models of which a part is judged; importance needs rows with attention."""
    if part == "statistics":
        return subjects
    if unknown := [x.name for x in subjects if (x.library, x.name) not in rows]:
        raise OptionError(f"--parts importance needs rows of --output, got none of {', '.join(unknown[:5])}")
    judged = [(x, rows[x.library, x.name]) for x in subjects]
    return [x for x, row in judged if row["verdict"] != "no attention" and row.get("built", True)]


def _part(field: str) -> str:
    """Return which part of a row a field is of."""
    return "importance" if field.startswith("importance") else "statistics"


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


def _importance(subject: Subject) -> dict[str, Any]:
    """Build one model and judge the importance of its heads, in a process of its own."""
    from benchmarks.coverage.catalogue import CannotBuildError
    from benchmarks.coverage.importance import WRONG, judge_importance

    start = time.process_time()
    with open(os.devnull, "w") as silent, contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            found = judge_importance(*subject.build())
        except CannotBuildError as error:
            return {"importance_reason": str(error)}
        except Exception as error:  # noqa: BLE001 - a verdict of its own
            found = {"importance": WRONG, "importance_reason": f"{type(error).__name__}: {error}"}
    return {**found, "importance_seconds": round(time.process_time() - start, 2)}


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

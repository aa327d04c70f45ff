"""`polyhead merge-runs`: merge the shards of an inspection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli.options import AllowPickle, HtmlReport, Language, ShowTable, TrustRemoteCode
from polyhead.cli.progress_bars import ProgressBars
from polyhead.cli.report import check_page
from polyhead.cli.terminal import plain_console


def merge_runs(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of all shards: of `polyhead inspect --shard I/N --save RUN`."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="New folder of the merged run.")],
    table: ShowTable = False,
    html: HtmlReport = None,
    lang: Language = "en",
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Merge the shards of a text into one run, as if one process had read it.

    Counts are equal to those of one process, other values up to the rounding of sums in another order. Shards of other
    models, texts, versions or settings are refused, and so is a missing, incomplete or repeated one. The model and the
    text are read once more, for the steps after the text: repeated words, random weights, importance.

    Example: `polyhead merge-runs run-1 run-2 run-3 --output run --html report.html`
    """
    from polyhead.cli.inspect_results import report_inspection
    from polyhead.files import check_pyarrow
    from polyhead.inspection.run_files import TABLE, check_new_run, check_shards

    language = check_page(html, lang)
    check_pyarrow(output / TABLE)
    check_shards(runs)
    check_new_run(output, "--output")

    from polyhead.workflows import sharded_inspecting

    with ProgressBars() as progress:
        inspection = sharded_inspecting.merge_runs(
            runs, output, progress=progress, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code
        )
    report_inspection(inspection, output, html, language, plain_console(), table=table)

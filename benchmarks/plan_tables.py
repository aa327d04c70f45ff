"""The table of benchmarks/RESULTS.md: errors of predicted times, by regime."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.measuring.markdown import markdown_table
from benchmarks.measuring.verdicts import Figure


def accuracy_section(path: Path) -> str:
    """Return the section of one run of `python -m benchmarks plan`, with the machine it ran on."""
    result = json.loads(path.read_text(encoding="utf-8"))
    machine, versions, bounds = result["machine"], result["versions"], result["bounds"]
    calibration = result["calibration"]
    lines = [
        f"### {machine['gpu'] or machine['cpu']}, {result['dtype']}",
        "",
        f"torch {versions['torch']}, commit {result['commit']}, {result['date'][:10]}; {len(result['rows'])} of "
        f"{result['drawn']} shapes drawn by seed {result['seed']}, a calibration of {calibration['samples']} samples.",
        "",
    ]
    header = ("regime", "shapes", f"median error (<= {bounds['median']:.0%})", f"worst (<= {bounds['worst']:.0%})")
    table = []
    for row in result["summary"]:
        median, worst = (
            f"{row[name]:.1%}" + (" **miss**" if Figure(name, row[name], bound=bounds[name]).above else "")
            for name in ("median", "worst")
        )
        others = (f"{row[f'{by}_{name}']:.1%}" for by in ("usual", "datasheet") for name in ("median", "worst"))
        table.append((row["regime"], f"{row['shapes']}", median, worst, *others))
    others_header = ("at any moment: median", "worst", "datasheet: median", "worst")
    return "\n".join((*lines, *markdown_table((*header, *others_header), *table), ""))

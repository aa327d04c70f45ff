"""The table of benchmarks/RESULTS.md: errors of predicted times, by regime."""

from __future__ import annotations

import json
from pathlib import Path

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
        f"| regime | shapes | median error (<= {bounds['median']:.0%}) | worst (<= {bounds['worst']:.0%}) | "
        "at any moment: median | worst | datasheet: median | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["summary"]:
        median, worst = (
            f"{row[name]:.1%}" + (" **miss**" if Figure(name, row[name], bound=bounds[name]).above else "")
            for name in ("median", "worst")
        )
        others = " | ".join(
            f"{row[f'{by}_{name}']:.1%}" for by in ("usual", "datasheet") for name in ("median", "worst")
        )
        lines.append(f"| {row['regime']} | {row['shapes']} | {median} | {worst} | {others} |")
    return "\n".join(lines) + "\n"

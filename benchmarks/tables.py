"""`python -m benchmarks.tables`: write the measured figures into docs/; nobody copies a number."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyhead.lab.measuring.results import at_most
from polyhead.lab.measuring.runner import Ratio

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
# `polyhead bench` names no file itself; its results are kept here under names that begin so.
STATISTICS = "statistics-"
INSPECTION = "inspection-"
VIEWER = "viewer-"
MARKS = re.compile(r"(<!-- *figures: *begin *-->).*?(<!-- *figures: *end *-->)", re.DOTALL)
COLUMNS = "| ours | against | theirs | ours / theirs [95%] | bound |"


def performance_page(page: str, results: Path = RESULTS) -> str:
    """docs/performance.md with everything between its two marks made anew from the layer's results."""
    others = (STATISTICS, INSPECTION, VIEWER)
    paths = [path for path in sorted(results.glob("*.json")) if not path.name.startswith(others)]
    return _between_marks(page, paths, "batch x n x d_model x heads")


def statistics_page(page: str, results: Path = RESULTS) -> str:
    """docs/statistics.md, from what `polyhead bench statistics` measured."""
    return _between_marks(page, sorted(results.glob(f"{STATISTICS}*.json")), "batch x heads x n x d")


def inspection_page(page: str, results: Path = RESULTS) -> str:
    """docs/inspecting.md, from what `polyhead bench inspection` measured."""
    return _between_marks(page, sorted(results.glob(f"{INSPECTION}*.json")), "model and text")


def looking_page(page: str, results: Path = RESULTS) -> str:
    """docs/looking.md, from what `polyhead bench viewer` measured."""
    return _between_marks(page, sorted(results.glob(f"{VIEWER}*.json")), "heads and text")


PAGES = {
    "performance.md": performance_page,
    "statistics.md": statistics_page,
    "inspecting.md": inspection_page,
    "looking.md": looking_page,
}


def _between_marks(page: str, paths: Sequence[Path], shape: str) -> str:
    if not paths:
        return page
    if len(MARKS.findall(page)) != 1:
        raise ValueError("a page of figures has the marks figures: begin and figures: end, once each")
    sections = "\n".join(_section(json.loads(path.read_text(encoding="utf-8")), shape) for path in paths)
    return MARKS.sub(lambda marks: f"{marks[1]}\n\n{sections}{marks[2]}", page)


def _section(result: dict[str, Any], shape: str) -> str:
    machine, versions = result["machine"], result["versions"]
    name = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    dtypes = list(dict.fromkeys(row["dtype"] for row in result["rows"]))
    alternations = sorted({len(samples) for row in result["rows"] for samples in row["samples_ms"].values()})
    spread = f"{alternations[0]} to {alternations[-1]}" if len(alternations) > 1 else f"{alternations[0]}"
    lines = [
        f"### {name}, {dtypes[0]}" + (f" (the CPU's rows in {dtypes[1]})" if len(dtypes) > 1 else ""),
        "",
        f"torch {versions['torch']}, Python {versions['python']}, commit {result['commit']}, {result['date'][:10]}; "
        f"{spread} alternations. " + (f"**{len(result['misses'])} misses.**" if result["misses"] else "No miss."),
        "",
        f"| what | {shape} {COLUMNS}",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines += _lines(row)
    return "\n".join(lines) + "\n"


def _lines(row: dict[str, Any]) -> list[str]:
    start = f"| {row['bench']} | {row['shape']} |"
    lines = []
    for c in row["comparisons"]:
        _, _, option = c["subject"].partition(", ")
        ours = f"{row['median_ms'][c['subject']]:.4g} ms" + (f" ({option})" if option else "")
        floor = " (floor)" if row["notes"].get("floor") == c["against"] else ""
        lines.append(
            f"{start} {ours} | {c['against']}{floor} | {row['median_ms'][c['against']]:.4g} ms | "
            f"{Ratio(**c['ratio'])} | {_verdict(c)} |"
        )
    for figure in row.get("figures", []):
        value = f"{figure['value']:.4g} {figure['unit']}".rstrip()
        lines.append(f"{start} {value} | {figure['what']} | | | {_verdict(figure)} |")
    for name, reason in row["absent"].items():
        lines.append(f"{start} | {name} | {reason} | | |")
    if row["failed"]:
        lines.append(f"{start} | | {row['failed']} | | **miss** |")
    return lines


def _verdict(found: dict[str, Any]) -> str:
    if found["bound"] is None:
        return ""
    return f"{at_most(found['bound'])} " + ("**miss**" if found["missed"] else "ok")


def main() -> None:
    for name, made_anew in PAGES.items():
        page = DOCS / name
        if not page.exists():
            print(f"there is no docs/{name} to write into")
            continue
        page.write_text(made_anew(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written to docs/{name}")


if __name__ == "__main__":
    main()

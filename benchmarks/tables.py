"""`python -m benchmarks.tables`: write the measured figures into docs/performance.md; nobody copies a number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def page_with_figures(page: str, results: Path = RESULTS) -> str:
    """The page with everything between its two marks made anew from the results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    sections = [_section(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(results.glob("*.json"))]
    return f"{before}{BEGIN}\n\n" + "\n".join(sections) + f"{END}{after}"


def _section(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    name = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    dtype = result["rows"][0]["dtype"]
    lines = [
        f"### {name}, {dtype}",
        "",
        f"torch {versions['torch']}, Python {versions['python']}, commit {result['commit']}, {result['date'][:10]}; "
        f"{result['alternations']} alternations. "
        + (f"**{len(result['misses'])} misses.**" if result["misses"] else "No miss."),
        "",
        "| what | batch x n x d_model x heads | ours | against | theirs | ours / theirs [95%] | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines += _lines(row)
    return "\n".join(lines) + "\n"


def _lines(row: dict[str, Any]) -> list[str]:
    lines = []
    for c in row["comparisons"]:
        ratio = c["ratio"]
        _, _, option = c["subject"].partition(", ")
        ours = f"{row['median_ms'][c['subject']]:.4g} ms" + (f" ({option})" if option else "")
        floor = " (floor)" if row["notes"].get("floor") == c["against"] else ""
        bound = "" if c["bound"] is None else f"<= {c['bound']:g} " + ("**miss**" if c["missed"] else "ok")
        lines.append(
            f"| {row['bench']} | {row['shape']} | {ours} | {c['against']}{floor} | "
            f"{row['median_ms'][c['against']]:.4g} ms | "
            f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] | {bound} |"
        )
    for name, reason in row["absent"].items():
        lines.append(f"| {row['bench']} | {row['shape']} | | {name} | {reason} | | |")
    return lines


def main() -> None:
    PAGE.write_text(page_with_figures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

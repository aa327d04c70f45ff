"""The table of docs/coverage.md, from the rows of a run."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.markdown import markdown_table

VERDICTS = ("exact", "slow", "partial", "refused", "wrong")
NONE = "no attention"
SURGERY = {
    "known": "heads can be pruned",
    "traced": "after `trace_layers`",
    "part": "in some layers",
    "refused": "refused",
    "wrong": "wrong",
}
IMPORTANCE = {"every": "at every site", "part": "at some sites", "refused": "refused", "wrong": "wrong"}
Row = Mapping[str, Any]


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a record, by library and name."""
    _, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(row["library"], row["name"]): row for row in rows}


def line(row: Row) -> str:
    """Return one row as text."""
    sites = f"{row.get('observed', 0)}/{row['sites']} sites" if row.get("sites") else ""
    more = "".join(f", {name} {row[name]}" for name in ("surgery", "importance") if name in row)
    return f"{row['library']} {row['name']}: {row['verdict']}{more} {sites} {why(row)}".rstrip()


def why(row: Row) -> str:
    """Return why a model is not exact, on one line."""
    parts = [*row.get("wrong", ())[:1]] if row["verdict"] == "wrong" else []
    if missing := row.get("missing"):
        parts.append(f"neither observed nor listed: {', '.join(missing[:2])}")
    if not parts and row["verdict"] in ("partial", "refused", "slow"):
        parts = [row.get("reason", "")]
    return _short(re.sub(r"\s+", " ", "; ".join(parts)))


def _short(text: str, length: int = 160) -> str:
    return text if len(text) <= length else text[: length - 3].rpartition(" ")[0] + " ..."


def rendered(facts: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the tables as Markdown: counts of each library, then every model by its verdict."""
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    seconds = sum(row.get("seconds", 0) + row.get("importance_seconds", 0) for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in facts["libraries"].items())
    lines = [
        f"{versions}, torch {facts['versions']['torch']}; commit {facts['commit'] or 'unknown'}; "
        f"{seconds / 60:.0f} minutes of CPU time.",
        "",
    ]
    counted = ("library", "models with softmax attention", *VERDICTS)
    table = []
    for name in (*libraries, None):
        chosen = [row for row in rows if name in (row["library"], None) and row["verdict"] != NONE]
        counts = Counter(row["verdict"] for row in chosen)
        built = sum(row.get("built", True) for row in chosen)
        good = counts["exact"] + counts["slow"]
        shares = _share(counts["exact"], len(chosen)), _share(good, len(chosen)), _share(good, built)
        table.append((name or "**all**", f"{len(chosen)}", *(f"{counts[verdict]}" for verdict in VERDICTS), *shares))
    lines += markdown_table((*counted, "exact", "exact or slow", "the same of those built"), *table)
    lines += ["", *_surgery(libraries, rows), "", *_importance(libraries, rows)]
    for library in libraries:
        lines += ["", f"## {library}", "", *_listed([row for row in rows if row["library"] == library])]
    return "\n".join(lines)


def _surgery(libraries: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the table of models whose heads can be pruned, by library."""
    table = []
    for name in (*libraries, None):
        counts = Counter(row["surgery"] for row in rows if name in (row["library"], None) and "surgery" in row)
        table.append((name or "**all**", f"{counts.total()}", *(f"{counts[verdict]}" for verdict in SURGERY)))
    return markdown_table(("library", "built", *SURGERY.values()), *table)


def _importance(libraries: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the table of models whose heads' importance is that of their own weights, by library."""
    first, *others = IMPORTANCE.values()
    table = []
    for name in (*libraries, None):
        chosen = [x for x in rows if name in (x["library"], None) and x["verdict"] != NONE and x.get("built", True)]
        counts = Counter(row.get("importance") for row in chosen)
        cells = (f"{counts[verdict]}" for verdict in (*IMPORTANCE, None))
        table.append((name or "**all**", f"{len(chosen)}", *cells))
    return markdown_table(("library", "built", f"importance {first}", *others, "not measured"), *table)


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else "-"


def _listed(rows: Sequence[Row]) -> list[str]:
    """Return what is exact or slow as lists, and what is not as a table with reasons."""
    by_verdict = defaultdict(list)
    for row in rows:
        by_verdict[row["verdict"]].append(row["name"])
    lines = []
    for verdict in ("exact", "slow", NONE):
        if names := by_verdict[verdict]:
            lines += [f"**{verdict.capitalize()}** ({len(names)}): {', '.join(sorted(names))}.", ""]
    for verdict in ("known", "traced", "part", "wrong"):
        if names := [row["name"] for row in rows if row.get("surgery") == verdict]:
            lines += [f"**Surgery, {SURGERY[verdict]}** ({len(names)}): {', '.join(sorted(names))}.", ""]
    for verdict in ("part", "refused", "wrong"):
        if names := [row["name"] for row in rows if row.get("importance") == verdict]:
            lines += [f"**Importance, {IMPORTANCE[verdict]}** ({len(names)}): {', '.join(sorted(names))}.", ""]
    others = [row for row in rows if row["verdict"] in ("wrong", "partial", "refused")]
    if others:
        others.sort(key=lambda row: (("wrong", "partial", "refused").index(row["verdict"]), row["name"]))
        table = []
        for row in others:
            sites = f"{row.get('observed', 0)} of {row['sites']}" if row.get("sites") else "not built"
            table.append((row["name"], row["verdict"], sites, why(row).replace("|", "\\|")))
        lines += markdown_table(("model", "verdict", "sites", "reason"), *table)
    return lines[:-1] if lines and lines[-1] == "" else lines

"""The table of docs/coverage.md, from the rows of a run."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"
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


def write(path: Path, facts: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Write a record: the machine and the versions, then one line per model."""
    path.write_text("".join(json.dumps(x) + "\n" for x in ({"facts": facts}, *rows)), encoding="utf-8")


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


def filled(page: str, facts: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the page with its table replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"a page needs the marks {BEGIN} and {END} exactly once")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{rendered(facts, rows)}\n\n{END}{rest.partition(END)[2]}"


def rendered(facts: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the tables as Markdown: counts of each library, then every model by its verdict."""
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    seconds = sum(row.get("seconds", 0) + row.get("importance_seconds", 0) for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in facts["libraries"].items())
    lines = [
        f"{versions}, torch {facts['versions']['torch']}; commit {facts['commit'] or 'unknown'}; "
        f"{seconds / 60:.0f} minutes of CPU time.",
        "",
        f"| library | models with softmax attention | {' | '.join(VERDICTS)} | exact | exact or slow "
        "| the same of those built |",
        "|---" * (len(VERDICTS) + 5) + "|",
    ]
    for name in (*libraries, None):
        chosen = [row for row in rows if name in (row["library"], None) and row["verdict"] != NONE]
        counts = Counter(row["verdict"] for row in chosen)
        cells = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
        built = sum(row.get("built", True) for row in chosen)
        good = counts["exact"] + counts["slow"]
        shares = f"{_share(counts['exact'], len(chosen))} | {_share(good, len(chosen))} | {_share(good, built)}"
        lines.append(f"| {name or '**all**'} | {len(chosen)} | {cells} | {shares} |")
    lines += ["", *_surgery(libraries, rows), "", *_importance(libraries, rows)]
    for library in libraries:
        lines += ["", f"## {library}", "", *_listed([row for row in rows if row["library"] == library])]
    return "\n".join(lines)


def _surgery(libraries: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the table of models whose heads can be pruned, by library."""
    lines = [f"| library | built | {' | '.join(SURGERY.values())} |", "|---" * (len(SURGERY) + 2) + "|"]
    for name in (*libraries, None):
        counts = Counter(row["surgery"] for row in rows if name in (row["library"], None) and "surgery" in row)
        cells = " | ".join(str(counts[verdict]) for verdict in SURGERY)
        lines.append(f"| {name or '**all**'} | {counts.total()} | {cells} |")
    return lines


def _importance(libraries: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the table of models whose heads' importance is that of their own weights, by library."""
    lines = [
        f"| library | built | importance {' | '.join(IMPORTANCE.values())} | not measured |",
        "|---" * (len(IMPORTANCE) + 3) + "|",
    ]
    for name in (*libraries, None):
        chosen = [x for x in rows if name in (x["library"], None) and x["verdict"] != NONE and x.get("built", True)]
        counts = Counter(row.get("importance") for row in chosen)
        cells = " | ".join(str(counts[verdict]) for verdict in (*IMPORTANCE, None))
        lines.append(f"| {name or '**all**'} | {len(chosen)} | {cells} |")
    return lines


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
        lines += ["| model | verdict | sites | reason |", "|---|---|---|---|"]
        others.sort(key=lambda row: (("wrong", "partial", "refused").index(row["verdict"]), row["name"]))
        for row in others:
            sites = f"{row.get('observed', 0)} of {row['sites']}" if row.get("sites") else "not built"
            lines.append(f"| {row['name']} | {row['verdict']} | {sites} | {why(row).replace('|', chr(92) + '|')} |")
    return lines[:-1] if lines and lines[-1] == "" else lines

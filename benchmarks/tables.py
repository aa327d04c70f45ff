"""`python -m benchmarks.tables`: write the measured figures into docs/; nobody copies a number."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import recorded
from benchmarks.measuring.results import at_most
from benchmarks.plan_tables import accuracy_section
from benchmarks.surgery_tables import quality_section
from benchmarks.training.contestants import contest
from benchmarks.training.standings import rows, standings
from benchmarks.training.trials import read_results
from benchmarks.variant_speed import floors
from benchmarks.variant_speed.steps import FORWARD
from benchmarks.variant_speed.steps import TRAINING as TRAINED
from polyhead.costs import Workload, estimate_cost
from polyhead.costs.measuring.runner import Ratio

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
# `python -m benchmarks` names no file itself; its results are kept here under names that begin so.
STATISTICS = "statistics-"
INSPECTION = "inspection-"
VIEWER = "viewer-"
ARRANGEMENTS = "arrangements-"
TRAINING = "training-"
SURGERY = "surgery-"
PLAN = "plan-"
RECORDED = "recorded-"
GPU_SUITE = "gpu-suite-"
MARKS = re.compile(r"(<!-- *figures: *begin *-->).*?(<!-- *figures: *end *-->)", re.DOTALL)
COMPARED_MARKS = re.compile(r"(<!-- *compared: *begin *-->).*?(<!-- *compared: *end *-->)", re.DOTALL)
TRAINING_MARKS = re.compile(r"(<!-- *training: *begin *-->).*?(<!-- *training: *end *-->)", re.DOTALL)
QUALITY_MARKS = re.compile(r"(<!-- *quality: *begin *-->).*?(<!-- *quality: *end *-->)", re.DOTALL)
RECORDED_MARKS = re.compile(r"(<!-- *recorded: *begin *-->).*?(<!-- *recorded: *end *-->)", re.DOTALL)
COLUMNS = "| ours | against | theirs | ours / theirs [95%] | bound |"


def performance_page(page: str, results: Path = RESULTS) -> str:
    """docs/performance.md with everything between its two marks made anew from the layer's results."""
    others = (STATISTICS, INSPECTION, VIEWER, ARRANGEMENTS, SURGERY, PLAN, RECORDED, GPU_SUITE)
    paths = [path for path in sorted(results.glob("*.json")) if not path.name.startswith(others)]
    return _between_marks(page, paths, "batch x n x d_model x heads")


def statistics_page(page: str, results: Path = RESULTS) -> str:
    """docs/statistics.md, from what `python -m benchmarks statistics` measured."""
    return _between_marks(page, sorted(results.glob(f"{STATISTICS}*.json")), "batch x heads x n x d")


def inspection_page(page: str, results: Path = RESULTS) -> str:
    """docs/inspecting.md, from what `python -m benchmarks inspection` measured."""
    return _between_marks(page, sorted(results.glob(f"{INSPECTION}*.json")), "model and text")


def looking_page(page: str, results: Path = RESULTS) -> str:
    """docs/looking.md, from what `python -m benchmarks viewer` measured."""
    return _between_marks(page, sorted(results.glob(f"{VIEWER}*.json")), "heads and text")


def arrangements_page(page: str, results: Path = RESULTS) -> str:
    """docs/arrangements.md, from what `python -m benchmarks variants` and `python -m benchmarks training` measured."""
    paths = sorted(results.glob(f"{ARRANGEMENTS}*.json"))
    page = _between_marks(page, paths, "heads and tokens")
    if paths:
        measured = json.loads(paths[0].read_text(encoding="utf-8"))
        page = _filled(page, COMPARED_MARKS, "compared", _compared(measured))
    tables = [_training_table(path) for path in sorted(results.glob(f"{TRAINING}*.jsonl"))]
    return _filled(page, TRAINING_MARKS, "training", "\n".join(tables)) if tables else page


def surgery_page(page: str, results: Path = RESULTS) -> str:
    """docs/surgery.md from `python -m benchmarks surgery`: quality by criterion and share, and time saved."""
    page = _between_marks(page, sorted(results.glob(f"{SURGERY}*.json")), "call")
    sections = [quality_section(path) for path in sorted(results.glob(f"{SURGERY}*.jsonl"))]
    return _filled(page, QUALITY_MARKS, "quality", "\n".join(sections)) if sections else page


def plan_page(page: str, results: Path = RESULTS) -> str:
    """docs/plan.md, from what `python -m benchmarks plan` measured."""
    sections = [accuracy_section(path) for path in sorted(results.glob(f"{PLAN}*.json"))]
    return _filled(page, MARKS, "figures", "\n".join(sections)) if sections else page


def attention_page(page: str, results: Path = RESULTS) -> str:
    """docs/attention.md, from what `python -m benchmarks.recorded` measured."""
    sections = [
        _recorded(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(results.glob(f"{RECORDED}*"))
    ]
    return _filled(page, RECORDED_MARKS, "recorded", "\n".join(sections)) if sections else page


PAGES = {
    "attention.md": attention_page,
    "performance.md": performance_page,
    "statistics.md": statistics_page,
    "inspecting.md": inspection_page,
    "looking.md": looking_page,
    "arrangements.md": arrangements_page,
    "surgery.md": surgery_page,
    "plan.md": plan_page,
}


def _between_marks(page: str, paths: Sequence[Path], shape: str) -> str:
    if not paths:
        return page
    sections = "\n".join(_section(json.loads(path.read_text(encoding="utf-8")), shape) for path in paths)
    return _filled(page, MARKS, "figures", sections)


def _filled(page: str, marks: re.Pattern[str], name: str, content: str) -> str:
    if len(marks.findall(page)) != 1:
        raise ValueError(f"a page of figures has the marks {name}: begin and {name}: end, once each")
    return marks.sub(lambda found: f"{found[1]}\n\n{content}{found[2]}", page)


def _recorded(result: dict[str, Any]) -> str:
    """Each contender's time over cuDNN's, a line a shape."""
    names = (recorded.AUTO, recorded.FUSED, recorded.STATISTICS, recorded.FLASH, recorded.EFFICIENT)
    lines = [
        f"{result['machine']['gpu']}, torch {result['versions']['torch']}, commit {result['commit']}; shapes: batch, "
        "heads, KV heads, tokens, head_dim (/value_dim).",
        "",
        "| shape | cuDNN | " + " | ".join(name.removeprefix("polyhead, ") for name in names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in result["rows"]:
        times = row["median_ms"]
        ratios = (f"{times[name] / times[recorded.CUDNN]:.2f}" if name in times else "-" for name in names)
        lines.append(f"| {row['shape']} | {times[recorded.CUDNN]:.3g} ms | " + " | ".join(ratios) + " |")
    return "\n".join([*lines, ""])


def _compared(result: dict[str, Any]) -> str:
    """All arrangements in one table: what each computes, what is counted of it, and how long it took."""
    times = {row["bench"]: row["median_ms"].get(floors.OURS) for row in result["rows"]}
    work = Workload.forward(floors.TOKENS, batch=2)
    lines = [
        f"Two causal sequences of {floors.TOKENS:,} tokens, width {floors.WIDTH:,}, {floors.HEADS} heads unless the "
        f"formula says otherwise, bfloat16, as CUDA graphs; {result['machine']['gpu']}, commit "
        f"{result['commit']}.",
        "",
        "| | computes | parameters | GFLOP forward | cache bytes a token | forward | forward + backward | when |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, variant in floors.VARIANTS.items():
        cost = estimate_cost(variant.config, work)
        taken = [times.get(f"{name}, {mode}") for mode in (FORWARD, TRAINED)]
        forward, both = ("" if x is None else f"{x:.2f} ms" for x in taken)
        lines.append(
            f"| {name} | {variant.formula} | {cost.parameters:,} | {cost.matrix_flops / 1e9:.0f} | "
            f"{cost.cache_bytes_per_token:,} | {forward} | {both} | {variant.when} |"
        )
    return "\n".join(lines) + "\n"


def _training_table(path: Path) -> str:
    results = read_results(path)
    facts = results[0].facts
    header, *lines = rows(standings(contest(quick=facts["quick"]), results))
    gpu, versions = facts["machine"]["gpu"] or facts["machine"]["cpu"], facts["versions"]
    commits = ", ".join(dict.fromkeys(str(result.facts["commit"]) for result in results))
    told = [f"{len(results)} trainings on {facts['text']}, {gpu}, torch {versions['torch']}, commit {commits}.", ""]
    if lines:
        told += [
            f"| {' | '.join(header)} |",
            f"|{'---|' * len(header)}",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
        ]
    return "\n".join(told)


def _section(result: dict[str, Any], shape: str) -> str:
    machine, versions = result["machine"], result["versions"]
    name = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    dtypes = list(dict.fromkeys(row["dtype"] for row in result["rows"]))
    alternations = sorted({len(samples) for row in result["rows"] for samples in row["samples_ms"].values()})
    spread = f"{alternations[0]} to {alternations[-1]}" if len(alternations) > 1 else f"{alternations[0]}"
    told = [one for row in result["rows"] for one in (*row["comparisons"], *row.get("figures", []))]
    missed = sum(map(_missed, told)) + sum(bool(row["failed"]) for row in result["rows"])
    lines = [
        f"### {name}, {dtypes[0]}" + (f" (the CPU's rows in {dtypes[1]})" if len(dtypes) > 1 else ""),
        "",
        f"torch {versions['torch']}, Python {versions['python']}, commit {result['commit']}, {result['date'][:10]}; "
        f"{spread} alternations. " + (f"**{missed} miss{'es' * (missed > 1)}.**" if missed else "No miss."),
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


def _missed(found: dict[str, Any]) -> bool:
    """By the numbers, whatever a file says: what counts as a miss has been stricter since some were written."""
    value = found["ratio"]["median"] if "ratio" in found else found["value"]
    return found["bound"] is not None and not value <= found["bound"]


def _verdict(found: dict[str, Any]) -> str:
    return "" if found["bound"] is None else f"{at_most(found['bound'])} " + ("**miss**" if _missed(found) else "ok")


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

"""`python -m benchmarks.tables`: write measured figures into benchmarks/RESULTS.md, so that none is copied by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks import dynamic_heads, recorded
from benchmarks.measuring.calls import FORWARD
from benchmarks.measuring.calls import TRAINING as TRAINED
from benchmarks.measuring.markdown import filled, markdown_table
from benchmarks.measuring.results import cells, counted, read
from benchmarks.plan_tables import accuracy_section
from benchmarks.stability.tables import settings_of, stability_section
from benchmarks.stability.trials import read_results as read_stability
from benchmarks.statements.command import OTHER
from benchmarks.surgery_tables import quality_section
from benchmarks.training.contestants import contest
from benchmarks.training.standings import rows as standing_rows
from benchmarks.training.standings import standings
from benchmarks.training.trials import read_results
from benchmarks.variant_speed import floors
from polyhead.costs import Workload, estimate_cost

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
COLUMNS = ("polyhead", "baseline", "baseline time", "ratio [95% CI]", "bound")
TRAINING_HEADER = {
    "equal": "equal budget of",
    "rate": "learning rate",
    "bits a byte": "bits per byte",
    "spread": "std over seeds",
    "to the first": "difference to the first",
}
# Results keep the labels they were measured under; the pages show these instead.
LABELS = {
    "with its Python": "with Python overhead",
    "latent, turning": "latent, rotary",
    "chosen rows": "selected rows",
    "decode one token": "decode, one token",
    "overhead, recording": "overhead, with autograd",
    "mask at hand": "precomputed mask",
    "ordinary heads": "plain heads",
    "a copy of as many bytes": "copy of the same bytes",
    "a matrix product of as many FLOPs": "matrix product of the same FLOPs",
    "rate of products": "matrix product throughput",
    "nothing watched": "not observed",
    "largest logit, entropy, reach": "max logit, entropy, mean distance",
    "these and maps": "default statistics and maps",
    "the default statistics": "default statistics",
    "bytes a row": "bytes per row",
    "beyond inputs and output": "memory beyond inputs and output",
    "the same over that of half the tokens": "ratio to half the tokens",
    "largest tensor, of the weights' bytes": "largest tensor / bytes of the weights",
    "the whole block's": "those of the unedited block",
    "the tile's rows, all of their weights": "all weights of the tile's rows",
    "exact picture": "exact map",
    "first picture, by sampled rows": "first map, from sampled rows",
}


def results_page(page: str, results: Path = RESULTS) -> str:
    """Return benchmarks/RESULTS.md with every table rebuilt for which there are results."""
    for mark, content in SECTIONS.items():
        found = content(results)
        page = filled(page, mark, found) if found else page
    return page


def _each(section: Callable[[Path], str], *patterns: str) -> Callable[[Path], str]:
    """Return the function that writes one section for each file of these patterns."""
    return lambda results: "\n".join(section(path) for pattern in patterns for path in sorted(results.glob(pattern)))


def _timed(shape: str, *patterns: str) -> Callable[[Path], str]:
    """Return the function that writes the tables of one command's results; `shape` is the title of their places."""
    return _each(lambda path: _section(path, shape), *patterns)


def _recorded(path: Path) -> str:
    """Return a table of times relative to cuDNN, one row per shape."""
    result = json.loads(path.read_text(encoding="utf-8"))
    names = (recorded.AUTO, recorded.FUSED, recorded.STATISTICS, recorded.FLASH, recorded.EFFICIENT)
    lines = [
        f"{result['machine']['gpu']}, torch {result['versions']['torch']}, commit {result['commit']}; shapes: batch, "
        "heads, KV heads, tokens, head_dim (/value_dim).",
        "",
    ]
    table = []
    for row in result["rows"]:
        times = row["median_ms"]
        ratios = (f"{times[name] / times[recorded.CUDNN]:.2f}" if name in times else "-" for name in names)
        table.append((row["shape"], f"{times[recorded.CUDNN]:.3g} ms", *ratios))
    header = ("shape", "cuDNN", *(name.removeprefix("polyhead, ") for name in names))
    return "\n".join([*lines, *markdown_table(header, *table), ""])


def _compared(path: Path) -> str:
    """Return one table of all variants: formula, counted costs and measured times."""
    result = json.loads(path.read_text(encoding="utf-8"))
    times = {row["bench"]: row["median_ms"].get(floors.OURS) for row in result["rows"]}
    work = Workload.forward(floors.TOKENS, batch=2)
    lines = [
        f"Two causal sequences of {floors.TOKENS:,} tokens, width {floors.WIDTH:,}, {floors.HEADS} heads unless the "
        f"formula states another number, bfloat16, CUDA graphs; {result['machine']['gpu']}, commit "
        f"{result['commit']}.",
        "",
    ]
    table = []
    for name, variant in floors.VARIANTS.items():
        cost = estimate_cost(variant.config, work)
        measured = [times.get(f"{name}, {mode}") for mode in (FORWARD, TRAINED)]
        forward, both = ("" if x is None else f"{x:.2f} ms" for x in measured)
        counts = f"{cost.parameters:,}", f"{cost.matrix_flops / 1e9:.0f}", f"{cost.cache_bytes_per_token:,}"
        table.append((_label(name), variant.formula, *counts, forward, both, variant.when))
    counted = ("parameters", "GFLOP forward", "cache bytes per token")
    header = ("", "formula", *counted, "forward", "forward + backward", "when")
    return "\n".join([*lines, *markdown_table(header, *table), ""])


def _statements(results: Path) -> str:
    """Return a table of the sentences of reports: how many, how many failed, and which findings hold elsewhere."""
    header = ("model", "text", "sentences", "failed", "findings", "that hold on another text")
    table = []
    for path in sorted(results.glob("statements-*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        own, others = ([row for row in rows if (row["place"] == OTHER) is x] for x in (False, True))
        failed = sum(row["verdict"] != "passed" for row in own)
        findings = sum(row["place"] == "findings" for row in own)
        holding = sum(row["verdict"] == "holds" for row in others)
        elsewhere = f"{holding} of {len(others)}, on {others[0]['other']}" if others else ""
        counts = map(str, (len(own), failed, findings))
        table.append((own[0]["model"], own[0]["text"], *counts, elsewhere))
    return "\n".join([*markdown_table(header, *table), ""]) if table else ""


def _training_table(path: Path) -> str:
    results = read_results(path)
    facts = results[0].facts
    header, *lines = standing_rows(standings(contest(quick=facts["quick"]), results))
    gpu, versions = facts["machine"]["gpu"] or facts["machine"]["cpu"], facts["versions"]
    commits = ", ".join(dict.fromkeys(str(result.facts["commit"]) for result in results))
    runs = f"{len(results)} training runs on {facts['text']}"
    table = [f"{runs}, {gpu}, torch {versions['torch']}, commit {commits}.", ""]
    if lines:
        table += [*markdown_table([TRAINING_HEADER.get(name, name) for name in header], *lines), ""]
    return "\n".join(table)


def _section(path: Path, shape: str) -> str:
    facts, rows = read(path)
    machine, versions = facts["machine"], facts["versions"]
    name = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    alternations = sorted({len(samples) for row in rows for samples in row.timings.samples_ms.values()})
    count = f"{alternations[0]} to {alternations[-1]}" if len(alternations) > 1 else f"{alternations[0]}"
    misses = counted(rows)
    lines = [
        f"### {name}, {dtypes[0]}" + (f" (CPU rows in {dtypes[1]})" if len(dtypes) > 1 else ""),
        "",
        f"torch {versions['torch']}, Python {versions['python']}, commit {facts['commit']}, {facts['date'][:10]}; "
        f"{count} alternations. " + (f"{misses}." if misses == "No miss" else f"**{misses}.**"),
        "",
    ]
    table = [
        (_label(bench), place, *map(_label, others), bound.replace("miss", "**miss**"))
        for bench, place, *others, bound in cells(rows)
    ]
    return "\n".join([*lines, *markdown_table(("benchmark", shape, *COLUMNS), *table), ""])


def _label(words: str) -> str:
    """Return the label that the pages show for one of a result."""
    for label, shown in LABELS.items():
        words = words.replace(label, shown)
    return words


def _dynamic_heads(path: Path) -> str:
    results = dynamic_heads.read_results(path)
    facts, data = results[0].facts, ", ".join(dict.fromkeys(x.facts["data"] for x in results))
    commits = ", ".join(dict.fromkeys(str(x.facts["commit"])[:7] for x in results))
    runs = f"{len(results)} training runs on {data}, {facts['machine']['cpu']}, torch {facts['versions']['torch']}"
    return "\n".join([f"{runs}, commit {commits}.", "", *markdown_table(*dynamic_heads.rows(results)), ""])


# What is written between the marks `<!-- name: begin -->` and `<!-- name: end -->` of the page, from the files of
# benchmarks/results that have these names.
SECTIONS: dict[str, Callable[[Path], str]] = {
    "layers": _timed("batch x n x d_model x heads", "cpu-*.json", "cuda-*.json"),
    "recorded": _each(_recorded, "recorded-*.json"),
    "replaced": _timed("shape", "replaced-*.json"),
    "statistics": _timed("batch x heads x n x d", "statistics-*.json"),
    "inspection": _timed("model and text", "inspection-*.json"),
    "statements": _statements,
    "viewer": _timed("heads and text", "viewer-*.json"),
    "compared": _each(_compared, "variants-*.json"),
    "variants": _timed("heads and tokens", "variants-*.json"),
    "monitoring": _timed("model and tokens", "monitoring-*.json"),
    "one-rank": _timed("model and tokens, or shape", "one-rank-*.json"),
    "training": _each(_training_table, "training-*.jsonl"),
    "dynamic-heads": _each(_dynamic_heads, "dynamic-heads-*.jsonl"),
    "stability": _each(stability_section, "stability-*.jsonl"),
    "quality": _each(quality_section, "surgery-*.jsonl"),
    "pruned-time": _timed("call", "surgery-*.json"),
    "plan": _each(accuracy_section, "plan-*.json"),
}


def draw_figures(results: Path = RESULTS, images: Path = ROOT / "docs" / "images") -> None:
    """Draw the figures to which sections link."""
    for path in sorted(results.glob("stability-*.jsonl")):
        from benchmarks.stability.figure import draw

        if settings_of(found := read_stability(path)):
            draw(found, images / f"{path.stem}.svg")


def main() -> None:
    draw_figures()
    PAGE.write_text(results_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"updated {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

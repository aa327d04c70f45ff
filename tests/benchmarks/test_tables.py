"""benchmarks/RESULTS.md holds the figures that were measured, and no guide holds a second copy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import tables
from benchmarks.measuring import results
from benchmarks.measuring.json_lines import append_result
from benchmarks.measuring.results import Row
from benchmarks.measuring.verdicts import Comparison, Figure, Ratio
from benchmarks.training.trials import RATES, SEEDS, Result, Trial
from polyhead.costs.measuring import machine_facts
from polyhead.costs.measuring.runner import Timings

CPU = torch.device("cpu")


def page_of(*marks: str) -> str:
    """A page with these marks, and all the others in their places."""
    return "before\n" + "".join(f"<!-- {mark}: begin -->\nold\n<!-- {mark}: end -->\n" for mark in marks) + "after\n"


def test_the_page_holds_the_figures_that_were_measured() -> None:
    for prefix in ("statistics", "inspection", "viewer", "variants", "recorded", "plan"):
        assert list(tables.RESULTS.glob(f"{prefix}-*.json")), prefix
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.results_page(page) == page, "run python -m benchmarks.tables"
    assert set(re.findall(r"<!-- (\S+): begin -->", page)) == set(tables.SECTIONS)


def test_figures_are_in_the_results_and_not_in_the_guides(project_root: Path) -> None:
    for guide in (project_root / "docs").rglob("*.md"):
        text = guide.read_text(encoding="utf-8")
        assert "ratio [95% CI]" not in text, guide.name
        assert not set(re.findall(r"<!-- (\S+): begin -->", text)) & set(tables.SECTIONS), guide.name


def test_tested_sentences_are_a_table(tmp_path):
    row = {"model": "small", "text": "some.txt", "sentence": "L0H1 ...", "recomputed": "1", "other": "plays.txt"}
    places = [("terminal", "passed"), ("findings", "passed"), ("findings", "failed"), ("columns", "not checked")]
    places += [("other text", "holds"), ("other text", "does not hold")]
    lines = [json.dumps(row | {"place": place, "verdict": verdict}) + "\n" for place, verdict in places]
    (tmp_path / "statements-small.jsonl").write_text("".join(lines), encoding="utf-8")
    assert "| small | some.txt | 4 | 2 | 2 | 1 of 2, on plays.txt |" in tables.results_page(
        page_of("statements"), tmp_path
    )


def test_trainings_are_a_table(tmp_path):
    facts = {**machine_facts.describe(CPU, "abc123"), "text": "some.txt", "quick": True}
    for number, rate in enumerate(RATES):
        trial = Trial("multi-head", "tokens", rate, SEEDS[0])
        result = Result(trial, 2.0 + number, steps=20, tokens=1, parameters=2000, flops=3, seconds=0.5, facts=facts)
        append_result(tmp_path / "training-a.jsonl", result)
    reported = tables.results_page(page_of("training"), tmp_path)
    assert "old" not in reported
    assert f"{len(RATES)} training runs on some.txt" in reported
    assert "| multi-head | tokens | 2,000 | 0.00 | 20 | 0.0005 (an end) | 2.0000 | nan of 1 |  |" in reported
    assert tables.results_page(reported, tmp_path) == reported


def test_trainings_without_a_whole_sweep_are_counted_and_are_no_table_yet(tmp_path):
    facts = {**machine_facts.describe(CPU, "abc123"), "text": "some.txt", "quick": True}
    trial = Trial("multi-head", "tokens", RATES[0], SEEDS[0])
    append_result(tmp_path / "training-a.jsonl", Result(trial, 2.0, 20, 1, 2000, 3, 0.5, facts))
    reported = tables.results_page(page_of("training"), tmp_path)
    assert "1 training runs on some.txt" in reported
    assert "|" not in reported


def test_each_section_takes_its_own_results_and_keeps_what_stands_around_the_marks(tmp_path):
    facts = {**machine_facts.describe(CPU, "abc123")}
    figures = (Figure("beyond inputs", 28.0, "bytes a row", 24.0),)
    ratio = Comparison("polyhead, statistics", "materialised", Ratio(0.02, 0.0199, 0.0201), 1 / 45)
    timings = Timings({"polyhead, statistics": [2.0], "materialised": [100.0]}, {"flash": "not here"})
    row = Row("forward", "1x2x3x4", "bfloat16", timings, (ratio,), figures, "something broke")
    results.write(tmp_path / "statistics-a.json", facts, [row])
    wide = Comparison("polyhead", "floor", Ratio(1.4, 1.3, 1.5), 1.05)
    other = Row("layer, forward", "2x3x5x1", "float32", Timings({"polyhead": [1.4], "floor": [1.0]}), (wide,))
    results.write(tmp_path / "cpu-b.json", facts, [other])
    page = page_of("statistics", "layers")
    whole = tables.results_page(page, tmp_path)
    assert whole.startswith("before\n<!-- statistics: begin -->\n")
    assert whole.endswith("<!-- layers: end -->\nafter\n")
    reported, other_page = whole.split("<!-- layers: begin -->")
    assert "old" not in reported
    assert (
        "| forward | 1x2x3x4 | 2 ms (statistics) | materialised | 100 ms | 0.0200 [0.0199, 0.0201] | <= 1/45 ok |"
    ) in reported
    assert "| forward | 1x2x3x4 | 28 bytes per row | beyond inputs |  |  | <= 24 **miss** |" in reported
    assert "| forward | 1x2x3x4 |  | flash | not here |  |  |" in reported
    assert "| forward | 1x2x3x4 |  |  | something broke |  | **miss** |" in reported
    assert "layer, forward" not in reported
    assert tables.results_page(whole, tmp_path) == whole
    assert "**No miss, 1 unsettled (1 with a median above the bound).**" in other_page
    assert (
        "| layer, forward | 2x3x5x1 | 1.4 ms | floor | 1 ms | 1.400 [1.300, 1.500] | <= 1.05 unsettled |" in other_page
    )
    assert "beyond inputs" not in other_page
    with pytest.raises(ValueError, match="exactly once"):
        tables.results_page("no marks", tmp_path)
    assert tables.results_page(page, tmp_path / "empty") == page
